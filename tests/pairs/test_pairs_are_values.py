"""Pairs and blocks are copied, pickled and saved with what they evaluate; modules are parts as they are."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from invfunc import (
    ArgumentError,
    ArgumentTypeError,
    Grid,
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    check_inverse,
    functional,
    invert,
    invertible_checkpoint,
    layers,
    leapfrog,
    momentum,
    repeated,
    tree,
    with_log_det,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

WIDTH = 4


# What is drawn: functions that can be found by their name, as pickle wants


def layer(b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(b @ p)


def two_layers(b: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(b @ p), torch.sin(b @ p)


def stretch(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (x @ torch.linalg.matrix_exp(p)).asinh()


def unstretch(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return y.sinh() @ torch.linalg.matrix_exp(-p)


@dataclass(frozen=True, repr=False)
class Drawn:
    """A pair with a state and parameters, and whether it has an inverse by itself and a volume."""

    pair: Invertible
    x: Any
    params: Any
    invertible: bool = True

    def __repr__(self) -> str:
        return repr(self.pair)


def halves(rand: Numbers) -> Any:
    return rand(3, WIDTH), rand(3, WIDTH)


def weight(rand: Numbers) -> torch.Tensor:
    return rand(WIDTH, WIDTH) / 2


def weights(rand: Numbers) -> Any:
    return weight(rand), weight(rand)


def modules(rand: Numbers) -> list[nn.Module]:
    found = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH).double())]
    with torch.no_grad():
        for module in found:
            for p in module.parameters():
                p.copy_(rand(*p.shape) / 2)
    return found


PAIRS = {
    "additive": lambda r: Drawn(additive_coupling(layer, layer), halves(r), weights(r)),
    "additive, split": lambda r: Drawn(additive_coupling(layer, layer, split_dim=-1), r(3, 2 * WIDTH), weights(r)),
    "exact": lambda r: Drawn(additive_coupling(layer, layer, exact=Grid(20)), Grid(20).enter(halves(r)), weights(r)),
    "affine": lambda r: Drawn(affine_coupling(two_layers, two_layers, log_scale=torch.sin), halves(r), weights(r)),
    "affine, split": lambda r: Drawn(affine_coupling(two_layers, two_layers, split_dim=1), r(3, 2 * WIDTH), weights(r)),
    "momentum": lambda r: Drawn(momentum(layer, 0.7), halves(r), weight(r)),
    "leapfrog": lambda r: Drawn(leapfrog(layer, 0.3), halves(r), weight(r)),
    "functions": lambda r: Drawn(Invertible(stretch, unstretch), r(3, WIDTH), weight(r)),
    "modules": lambda r: Drawn(additive_coupling(*modules(r)), halves(r), None),
    "modules, momentum": lambda r: Drawn(momentum(modules(r)[1]), halves(r), None),
    "modules, exact": lambda r: Drawn(
        additive_coupling(*modules(r), exact=Grid(20, torch.float64)),
        Grid(20, torch.float64).enter(halves(r)),
        None,
    ),
    "methods": lambda r: Drawn(additive_coupling(modules(r)[0].forward, modules(r)[1].forward), halves(r), None),
    "linear": lambda r: Drawn(layers.linear(), r(3, WIDTH), (weight(r), r(WIDTH))),
    "orthogonal_linear": lambda r: Drawn(layers.orthogonal_linear(), r(3, WIDTH), weight(r)),
    "conv1x1": lambda r: Drawn(layers.conv1x1(), r(2, WIDTH, 3), weight(r)),
    "conv1x1, orthogonal": lambda r: Drawn(layers.conv1x1(orthogonal=True), r(2, WIDTH, 3), weight(r)),
    "patch_conv": lambda r: Drawn(layers.patch_conv(), r(2, 1, 4, 2), weight(r).view(WIDTH, 1, 2, 2)),
    "batch_norm": lambda r: Drawn(layers.batch_norm(1e-3), r(5, WIDTH), (1 + r(WIDTH) / 4, r(WIDTH)), False),
    "batch_norm, given": lambda r: Drawn(
        layers.batch_norm(statistics=(r(WIDTH), 1 + r(WIDTH).square())), r(5, WIDTH), None
    ),
    "leaky_relu": lambda r: Drawn(layers.leaky_relu(0.3), r(3, WIDTH), None),
    "flatten": lambda r: Drawn(layers.flatten(1, 2), r(3, 2, 2), None, False),
    "unflatten": lambda r: Drawn(layers.unflatten(1, (2, -1)), r(3, WIDTH), None),
    "pixel_shuffle": lambda r: Drawn(layers.pixel_shuffle(2), r(2, 4, 1, 3), None),
    "pixel_unshuffle": lambda r: Drawn(layers.pixel_unshuffle(2), r(2, 1, 4, 2), None),
    "haar": lambda r: Drawn(layers.haar(), r(2, 1, 4, 2), None),
    "pad": lambda r: Drawn(layers.pad((1, 2), 0.5), r(2, 3), None, False),
    "identity": lambda r: Drawn(layers.identity(), r(2, 3), None),
}


def changed(drawn: Drawn, how: str) -> Drawn:
    """The same in something that is made of pairs."""
    pair, params = drawn.pair, drawn.params
    if how == "inverted" and drawn.invertible:
        return Drawn(invert(pair), pair(drawn.x, *given_to(params)), params)
    if how == "with log_det" and drawn.invertible and pair.log_det is not None:
        n = len(tree.tensors(drawn.x)[0])
        return Drawn(with_log_det(pair), (drawn.x, torch.zeros(n, dtype=torch.float64)), params)
    if how == "chain" and drawn.invertible:
        return Drawn(chain(pair, invert(pair), layers.identity(), anchor_every=2), drawn.x, [params, params, None])
    if how == "repeated" and drawn.invertible and "flatten" not in repr(pair) and "pixel" not in repr(pair):
        moves = "haar" in repr(pair) or "patch" in repr(pair)
        return drawn if moves else Drawn(repeated(pair), drawn.x, [params, params])
    return drawn


def given_to(params: Any) -> tuple:
    return () if params is None else (params,)


@st.composite
def pairs(draw: Any) -> Drawn:
    found = PAIRS[draw(st.sampled_from(list(PAIRS)))](Numbers(draw(st.integers(0, 3))))
    for how in draw(st.lists(st.sampled_from(["inverted", "with log_det", "chain", "repeated"]), max_size=2)):
        found = changed(found, how)
    return found


def told(pair: Invertible, x: Any, params: Any) -> dict[str, Any]:
    """Value, way back, volume, and gradients of the checkpointed function in all that it reads."""
    own = [p for fn in (*pair.shared, pair.forward) for p in held_by(fn)]
    leaves = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, params))
    g = invertible_checkpoint(pair)
    y = g(leaves[0], *given_to(leaves[1]))
    loss = sum((t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y) if t.requires_grad)
    inputs = [*tree.tensors(leaves), *own]
    found = {"y": y, "gradients": torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)}
    if not pair.hidden:
        found["x"] = pair.inverse(*pair.shared, tree.map_tensors(torch.Tensor.detach, y), *given_to(params))
    if pair.log_det is not None:
        found["log_det"] = pair.log_det(*pair.shared, x, *given_to(params))
    return found


def held_by(fn: Any) -> list[torch.Tensor]:
    module = getattr(fn, "module", None) or getattr(getattr(fn, "part", None), "module", None)
    module = module or getattr(fn, "__self__", None)
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


def _entries(parts):
    return parts.values() if isinstance(parts, dict) else parts


class TestCopies:
    @pytest.mark.parametrize("copied", [pickled, copy.deepcopy, saved])
    @settings(max_examples=40)
    @given(drawn=pairs())
    def test_are_equal_in_all_that_a_pair_does(self, copied, drawn):
        for whole in (drawn.pair, invertible_checkpoint(drawn.pair, preserve_rng_state=False)):
            again = copied(whole)
            assert repr(again) == repr(whole)
            pair = getattr(again, "pair", again)
            found, wanted = (told(p, drawn.x, drawn.params) for p in (pair, drawn.pair))
            for name in wanted:
                assert_trees_close(tree.tensors(found[name]), tree.tensors(wanted[name]), 0)

    def test_in_a_process_that_was_spawned(self):
        code = "import pickle, sys; g = pickle.load(sys.stdin.buffer); print(repr(g))"
        block = invertible_checkpoint(chain(additive_coupling(nn.Linear(2, 2), torch.sin), layers.identity()))
        run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(block), capture_output=True, check=True)
        assert run.stdout.decode().strip() == repr(block)


class Net(nn.Module):
    """Holds a block of its own modules, made in one of several ways."""

    def __init__(self, make: str) -> None:
        super().__init__()
        self.rounded = make == "rounded"
        self.F = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.G = nn.Linear(WIDTH, WIDTH)
        F, G = self.F, self.G
        made = {
            "modules": lambda: additive_coupling(self.F, self.G, split_dim=1),
            "lambdas": lambda: additive_coupling(lambda b: self.F(b), lambda a: self.G(a), split_dim=1),
            "closures": lambda: additive_coupling(lambda b: F(b), lambda a: G(a), split_dim=1),
            "defaults": lambda: additive_coupling(lambda b, m=F: m(b), lambda a, *, m=G: m(a), split_dim=1),
            "methods": lambda: additive_coupling(self.F.forward, self.part, split_dim=1),
            "partials": lambda: additive_coupling(partial(_through, F), partial(lambda m, a: m(a), G), split_dim=1),
            "affine": lambda: affine_coupling(self.two, self.two, split_dim=1),
            "rounded": lambda: additive_coupling(self.F, lambda a: self.G(a), split_dim=1, exact=True),
            "chain": lambda: chain(*(additive_coupling(m, m, split_dim=1) for m in (F, G)), anchor_every=1),
            "inverted": lambda: invert(additive_coupling(self.F, lambda a: self.G(a), split_dim=1)),
            "functional": lambda: additive_coupling(_with_own(F), _with_own(G), split_dim=1),
            "functions": lambda: Invertible(lambda x: x + _wide(self.G, F(x[:, :0].new_ones(1, WIDTH))), _back(F, G)),
        }
        self.block = invertible_checkpoint(made[make]())

    def part(self, a: torch.Tensor) -> torch.Tensor:
        return self.G(a)

    def two(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.F(a), self.G(a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(Grid().enter(x) if self.rounded else x)


def _through(module: nn.Module, b: torch.Tensor) -> torch.Tensor:
    return module(b)


def _with_own(module: nn.Module) -> Any:
    f, _ = functional(module)
    return lambda b: f(dict(module.named_parameters()), b)


def _wide(G: nn.Module, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([G(v), v], 1)


def _back(F: nn.Module, G: nn.Module) -> Any:
    return lambda y: y - _wide(G, F(y[:, :0].new_ones(1, WIDTH)))


WAYS = ["modules", "lambdas", "closures", "defaults", "methods", "partials", "affine", "chain", "inverted", "functions"]
WAYS += ["functional", "rounded"]


def slopes(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


class TestOfAModuleThatHoldsABlock:
    @pytest.mark.quick
    @pytest.mark.parametrize("copied", [copy.deepcopy, averaged, pickled])
    @pytest.mark.parametrize("way", WAYS)
    def test_a_copy_evaluates_its_own_weights(self, way, copied):
        """The original's are changed afterwards; then those of the copy."""
        net, x = Net(way), torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
        if copied is pickled and way in ("lambdas", "closures", "defaults", "partials", "inverted", "functions"):
            pytest.skip("pickle refuses a lambda by itself")
        if copied is pickled and way in ("functional", "rounded"):
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
        if way in ("rounded",):
            pytest.skip("the grid has a dtype of its own")
        net, x = Net(way), torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
        y = net(x)
        assert_trees_close(net.double()(x.double()).float(), y, 1e-5)

    @pytest.mark.parametrize("kind", [list, tuple, deque, OrderedDict, frozenset])
    def test_whatever_holds_the_parts(self, kind):
        part = nn.Linear(2, 2).double()
        parts = OrderedDict(part=part) if kind is OrderedDict else kind([part])
        pair = additive_coupling(lambda b: next(iter(_entries(parts)))(b), torch.sin, split_dim=1)
        twin, x = copy.deepcopy(pair), torch.ones(1, 4, dtype=torch.float64)
        with torch.no_grad():
            before = twin(x)
            part.weight.zero_()
        assert torch.equal(twin(x), before)

    def test_what_functions_share_is_shared_by_their_copies(self):
        m = nn.Linear(2, 2)

        def F(b):
            return m(b)

        again = copy.deepcopy(additive_coupling(F, lambda a: F(a)))
        (inner,) = (c.cell_contents for c in again.shared[1].__closure__)
        assert inner is again.shared[0] is not F

    def test_a_function_of_constants_stays_the_same(self):
        scale, other = 2.0, object()
        pair = additive_coupling(lambda b: scale * b, lambda a: a if other else a)
        assert copy.deepcopy(pair).shared == pair.shared

    def test_a_function_that_calls_itself(self):
        m = nn.Linear(2, 2)

        def again(b, depth=2):
            return m(again(b, depth - 1)) if depth else b

        pair = copy.deepcopy(additive_coupling(again, again))
        x = torch.ones(1, 2), torch.ones(1, 2)
        y = pair(x)
        with torch.no_grad():
            m.weight.zero_()
        assert_trees_close(pair(x), y, 0)


