"""Hessian diagonals and KFRA by the core: ordinary programs, against dense loops and the other engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import diag_hessian, functional, kfac, tree
from invfunc.errors import SampleAxisError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian
from tests.core.programs import MODULES, losses, of_module
from tests.kfac_loops import loop_kfra
from tests.strategies import Numbers

EXACT, FLOOR = 1e-8, 1e-3
REDUCTIONS = {"none": lambda z: z, "sum": torch.sum, "mean": torch.mean}


def whole(each):
    return tree.map_tensors(lambda d: d.sum(0), each)


def dense(f, *args):
    with sdpa_kernel(SDPBackend.MATH):  # in torch 2.13 fused attention has no second derivative
        return dense_batch_diag_hessian(f)(*args)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", [name for name in MODULES if "bag" not in name])  # torch has no second derivative
def test_of_ordinary_programs(name, n):
    f, *args = of_module(name, n)
    each = dense(losses(f), *args)
    for reduction, reduce in REDUCTIONS.items():
        scale = 1 / n if reduction == "mean" else 1

        def loss(p, x, y, reduce=reduce):
            return reduce(losses(f)(p, x, y))

        wanted = tree.map_tensors(lambda d, scale=scale: d * scale, each)
        assert_trees_close(diag_hessian(loss, per_sample=True)(*args), wanted, EXACT, FLOOR)
        assert_trees_close(diag_hessian(loss)(*args), whole(wanted), EXACT, FLOOR)


def again(p, x):
    """Weights that are read again by what depends on them, transposed, in part, masked and computed."""
    h = (x @ p["w"]).tanh()
    h = h @ p["w"].mT[:, :4] + p["b"]
    h = (h / (h.square().mean(1, keepdim=True) + 0.1).sqrt() * p["b"].exp()).sigmoid()
    return F.linear(h, (p["v"] * torch.ones(3, 4).tril()), p["v"][0, :3]) / p["w"].square().sum()


def own(z, y):
    """Neither convex nor known."""
    return ((z.sin() * (z - y)).sum(1) / (1 + z.square().mean(1))).exp()


def in_one_call(p, x):
    return torch.einsum("ij,nj,jk->nk", p["w"], x, p["w"])[:, :3].tanh()


def written(p, x):
    h = F.linear(x, p["w"] / 2)
    h[:, :2].sigmoid_()
    return F.silu(h @ p["v"].mT + p["b"][:3], inplace=True).mul_(2)


def added(p, x):
    return torch.addmm(p["w"][:1].expand(len(x), 4), x, p["w"]).square()[:, :3] / (1 + p["b"].square()[:3])


class TestOfTiedWeights:
    params = {"w": Numbers()(4, 4), "v": Numbers(1)(3, 4), "b": Numbers(2)(4)}
    args = params, Numbers(3)(5, 4), Numbers(4)(5, 3)

    @pytest.mark.parametrize("chosen", [None, [3, 0, 0, -1]])
    def test_of_chosen_samples(self, chosen):
        each = dense(lambda p, x, y: own(again(p, x), y), *self.args)
        each = each if chosen is None else tree.map_tensors(lambda d: d[chosen], each)
        assert_trees_close(diag_hessian(again, own, samples=chosen, per_sample=True)(*self.args), each, EXACT)
        scalar = diag_hessian(lambda p, x, y: own(again(p, x), y).sum(), samples=chosen)
        assert_trees_close(scalar(*self.args), whole(each), EXACT)

    @pytest.mark.parametrize("f", [in_one_call, written, added])
    def test_of_plain_functions(self, f):
        wanted = dense(lambda p, x, y: own(f(p, x), y), *self.args)
        assert_trees_close(diag_hessian(f, own, per_sample=True)(*self.args), wanted, EXACT, FLOOR)

    def test_a_term_of_parameters_is_of_no_sample(self):
        """It counts in the sum alone."""

        def f(p, x, y):
            return own(again(p, x), y).sum() + p["w"].pow(4).sum()

        each = dense(lambda p, x, y: own(again(p, x), y), *self.args)
        wanted = whole(each) | {"w": whole(each)["w"] + 12 * self.params["w"].square()}
        assert_trees_close(diag_hessian(f)(*self.args), wanted, EXACT)
        with pytest.raises(ValueError):
            diag_hessian(f, per_sample=True)(*self.args)


def test_kfra_is_that_of_the_loop():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()
    f, params = functional(model)
    args = Numbers()(6, 4), Numbers(1).below(3, 6)
    found, wanted = kfra(f, F.cross_entropy)(params, *args), loop_kfra(model, F.cross_entropy)(params, *args)
    assert_trees_close({name: k.factors for name, k in found.items()}, wanted, EXACT)


def test_a_table_that_scales_its_gradient_by_counts_has_none():
    """Its gradient is not the derivative of its value."""
    w, x = torch.randn(5, 3, dtype=torch.float64), torch.tensor([[0, 1], [1, 1], [2, 0]])
    t = diag_hessian(lambda w, x: F.embedding(x, w, scale_grad_by_freq=True).tanh().square().sum())
    with pytest.raises(SampleAxisError, match="scale_grad_by_freq"):
        t(w, x)


def test_k_factors_of_rows_that_a_buffer_picks_are_those_of_rows_that_the_samples_pick():
    """As the token types of BERT."""
    w, x, rows = torch.randn(6, 3).double(), torch.randn(4, 5, 3).double(), torch.tensor([0, 1, 1, 4, 2]).expand(4, 5)

    def f(w, x, rows):
        return ((F.embedding(rows, w) + x).sin() * x).sum((1, 2))

    wanted = kfac(f, fisher="empirical")(w, x, rows)
    found = kfac(lambda w, x: f(w, x, rows), fisher="empirical")(w, x)
    assert all(map(torch.allclose, found.factors, wanted.factors))
