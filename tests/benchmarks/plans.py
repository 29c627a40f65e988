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


def _cnn() -> Problem:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, before in ((8, 3), (16, 8)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    return Problem(model, F.cross_entropy, torch.randn(16, 3, 16, 16), torch.randint(10, (16,)))


class _Layer(nn.Module):
    """The mean over positions of a layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def _transformer() -> Problem:
    torch.manual_seed(0)
    return Problem(_Layer(), F.cross_entropy, torch.randn(16, 12, 32), torch.randint(10, (16,)))


PROBLEMS = {
    "MLP 64-32-10, N = 128": _mlp,
    "CNN, N = 16": _cnn,
    "transformer layer, N = 16, T = 12": _transformer,
    "3c3d, N = 32": three_c_three_d,
}
BY_INDUCTOR = next(iter(PROBLEMS))
"""The problem of which each statistic is compiled, which takes a minute or so for each."""
NO_BACKPACK = "transformer layer, N = 16, T = 12"
"""It has no rules for attention."""
CHUNKS = 8, 64, 256, 1000
"""In how many chunks the variance is computed, of 1024 samples."""
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
            if peer is not None and has(BACKPACK) and called != NO_BACKPACK:
                calls[row, BACKPACK] = peer(problem)
            drawn = row == "kfac, drawn"  # whose numbers inductor would draw otherwise
            several = not drawn and (options.inductor or called == BY_INDUCTOR)
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
    chunks = _chunks(name, options)
    announce(name, "")
    print(f"{name}: in gradients of the mean loss; {options.device}, one thread, median of {options.repeats} rounds")
    print_table(lines)
    for words in failures:
        print(f"{INDUCTOR} fails: {words}")
    print("faster: how many times the faster backend is than the call itself")
    print("first: how many calls the first one by replay takes, in which the plan is written down\n")
    print(f"{name} of chunks: the variance of the MLP with N = 1024; ms, median of {options.repeats} rounds")
    print_table(chunks)


def _chunks(name: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """The lines of a table: calls in few and in many chunks, the first ones and later ones."""
    torch.manual_seed(0)
    own, lines = _mlp(), []
    problem = Problem(own.model, own.loss, torch.randn(1024, 64), torch.randint(10, (1024,))).to(options.device)
    args = problem.params, problem.x, problem.y
    for n in CHUNKS:
        announce(name, f"{n} chunks")
        t = invfunc.chunked(invfunc.variance(problem.loss_fn), n)
        planned = invfunc.compiled(t)
        first = once(partial(planned, *args), options.device)
        times = medians(
            {"eager": partial(t, *args), "later": partial(planned, *args)},
            dict.fromkeys(("eager", "later"), options.repeats),
            options.device,
            partial(announce, name),
        )
        cells = {"eager": times["eager"], "first": first, "later": times["later"]}
        (plan,) = (entry.plan for entry in planned.calls.entries.values())
        operations = "none" if plan is None else str(plan.operations)
        each = {way: number(seconds * 1e3, 3) for way, seconds in cells.items()}
        lines.append({"chunks": str(n), **each, "operations": operations})
    return lines


def _first(eager: Callable[[], Any], planned: Callable[[], Any], device: torch.device) -> float:
    """How many times as long a first call takes as the call itself."""
    for _ in range(2):
        eager()
    times = [once(call, device) for call in (eager, planned, eager)]
    return times[1] / min(times[0], times[2])
