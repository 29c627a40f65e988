"""The table of calls that are repeated by a plan, beside the calls themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import invfunc

from .measure import medians, once
from .peers import BACKPACK, Peer, Problem, backpack, has, plain_gradient
from .problems import three_c_three_d
from .report import announce, number, over, print_table

PLANS = "plans"
EAGER, INDUCTOR = "eager", "inductor"
BACKENDS = "replay", INDUCTOR


def _mlp() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return Problem(model, F.cross_entropy, torch.randn(128, 64), torch.randint(10, (128,)))


PROBLEMS = {"MLP 64-32-10, N = 128": _mlp, "3c3d, N = 32": three_c_three_d}
BY_INDUCTOR = next(iter(PROBLEMS))
"""The problem of which each statistic is compiled, which takes a minute or so for each."""
Rows = dict[str, tuple[Callable[[Problem], Callable], Peer | None]]


def _drawn(problem: Problem) -> Callable:
    generator = torch.Generator(problem.x.device).manual_seed(0)
    return invfunc.kfac(problem.f, problem.loss, mc_samples=1, generator=generator)


ROWS: Rows = {
    "variance": (lambda p: invfunc.variance(p.loss_fn), backpack("Variance")),
    "sum_grad_squared": (lambda p: invfunc.sum_grad_squared(p.loss_fn), backpack("SumGradSquared")),
    "diag_ggn": (lambda p: invfunc.diag_ggn(p.f, p.loss), backpack("DiagGGNExact")),
    "kfac_exact": (lambda p: invfunc.kfac(p.f, p.loss, fisher="exact"), backpack("KFLR")),
    "kfac, drawn": (_drawn, backpack("KFAC")),
    "hvp": (lambda p: invfunc.hvp(p.f, p.loss), None),
}


def plans(name: str, options: argparse.Namespace) -> None:
    """Measure the table and print it."""
    failures = set[str]()
    lines, load = [], invfunc.compiled(invfunc.variance(lambda w, x: (x @ w).square()))
    load(torch.ones(2), torch.ones(3, 2))  # what a first call of all loads
    for called, make in PROBLEMS.items():
        problem, first = make().to(options.device), dict[str, float]()
        calls = {("", "gradient"): plain_gradient(problem)}
        for row, (statistic, peer) in ROWS.items():
            args = problem.params, *[problem.params] * (row == "hvp"), problem.x, problem.y
            calls[row, EAGER] = partial(statistic(problem), *args)
            if peer is not None and has(BACKPACK):
                calls[row, BACKPACK] = peer(problem)
            drawn = row == "kfac, drawn"  # whose numbers inductor would draw otherwise
            several = not drawn and called == BY_INDUCTOR
            for backend in BACKENDS if several else BACKENDS[:1]:
                announce(name, f"{called}: {row} by {backend}")
                calls[row, backend] = partial(invfunc.compiled(statistic(problem), backend=backend), *args)
            first[row] = _first(calls[row, EAGER], calls[row, BACKENDS[0]], options.device)
        for (row, way), call in list(calls.items()):
            try:
                for _ in range(3):  # in which plans are made, and compiled
                    call()
            except Exception as error:
                if way != INDUCTOR:  # which needs a compiler
                    raise
                del calls[row, way]
                failures.add(str(error).partition("\n")[0])
        times = medians(calls, dict.fromkeys(calls, options.repeats), options.device, partial(announce, name))
        base = times["", "gradient"]
        for row in ROWS:
            cells = {way: number(over(times.get((row, way)), base), 3) for way in (EAGER, *BACKENDS, BACKPACK)}
            faster = number(over(times[row, EAGER], min(times[row, way] for way in BACKENDS if (row, way) in times)))
            line = {"": f"{called}: {row}", "gradient ms": number(base * 1e3, 3), **cells, "faster": faster}
            lines.append(line | {"first": number(first[row])})
    announce(name, "")
    print(f"{name}: in gradients of the mean loss; {options.device}, one thread, median of {options.repeats} rounds")
    print_table(lines)
    for words in failures:
        print(f"{INDUCTOR} fails: {words}")
    print("faster: how many times the faster backend is than the call itself")
    print("first: how many calls the first one by replay takes, in which the plan is written down\n")


def _first(eager: Callable[[], Any], planned: Callable[[], Any], device: torch.device) -> float:
    """Time of a first call over the time of a later one."""
    for _ in range(2):
        eager()
    times = [once(call, device) for call in (eager, planned, eager)]
    return times[1] / min(times[0], times[2])
