"""What a call takes of a budget, as its user finds it: in the first calls of a process, which has only imported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc.budgeted import Budgeted, Chunks
from invfunc.errors import BudgetError
from invfunc.plan import AxisName
from invfunc.statistic import Statistic
from invfunc.testing import peak_memory, return_freed_memory

from .measure import medians
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
    kind, _, how = name.partition(" ")
    options = OPTIONS.get(kind, {}) | OPTIONS.get(how, {})
    if how == "drawn" or (kind in DRAWN and not how):
        options["generator"] = torch.Generator().manual_seed(0)
    of = getattr(invfunc, kind, None) or getattr(invfunc.kronecker, kind)
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
    "drawn": {"mc_samples": 1},
    "exact": {"fisher": "exact"},
    "clipped_grad": {"max_norm": 1.0},
    "sketched_grad": {"rows": 8, "columns": 8},
    "predictive_covariance": {"covariance": 1.0},
}
STATISTICS = (
    *(*OF_LOSSES, "diag_ggn drawn", "sqrt_ggn drawn", "kfac", "kfoc", "ekfac", "diag_ggn", "ggn_trace", "kfac exact"),
    *("batch_diag_ggn", "sqrt_ggn", *OF_OUTPUTS, "diag_hessian", "batch_diag_hessian"),
)
COLUMNS = STATISTICS[STATISTICS.index("diag_ggn") :]
CASES = [(problem, name) for name in STATISTICS for problem in PROBLEMS]
BY_HAND = {
    *(("3c3d", "variance"), ("transformer", "diag_ggn drawn"), ("u-net", "clipped_grad")),
    *(("auto-encoder", "diag_ggn"), ("transformer", "clipped_grad")),
}
"""Cases that are timed beside chunks that are found by hand, in the same process."""
COLUMNS_BY_HAND = 32
"""Into how many chunks columns are divided by hand at most."""


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


@dataclass
class Taken:
    """What calls within a budget took."""

    chunks: str
    """Those of the first call."""
    why: str
    """Those of later ones, and what was promised of them."""
    first: int
    later: int
    choosing: float
    """Seconds of the search."""
    seconds: float


def least(problem: str, name: str) -> tuple[str, int]:
    """What is less in a case, and the smallest budget that is possible."""
    t, given, fewer = _case(problem, name)
    try:
        invfunc.chunked(t, memory=1)(*given)
    except BudgetError as error:
        return fewer, error.least
    raise AssertionError("a byte was enough")


def taken(problem: str, name: str, budget: int) -> Taken:
    """What the first calls of a process take of a budget."""
    t, given, _ = _case(problem, name)
    within = invfunc.chunked(t, memory=budget)
    start = time.process_time()
    first = _peak(within, given)
    middle = time.process_time()
    later = max(_peak(within, given) for _ in range(LATER))
    seconds = (time.process_time() - middle) / LATER
    (kept,) = cast(Budgeted, within).choices.values()
    why = invfunc.explain(within)(*given).why
    return Taken(spelled(kept.chunks(len(given[1]))), why, first, later, max(0.0, middle - start - seconds), seconds)


def by_hand(problem: str, name: str) -> list[list[tuple[AxisName, int]]]:
    """Into how many chunks each axis can be divided, the fewest first."""
    t, given, _ = _case(problem, name)
    columns = sum(d.count for d in t.drawings) or COLUMNS_BY_HAND
    most: dict[AxisName, int] = {"samples": len(given[1]), "outputs": columns}
    found: list[list[tuple[AxisName, int]]] = []
    for axis, length in most.items():
        if axis in t.axes:
            found.append([(axis, n) for n in sorted({math.ceil(length / size) for size in range(1, length)})])
    return found


def first_by_hand(problem: str, name: str, axis: AxisName, n: int) -> int:
    """The peak of a call in chunks by hand, after one that loads what libraries load."""
    t, given, _ = _case(problem, name)
    invfunc.chunked(t, n, over=axis)(*given)
    return _peak(invfunc.chunked(t, n, over=axis), given)


def behind(problem: str, name: str, budget: int, others: list[tuple[AxisName, int]]) -> tuple[float, str]:
    """How many times as long a call takes as the fastest in some chunks by hand, and which these are."""
    t, given, _ = _case(problem, name)
    calls: dict[str, Call] = {"": partial(invfunc.chunked(t, memory=budget), *given)}
    calls |= {spelled({axis: n}): partial(invfunc.chunked(t, n, over=axis), *given) for axis, n in others}
    for call in calls.values():
        call()
    seconds = medians(calls, dict.fromkeys(calls, REPEATS), torch.device("cpu"), lambda _: None)
    ours = seconds.pop("")
    best = min(seconds, key=seconds.__getitem__)
    return ours / seconds[best], best


def spelled(chunks: Chunks) -> str:
    """Chunks, as short as the table has them."""
    return " and ".join(f"{n} {axis}" for axis, n in chunks.items()) or "one piece"


def _case(problem: str, name: str) -> tuple[Statistic, tuple, str]:
    """A statistic and its arguments in this process, which has not computed before; and what is less in it."""
    torch.set_num_threads(1)
    return_freed_memory()
    p, fewer = _smaller(problem, name, PROBLEMS[problem]())
    return _statistic(name, p), (p.params, p.x) if name in OF_OUTPUTS else (p.params, p.x, p.y), fewer


def _peak(f: Callable, given: tuple) -> int:
    return peak_memory(lambda: [f(*given)].clear())[1]
