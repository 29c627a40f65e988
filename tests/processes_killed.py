"""Two processes of which one is killed, as often as is asked."""

import itertools
import math
import os
import random
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import invfunc
from invfunc import distributed, streamed, tree
from invfunc.kronecker import Origin
from tests.streamed_killed import SECONDS, data, two_sweeps

SECONDS_OF_OTHERS = 20
"""In which a process has to end after another one was killed."""


def part(rank: int, seconds: float):
    """The parameters, and every other batch."""
    params, loader = data(seconds)
    return params, lambda: (batch for k, batch in enumerate(loader()) if k % 2 == rank)


def run(where: Path, rank: int, turn: int) -> None:
    """Go on in one of the processes, and write its result."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{where}/store.{turn}", rank=rank, world_size=2)
        t = streamed(two_sweeps(), checkpoint=where / "state", every=0)
        found = distributed(t)(*part(rank, 10 * SECONDS))
        torch.save(found, where / f"part.{rank}")
        (where / f"part.{rank}").replace(where / f"result.{rank}")
        dist.barrier()
    except (invfunc.errors.ProcessError, RuntimeError):  # the latter where the other one ends before or behind the call
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@dataclass
class Two:
    """Two processes that were forked, as torch is imported once then."""

    where: Path
    turn: int
    begun: float = field(default_factory=time.monotonic)
    running: dict[int, int] = field(default_factory=dict)
    """The numbers that the system has for those that run, by rank."""

    def start(self) -> None:
        for rank in (0, 1):
            pid = os.fork()
            if not pid:
                run(self.where, rank, self.turn)
            self.running[rank] = pid

    def kill(self, rank: int) -> None:
        os.kill(self.running[rank], signal.SIGKILL)

    def look(self) -> None:
        """See which have ended, none of them with an error."""
        time.sleep(SECONDS)
        for rank, pid in list(self.running.items()):
            over, status = os.waitpid(pid, os.WNOHANG)
            assert os.waitstatus_to_exitcode(status) != 1
            if over:
                del self.running[rank]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def until_both_end(self, most: float, moment: float = math.inf, victim: int = 0) -> bool:
        """Wait for them, and kill one at a moment, if both run then; whether that was so."""
        killed = False
        while self.running:
            self.look()
            if not killed and len(self.running) == 2 and self.seconds > moment:
                self.kill(victim)
                killed = True
            assert self.seconds < most, self.running
        return killed


def results(where: Path) -> list[list[torch.Tensor]] | None:
    """What both have brought, if both have, and then all files have to be gone."""
    paths = [where / f"result.{rank}" for rank in (0, 1)]
    if not all(path.exists() for path in paths):
        return None
    with torch.serialization.safe_globals([invfunc.kronecker.Kronecker, Origin]):
        found = [tree.tensors(torch.load(path)) for path in paths]
    assert not list(where.glob("state*")), list(where.iterdir())
    for path in paths:
        path.unlink()
    return found


def killed(_: int, folder: str, kills: int) -> None:
    """Kill one of two processes at random moments until both have brought a result, and compare it; again and again."""
    torch.set_num_threads(1)
    where, rng, turns = Path(folder), random.Random(0), itertools.count()

    def turn(most: float, **kill: Any) -> tuple[bool, list[list[torch.Tensor]] | None]:
        two = Two(where, next(turns))
        two.start()
        return two.until_both_end(most, **kill), results(where)

    began = time.monotonic()
    _, wanted = turn(math.inf)
    whole = time.monotonic() - began
    assert wanted is not None
    while kills:
        done, found = turn(whole + SECONDS_OF_OTHERS, moment=rng.uniform(0.3, 1) * whole, victim=rng.randrange(2))
        kills -= done
        if found is not None:
            pairs = zip(found, wanted, strict=True)
            assert all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))