class TestModulesAsParts:
    MAKERS = {
        "additive": lambda F, G: (additive_coupling(F, G), (0, 1)),
        "momentum": lambda F, G: (momentum(F), (0,)),
        "leapfrog": lambda F, G: (leapfrog(F, 0.5), (0,)),
    }

    @pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
    def test_are_functions_of_their_own_parameters_and_of_those_of_functional(self, make):
        """Passed ones get the gradients, and the module none."""
        parts, x = modules(Numbers(1)), halves(Numbers(2))
        pair, used = make(*parts)
        plain, _ = make(*(lambda b, m=m: m(b) for m in parts))
        assert_trees_close(pair(x), plain(x), 0)
        assert "Linear" in repr(pair)
        params = [{name: 2 * p for name, p in functional(m)[1].items()} for m in parts]
        other, _ = make(*(functional(m)[0] for m in parts))
        swapped, _ = make(*(lambda b, p, m=m: functional(m)[0](p, b) for m in parts))
        given_ = tuple(params) if len(used) == 2 else params[0]

        def loss(pair, params, call=lambda g: g):
            return sum(t.square().sum() for t in call(pair)(x, params))

        found = torch.func.grad(lambda p: loss(pair, p, invertible_checkpoint))(given_)
        wanted = torch.func.grad(lambda p: loss(swapped, p))(given_)
        assert_trees_close(found, wanted, 1e-10)
        assert all(p.grad is None for m in parts for p in m.parameters())

    def test_get_gradients_in_plain_autograd(self):
        parts, x = modules(Numbers(1)), halves(Numbers(2))
        own = [p for m in parts for p in m.parameters()]
        plain = additive_coupling(lambda b: parts[0](b), lambda a: parts[1](a))
        losses = (
            sum(t.square().sum() for t in f(f(x))) for f in (plain, invertible_checkpoint(additive_coupling(*parts)))
        )
        wanted, found = (torch.autograd.grad(loss, own) for loss in losses)
        assert_trees_close(found, wanted, 1e-10)

    def test_further_inputs_stand_behind_the_parameters(self):
        class Scaled(nn.Linear):
            def forward(self, b, by):
                return super().forward(b) * by

        m, x = Scaled(2, 2), (torch.ones(1, 2), torch.ones(1, 2))
        for pair, none in ((additive_coupling(m, m), (None, None)), (momentum(m), None)):
            assert_trees_close(pair(x, None, 0.0), pair(x, none, 0.0), 0)
            assert not torch.equal(pair(x, None, 1.0)[0], pair(x, None, 0.0)[0])
        with pytest.raises(ArgumentTypeError, match="of the module Scaled are of type Tensor.*behind them"):
            momentum(m)(x, torch.ones(1, 2))
        with pytest.raises(ArgumentError, match="Scaled.*params has 'w', which is not a parameter or buffer"):
            momentum(m)(x, {"w": torch.ones(2, 2)})

    def test_chains_need_no_parameters(self):
        parts, x = modules(Numbers(1)), halves(Numbers(2))
        g = invertible_checkpoint(chain(additive_coupling(*parts), layers.identity(), momentum(parts[0])))
        assert_trees_close(g(x), g(x, [None] * 3), 0)
        assert_trees_close(invert(g.pair)(g(x)), x, 1e-10)
        with pytest.raises(ArgumentError, match=r"params says how often.*\[None\] \* n"):
            repeated(momentum(parts[0]))(x)
        check_inverse(repeated(momentum(parts[0])), x, [None] * 3)


