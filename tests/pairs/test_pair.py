"""A function with its inverse as one value, and what couplings of them refuse."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    functional,
    invert,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
    with_log_det,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError
from invfunc.pairs import Grid, bdia, fixed_point, leapfrog, momentum, reversible_step, runge_kutta, state_first
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

WIDTH, DOUBLE = 4, Grid(20, torch.float64)


# What is drawn: functions that can be found by their name, as pickle wants


def layer(b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(b @ p)


def field(x: torch.Tensor, t: float, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p) + t


def two_layers(b: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(b @ p), torch.sin(b @ p)


def stretch(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (x @ torch.linalg.matrix_exp(p)).asinh()


def unstretch(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return y.sinh() @ torch.linalg.matrix_exp(-p)


def halves(rand: Numbers) -> Any:
    return rand(3, WIDTH), rand(3, WIDTH)


def weight(rand: Numbers) -> torch.Tensor:
    return rand(WIDTH, WIDTH) / 2


def weights(rand: Numbers) -> Any:
    return weight(rand), weight(rand)


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double(), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()]


AFFINE = affine_coupling(two_layers, two_layers, log_scale=torch.sin)
PAIRS: dict[str, Callable[[Numbers], tuple]] = {
    "additive, split": lambda r: (additive_coupling(layer, layer, split_dim=-1), r(3, 2 * WIDTH), weights(r)),
    "exact": lambda r: (additive_coupling(layer, layer, exact=Grid(20)), Grid(20).enter(halves(r)), weights(r)),
    "bdia": lambda r: (bdia(layer, DOUBLE), DOUBLE.enter(halves(r)), (True, weight(r))),
    "affine": lambda r: (AFFINE, halves(r), weights(r)),
    "momentum": lambda r: (momentum(layer, 0.7), halves(r), weight(r)),
    "leapfrog": lambda r: (leapfrog(layer, 0.3), halves(r), weight(r)),
    "reversible_step": lambda r: (reversible_step(runge_kutta(field, "heun"), 0.7), halves(r), (0.0, 0.5, weight(r))),
    "one copy": lambda r: (reversible_step(runge_kutta(field, "ees25"), None), r(3, WIDTH), (0.0, 0.01, weight(r))),
    "fixed_point": lambda r: (fixed_point(layer, 0.3), halves(r), weight(r)),
    "functions": lambda r: (Invertible(stretch, unstretch), r(3, WIDTH), weight(r)),
    "modules": lambda r: (additive_coupling(*modules()), halves(r), None),
    "methods": lambda r: (additive_coupling(*[m.forward for m in modules()]), halves(r), None),
    "linear": lambda r: (layers.linear(), r(3, WIDTH), (weight(r), r(WIDTH))),
    "patch_conv": lambda r: (layers.patch_conv(), r(2, 1, 4, 2), weight(r).view(WIDTH, 1, 2, 2)),
    "batch_norm": lambda r: (layers.batch_norm(1e-3), r(5, WIDTH), (1 + r(WIDTH) / 4, r(WIDTH))),
    "pad": lambda r: (layers.pad((1, 2), 0.5), r(2, 3), None),
    "inverted": lambda r: (invert(layers.haar()), r(2, 4, 2, 1), None),
    "with log_det": lambda r: (with_log_det(AFFINE), (halves(r), r(3)), weights(r)),
    "chain": lambda r: (
        chain(AFFINE, invert(AFFINE), layers.identity(), anchor_every=2),
        halves(r),
        [*[weights(r)] * 2, None],
    ),
    "repeated": lambda r: (with_log_det(repeated(AFFINE)), (halves(r), r(3)), [weights(r)] * 2),
}


def told(pair: Invertible, x: Any, params: Any) -> dict[str, Any]:
    """Value, way back, volume, and gradients of the checkpointed function in all that it reads."""
    given = () if params is None else (params,)
    own = [p for fn in (*pair.shared, pair.forward) for p in held_by(fn)]
    leaves = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, given))
    y = invertible_checkpoint(pair)(leaves[0], *leaves[1])
    loss = sum((t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y) if t.requires_grad)
    inputs = [*tree.tensors(leaves), *own]
    found = {"y": y, "gradients": torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)}
    if not pair.hidden:
        found["x"] = pair.inverse(*pair.shared, tree.map_tensors(torch.Tensor.detach, y), *given)
    if pair.log_det is not None:
        found["log_det"] = pair.log_det(*pair.shared, x, *given)
    return found


def held_by(fn: Any) -> list[torch.Tensor]:
    module = getattr(fn, "module", None) or getattr(getattr(fn, "fn", None), "module", None)
    module = module or getattr(fn, "__self__", None)
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, saved])
@pytest.mark.parametrize("name", PAIRS)
def test_copies_are_equal_in_all_that_a_pair_does(name, copied):
    pair, x, params = PAIRS[name](Numbers())
    wanted = told(pair, x, params)
    for whole in (pair, invertible_checkpoint(pair, preserve_rng_state=False)):
        again = copied(whole)
        assert repr(again) == repr(whole)
        found = told(getattr(again, "pair", again), x, params)
        for key in wanted:
            assert_trees_close(tree.tensors(found[key]), tree.tensors(wanted[key]), 0)


def there(x, by, *, times=1.0):
    return {name: times * t * by for name, t in x.items()}


def back(y, by, *, times=1.0):
    return {name: t / by / times for name, t in y.items()}


class TestInvertible:
    @pytest.mark.parametrize("given_out", [torch.ones(2), (torch.ones(2),), [torch.ones(2), None], {"a": 1, "b": 2}])
    def test_that_hides_gives_a_pair(self, given_out):
        """A tensor of two rows would be taken for y and what is hidden."""
        pair = Invertible(lambda x: given_out, lambda y, hidden: y, hidden=True)
        for call in (pair, invertible_checkpoint(pair)):
            with pytest.raises(ArgumentError, match=r"forward has to return \(y, hidden\)"):
                call(torch.ones(2, requires_grad=True))


def centred(x, w):
    mean = (w * x).mean(0, keepdim=True)
    return x - mean, {"mean": mean, "note": "kept"}


CENTRE = Invertible(centred, lambda y, hidden, w: y + hidden["mean"], hidden=True, name="centre")


class TestHidden:
    def test_is_seen_with_has_aux_alone(self):
        rand = Numbers()
        x, w = rand(4, 3).requires_grad_(), rand(3)
        y, hidden = invertible_checkpoint(CENTRE, has_aux=True)(x, w)
        assert_trees_close(hidden["mean"], (w * x).mean(0, keepdim=True), 1e-12)
        assert hidden["note"] == "kept"
        for g in (CENTRE, invertible_checkpoint(CENTRE)):
            assert_trees_close(g(x, w), y, 0)
        with pytest.raises(ArgumentError, match=r"^invertible_checkpoint\(.*has_aux=True returns hidden values"):
            invertible_checkpoint(Invertible(there, back), has_aux=True)

    def test_has_gradients_of_its_own(self):
        rand = Numbers()
        x, w = rand(4, 3), rand(3)

        def loss(f):
            def value(x, w):
                y, hidden = f(x, w)
                y, more = f(y, 2 * w)
                return (y.sin() * (hidden["mean"] + more["mean"].exp())).sum()

            return value

        g = invertible_checkpoint(CENTRE, has_aux=True)
        wanted = grad(loss(centred), (0, 1))(x, w)
        assert_trees_close(grad(loss(g), (0, 1))(x, w), wanted, 1e-10)
        leaves = x.requires_grad_(), w.requires_grad_()
        assert_trees_close(torch.autograd.grad(loss(g)(*leaves), leaves), wanted, 1e-10)

    def test_is_what_the_inverse_gets(self):
        """x is computed from it: with a wrong hidden part the gradient is wrong."""
        x, w = Numbers()(4, 3), Numbers(1)(3)
        wrong = Invertible(lambda x, w: (centred(x, w)[0], {"mean": x[:1] * 0}), CENTRE.inverse, hidden=True)

        def slope(g, **options):
            return grad(lambda w: invertible_checkpoint(g, **options)(x * 1, w).sin().sum())(w)

        assert not torch.allclose(slope(CENTRE), slope(wrong, check="off"))
        with pytest.raises(InverseError, match="gives x back with an error"):
            slope(wrong)


def first(b, p):
    return (b @ p).tanh()


def second(a, q):
    return (a @ q).sin()


def coupled(F, G, x, params):
    a = x[0] + F(x[1], params[0])
    return a, x[1] + G(a, params[1])


def uncoupled(F, G, y, params):
    b = y[1] - G(y[0], params[1])
    return y[0] - F(b, params[0]), b


def again(F, G, y, params):
    G(y[0], params[1])
    return uncoupled(F, G, y, params)


def by_itself(F, G, y, params):
    return uncoupled(F, second, y, params)


def in_order(F, G, y, params):
    x = uncoupled(F, second, y, params)
    G(y[0], params[1])
    return x


class TestShared:
    @pytest.mark.parametrize("functional", [True, False])
    @pytest.mark.parametrize("inverse", [again, by_itself, in_order])
    def test_are_evaluated_by_the_inverse_as_often_and_in_reverse_order(self, inverse, functional):
        """Else the graph of one evaluation would serve another."""
        rand = Numbers()
        x, params = (rand(4, 3), rand(4, 3)), (rand(3, 3), rand(3, 3))

        def backwards(pair):
            def loss(params):
                g = invertible_checkpoint(pair)
                a, b = g(g(x, params), params)  # what is between them is not in memory
                return (a * b).sin().sum()

            if functional:
                return grad(loss)(params)
            leaves = [p.clone().requires_grad_() for p in params]
            return tuple(torch.autograd.grad(loss(leaves), leaves))

        def plain(params):
            a, b = coupled(first, second, coupled(first, second, x, params), params)
            return (a * b).sin().sum()

        wanted = grad(plain)(params)
        assert_trees_close(backwards(Invertible(coupled, uncoupled, (first, second))), wanted, 1e-10)
        with pytest.raises(InverseError, match="shared function"):
            backwards(Invertible(coupled, inverse, (first, second)))


class TestStateFirst:
    def test_swaps_two_arguments(self):
        def f(params, x, *more, **named):
            return params, x, more, named

        assert state_first(f)(1, 2, 3, named=4) == (2, 1, (3,), {"named": 4})
        assert state_first(state_first(f))(1, 2, 3, named=4) == f(1, 2, 3, named=4)
        assert repr(state_first(f)) == "state_first(f)"
        assert repr(invertible_checkpoint(state_first(f), None)).startswith("invertible_checkpoint(state_first(f)")

    def test_refuses_what_is_no_function(self):
        model = torch.nn.Linear(2, 2)
        for f, told in ((3, "int"), (None, "NoneType"), (model, "functional")):
            with pytest.raises(ArgumentTypeError, match=rf"^state_first\(f\): .*{told}"):
                state_first(f)
        f, params = functional(model)
        assert_trees_close(state_first(f)(torch.ones(2), params), model(torch.ones(2)), 0)


# The parts of couplings: modules or functions, in their own dtype, whose shapes are checked.


@pytest.mark.quick
class TestOnAGrid:
    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
    def test_parts_compute_in_the_dtype_of_their_parameters(self, kind):
        """The state comes back to the bit, and the parameters have gradients of their own dtype."""
        x = Grid().enter(tree.map_tensors(torch.Tensor.float, halves(Numbers(0))))
        parts = [m.to(kind) for m in modules()]
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

        told = rf"is a tensor of shape \[{', '.join(map(str, size))}\], but .* is a tensor of shape \[3, 4\]"
        for pair in (
            additive_coupling(wrong, right),
            additive_coupling(right, wrong),
            momentum(wrong),
            leapfrog(wrong, 1),
            fixed_point(wrong),
        ):
            with pytest.raises(ArgumentError, match=told):
                block(pair)(self.X)
        for pair in (lambda b: (b, wrong(b)), lambda b: (wrong(b), b)):
            with pytest.raises(ArgumentError, match=told):
                block(affine_coupling(pair, pair))(self.X)
        with pytest.raises(ArgumentError, match="log_scale returns " + told):
            block(affine_coupling(lambda b: (b, b), lambda b: (b, b), log_scale=wrong))(self.X)
        told = rf"is a tensor of shape \[3, 4\], but v, .* of shape \[{', '.join(map(str, size))}\]"
        with pytest.raises(ArgumentError, match=told):
            block(momentum(right))((self.X[0], torch.ones(size)))

    def test_of_halves_of_an_odd_size_fit_functions_of_them(self):
        with pytest.raises(ArgumentError, match=r"what F returns is a tensor of shape \[8, 3\].* shape \[8, 4\]"):
            additive_coupling(torch.sin, torch.sin, split_dim=1)(torch.ones(8, 7))
        fitting = additive_coupling(nn.Linear(3, 4), nn.Linear(4, 3), split_dim=1)
        assert fitting(torch.ones(8, 7)).shape == (8, 7)
