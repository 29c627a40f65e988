"""The table of memory budgets: what is promised, and what a process takes."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc.errors import BudgetError
from invfunc.statistic import Statistic
from invfunc.testing import peak_memory, return_freed_memory

from .measure import ROOT
from .peers import Problem
from .problems import autoencoder, part, resnet_18, three_c_three_d, transformer, u_net
from .report import announce, mebibytes, number, print_table, verdict

MEMORY_BUDGET = "memory-budget"
BUDGETS = {"1.1 x least": 1.1, "2 x least": 2.0, "plenty": 1e3}
REPEATS, LONG = 3, 2.0
"""How often each call is timed, if it does not take more seconds."""
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


def _statistic(name: str, p: Problem) -> Statistic:
    kind, _, drawn = name.partition(" ")
    options = dict(OPTIONS.get(kind, {}))
    if drawn:
        options["mc_samples"] = 1
    if drawn or kind in DRAWN:
        options["generator"] = torch.Generator().manual_seed(0)
    of = getattr(invfunc, kind)
    if kind in OF_LOSSES:
        return of(p.loss_fn, **options)
    return of(p.f, **options) if kind in OF_OUTPUTS else of(p.f, p.loss, **options)


OF_LOSSES = (
    *("sum_grad_squared", "variance", "grad_and_variance", "noise_scale", "batch_grad", "batch_l2_grad"),
    *("clipped_grad", "sketched_grad", "gram"),
)
OF_OUTPUTS = ("batch_jacobian", "predictive_covariance")
DRAWN = ("sketched_grad", "kfac", "kfoc", "ekfac")
OPTIONS = {
    "clipped_grad": {"max_norm": 1.0},
    "sketched_grad": {"rows": 8, "columns": 8},
    "predictive_covariance": {"covariance": 1.0},
}
STATISTICS = (
    *(*OF_LOSSES, "diag_ggn drawn", "sqrt_ggn drawn", "kfac", "kfoc", "ekfac", "diag_ggn", "ggn_trace", "kflr"),
    *("batch_diag_ggn", "sqrt_ggn", *OF_OUTPUTS, "diag_hessian", "batch_diag_hessian"),
)
COLUMNS = STATISTICS[STATISTICS.index("diag_ggn") :]
CASES = [(problem, name) for name in STATISTICS for problem in PROBLEMS]


def _smaller(problem: str, name: str, p: Problem) -> tuple[Problem, str]:
    """What is less in a case whose columns are many or large, and in words what that is."""
    if name not in COLUMNS or problem in ("3c3d", "residual", "auto-encoder"):
        return p, ""
    if problem == "u-net":
        return part(p, 4, 4, 4), ", 4 x 4 of its pixels"
    if problem == "transformer" and "hessian" in name:
        return Problem(p.model, p.loss, p.x[:4, :4], p.y[:4]), ", N = 4, 4 positions"
    n = 2 if name in ("sqrt_ggn", "batch_jacobian") else 4
    return Problem(p.model, p.loss, p.x[:n], p.y[:n]), f", N = {n}"


def budgets_here(case: tuple[str, str], device: torch.device) -> str:
    """The smallest possible budget of a call in this process, which is its first, or with `@` and a budget behind the
    case what it takes; as a line of JSON."""
    return_freed_memory()
    problem, (name, _, size) = case[0], case[1].partition("@")
    p, fewer = _smaller(problem, name, PROBLEMS[problem]())
    t, given = _statistic(name, p), (p.params, p.x, p.y)
    within = invfunc.chunked(t, memory=int(size or 1))
    start = time.process_time()
    try:
        first, later = (peak_memory(lambda: within(*given) and None)[1] for _ in range(2))
    except BudgetError as error:
        return json.dumps([fewer, error.least])
    both = time.process_time() - start
    why = invfunc.explain(within)(*given).why
    start = time.process_time()
    within(*given)
    run = time.process_time() - start
    found = why, first, later, max(0.0, both - 2 * run), run, *_by_hand(t, given, int(size), within, run)
    return json.dumps([fewer, found])


def _by_hand(t: Statistic, given: tuple, budget: int, within: Callable, seconds: float) -> tuple[float | None, str]:
    """How many times as long it takes as the fastest of some chunks that a process has been seen to take the budget
    for, and which these are; None for a call in one piece, and for one that takes long."""
    if seconds > LONG or budget > peak_memory(lambda: t(*given))[1]:
        return None, ""
    n = len(given[1])
    splits = [("samples", k) for k in sorted({math.ceil(n / size) for size in range(1, n)})]
    splits += [("outputs", k) for k in (2, 5, 10)]
    calls = {f"{k} {axis}": invfunc.chunked(t, k, over=axis) for axis, k in splits if axis in t.axes}
    for call in calls.values():
        call(*given)
    fitting = {name: call for name, call in calls.items() if peak_memory(lambda: call(*given))[1] <= budget}  # noqa: B023
    fastest = dict.fromkeys(["", *fitting], math.inf)
    for _ in range(REPEATS):
        for name, call in {"": within, **fitting}.items():
            start = time.process_time()
            call(*given)
            fastest[name] = min(fastest[name], time.process_time() - start)
    ours = fastest.pop("")
    if not fastest:
        return None, ""
    best = min(fastest, key=fastest.__getitem__)
    return ours / fastest[best], best


def budgets(name: str, options: argparse.Namespace) -> None:
    """Print the table."""
    part, parts = options.part
    print(f"{name}: MiB over what was in use before the call; a process for each statistic of a model, one thread")
    lines = [line for case in CASES[part - 1 :: parts] for line in _lines(name, case, options.limit)]
    announce(name, "")
    if not lines:
        return
    print_table(lines)
    exceeded = sum("NO" in line["within"] for line in lines)
    print(f"{exceeded} of {len(lines)} take more than was promised")
    print("first: by the first call in a process, with its search, which takes `s to choose`\n")


HEADS = (
    *("", "budget", "MiB", "chunks", "predicted", "first", "later", "within", "used", "s to choose", "s"),
    *("over best by hand", "that"),
)


def _lines(name: str, case: tuple[str, str], limit: int) -> Iterator[dict[str, str]]:
    """The rows of a statistic of a model."""
    announce(name, " ".join(case))
    told = _measured(name, case, "", limit)
    if told is None:
        return
    fewer, least = told
    for kind, factor in BUDGETS.items():
        budget = int(factor * least)
        if (told := _measured(name, case, f"@{budget}", limit)) is None:
            continue
        line = dict.fromkeys(HEADS, "-") | {"": " ".join(case) + fewer, "budget": kind, "MiB": mebibytes(budget)}
        if isinstance(told[1], int):
            yield line | {"chunks": f"asks for {mebibytes(told[1])} MiB"}
            continue
        why, first, later, choice, run, behind, best = told[1]
        chunks, _, predicted = why.partition(", at most ")
        promised, used = float(predicted.split("MiB")[0]) * 2**20, max(first, later) / budget
        line |= {"chunks": chunks.removeprefix("in ").replace(" chunks of", ""), "predicted": mebibytes(promised)}
        line |= {"first": mebibytes(first), "later": mebibytes(later)}
        line["within"] = verdict(max(first / budget, later / min(budget, promised)), 1)
        if "in one piece" not in why:
            line["used"] = number(used) + (" NO" if used < USED else "")
        line |= {"s to choose": number(choice), "s": number(run)}
        if behind is not None:
            line |= {"over best by hand": verdict(behind, BEHIND), "that": best}
        yield line


def _measured(name: str, case: tuple[str, str], budget: str, limit: int) -> Any:
    """What a process of its own says, if it does in time."""
    command = [sys.executable, "-m", __package__, "--memory-case", f"{name}/{'/'.join(case)}{budget}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(case)}: not done in {limit} s")
        return None
    if done.returncode:
        print(f"{' '.join(case)}: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])
