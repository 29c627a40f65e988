"""Couplings: the formulas of their docstrings, the way back, and their log-determinants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jacrev

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    invert,
    invertible_checkpoint,
    layers,
    tree,
    with_log_det,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, ModifiedError
from invfunc.pairs import fixed_point, leapfrog, momentum
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.laws import FLOOR
from tests.meter import Meter
from tests.pairs.cases import KINDS, Case, mixing
from tests.strategies import Numbers

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}
few = settings(max_examples=5)

of_each = pytest.mark.parametrize("cases", KINDS.values(), ids=KINDS)


def placed(case: Case, dtype: torch.dtype, device: torch.device) -> Case:
    x, args = moved((case.x, case.args), dtype, device)
    return replace(case, x=x, args=args)


def summed(f: Callable) -> Callable:
    """A number whose gradient tells the entries of all tensors apart."""
    return lambda *args: sum((t.sin() * t.flatten(0).cumsum(0).view_as(t)).sum() for t in tree.tensors(f(*args)))


def volume(pair: Invertible, x: Any, *args: Any) -> torch.Tensor:
    return pair.log_det(*pair.shared, x, *args)


def dense_log_det(f: Callable, x: Any) -> torch.Tensor:
    """From the Jacobian of each entry of the leading axis."""
    found = []
    for n in range(len(tree.tensors(x)[0])):
        tensors, form = tree.separate(tree.map_tensors(lambda t, n=n: t[n : n + 1], x))
        sizes, shapes = [t.numel() for t in tensors], [t.shape for t in tensors]

        def flat(v, form=form, sizes=sizes, shapes=shapes):
            y = f(form.join(part.view(s) for part, s in zip(v.split(sizes), shapes, strict=True)))
            return torch.cat([t.flatten() for t in tree.tensors(y)])

        found.append(torch.linalg.slogdet(jacrev(flat)(torch.cat([t.flatten() for t in tensors]))).logabsdet)
    return torch.stack(found)


@pytest.mark.quick
class TestFormula:
    @of_each
    @given(data=st.data())
    def test_is_that_of_the_docstring_in_both_directions(self, device, dtype, cases, data):
        case = placed(data.draw(cases), dtype, device)
        kept = [t.clone() for t in tree.tensors((case.x, case.args))]
        assert_trees_close(tree.leaves(case.pair(case.x, *case.args)), tree.leaves(case.there(case.x, *case.args)), 0)
        back = invert(case.pair)(case.x, *case.args)  # any state is the image of another
        assert_trees_close(tree.leaves(back), tree.leaves(case.back(case.x, *case.args)), RTOL[dtype])
        assert_trees_close(tree.tensors((case.x, case.args)), kept, 0)  # nothing of the caller's was written

    @of_each
    @pytest.mark.parametrize("kind", [torch.float64, torch.float32], ids=str)
    @given(data=st.data())
    def test_inverse_restores_the_state(self, device, kind, cases, data):
        case = placed(data.draw(cases), kind, device)
        y = case.pair(case.x, *case.args)
        assert {t.dtype for t in tree.tensors(y)} == {kind}
        restored = invert(case.pair)(y, *case.args)
        assert_trees_close(tree.leaves(restored), tree.leaves(case.x), RTOL[kind] / 30)
        assert_trees_close(tree.leaves(invert(invert(case.pair))(case.x, *case.args)), tree.leaves(y), 0)

    @pytest.mark.parametrize("affine", [False, True])
    @pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
    def test_odd_sizes_are_split_on_every_axis(self, dim, affine):
        x, make = Numbers()(3, 5, 7), affine_coupling if affine else additive_coupling
        second, first = sorted([x.shape[dim] // 2, (x.shape[dim] + 1) // 2])
        weights = [[Numbers(s)(*shape) for s in range(1 + affine)] for shape in ((second, first), (first, second))]
        F, G = (mixing(dim, 1 + affine, w) for w in weights)
        y = make(F, G, split_dim=dim)(x)
        assert_trees_close(y, torch.cat(make(F, G)((x.narrow(dim, 0, first), x.narrow(dim, first, second))), dim), 0)
        assert_trees_close(invert(make(F, G, split_dim=dim))(y), x, 1e-12)


WRITING = {
    "additive": lambda f: additive_coupling(f, f),
    "affine": lambda f: affine_coupling(lambda x: (f(x), x), lambda x: (f(x), x)),
    "one tensor": lambda f: additive_coupling(f, f, split_dim=-1),
    "one tensor of rows": lambda f: additive_coupling(f, f, split_dim=0),
    "leapfrog": lambda f: leapfrog(f, 0.1),
    "momentum": momentum,
    "fixed_point": fixed_point,
}


@pytest.mark.parametrize("wrap", [lambda pair: pair, invertible_checkpoint, invert], ids=["plain", "block", "inverse"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "enable_grad"])
@pytest.mark.parametrize("name", WRITING)
def test_functions_that_write_the_state_are_errors(name, mode, wrap):
    """`nn.ReLU(inplace=True)` as the first layer would change what the pair reads next, and what the caller has."""
    pair = WRITING[name](nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    halves = [2 * Numbers(seed)(4, 3).float().requires_grad_() for seed in range(2)]
    x = torch.cat(halves, 0 if "rows" in name else -1) if "one tensor" in name else tuple(halves)
    with mode(), pytest.raises(ModifiedError, match=r"has written into its argument, .* inplace=False"):
        wrap(pair)(x)


@pytest.mark.parametrize("dim", [0, -1])
def test_gradients_of_halves_are_joined_without_zeros_of_the_whole_size(dim):
    x = Numbers()(40, 60).requires_grad_()
    y = additive_coupling(torch.sin, torch.cos, split_dim=dim)(x)
    with Meter() as meter:
        (slope,) = torch.autograd.grad(y, x, x.detach())
    assert meter.peak(slope) <= 1.6 * x.nbytes


def test_what_nobody_counts_the_writes_of_is_copied():
    pair = additive_coupling(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)), nn.Identity())
    with torch.inference_mode():
        x = torch.randn(4, 3), torch.randn(4, 3)
        before = [t.clone() for t in x]
        pair(x)
        assert all(map(torch.equal, x, before))


class TestDerivatives:
    @of_each
    @few
    @given(data=st.data())
    def test_checkpointed_equal_those_of_the_formula(self, device, dtype, cases, data):
        case = placed(data.draw(cases), dtype, device)
        g = invertible_checkpoint(case.pair)
        wanted = grad(summed(case.there), 0)(case.x, *case.args)
        assert_trees_close(grad(summed(g), 0)(case.x, *case.args), wanted, RTOL[dtype], FLOOR)
        leaves = tree.map_tensors(lambda t: t.clone().requires_grad_(), (case.x, *case.args))
        found = torch.autograd.grad(summed(g)(*leaves), tree.tensors(leaves), allow_unused=True)
        leaves = tree.map_tensors(lambda t: t.detach().requires_grad_(), leaves)
        wanted = torch.autograd.grad(summed(case.there)(*leaves), tree.tensors(leaves), allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        assert all(f is None or not f.any() if w is None else torch.allclose(f, w, RTOL[dtype]) for f, w in pairs)

    @of_each
    @pytest.mark.parametrize("functional", [True, False])
    @few
    @given(data=st.data())
    def test_every_function_is_evaluated_once_more(self, cases, functional, data):
        """The merge of the inverse and the derivative saves an evaluation: peers evaluate it twice more."""
        case, calls = data.draw(cases), []

        def counted(fn):
            return lambda *args, **kwargs: (calls.append(fn), fn(*args, **kwargs))[1]

        pair = replace(case.pair, shared=tuple(counted(fn) for fn in case.pair.shared))
        loss = summed(invertible_checkpoint(pair))
        if functional:
            grad(loss)(case.x, *case.args)
        else:
            loss(tree.map_tensors(lambda t: t.requires_grad_(), case.x), *case.args).backward()
        assert len(calls) == 2 * case.functions


class TestLogDeterminant:
    @of_each
    @given(data=st.data())
    def test_is_that_of_the_jacobian_of_each_sample(self, device, dtype, cases, data):
        case = placed(data.draw(cases), dtype, device)
        found = volume(case.pair, case.x, *case.args)
        wanted = dense_log_det(lambda x: case.there(x, *case.args), case.x)
        assert found.dtype == dtype and found.shape == (len(tree.tensors(case.x)[0]),)
        assert_trees_close(found, wanted, 10 * RTOL[dtype], FLOOR)
        y = case.pair(case.x, *case.args)
        assert_trees_close(volume(invert(case.pair), y, *case.args), -wanted, 10 * RTOL[dtype], FLOOR)

    @pytest.mark.parametrize("dim", [0, -2])
    @pytest.mark.parametrize("make", [additive_coupling, affine_coupling])
    def test_has_no_samples_where_their_axis_is_split(self, make, dim):
        pair = make(*[lambda t: (t, t) if make is affine_coupling else t] * 2, split_dim=dim)
        with pytest.raises(ArgumentError, match=f"split_dim={dim}"):
            volume(pair, torch.ones(4, 3))

    def test_of_some_there_are_none(self):
        for pair, told in [
            (layers.pad((1, 1)), "has no log_det"),
            (chain(leapfrog(torch.sin, 0.5), torch.sin), "has no log_det"),
        ]:
            with pytest.raises(ArgumentError, match=rf"^with_log_det\(.*the pair {told}"):
                with_log_det(pair)
        with pytest.raises(ArgumentTypeError, match=r"^with_log_det\(pair\): pair is of type function"):
            with_log_det(summed)
