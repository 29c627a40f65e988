"""Processes that are interrupted at random moments, one or both, and go on: programs for `tests/data_sets`."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
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
    except invfunc.ProcessError as error:
        return str(error), None
    return "", found


def interrupted(times: int, folder: str) -> list[str]:
    """What is wrong where processes are interrupted, each case so many times, at moments that all know."""
    rank, rng, wrong = dist.get_rank(), random.Random(0), list[str]()
    params = {"w": Numbers(0)(4, 3), "b": Numbers(1)(3)}
    sharded = {name: distribute_tensor(p, mesh(2), [Shard(0)], src_data_rank=None) for name, p in params.items()}
    x, y = Numbers(2 + rank)(BATCHES, 3, 4), torch.arange(3)

    def loader() -> Iterator[tuple]:
        for k in range(BATCHES):
            time.sleep(SECONDS)
            yield x[k], y

    def call(name: str, given: Any, after: float = 0, **options: Any) -> tuple[str, Any]:
        t = distributed(streamed(MAKES[name](), **options))
        said, found = ended(lambda: t(given, *[given] * hasattr(t, "linearize"), loader), after)
        return said, None if said else tree.map_tensors(local, found)

    for name in MAKES:
        for given in (params, sharded):
            files: list[dict[str, Any]] = [{}, {"checkpoint": Path(folder, "state")}]
            wanted, began = [call(name, given, **options)[1] for options in files], time.monotonic()
            call(name, given)
            whole = [time.monotonic() - began]
            dist.broadcast_object_list(whole)
            for _ in range(times):
                who, after = rng.choice([{0}, {1}, {0, 1}]), rng.uniform(0.001, whole[0])
                options, began = files[which := rng.randrange(2)], time.monotonic()
                said, found = call(name, given, after if rank in who else 0, **options)
                each: list[Any] = [None, None]
                dist.all_gather_object(each, (said, time.monotonic() - began))
                what = f"{name} {'of parts' if given is sharded else ''} {who} {after:.3f}: {each}"
                right = ["", "KeyboardInterrupt"] if rank in who else [""]
                if said not in right and "failed with KeyboardInterrupt" not in said:
                    wrong.append(what)
                if max(seconds for _, seconds in each) > after + OF_OTHERS:
                    wrong.append(f"late: {what}")
                if any(said for said, _ in each) and options:
                    _, found = call(name, given, **options)
                if found is not None:
                    pairs = zip(tree.tensors((found,)), tree.tensors((wanted[which],)), strict=True)
                    if not all(torch.equal(a, b) for a, b in pairs):
                        wrong.append(f"another result: {what}")
                dist.barrier()
                if list(Path(folder).iterdir()):
                    wrong.append(f"files are left: {what}")
                dist.barrier()
    return wrong


def kept(folder: str) -> list[int]:
    """How many batches are computed until Ctrl-C is pressed in the loader of the last process, and then: of parts."""
    params = {"w": Numbers(0)(4, 3), "b": Numbers(1)(3)}
    sharded = {name: distribute_tensor(p, mesh(2), [Shard(0)], src_data_rank=None) for name, p in params.items()}
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
        ended(lambda: t(sharded, loader))
    return counts


def alarmed() -> tuple[str, float]:
    """What one process sees of another one that fails at once, where it has batches for a minute, and when."""
    params, x, y = {"w": Numbers(0)(4, 3), "b": Numbers(1)(3)}, Numbers(2)(3, 4), torch.arange(3)
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
