"""Modules of libraries of normalizing flows as pairs: normflows, FrEIA and zuko, and deep models made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import FrEIA.framework
import FrEIA.modules
import normflows
import pytest
import torch
import zuko
from torch import nn
from torch.optim.swa_utils import AveragedModel

import invfunc
from invfunc import Invertible, additive_coupling, affine_coupling, chain, functional, invert, invertible_checkpoint
from invfunc import with_log_det as carrying
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs import from_module, momentum
from invfunc.testing import assert_trees_close, laws
from tests.many_processes import alone
from tests.pairs.test_pair import WIDTH, pickled
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


# Blocks as modules: they register the parameters of their parts, once, under the names of the parts


class Attend(nn.Linear):
    def forward(self, x, mask=None):
        y = super().forward(x)
        return y if mask is None else y * mask


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.w.exp()

    def inverse(self, y):
        return y / self.w.exp()


def part():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Dropout(0.2))


def halved():
    module = Halved()
    return invertible_checkpoint(module, module.inverse)


MADE = {
    "pair": (lambda: additive_coupling(part(), part(), split_dim=1), {"F", "G"}),
    "block": (lambda: invertible_checkpoint(additive_coupling(part(), part(), split_dim=1)), {"F", "G"}),
    "chain": (lambda: chain(*[additive_coupling(part(), part(), split_dim=1) for _ in range(3)]), {"0", "1", "2"}),
    "functions": (halved, {"f"}),
}


@pytest.mark.parametrize("name", MADE)
class TestModule:
    def test_registers_its_parts(self, name):
        made, names = MADE[name]
        module = made().module()
        assert {path.split(".")[0] for path, _ in module.named_parameters()} == names
        assert len({*map(id, module.parameters())}) == len([*module.parameters()])

    def test_trains_in_distributed_data_parallel(self, name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), MADE[name][0]().module(), nn.Linear(4, 1))
        twin, x = copy.deepcopy(net), torch.randn(6, 3)
        with alone():
            for model in (nn.parallel.DistributedDataParallel(net), twin):
                torch.manual_seed(1)  # of the dropout
                model(x).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad)

    def test_gradients_are_those_of_the_pair(self, name):
        block = MADE[name][0]()
        module, x = block.module().eval(), torch.randn(6, 4)
        found = torch.autograd.grad(module(x).sin().sum(), [*module.parameters()])
        wanted = torch.autograd.grad(getattr(block, "pair", block)(x).sin().sum(), [*module.parameters()])
        torch.testing.assert_close(found, wanted)


def test_further_arguments_reach_the_parts():
    x, mask = torch.randn(3, 4), torch.zeros(2)
    for block in (additive_coupling(Attend(2, 2), Attend(2, 2), split_dim=1), momentum(Attend(4, 4))):
        module, state = chain(block).module(), x if "additive" in repr(block) else (x, torch.zeros(3, 4))
        if "momentum" in repr(block):
            mask = torch.zeros(4)
        assert torch.equal(torch.cat([*module(state, mask)]), torch.cat([*module(state, mask=mask)]))
        assert not torch.equal(torch.cat([*module(state, mask)]), torch.cat([*module(state)]))


def test_of_repeated_is_given_how_often():
    module, x = (
        invfunc.repeated(additive_coupling(nn.Linear(2, 2), nn.Linear(2, 2), split_dim=1)).module(),
        torch.ones(3, 4),
    )
    assert torch.equal(module(module(x, [None]), [None] * 2), module(x, [None] * 3))


def test_without_modules_is_an_error():
    layer = nn.Linear(2, 2)
    with pytest.raises(invfunc.errors.ArgumentError, match="it has no modules to register"):
        affine_coupling(lambda b: layer(b).chunk(2, 1), torch.sin).module()


# A module that holds a block is copied and moved with all that the block evaluates


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
