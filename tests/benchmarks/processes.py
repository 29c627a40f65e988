"""The table of statistics whose samples are divided among two processes, beside all of them in one."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.kronecker import Kronecker
from tests.many_processes import start

from .peers import Problem
from .problems import three_c_three_d
from .report import announce, number, over, print_table

PROCESSES = "distributed"
SAMPLES, COUNT = 512, 2
"""Of all processes, and how many these are."""
SECONDS, LEAST = 25, 3
"""A row has no more rounds after so many seconds, unless it has had fewer than these."""
SECONDS_OF_ALL = 180
"""After which each row that is left has a single round."""
FASTER = 1.7
"""How many times faster than one process two are to be, on two idle cores."""

Make = Callable[[Problem], Callable]


def _losses(problem: Problem) -> Callable:
    """Of each sample, without a factor that depends on how many there are."""
    return lambda params, x, y: F.cross_entropy(problem.f(params, x), y, reduction="none")


def _drawn(make: Callable) -> Make:
    return lambda p: make(p.f, p.loss, generator=torch.Generator().manual_seed(0))


ROWS: dict[str, Make] = {
    "sum_grad_squared": lambda p: invfunc.sum_grad_squared(_losses(p)),
    "variance": lambda p: invfunc.variance(_losses(p)),
    "batch_l2_grad": lambda p: invfunc.batch_l2_grad(_losses(p)),
    "diag_ggn": lambda p: invfunc.diag_ggn(p.f, p.loss),
    "kfac": _drawn(invfunc.kfac),
    "ekfac": _drawn(invfunc.ekfac),
    "kflr": lambda p: invfunc.kfac(p.f, p.loss, fisher="exact"),
}


def processes(name: str, options: argparse.Namespace) -> None:
    """Measure the table and print it."""
    announce(name, f"{COUNT} processes")
    load = os.getloadavg()[0]
    lines = start(COUNT, measured, options.repeats)[0]
    announce(name, "")
    print(
        f"{name}: 3c3d, N = {SAMPLES}; cpu, {COUNT} processes of one thread beside one, which the others wait for, "
        f"median of {options.repeats} rounds, or of those begun in {SECONDS} s, at least {LEAST}; load of the machine "
        f"{load:.1f} before, {os.getloadavg()[0]:.1f} behind"
    )
    print_table(lines)
    print(
        "faster: how many times, * where it is less than is asked for. exchanged: bytes that a process hands to its "
        "collectives, beside the numbers of the result that are of all samples (of K-factors, triangles)\n"
    )


def measured(repeats: int) -> list[dict[str, str]]:
    """The lines of the table, measured by the first process with the others."""
    problem, began = _many(), time.perf_counter()
    rank, rows = dist.get_rank(), []
    own = slice(rank * SAMPLES // COUNT, (rank + 1) * SAMPLES // COUNT)
    for name, make in ROWS.items():
        one, all_ = make(problem), invfunc.distributed(make(problem))
        alone = partial(one, problem.params, problem.x, problem.y)
        together = partial(all_, problem.params, problem.x[own], problem.y[own])
        with _counted() as sent:
            result = together()
        if not rank:
            announce(PROCESSES, name)
            alone()
        first, second, rounds = _rounds(alone, together, repeats, began)
        least = _numbers(name, result)
        rows.append(
            {
                "": name,
                "one, s": number(first, 3),
                f"{COUNT}, s": number(second, 3),
                "rounds": str(rounds),
                "faster": _faster(over(first, second)),
                "exchanged, KiB": number(sum(sent) / 2**10, 0),
                "numbers, KiB": number(least / 2**10, 0),
            }
        )
    return rows


def _rounds(
    alone: Callable[[], Any], together: Callable[[], Any], repeats: int, first: float
) -> tuple[float, float, int]:
    """The median seconds of one process alone and of all together, in turns, and how many turns these were; the table
    began with the `first` second."""
    one, all_, began = list[float](), list[float](), time.perf_counter()
    over = torch.zeros(())  # whether the first process, whose time counts, has no more of it
    while not over and len(all_) < repeats:
        dist.barrier()
        if not dist.get_rank():
            one.append(_seconds(alone))
        dist.barrier()
        all_.append(_seconds(together))
        now, enough = time.perf_counter(), len(all_) >= LEAST
        over.fill_((now - began > SECONDS and enough) or now - first > SECONDS_OF_ALL)
        dist.broadcast(over, 0)
    return median(one or [0.0]), median(all_), len(all_)


def _faster(faster: float | None) -> str:
    """With a star where it is less than asked for."""
    return number(faster) + ("*" if faster is not None and faster < FASTER else "")


def _many() -> Problem:
    given = three_c_three_d()
    times = -(-SAMPLES // len(given.x))
    generator = torch.Generator().manual_seed(0)
    x = given.x.repeat(times, 1, 1, 1)[:SAMPLES]
    given.x, given.y = x + torch.randn(x.shape, generator=generator) / 4, given.y.repeat(times)[:SAMPLES]
    return given


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _numbers(name: str, result: Any) -> int:
    """The bytes of a result that all processes have to know."""
    if name == "batch_l2_grad":
        return 0
    of = [_triangles(x) if isinstance(x, Kronecker) else x.nbytes for _, x in tree.named_parts(result, Kronecker)[0]]
    return sum(of) * (2 if name == "variance" else 1)


def _triangles(matrix: Kronecker) -> int:
    sizes = [f.shape[-1] for f in matrix.factors]
    own = sum(f.itemsize * (k * (k + 1) // 2) for f, k in zip(matrix.factors, sizes, strict=True))
    return own + (0 if matrix.values is None else matrix.values.nbytes)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The bytes of what is handed to each collective."""
    sent: list[int] = []

    def counting(collective: Callable, place: int) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            x = args[place]
            sent.append(x.nbytes if isinstance(x, torch.Tensor) else len(x) if isinstance(x, bytes) else 0)
            return collective(*args, **kwargs)

        return call

    names = {"all_reduce": 0, "all_gather": 1, "all_gather_object": 1}
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), i) for name, i in names.items()}):
        yield sent
