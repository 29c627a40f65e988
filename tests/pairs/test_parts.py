"""The parts of couplings: modules or functions, in their own dtype, whose shapes are checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from invfunc import (
    additive_coupling,
    affine_coupling,
    functional,
    invertible_checkpoint,
    tree,
)
from invfunc.errors import ArgumentError
from invfunc.pairs import Grid, fixed_point, leapfrog, momentum
from invfunc.testing import assert_trees_close
from tests.pairs.test_pairs_are_values import WIDTH, halves, layer, modules, weight
from tests.strategies import Numbers


class TestModulesAsParts:
    MAKERS = {
        "additive": lambda F, G: (additive_coupling(F, G), (0, 1)),
        "momentum": lambda F, G: (momentum(F), (0,)),
        "leapfrog": lambda F, G: (leapfrog(F, 0.5), (0,)),
        "fixed_point": lambda F, G: (fixed_point(F), (0,)),
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
