"""A block may be a part of what torch.utils.checkpoint evaluates again, in statistics and products of all orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from invfunc import (
    additive_coupling,
    batch_grad,
    batch_l2_grad,
    diag_hessian,
    functional,
    ggnvp,
    hvp,
    invertible_checkpoint,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


class Blocks(nn.Module):
    def __init__(self, part: Callable, wrap: Callable, where: str) -> None:
        super().__init__()
        self.f, self.g, self.where = part(), part(), where
        self.block = wrap(additive_coupling(self.f, self.g, split_dim=1))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "around":
            return checkpoint(self.part, x, use_reentrant=False)
        if self.where == "alone":
            return checkpoint(self.block, x, use_reentrant=False).sin()
        return self.part(x) if self.where == "twice" else self.block(x).sin()


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    "a norm": lambda: nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.Tanh()),
    "a block": lambda: Blocks(lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh()), invertible_checkpoint, "once"),
}


def mean(f: Callable, params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(f(params, x), y)


def penalised(f: Callable) -> Callable:
    def transformed(params: dict, v: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        params = {name: p.clone().requires_grad_() for name, p in params.items()}
        norms = batch_l2_grad(partial(mean, f))(params, x, y)
        return torch.autograd.grad(torch.stack([*norms.values()]).sum(), list(params.values()))

    return transformed


def without(statistic: Callable) -> Callable:
    return lambda params, v, x, y: statistic(params, x, y)


TRANSFORMS: dict[str, Callable] = {
    "ggnvp": lambda f: ggnvp(f, F.mse_loss),
    "hvp": lambda f: hvp(partial(mean, f)),
    "hvp of blocks": lambda f: (
        lambda p, v, x, y: hvp(f, F.mse_loss, blocks=True)(p, {name: t[None] for name, t in v.items()}, x, y)
    ),
    "diag_hessian": lambda f: without(diag_hessian(f, F.mse_loss)),
    "batch_grad": lambda f: without(batch_grad(partial(mean, f))),
}
CASES = [pytest.param(t, p, id=f"{a}-{b}") for a, t in TRANSFORMS.items() for b, p in PARTS.items()]
CASES += [pytest.param(penalised, PARTS[name], id=f"penalised-{name}") for name in ("linear", "a block")]


@pytest.mark.parametrize("where", ["around", "alone"])
@pytest.mark.parametrize(("transform", "part"), CASES)
def test_equals_the_function(transform, part, where):
    rand = Numbers(2)
    model, plain = (
        Blocks(part, invertible_checkpoint, where).double(),
        Blocks(part, lambda pair: pair, "twice" if where == "around" else "once").double(),
    )
    plain.load_state_dict({name: rand(*t.shape) for name, t in plain.state_dict().items()})
    model.load_state_dict(plain.state_dict())
    x, y = rand(3, 4), rand(3, 4)
    found, wanted = (
        transform(f)(params, {name: p.cos() for name, p in params.items()}, x, y)
        for f, params in map(functional, (model, plain))
    )
    assert_trees_close(found, wanted, 1e-9, 1e-2)
