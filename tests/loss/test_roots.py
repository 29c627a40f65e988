"""Square roots of Hessians of any loss: what is made of their products has derivatives, also of equal eigenvalues."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, ggn_trace, kfac, outputs, sqrt_ggn
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from tests.networks import total
from tests.strategies import Numbers, seeded

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


def flat(result):
    """The unique parts of a result: its tensors, and the products of roots and factors."""
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


# diag_ggn where probabilities round to 0 and 1, and where nothing counts


class TestExtremes:
    """Probabilities that round to 0 and 1, and losses without a counted entry: finite values, finite gradients."""

    CALLS = {
        "cross_entropy": lambda z, y: F.cross_entropy(z, y),
        "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, 3).to(z.dtype)),
        "nll_loss": lambda z, y: F.nll_loss(z.log_softmax(1), y),
        "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).to(z.dtype)),
    }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("scale", [1e4, -1e4, 0.0])
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_saturated_outputs(self, call, scale, dtype):
        w, x, y = Numbers()(2, 3).to(dtype), Numbers(1)(4, 2).to(dtype), Numbers(2).below(3, 4)
        for drawing in ({}, {"mc_samples": 3, "generator": seeded()}):
            self.assert_finite(diag_ggn(lambda w, x: scale * (x @ w), call, **drawing), w, x, y)
            self.assert_finite(diag_ggn(lambda w, x, y: call(scale * (x @ w), y), **drawing), w, x, y)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_what_is_drawn_of_a_sure_prediction_is_what_there_is_of_it(self, call, dtype):
        """Nothing, of outputs whose probabilities round to 0 and 1; beside them each has what it has alone."""
        logits, y = torch.tensor([[1e4, -1e4, -1e4], [-1e4, 1e4, -1e4], [0.5, -0.25, 0.0]]).to(dtype), torch.arange(3)

        def columns(x, y):
            sqrt = sqrt_ggn(lambda w, x: x + w, call, mc_samples=64, generator=seeded())
            return sqrt(torch.zeros(3, dtype=dtype), x, y)

        found = columns(logits, y)
        assert not found[:, :2].any() and found[:, 2].any(0).all()

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(3).double()}], ids=str)
    def test_all_targets_ignored(self, options, reduction):
        w, x, y = Numbers()(2, 3), Numbers(1)(4, 2), torch.full((4,), -100)

        def loss(z, y):
            return F.cross_entropy(z, y, reduction=reduction, **options)

        for t in diag_ggn(lambda w, x: x @ w, loss), diag_ggn(lambda w, x, y: loss(x @ w, y)):
            assert not t(w, x, y).any()
            self.assert_finite(t, w, x, y)

    @staticmethod
    def assert_finite(t, w, *batch):
        w = w.clone().requires_grad_()
        result = t(w, *batch)
        assert result.isfinite().all()
        if result.requires_grad:
            (slope,) = torch.autograd.grad(total(result), w)
            assert slope.isfinite().all()
