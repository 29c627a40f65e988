"""Weights of samples by what is counted in the data of all of them: a constant, in each form of the loss."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, chunked, diag_ggn
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N, CLASSES = 6, 3
X = Numbers()(N, 3)
Y = torch.tensor([0, 1, 1, 0, 2, 1])
P = Numbers(1)(3, CLASSES)


def of_unique(y):
    _, inverse, counts = torch.unique(y, return_inverse=True, return_counts=True)
    return counts[inverse].double()


WEIGHTS = {
    "bincount": lambda x, y: 1 / torch.bincount(y)[y].to(x.dtype),
    "bincount of all classes": lambda x, y: (len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES)))[y].to(x.dtype),
    "histc": lambda x, y: torch.histc(y.to(x.dtype), CLASSES, 0, CLASSES - 1)[y],
    "unique": lambda x, y: torch.unique(y, return_counts=True)[1][y].to(x.dtype),
    "inverse": lambda x, y: of_unique(y),
    "cov": lambda x, y: (x @ torch.cov(x.T)).square().sum(1),
    "corrcoef": lambda x, y: (x @ torch.corrcoef(x.T)).square().sum(1),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_is_a_constant(weights):
    def each(p, x, y):
        return F.cross_entropy(x @ p, y, reduction="none") * weights(x, y)

    def weighted(z, given):
        y, w = given
        return F.cross_entropy(z, y, reduction="none") * w

    wanted = torch.func.jacrev(each)(P, X, Y)
    assert_trees_close(batch_grad(each)(P, X, Y), wanted, 1e-12)
    assert_trees_close(batch_grad(lambda *args: each(*args).sum())(P, X, Y), wanted, 1e-12)
    ggn = diag_ggn(lambda p, x: x @ p, lambda z, t: weighted(z, t).sum())(P, X, (Y, weights(X, Y)))
    assert_trees_close(diag_ggn(lambda *args: each(*args).sum())(P, X, Y), ggn, 1e-12)
    with suppress(SampleAxisError):  # of a part of the batch they are others
        assert_trees_close(chunked(batch_grad(each), 2, over="samples")(P, X, Y), wanted, 1e-12)


def test_weights_of_classes():
    def loss(p, x, y):
        return F.cross_entropy(x @ p, y, weight=1 / torch.bincount(y, minlength=CLASSES).to(x.dtype))

    k = 1 / torch.bincount(Y, minlength=CLASSES).to(X.dtype)
    wanted = torch.func.jacrev(lambda p: F.cross_entropy(X @ p, Y, weight=k, reduction="none") / k[Y].sum())(P)
    assert_trees_close(batch_grad(loss)(P, X, Y), wanted, 1e-12)


@pytest.mark.parametrize("mixing", [torch.cov, lambda z: torch.cov(z.T), lambda z: torch.histc(z, 3)])
def test_of_outputs_mixes_samples(mixing):
    with pytest.raises((SampleAxisError, ArgumentError)):  # a histogram has no derivative
        batch_grad(lambda p, x: mixing(x @ p).square().sum())(P, X)