@pytest.mark.quick
class TestOnAGrid:
    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
    def test_parts_compute_in_the_dtype_of_their_parameters(self, kind):
        """The state comes back to the bit, and the parameters have gradients of their own dtype."""
        x = Grid().enter(tree.map_tensors(torch.Tensor.float, halves(Numbers(0))))
        parts = [m.to(kind) for m in modules(Numbers(1))]
        w = weight(Numbers(2)).to(kind).requires_grad_()
        for pair, params in (
            (additive_coupling(*parts, exact=True), None),
            (additive_coupling(layer, layer, exact=True), (w, w)),
        ):
            y = invertible_checkpoint(pair)(x, params)
            assert_trees_close(pair.inverse(*pair.shared, y, params), x, 0)
            inputs = [w] if params else [p for m in parts for p in m.parameters()]
            gradients = torch.autograd.grad(sum(t.sum() for t in y), inputs)
            assert {t.dtype for t in y} == {torch.float32} and {g.dtype for g in gradients} == {kind}
            plain = torch.autograd.grad(sum(t.sum() for t in pair(x, params)), inputs)
            assert_trees_close(gradients, plain, 0)

    def test_weights_that_are_not_seen_are_told_of(self):
        m = nn.Linear(WIDTH, WIDTH).bfloat16()
        pair = additive_coupling(lambda b: m(b), lambda b: m(b), exact=True)
        with pytest.raises(RuntimeError) as raised:
            pair(Grid().enter((torch.ones(1, WIDTH), torch.ones(1, WIDTH))))
        assert "lambda b: F(b.to(torch.bfloat16))" in raised.value.__notes__[0]


