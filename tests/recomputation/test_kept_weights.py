"""Weights that torch keeps within `parametrize.cached()` get their gradients through blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn.utils import parametrizations, parametrize

import invfunc as i
from invfunc.testing import assert_trees_close

KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda m: parametrizations.spectral_norm(m).eval(),
}


class Net(nn.Module):
    """Two layers that share a parametrized one, twice, within `cached()`."""

    def __init__(self, wrap: Callable, kind: Callable, before: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(nn.Linear(2, 2, dtype=dtype))
        self.before = before
        self.block = wrap(i.additive_coupling(self.layer, nn.Sequential(self.layer, nn.Tanh()), split_dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            if self.before:
                x = x * self.get_submodule("layer").weight.sum()
            return self.block(self.block(x))


def in_autograd(net: Net, x: torch.Tensor) -> Any:
    net(x).sin().sum().backward()
    return [p.grad for p in net.parameters()]


def within_cached(net: Net, x: torch.Tensor) -> Any:
    with parametrize.cached():
        return in_autograd(net, x)


def in_torch_func(net: Net, x: torch.Tensor) -> Any:
    f, params = i.functional(net)
    return grad(lambda p: f(p, x).sin().sum())(params)


def shares(net: Net, x: torch.Tensor) -> Any:
    f, params = i.functional(net)
    return i.batch_grad(lambda p, x: f(p, x).sin().sum())(params, x)


@pytest.mark.parametrize("way", [in_autograd, within_cached, in_torch_func, shares])
@pytest.mark.parametrize("before", [False, True], ids=["read by blocks", "read before"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equals_the_function(kind, before, way, dtype, device):
    x = torch.linspace(-1, 2, 12, dtype=dtype, device=device).reshape(3, 4)
    nets = [Net(wrap, kind, before, dtype).to(device) for wrap in (i.invertible_checkpoint, lambda pair: pair)]
    if way is shares and kind is KINDS["orthogonal"] and not before:  # in plain autograd, behind functional_call
        with pytest.raises(i.ReplayError, match="as functional_call has ended"):
            way(nets[0], x)
        return
    found, wanted = (way(net, x) for net in nets)
    assert_trees_close(found, wanted, 1e-4 if dtype == torch.float32 else 1e-9, 1e-3)


def test_what_is_kept_is_that_of_outside(dtype, device):
    """A block neither keeps its own weights nor drops those of others."""
    layer = parametrizations.orthogonal(nn.Linear(2, 2, dtype=dtype)).to(device)
    block = i.invertible_checkpoint(i.additive_coupling(layer, torch.sin, split_dim=1))
    x = torch.ones(3, 4, dtype=dtype, device=device)
    with parametrize.cached():
        y = block(x)
        first = layer.weight
        block(y).sum().backward()
        assert layer.weight is first
