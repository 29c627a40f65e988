"""The table of memory budgets: what is promised, and what a process takes."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc.errors import BudgetError
from invfunc.testing import peak_memory, return_freed_memory

from .measure import ROOT
from .peers import Problem
from .problems import autoencoder, resnet_18, three_c_three_d, transformer, u_net
from .report import announce, mebibytes, number, print_table, verdict

MEMORY_BUDGET = "memory-budget"
BUDGETS = {"1.1 x least": 1.1, "2 x least": 2.0, "plenty": 1e3}
REPEATS = 3
USED = 0.6
"""The part of a promise that is used at least where the work is larger than it."""
BEHIND = 1.15
"""How many times as long as the fastest chunks that were found by hand a call takes at most."""


def _residual_net() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32).eval(), nn.ReLU(), _Residual(32)),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), _Residual(64)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return Problem(model, F.cross_entropy, torch.rand(16, 3, 32, 32), torch.randint(10, (16,)))


class _Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.b(self.norm(self.a(x)).relu())).relu()


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "3c3d": three_c_three_d,
    "residual": _residual_net,
    "resnet-18": resnet_18,
    "transformer": transformer,
    "auto-encoder": lambda: autoencoder(16),
    "u-net": lambda: u_net(64),
}


def _statistic(name: str, p: Problem) -> invfunc.statistic.Statistic:
    drawn = {"generator": torch.Generator().manual_seed(0)}
    of_model = {"mc_samples": 1, **drawn} if name.endswith("_mc") else drawn if name in DRAWN else {}
    if name in FIRST_ORDER:
        return getattr(invfunc, name)(p.loss_fn, **({"max_norm": 1.0} if name == "clipped_grad" else {}))
    return getattr(invfunc, name.removesuffix("_mc"))(p.f, p.loss, **of_model)


FIRST_ORDER = ("variance", "batch_l2_grad", "sum_grad_squared", "grad_and_variance", "batch_grad", "clipped_grad")
DRAWN = ("kfac", "ekfac")
STATISTICS = (*FIRST_ORDER, "diag_ggn_mc", *DRAWN, "diag_ggn", "ggn_trace", "kflr", "batch_diag_ggn", "diag_hessian")
CASES = [(problem, name) for name in STATISTICS for problem in PROBLEMS]


def budgets_here(case: tuple[str, str], device: torch.device) -> str:
    """What each budget takes in this process, as a line of JSON."""
    return_freed_memory()
    p = PROBLEMS[case[0]]()
    t, given = _statistic(case[1], p), (p.params, p.x, p.y)
    invfunc.chunked(t, memory="1TiB")(p.params, p.x[:2], p.y[:2])  # the first call loads libraries
    least = _least(t, given)
    found = []
    for factor in BUDGETS.values():
        budget = int(factor * least)
        within = invfunc.chunked(t, memory=budget)
        start = time.process_time()
        invfunc.explain(within)(*given)
        chosen = time.process_time()
        why = invfunc.explain(within)(*given).why  # that of a next call, to which nothing was left
        peak = peak_memory(lambda: within(*given))[1]  # noqa: B023
        found.append(
            (budget, why, peak, chosen - start, time.process_time() - chosen, _by_hand(t, given, budget, within))
        )
    return json.dumps(found)


def _by_hand(t: invfunc.statistic.Statistic, given: tuple, budget: int, within: Callable) -> float | None:
    """How many times as long it takes as the fastest of some chunks that a process has been seen to take the budget
    for; None for a call in one piece."""
    if budget > peak_memory(lambda: t(*given))[1]:
        return None
    n = len(given[1])
    splits = [("samples", k) for k in {math.ceil(n / size) for size in range(1, n)}]
    splits += [("outputs", k) for k in (2, 4, 8)] if "outputs" in t.axes else []
    calls = [within] + [invfunc.chunked(t, k, over=axis) for axis, k in splits if axis in t.axes]
    fitting = [call for call in calls if call is within or peak_memory(lambda: call(*given))[1] <= budget]  # noqa: B023
    seconds = [math.inf] * len(fitting)
    for _ in range(REPEATS):
        for k, call in enumerate(fitting):
            start = time.process_time()
            call(*given)
            seconds[k] = min(seconds[k], time.process_time() - start)
    return seconds[0] / min(seconds[1:], default=seconds[0])


def _least(t: invfunc.statistic.Statistic, given: tuple) -> int:
    try:
        invfunc.chunked(t, memory=1)(*given)
    except BudgetError as error:
        return error.least
    raise AssertionError("nothing takes a byte")


def budgets(name: str, options: argparse.Namespace) -> None:
    """Print the table."""
    part, parts = options.part
    print(f"{name}: MiB over what was in use before the call; a process for each statistic of a model, one thread")
    lines, exceeded = [], 0
    for problem, statistic in CASES[part - 1 :: parts]:
        announce(name, f"{problem} {statistic}")
        command = [sys.executable, "-m", __package__, "--memory-case", f"{name}/{problem}/{statistic}"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.limit)
        except subprocess.TimeoutExpired:
            print(f"{problem} {statistic}: not done in {options.limit} s")
            continue
        if done.returncode:
            print(f"{problem} {statistic}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        for kind, (budget, why, peak, choice, run, behind) in zip(BUDGETS, found, strict=True):
            chunks, _, predicted = why.partition(", at most ")
            promised = float(predicted.split("MiB")[0]) * 2**20
            larger = "in one piece" not in why
            exceeded += peak > min(budget, promised)
            lines.append(
                {
                    "": f"{problem} {statistic}",
                    "budget": kind,
                    "MiB": "-" if kind == "plenty" else mebibytes(budget),
                    "chunks": chunks.removeprefix("in ").replace(" chunks of", ""),
                    "predicted": mebibytes(promised),
                    "measured": mebibytes(peak),
                    "within": verdict(peak / min(budget, promised), 1),
                    "used": number(peak / budget) + (" NO" if peak / budget < USED else "") if larger else "-",
                    "s to choose": number(choice),
                    "s in all": number(run),
                    "by hand": "-" if behind is None else verdict(behind, BEHIND),
                }
            )
    announce(name, "")
    print_table(lines)
    print(f"{exceeded} of {len(lines)} take more than was promised\n")
