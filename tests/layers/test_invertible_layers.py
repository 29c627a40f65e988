"""Layers as pairs: each inverse undoes its layer, each log-determinant is that of the dense Jacobian."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import jacrev

from invfunc import layers, tree
from invfunc.pairs.pair import Invertible, invert
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.strategies import Numbers

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}
FLOOR = 1e-2
"""Absolute tolerance for a log-determinant or a derivative that is 0."""


@dataclass(frozen=True, repr=False)
class Case:
    """A layer with an input, and what comes behind it."""

    pair: Invertible
    x: torch.Tensor
    args: tuple = ()
    onto: bool = True
    """True if every tensor of the shape of y is an output of the layer."""
    statistics: tuple = ()
    of: Callable[[tuple], Invertible] | None = None
    """Makes the layer of statistics, such as these or what the pair hides."""

    def __repr__(self) -> str:
        behind = tree.map_tensors(lambda p: tuple(p.shape), self.args)
        return f"{self.pair!r} of {tuple(self.x.shape)}, {behind}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Text that hypothesis shows."""
        printer.text(repr(self))


def conditioned(rand: Numbers, out: int, inner: int) -> torch.Tensor:
    """A matrix with singular values between 1/2 and 2."""
    left, right = (torch.linalg.qr(rand(n, inner))[0] for n in (out, inner))
    return ((left * torch.linspace(0.5, 2, inner).double()) @ right).float().double()


def parametrised(draw, rand: Numbers, weight: torch.Tensor) -> Any:
    """The three ways in which a weight and a bias are given."""
    return draw(st.sampled_from([(weight, rand(weight.shape[0])), (weight, None), weight]))


def sizes(draw, least: int, most: int, largest: int = 3) -> list[int]:
    return draw(st.lists(st.integers(1, largest), min_size=least, max_size=most))


@st.composite
def identities(draw) -> Case:
    return Case(layers.identity(), Numbers()(*sizes(draw, 1, 3)))


@st.composite
def linears(draw, tall: bool) -> Case:
    rand, inner = Numbers(), draw(st.integers(1, 3))
    weight = conditioned(rand, inner + draw(st.integers(1, 2)) * tall, inner)
    return Case(layers.linear(), rand(*sizes(draw, 1, 3), inner), (parametrised(draw, rand, weight),))


@st.composite
def orthogonal_linears(draw) -> Case:
    rand, n = Numbers(), draw(st.integers(1, 4))
    return Case(layers.orthogonal_linear(), rand(*sizes(draw, 1, 3), n), (parametrised(draw, rand, rand(n, n)),))


@st.composite
def convolutions(draw, orthogonal: bool) -> Case:
    rand, n = Numbers(), draw(st.integers(1, 3))
    weight = rand(n, n) if orthogonal else conditioned(rand, n, n)
    x = rand(draw(st.integers(1, 2)), n, *sizes(draw, 1, 3))
    return Case(layers.conv1x1(orthogonal=orthogonal), x, (parametrised(draw, rand, weight),))


@st.composite
def patch_convolutions(draw, tall: bool) -> Case:
    rand, channels, kernel = Numbers(), draw(st.integers(1, 2)), sizes(draw, 1, 3, 2)
    numbers, counts = channels * math.prod(kernel), [draw(st.integers(1, 2)) for _ in kernel]
    weight = conditioned(rand, numbers + tall, numbers).unflatten(1, (channels, *kernel))
    x = rand(draw(st.integers(1, 2)), channels, *(c * k for c, k in zip(counts, kernel, strict=True)))
    return Case(layers.patch_conv(), x, (parametrised(draw, rand, weight),))


