"""A module that holds a block is copied and moved with all that the block evaluates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from invfunc import (
    Invertible,
    additive_coupling,
    chain,
    functional,
    invert,
    invertible_checkpoint,
)
from invfunc.testing import assert_trees_close
from tests.pairs.test_pairs_are_values import WIDTH, pickled


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


class Net(nn.Module):
    """Holds a block of its own modules, made in one of several ways."""

    def __init__(self, make: str) -> None:
        super().__init__()
        self.F = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.G = nn.Linear(WIDTH, WIDTH)
        F, G = self.F, self.G
        made = {
            "modules": lambda: additive_coupling(self.F, self.G, split_dim=1),
            "lambdas": lambda: additive_coupling(lambda b: self.F(b), lambda a: self.G(a), split_dim=1),
            "closures": lambda: additive_coupling(lambda b: F(b), lambda a: G(a), split_dim=1),
            "methods": lambda: additive_coupling(self.F.forward, self.part, split_dim=1),
            "chain": lambda: chain(*(additive_coupling(m, m, split_dim=1) for m in (F, G)), anchor_every=1),
            "inverted": lambda: invert(additive_coupling(self.F, lambda a: self.G(a), split_dim=1)),
            "functional": lambda: additive_coupling(_with_own(F), _with_own(G), split_dim=1),
            "functions": lambda: Invertible(lambda x: x + _wide(self.G, F(x[:, :0].new_ones(1, WIDTH))), _back(F, G)),
        }
        self.block = invertible_checkpoint(made[make]())

    def part(self, a: torch.Tensor) -> torch.Tensor:
        return self.G(a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def _with_own(module: nn.Module) -> Any:
    f, _ = functional(module)
    return lambda b: f(dict(module.named_parameters()), b)


def _wide(G: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([G(v), v], 1)


def _back(F: nn.Module, G: nn.Module) -> Any:
    return lambda y: y - _wide(G, F(y[:, :0].new_ones(1, WIDTH)))


WAYS = ["modules", "lambdas", "closures", "methods", "chain", "inverted", "functions", "functional"]


def slopes(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


class TestOfAModuleThatHoldsABlock:
    @pytest.mark.quick
    @pytest.mark.parametrize("copied", [copy.deepcopy, averaged, pickled])
    @pytest.mark.parametrize("way", WAYS)
    def test_a_copy_evaluates_its_own_weights(self, way, copied):
        """The original's are changed afterwards; then those of the copy."""
        net, x = Net(way), torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
        if copied is pickled and way not in ("modules", "methods", "chain"):
            pytest.skip("pickle refuses a lambda by itself")
        y, gradients = net(x).detach(), slopes(net, x)
        again = copied(net)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2.0)
        assert not torch.allclose(net(x), y)
        assert_trees_close([again(x), *slopes(again, x)], [y, *gradients], 0)
        with torch.no_grad():
            for p in again.parameters():
                p.mul_(2.0)
        assert_trees_close([again(x), *slopes(again, x)], [net(x), *slopes(net, x)], 0)

    @pytest.mark.parametrize("way", WAYS)
    def test_moves_with_it(self, way):
        net, x = Net(way), torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
        y = net(x)
        assert_trees_close(net.double()(x.double()).float(), y, 1e-5)
