"""The arguments of a call, sorted: what is of samples, and what is differentiated."""

import pytest
import torch

from invfunc import batch_grad
from invfunc.errors import ArgumentError
from invfunc.problem import problem
from tests.strategies import Numbers

P, X, Y = {"w": Numbers(0)(3, 2)}, Numbers(1)(4, 3), Numbers(2)(4, 2)


def losses(p, x, y):
    return (x @ p["w"] - y).square().sum(1)


@pytest.mark.quick
@pytest.mark.parametrize("dims, sizes", [(0, {1: 0, 2: 0}), ((1, 0), {1: 1, 2: 0}), ((0, None), {1: 0, 2: None})])
def test_tells_where_each_argument_has_its_samples(dims, sizes):
    x = X.T if dims == (1, 0) else X
    given = problem(losses, None, (P, x, Y), {}, 0, dims, 0, False, ("p", "x", "y"))
    assert given.n == 4
    assert given.dims == sizes
    assert [p.shape for p in given.leaves] == [(3, 2)]


@pytest.mark.quick
def test_samples_along_another_dim_are_the_same_samples():
    found = batch_grad(lambda p, x, y: losses(p, x.T, y), in_dims=(1, 0))(P, X.T, Y)["w"]
    assert torch.allclose(found, batch_grad(losses)(P, X, Y)["w"])


@pytest.mark.quick
def test_batches_of_different_lengths_are_told_with_both():
    with pytest.raises(ArgumentError, match="4.*3|3.*4"):
        batch_grad(losses)(P, X, Y[:3])
