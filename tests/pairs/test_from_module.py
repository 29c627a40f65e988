"""Modules of libraries of normalizing flows as pairs: normflows, FrEIA and zuko, and deep models made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import FrEIA.framework
import FrEIA.modules
import normflows
import pytest
import torch
import zuko
from torch import nn

from invfunc import functional, invert, invertible_checkpoint
from invfunc import with_log_det as carrying
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs import from_module
from invfunc.testing import assert_trees_close, laws
from tests.strategies import Numbers

EXACT = 1e-10


def subnet(inner: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, 8), nn.Tanh(), nn.Linear(8, out))


def frozen_start() -> nn.Module:
    """A normflows ActNorm after its first batch, from which it starts."""
    norm = normflows.flows.ActNorm(4)
    norm(Numbers(3)(5, 4).float())
    return norm


def sequence() -> nn.Module:
    net = FrEIA.framework.SequenceINN(4)
    for _ in range(2):
        net.append(FrEIA.modules.AllInOneBlock, subnet_constructor=subnet)
    return net


MODULES: dict[str, Callable[[], nn.Module]] = {
    "normflows affine coupling": lambda: normflows.flows.AffineCouplingBlock(subnet(2, 4)),
    "normflows spline": lambda: normflows.flows.CoupledRationalQuadraticSpline(4, 1, 8),
    "normflows ActNorm": frozen_start,
    "normflows permutation": lambda: normflows.flows.Permute(4),
    "FrEIA coupling": lambda: FrEIA.modules.GLOWCouplingBlock([(4,)], subnet_constructor=subnet),
    "FrEIA sequence": sequence,
    "zuko autoregressive": lambda: zuko.flows.MAF(4, 0, transforms=1, hidden_features=(8,)).transform,
    "zuko inverse": lambda: zuko.flows.NSF(4, 0, transforms=1, hidden_features=(8,)).transform.inv,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


@pytest.mark.parametrize("name", MODULES)
class TestLibraries:
    @pytest.mark.filterwarnings("ignore:.*leaves a tensor")  # an inverse of zuko is in a cycle until that is collected
    def test_modules_have_the_laws_of_pairs(self, name):
        module = made(name)
        table = laws.check_pair(from_module(module), Numbers()(3, 4), functional(module)[1], seconds=3)
        assert not table.failed and not table.refused

    def test_carry_their_log_determinants(self, name):
        """Each direction evaluates the module once, with its own parameters and with others."""
        module, x, s = made(name), Numbers()(3, 4), Numbers(1)(3)
        pair, (_, params) = from_module(module), functional(module)
        calls = []
        module.register_forward_pre_hook(lambda *_: calls.append(1))
        y, total = carrying(pair)((x, s))
        assert len(calls) == 1
        assert_trees_close(total, s + pair.log_det(x, params), EXACT)
        assert_trees_close(invert(carrying(pair))((y, total), params), (x, s), EXACT)
        assert_trees_close(carrying(invert(pair))((y, total), params), (x, s), EXACT)

    def test_own_parameters_get_their_gradients(self, name):
        module, x = made(name), Numbers()(3, 4)
        flow, own = carrying(from_module(module)), [p for p in module.parameters() if p.requires_grad]

        def likelihood(flow: Callable) -> list[torch.Tensor]:
            z, s = flow((x, torch.zeros(3).double()))
            loss = z.square().sum() - s.sum()
            return [] if not own else [*torch.autograd.grad(loss, own, materialize_grads=True)]

        assert_trees_close(likelihood(invertible_checkpoint(flow)), likelihood(flow), EXACT)


class Scale(nn.Module):
    """The smallest module that knows its inverse."""

    def __init__(self, log_det: Any = None) -> None:
        super().__init__()
        self.weight, self.log_det = nn.Parameter(torch.tensor([1.0, -2.0]).double()), log_det

    def forward(self, x: torch.Tensor, by: float = 1.0) -> Any:
        y = x * self.weight * by
        return y if self.log_det is None else (y, self.log_det(x))

    def inverse(self, y: torch.Tensor, by: float = 1.0) -> Any:
        x = y / self.weight / by
        return x if self.log_det is None else (x, -self.log_det(x))


@pytest.mark.quick
class TestInterface:
    x = Numbers()(3, 2)

    def test_without_log_determinants(self):
        pair = from_module(Scale(), log_det=False)
        assert pair.log_det is None and repr(pair) == "from_module(Scale)"
        assert_trees_close(pair.inverse(pair(self.x, None, 3.0), None, 3.0), self.x, EXACT)
        assert_trees_close(pair(self.x, {"weight": torch.ones(2).double()}, by=3.0), 3 * self.x, EXACT)

    @pytest.mark.parametrize(
        "log_det",
        [lambda x: 0.5, lambda x: x.new_tensor(0.5), lambda x: x.new_full((1,), 0.5), lambda x: 0 * x + 0.25],
        ids=["number", "scalar", "[1]", "[N, ...]"],
    )
    def test_log_determinants_are_of_each_sample(self, log_det):
        assert_trees_close(from_module(Scale(log_det)).log_det(self.x), torch.full((3,), 0.5).double(), EXACT)

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            (
                lambda: from_module(torch.tanh),
                ArgumentTypeError,
                r"of type \w+, but has to be an nn.Module.*Invertible",
            ),
            (lambda: from_module(nn.Tanh()), ArgumentError, r"from_module\(Tanh\): it has no method `inverse`"),
            (lambda: from_module(Scale())(TestInterface.x), ArgumentError, r"returns a Tensor. Pass log_det=False"),
            (
                lambda: from_module(Scale(lambda x: x.new_zeros(2))).log_det(TestInterface.x),
                ArgumentError,
                r"has shape \[2\], but there are 3 samples",
            ),
            (lambda: from_module(made("zuko inverse"), log_det=False), ArgumentError, r"only a module with a method"),
        ],
    )
    def test_what_does_not_fit_is_an_error(self, call, error, text):
        with pytest.raises(error, match=text):
            call()


# Deep models
