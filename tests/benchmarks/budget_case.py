"""What a call takes of a budget, as its user finds it: the first call of a process that has imported nothing else.

python -m tests.benchmarks.budget_case PROBLEM STATISTIC [BYTES | "N AXIS"]
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc.errors import BudgetError
from invfunc.statistic import Statistic
from invfunc.testing import peak_memory, return_freed_memory

from .measure import ROOT, medians
from .peers import Call, Problem
from .problems import autoencoder, part, resnet_18, three_c_three_d, transformer, u_net

REPEATS, LATER = 7, 3
"""How often each call is timed beside chunks by hand, and how many calls after the first one are measured."""


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


def _samples(p: Problem, n: int) -> Problem:
    return Problem(p.model, p.loss, p.x[:n], p.y[:n])


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "3c3d": three_c_three_d,
    "residual": _residual_net,
    "resnet-18": lambda: _samples(resnet_18(), 8),
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
BY_HAND = {
    *(("3c3d", "variance"), ("transformer", "diag_ggn drawn"), ("u-net", "clipped_grad")),
    *(("auto-encoder", "diag_ggn"), ("transformer", "clipped_grad")),
}
"""Cases that are timed beside chunks that are found by hand, in the same process."""
COLUMNS_BY_HAND, FEWEST = 32, 2
"""Into how many chunks columns are divided by hand at most, and how many numbers of chunks of an axis are timed: the
fewest that fit."""


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


def main(problem: str, name: str, size: str = "1") -> None:
    """Print what a call takes of a budget, or the smallest that is possible, as a line of JSON; of chunks by hand, what
    their first call takes."""
    torch.set_num_threads(1)
    return_freed_memory()
    p, fewer = _smaller(problem, name, PROBLEMS[problem]())
    t, given = _statistic(name, p), (p.params, p.x, p.y)
    if not size.isdigit():
        print(_first_by_hand(t, given, size))
        return
    within = invfunc.chunked(t, memory=int(size))
    start = time.process_time()
    try:
        first = peak_memory(lambda: within(*given) and None)[1]
    except BudgetError as error:
        print(json.dumps([fewer, error.least]))
        return
    middle = time.process_time()
    later = max(peak_memory(lambda: within(*given) and None)[1] for _ in range(LATER))
    run = (time.process_time() - middle) / LATER
    why, (kept,) = invfunc.explain(within)(*given).why, within.choices.values()
    beside = partial(_by_hand, t, given, int(size), within, partial(_in_a_process, problem, name))
    by_hand = beside() if (problem, name) in BY_HAND and "one piece" not in why else ()
    found = [why, kept.first.chunks, first, later, max(0.0, middle - start - run), run, *(by_hand or (None, ""))]
    print(json.dumps([fewer, found]))


def _by_hand(
    t: Statistic, given: tuple, budget: int, within: Callable, first: Callable[[str], int]
) -> tuple[float, str] | tuple[None, str]:
    """How many times as long it takes as the fastest of the fewest chunks of an axis that a process is seen to take the
    budget for, in its first call, too, and which these are; None where none are."""
    calls: dict[str, Call] = {}
    columns = sum(d.count for d in t.drawings) or COLUMNS_BY_HAND
    for axis, most in (("samples", len(given[1])), ("outputs", columns)):
        for n in sorted({math.ceil(most / size) for size in range(1, most)}) if axis in t.axes else ():
            call, called = partial(invfunc.chunked(t, n, over=axis), *given), f"{n} {axis}"
            call()
            if peak_memory(call)[1] <= budget and first(called) <= budget:
                calls[called] = call
                if len(calls) % FEWEST == 0:
                    break
    if not calls:
        return None, ""
    every = {"": partial(within, *given), **calls}
    seconds = medians(every, dict.fromkeys(every, REPEATS), torch.device("cpu"), lambda _: None)
    ours = seconds.pop("")
    best = min(seconds, key=seconds.__getitem__)
    return ours / seconds[best], best


def _first_by_hand(t: Statistic, given: tuple, chunks: str) -> int:
    """The peak of a first call, where libraries are loaded as for one within a budget."""
    n, axis = chunks.split()
    invfunc.chunked(t, memory="1GiB")
    call = partial(invfunc.chunked(t, int(n), over=axis), *given)
    return peak_memory(lambda: call() and None)[1]


def _in_a_process(problem: str, name: str, chunks: str) -> int:
    command = [sys.executable, "-m", __spec__.name, problem, name, chunks]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
