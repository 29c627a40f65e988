"""Square roots of Hessians of any loss: what is made of their products has derivatives, also of equal eigenvalues."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, ggn_trace, kfac, outputs, sqrt_ggn
from invfunc.kronecker import kfra
from invfunc.loss.square_root import MatrixRoot
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X, Y, T = Numbers(1)(4, 2), Numbers(2).below(3, 4), Numbers(3)(4, 3)
P = {"w": Numbers(4)(2, 5), "v": Numbers(5)(5, 3)}


def model(p, x):
    return (x @ p["w"]).tanh() @ p["v"]


LOSSES = {
    "of equal eigenvalues": lambda z, y: (z - T).square().mean(),
    "of a null space": lambda z, y: z.logsumexp(1) - z.gather(1, y[:, None])[:, 0],
    "of one direction": lambda z, y: (z.sum(1) - 1).square().exp().mean(),
    "of a criterion": lambda z, y: (1 + F.cross_entropy(z, y, reduction="none")).square().sum(),
    "two": lambda z, y: F.cross_entropy(z, y) + 0.3 * F.mse_loss(2 * z[:, :2], T[:, :2]),
}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_derivatives_of_any_order(rank):
    a, weights = Numbers(6)(3, 4, rank), Numbers(7)(3, 4, 4)

    def hessian(a):
        b = torch.cat([a, a.sin()], 1)[:, :4]
        return b @ b.mT

    def through(a):
        s = MatrixRoot.apply(hessian(a))
        return s @ s.mT

    for derivative in (torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        of = [derivative(lambda a, f=f: (f(a) * weights).sum() ** 2)(a) for f in (through, hessian)]
        assert_trees_close(*of, 1e-9, 1e-9)


def flat(result):
    """What is unique of a result: its tensors, and the products of roots and factors."""
    found = []
    for x in result.values() if isinstance(result, dict) else [result]:
        x = x.dense() if hasattr(x, "dense") else x
        if isinstance(x, torch.Tensor) and x.ndim == 4:
            x = torch.einsum("vni,vnj->nij", x.flatten(2), x.flatten(2))
        found.append(x)
    return found


@pytest.mark.parametrize(
    "make", [diag_ggn, partial(diag_ggn, per_sample=True), ggn_trace, sqrt_ggn, partial(kfac, fisher="exact"), kfra]
)
@pytest.mark.parametrize("name", LOSSES)
def test_every_statistic_in_both_forms(make, name):
    """And as its derivative, which is that of the loss that is given apart."""
    loss = LOSSES[name]

    def alone(p, x, y):
        return loss(outputs(model(p, x)), y)

    def weighted(t):
        return lambda p: sum((x * torch.arange(1.0, x.numel() + 1).view(x.shape).cos()).sum() for x in flat(t(p, X, Y)))

    forms = (make(model, loss), make(alone))
    assert_trees_close(*[flat(t(P, X, Y)) for t in forms], 1e-9)
    assert_trees_close(*[torch.func.grad(weighted(t))(P) for t in forms], 1e-8, 1e-8)