@st.composite
def batch_norms(draw, fixed: bool) -> Case:
    rand, eps = Numbers(), draw(st.sampled_from([1e-5, 0.1]))
    x = rand(draw(st.integers(2, 3)), draw(st.integers(1, 3)), *sizes(draw, 0, 3, 2))
    statistics = (rand(x.shape[1]), rand(x.shape[1]).square()) if fixed else ()
    affine = (rand(x.shape[1]).sign() + rand(x.shape[1]) / 8, rand(x.shape[1]))
    args = draw(st.sampled_from([(), (None,), (affine,)]))

    def of(statistics: tuple) -> Invertible:
        return layers.batch_norm(eps, statistics=statistics)

    return Case(of(statistics) if fixed else layers.batch_norm(eps), x, args, fixed, statistics, of)


@st.composite
def actnorms(draw) -> Case:
    rand = Numbers()
    x = rand(draw(st.integers(2, 3)), draw(st.integers(1, 3)), *sizes(draw, 0, 3, 2))
    return Case(layers.actnorm(draw(st.sampled_from([1e-6, 0.1]))), x, ((rand(x.shape[1]) / 4, rand(x.shape[1])),))


@st.composite
def leaky_relus(draw) -> Case:
    return Case(layers.leaky_relu(draw(st.sampled_from([0.01, 0.5, 3]))), Numbers()(*sizes(draw, 1, 3)))


@st.composite
def flattens(draw) -> Case:
    x = Numbers()(*sizes(draw, 2, 4))
    first = draw(st.integers(1, x.ndim - 1))
    last = draw(st.integers(first, x.ndim - 1))
    first, last = (d - draw(st.sampled_from([0, x.ndim])) for d in (first, last))
    return Case(layers.flatten(first, last), x)


@st.composite
def unflattens(draw) -> Case:
    into, shape = sizes(draw, 1, 3), sizes(draw, 1, 3)
    dim = draw(st.integers(1, len(shape)))
    x = Numbers()(*shape[:dim], math.prod(into), *shape[dim:])
    if draw(st.booleans()):
        into[draw(st.integers(0, len(into) - 1))] = -1
    return Case(layers.unflatten(dim - draw(st.sampled_from([0, x.ndim])), tuple(into)), x)


@st.composite
def pixels(draw, way: str) -> Case:
    r, (n, c, h, w) = draw(st.integers(1, 2)), sizes(draw, 4, 4, 2)
    shape = (n, c * r * r, h, w) if way == "pixel_shuffle" else (n, c, h * r, w * r)
    return Case(getattr(layers, way)(r), Numbers()(*shape))


@st.composite
def pads(draw) -> Case:
    x = Numbers()(*sizes(draw, 1, 3))
    margins = [draw(st.integers(0, 2)) for _ in range(2 * draw(st.integers(0, x.ndim)))]
    return Case(layers.pad(tuple(margins), draw(st.sampled_from([0.0, 1.5]))), x, onto=False)


@st.composite
def haars(draw) -> Case:
    n, c, h, w = sizes(draw, 4, 4, 2)
    return Case(layers.haar(), Numbers()(n, c, 2 * h, 2 * w))


SQUARE = {
    "identity": identities(),
    "linear": linears(tall=False),
    "orthogonal_linear": orthogonal_linears(),
    "conv1x1": convolutions(orthogonal=False),
    "conv1x1 orthogonal": convolutions(orthogonal=True),
    "patch_conv": patch_convolutions(tall=False),
    "batch_norm": batch_norms(fixed=False),
    "batch_norm of statistics": batch_norms(fixed=True),
    "actnorm": actnorms(),
    "leaky_relu": leaky_relus(),
    "flatten": flattens(),
    "unflatten": unflattens(),
    "pixel_shuffle": pixels("pixel_shuffle"),
    "pixel_unshuffle": pixels("pixel_unshuffle"),
    "haar": haars(),
}
TALL = {"linear tall": linears(tall=True), "patch_conv tall": patch_convolutions(tall=True), "pad": pads()}
LAYERS = SQUARE | TALL
of_each = pytest.mark.parametrize("cases", LAYERS.values(), ids=LAYERS)


@pytest.mark.quick
def test_every_layer_has_cases():
    assert {name.split()[0] for name in LAYERS} == {*layers.__all__}


