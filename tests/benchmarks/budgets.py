"""The table of memory budgets: what is promised, and what a process takes."""

from __future__ import annotations

import argparse
import json
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
from .problems import autoencoder, three_c_three_d, transformer
from .report import announce, mebibytes, number, print_table, verdict

MEMORY_BUDGET = "memory-budget"
BUDGETS = {"1.1 x least": 1.1, "2 x least": 2.0, "plenty": 1e3}
USED = 0.6
"""The part of a promise that is used at least where the work is larger than it."""


def _resnet() -> Problem:
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
    "residual": _resnet,
    "transformer": transformer,
    "auto-encoder": lambda: autoencoder(16),
}


def _statistic(name: str, p: Problem) -> invfunc.statistic.Statistic:
    drawn = {"generator": torch.Generator().manual_seed(0)}
    made = {
        "diag_ggn": lambda: invfunc.diag_ggn(p.f, p.loss),
        "diag_hessian": lambda: invfunc.diag_hessian(p.f, p.loss),
        "diag_ggn_mc": lambda: invfunc.diag_ggn(p.f, p.loss, mc_samples=1, **drawn),
        "kfac": lambda: invfunc.kfac(p.f, p.loss, **drawn),
    }
    return made[name]() if name in made else getattr(invfunc, name)(p.loss_fn)


STATISTICS = ("variance", "batch_grad", "sum_grad_squared", "batch_l2_grad")
STATISTICS += ("diag_ggn", "diag_ggn_mc", "kfac", "diag_hessian")
CASES = {(problem, name) for problem in PROBLEMS for name in STATISTICS} - {
    ("transformer", "diag_hessian"),  # a column for each entry at attention: minutes
}


def budgets_here(case: tuple[str, str], device: torch.device) -> str:
    """What each budget takes in this process, as a line of JSON."""
    return_freed_memory()
    p = PROBLEMS[case[0]]()
    t, given = _statistic(case[1], p), (p.params, p.x, p.y)
    invfunc.chunked(t, memory="1TiB")(p.params, p.x[:2], p.y[:2])  # the first call loads libraries
    try:
        invfunc.chunked(t, memory=1)(*given)
        least = 0
    except BudgetError as error:
        least = error.least
    found = []
    for factor in BUDGETS.values():
        budget = int(factor * least)
        within = invfunc.chunked(t, memory=budget)
        start = time.process_time()
        why = invfunc.explain(within)(*given).why
        chosen = time.process_time()
        peak = peak_memory(lambda: within(*given))[1]  # noqa: B023
        found.append((budget, why, peak, chosen - start, time.process_time() - chosen))
    return json.dumps(found)


def budgets(name: str, options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{name}: MiB over what was in use before the call; a process for each statistic of a model, one thread")
    lines, exceeded = [], 0
    for problem, statistic in sorted(CASES):
        announce(name, f"{problem} {statistic}")
        command = [sys.executable, "-m", __package__, "--memory-case", f"{name}/{problem}/{statistic}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(f"{problem} {statistic}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        for kind, (budget, why, peak, choice, run) in zip(BUDGETS, found, strict=True):
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
                }
            )
    announce(name, "")
    print_table(lines)
    print(f"{exceeded} of {len(lines)} take more than was promised\n")
