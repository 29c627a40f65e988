"""Processes that are interrupted at random moments, one or both, and go on: programs for `tests/data_sets`."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import invfunc
from invfunc import distributed, streamed, tree
from invfunc.data_sets.part import Part
from tests.data_sets.test_streamed import linear, losses
from tests.many_processes import mesh
from tests.strategies import Numbers

BATCHES, SECONDS = 4, 0.01
"""Of each process, and for which each is waited."""
OF_OTHERS = 20
"""Seconds in which a process has to end after another one."""
MAKES: dict[str, Callable[[], Any]] = {
    "variance": lambda: invfunc.variance(losses),
    "ekfac": lambda: invfunc.ekfac(linear, F.cross_entropy, fisher="exact"),
    "hvp": lambda: invfunc.hvp(losses),
}


def local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def ended(call: Callable[[], Any], after: float = 0) -> tuple[str, Any]:
    """How a call ends in which Ctrl-C is pressed so many seconds after all have begun, if at all, and what it gives."""
    timer, found, begun = Timer(after, os.kill, (os.getpid(), signal.SIGINT)), None, Part.begun

    def timed(*args: Any) -> Any:
        if after:
            timer.start()
        return begun(*args)

    try:
        with mock.patch.object(Part, "begun", timed):
            try:
                found = call()
            finally:
                timer.cancel()
                if after:
                    timer.join()
    except (KeyboardInterrupt, OSError) as error:
        return type(error).__name__, None
    except invfunc.errors.ProcessError as error:
        return str(error), None
    return "", found


@dataclass(frozen=True)
class Case:
    """Ctrl-C in some processes during a call, of which all know."""

    of: str
    sharded: bool
    """Whether each process has parts of the parameters."""
    checkpoint: bool
    pressed: tuple[int, ...]
    """In which processes."""
    when: float
    """After which part of the time that a call takes."""


def cases(of: str, sharded: bool, times: int) -> list[Case]:
    rng = random.Random(f"{of} {sharded}")
    return [Case(of, sharded, rng.random() < 0.5, rng.choice([(0,), (1,), (0, 1)]), rng.random()) for _ in range(times)]


def parameters(sharded: bool) -> dict[str, torch.Tensor]:
    params = {"w": Numbers(0)(4, 3), "b": Numbers(1)(3)}
    if not sharded:
        return params
    return {name: distribute_tensor(p, mesh(2), [Shard(0)], src_data_rank=None) for name, p in params.items()}


class Calls:
    """The calls of this process, and what they give and take where nobody presses Ctrl-C."""

    def __init__(self, of: str, sharded: bool, folder: Path) -> None:
        self._of, self._params, self._folder = of, parameters(sharded), folder
        self._x, self._y = Numbers(2 + dist.get_rank())(BATCHES, 3, 4), torch.arange(3)
        self.wanted = {checkpoint: self.ended(checkpoint)[1] for checkpoint in (False, True)}
        began = time.monotonic()
        self.ended(False)
        seconds = [time.monotonic() - began]
        dist.broadcast_object_list(seconds)
        self.seconds = seconds[0]

    def ended(self, checkpoint: bool, after: float = 0) -> tuple[str, list[torch.Tensor]]:
        options: dict[str, Any] = {"checkpoint": self._folder / "state"} if checkpoint else {}
        t = distributed(streamed(MAKES[self._of](), **options))
        vectors = [self._params] * hasattr(t, "linearize")
        said, found = ended(lambda: t(self._params, *vectors, self._loader), after)
        return said, tree.tensors((tree.map_tensors(local, found),))

    def _loader(self) -> Iterator[tuple]:
        for k in range(BATCHES):
            time.sleep(SECONDS)
            yield self._x[k], self._y


def faults(case: Case, calls: Calls, folder: Path) -> list[str]:
    """What is wrong in a case, in this process."""
    after, began = 0.001 + case.when * calls.seconds, time.monotonic()
    pressed = dist.get_rank() in case.pressed
    said, found = calls.ended(case.checkpoint, after if pressed else 0)
    each: list[Any] = [None, None]
    dist.all_gather_object(each, (said, time.monotonic() - began))
    wanted = calls.wanted[case.checkpoint] if not said else []
    if case.checkpoint and any(said for said, _ in each):  # which goes on
        (_, found), wanted = calls.ended(True), calls.wanted[True]
    dist.barrier()
    left = list(folder.iterdir())
    dist.barrier()
    seen = {
        "another end": said not in ["", "KeyboardInterrupt"][: 1 + pressed]
        and "failed with KeyboardInterrupt" not in said,
        "late": max(seconds for _, seconds in each) > after + OF_OTHERS,
        "another result": len(found) != len(wanted) or not all(map(torch.equal, found, wanted)),
        "files are left": bool(left),
    }
    return [f"{fault}: {case}, {each}" for fault, is_so in seen.items() if is_so]


def interrupted(times: int, folder: str) -> list[str]:
    """What is wrong where processes are interrupted, each so many times."""
    wrong = list[str]()
    for of, sharded in itertools.product(MAKES, (False, True)):
        calls = Calls(of, sharded, Path(folder))
        for case in cases(of, sharded, times):
            wrong += faults(case, calls, Path(folder))
    return wrong


def kept(folder: str) -> list[int]:
    """How many batches are computed until Ctrl-C is pressed in the loader of the last process, and then: of parts."""
    counts, x, y = list[int](), Numbers(2)(BATCHES, 3, 4), torch.arange(3)

    def f(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        counts[-1] += len(x) == 3
        return losses(params, x, y)

    def loader() -> Iterator[tuple]:
        for k in range(BATCHES):
            if dist.get_rank() and k == 2 and len(counts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield x[k], y

    t = distributed(streamed(invfunc.variance(f), checkpoint=Path(folder, "kept")))
    for _ in range(2):
        counts.append(0)
        ended(lambda: t(parameters(True), loader))
    return counts


def alarmed() -> tuple[str, float]:
    """What one process sees of another one that fails at once, where it has batches for a minute, and when."""
    params, x, y = parameters(False), Numbers(2)(3, 4), torch.arange(3)
    rank, began = dist.get_rank(), time.monotonic()

    def loader() -> Iterator[tuple]:
        for _ in range(3000):
            if rank:
                raise OSError("the disk is gone")
            time.sleep(0.02)
            yield x, y

    said, _ = ended(lambda: distributed(streamed(invfunc.variance(losses)))(params, loader))
    return said, time.monotonic() - began


def told_of_interrupts(times: int) -> tuple[list[str], list[int], tuple[str, float]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with TemporaryDirectory() as folder:
        where = [folder]
        dist.broadcast_object_list(where)
        found = interrupted(times, where[0]), kept(where[0]), alarmed()
        dist.barrier()
    return found
