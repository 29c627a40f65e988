"""Two processes of which one is killed, as often as is asked: `python -m tests.processes_killed FOLDER KILLS`."""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

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
        torch.save(found, where / f"result.{rank}")
        dist.barrier()
    except (invfunc.ProcessError, RuntimeError):  # the latter where the other one ends before or behind the call
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(where: Path, kills: int) -> None:
    """Kill one of two processes at random moments until both have brought a result, and compare it; again and again."""
    torch.set_num_threads(1)
    rng, turn, wanted, whole = random.Random(0), 0, None, 0.0
    while kills or wanted is None:
        begun, pids = time.monotonic(), []
        for rank in (0, 1):
            pid = os.fork()  # torch is imported once
            if not pid:
                run(where, rank, turn)
            pids.append(pid)
        turn += 1
        ended = [False, False]
        moment, victim = begun + rng.uniform(0.3, 1) * whole, rng.randrange(2)
        while not all(ended):
            time.sleep(SECONDS)
            for rank, pid in enumerate(pids):
                over, status = (0, 0) if ended[rank] else os.waitpid(pid, os.WNOHANG)
                ended[rank] |= bool(over)
                assert os.waitstatus_to_exitcode(status) != 1
            if wanted is not None and kills and not any(ended) and time.monotonic() > moment:
                os.kill(pids[victim], signal.SIGKILL)
                kills -= 1
                moment = time.monotonic() + 1e9
            assert time.monotonic() - begun < whole + SECONDS_OF_OTHERS or wanted is None, ended
        results = [where / f"result.{rank}" for rank in (0, 1)]
        if not all(path.exists() for path in results):
            continue
        with torch.serialization.safe_globals([invfunc.Kronecker, Origin]):
            found = [tree.tensors(torch.load(path)) for path in results]
        if wanted is None:
            wanted, whole = found, time.monotonic() - begun
        pairs = zip(found, wanted, strict=True)
        assert all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))
        assert not list(where.glob("state*")), list(where.iterdir())
        for path in results:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