class TestShapes:
    """Parts that would be broadcast."""

    X = torch.ones(3, WIDTH), torch.ones(3, WIDTH)

    @pytest.mark.parametrize("size", [(3, 1), (WIDTH,), (1, WIDTH), (), (2, 3, WIDTH)], ids=str)
    @pytest.mark.parametrize("block", [lambda pair: pair, invertible_checkpoint], ids=["pair", "block"])
    def test_of_what_a_part_returns_are_those_of_what_it_changes(self, block, size):
        def wrong(b):
            return torch.ones(size)

        def right(b):
            return b

        told = rf"returns a tensor of shape \[{', '.join(map(str, size))}\], but .* has shape \[3, 4\]"
        for pair in (
            additive_coupling(wrong, right),
            additive_coupling(right, wrong),
            momentum(wrong),
            leapfrog(wrong, 1),
        ):
            with pytest.raises(ArgumentError, match=told):
                block(pair)(self.X)
        for pair in (lambda b: (b, wrong(b)), lambda b: (wrong(b), b)):
            with pytest.raises(ArgumentError, match=told):
                block(affine_coupling(pair, pair))(self.X)
        with pytest.raises(ArgumentError, match="log_scale " + told):
            block(affine_coupling(lambda b: (b, b), lambda b: (b, b), log_scale=wrong))(self.X)
        with pytest.raises(ArgumentError, match="the state"):
            block(momentum(right))((self.X[0], torch.ones(size)))

    def test_of_halves_of_an_odd_size_are_told(self):
        m = nn.Linear(4, 4)
        for F in (m, lambda b: m(b)):
            with pytest.raises(RuntimeError) as raised:
                additive_coupling(F, F, split_dim=1)(torch.ones(8, 7))
            (note,) = raised.value.__notes__
            assert "a of shape [8, 4] and b of shape [8, 3]" in note
        with pytest.raises(ArgumentError) as raised:
            additive_coupling(torch.sin, torch.sin, split_dim=1)(torch.ones(8, 7))
        assert "returns a tensor of shape [8, 3]" in str(raised.value)
        fitting = additive_coupling(nn.Linear(3, 4), nn.Linear(4, 3), split_dim=1)
        assert fitting(torch.ones(8, 7)).shape == (8, 7)

    @pytest.mark.parametrize(
        "pair",
        [
            additive_coupling(torch.sin, torch.sin),
            momentum(torch.sin),
            additive_coupling(torch.sin, torch.sin, split_dim=1),
        ],
    )
    def test_functions_of_a_pair_get_what_it_shares_in_front(self, pair):
        for fn in (pair.forward, pair.inverse, pair.log_det):
            with pytest.raises(ArgumentTypeError, match=r"pair.log_det\(\*pair.shared, x, params\)"):
                fn(self.X)


def test_attributes_are_there_before_threads_ask():
    """Python 3.11 makes the dict of an instance late, and crashes where two threads ask for it at once."""
    block = invertible_checkpoint(additive_coupling(nn.Linear(2, 2), nn.Linear(2, 2)))
    for value in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        for held in (value, value.pair, *value.pair.shared):
            assert any(isinstance(known, dict) for known in gc.get_referents(held))