def placed(cases: Any, data: Any, dtype: torch.dtype, device: torch.device) -> Case:
    case = data.draw(cases)
    x, args, statistics = moved((case.x, case.args, case.statistics), dtype, device)
    pair = case.of(statistics) if case.of is not None and statistics else case.pair
    return replace(case, pair=pair, x=x, args=args)


def there(pair: Invertible, x: torch.Tensor, args: tuple) -> tuple[torch.Tensor, tuple]:
    """y, and in a tuple what is hidden."""
    y = pair.forward(x, *args)
    return (y[0], (y[1],)) if pair.hidden else (y, ())


def and_back(pair: Invertible, x: torch.Tensor, args: tuple) -> torch.Tensor:
    y, hidden = there(pair, x, args)
    return pair.inverse(y, *hidden, *args)


@pytest.mark.quick
class TestInverse:
    @of_each
    @given(data=st.data())
    def test_restores_x(self, device, dtype, cases, data):
        case = placed(cases, data, dtype, device)
        kept = [t.clone() for t in tree.tensors((case.x, case.args))]
        x = and_back(case.pair, case.x, case.args)
        assert x.dtype == dtype and torch.equal(case.pair(case.x, *case.args), there(case.pair, case.x, case.args)[0])
        assert_trees_close(x, case.x, RTOL[dtype])
        assert_trees_close(tree.tensors((case.x, case.args)), kept, 0)  # nothing of the caller's was written

    @of_each
    @given(data=st.data())
    def test_and_layer_take_tensors_in_any_layout(self, device, dtype, cases, data):
        case = placed(cases, data, dtype, device)
        spread = tree.map_tensors(lambda t: torch.stack([t, t], -1)[..., 0], (case.x, case.args))
        turned = tree.map_tensors(lambda t: t.mT.contiguous().mT if t.ndim > 1 else t, (case.x, case.args))
        y = case.pair(case.x, *case.args)
        for x, args in (spread, turned):
            assert_trees_close(case.pair(x, *args), y, RTOL[dtype])
            assert_trees_close(and_back(case.pair, x, args), case.x, RTOL[dtype])

    @pytest.mark.parametrize("cases", [TALL["linear tall"], TALL["patch_conv tall"]], ids=["linear", "patch_conv"])
    @given(data=st.data())
    def test_of_a_tall_one_has_the_least_error(self, device, dtype, cases, data):
        """The residual is orthogonal to all outputs of the layer."""
        case = placed(cases, data, dtype, device)
        y = Numbers(5)(*case.pair(case.x, *case.args).shape).to(case.x)
        left = case.pair(case.pair.inverse(y, *case.args), *case.args) - y
        pulled = torch.func.vjp(lambda x: case.pair(x, *case.args), case.x)[1](left)[0]
        assert left.any() and pulled.abs().max() <= RTOL[dtype] * left.norm()


class TestLogDeterminant:
    @pytest.mark.parametrize("cases", SQUARE.values(), ids=SQUARE)
    @given(data=st.data())
    def test_is_that_of_the_jacobian_of_each_sample(self, device, dtype, cases, data):
        case = placed(cases, data, dtype, device)
        found, pair = case.pair.log_det(case.x, *case.args), case.pair
        if pair.hidden and case.of is not None:  # its statistics are constants here
            pair = case.of(pair.forward(case.x, *case.args)[1])
        wanted = []
        for x in case.x:
            jacobian = jacrev(lambda x: pair(x[None], *case.args)[0])(x)
            wanted.append(torch.linalg.slogdet(jacobian.reshape(x.numel(), x.numel())).logabsdet)
        assert found.shape == (len(case.x),) and found.dtype == dtype
        assert_trees_close(found, torch.stack(wanted), 10 * RTOL[dtype], FLOOR)
        if not pair.hidden:
            back = invert(pair).log_det(pair(case.x, *case.args), *case.args)
            assert_trees_close(back, -found, 10 * RTOL[dtype], FLOOR)

    def test_of_pad_is_none(self):
        assert layers.pad((1, 1)).log_det is None
