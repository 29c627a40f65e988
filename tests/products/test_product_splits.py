"""Products of functions whose samples are mixed, moved or pooled, and where a loss function is split."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, ggnvp, hvp, kfac, outputs, tree
from invfunc.errors import ConvexityError, SampleAxisError
from tests import matrices
from tests.criteria import model
from tests.laws import composed
from tests.matrices import assert_near, flat
from tests.products.test_products import vectors
from tests.strategies import Numbers


class TestSamples:
    """What the samples have to be for which product."""

    @staticmethod
    def normalised(p, x):
        return F.batch_norm((x @ p["w"]).tanh(), None, None, p["scale"], p["shift"], training=True)

    @staticmethod
    def args():
        rand = Numbers()
        params = {"w": rand(2, 3), "scale": rand(3), "shift": rand(3)}
        return params, rand(5, 2), rand.below(3, 5)

    def test_may_be_mixed_by_a_model(self):
        args, f = self.args(), self.normalised
        assert_near(
            matrices.of(hvp(f, F.cross_entropy), *args), matrices.hessian(composed(f, F.cross_entropy), *args), 1e-8
        )
        wanted = matrices.ggn(f, F.cross_entropy, *args)
        for product in (ggnvp(f, F.cross_entropy), ggnvp(composed(f, F.cross_entropy))):
            assert_near(matrices.of(product, *args), wanted, 1e-8)
            v = vectors(args[0])
            assert_near(flat(product(args[0], v, *args[1:])), wanted @ flat(v), 1e-8)
        each = composed(f, lambda z, y: F.cross_entropy(z, y, reduction="none"))
        assert_near(matrices.of(ggnvp(each, fisher="empirical"), *args), matrices.fisher(each, *args), 1e-8)

    @pytest.mark.parametrize(
        "loss",
        [
            lambda z, y: (z - z.mean(0)).square().sum(),
            lambda z, y: (z - z.mean(0)).square().sum(1),
            lambda z, y: F.cross_entropy(z @ z.detach().T, torch.arange(len(z))),
            lambda z, y: (z[:, None] - z[None]).square().sum() + F.mse_loss(z.sum(0), y),
        ],
        ids=["centred", "centred losses", "contrastive", "pairs"],
    )
    def test_may_be_mixed_by_a_convex_loss(self, loss):
        f, params = model((3,))
        x, y = Numbers(1)(4, 2), Numbers(2)(3)
        wanted = matrices.ggn(f, loss, params, x, y)
        assert_near(matrices.of(ggnvp(f, loss, in_dims=(0, None)), params, x, y), wanted, 1e-8)
        assert_near(matrices.of(ggnvp(f, loss), params, x, y), wanted, 1e-8)  # 4 samples and 3: none are told apart

    @pytest.mark.parametrize("make", [batch_grad, diag_ggn, partial(kfac, fisher="exact")])
    def test_of_a_contrastive_loss_are_mixed_and_the_error_says_what_there_is(self, make):
        f, params = model((3,))
        x, y = Numbers(1)(4, 2), torch.arange(4)

        def similarities(p, x):
            return f(p, x) @ f(p, x.flip(1)).T

        loss = composed(similarities, F.cross_entropy)
        with pytest.raises(SampleAxisError, match=r"products of samples.*`hvp\(f\)` and `ggnvp\(f, loss\)`"):
            make(loss)(params, x, y)
        assert_near(matrices.of(hvp(loss), params, x, y), matrices.hessian(loss, params, x, y), 1e-8)
        wanted = matrices.ggn(similarities, F.cross_entropy, params, x, y)
        assert_near(matrices.of(ggnvp(similarities, F.cross_entropy), params, x, y), wanted, 1e-8)

    def test_are_mixed_by_a_loss_that_draws_as_one_call_of_it_does(self):
        f, params = model((3,))
        x, v = Numbers(1)(4, 2), vectors(params)

        def loss(z, y):
            return F.dropout((z - z.mean(0)).square(), 0.5).sum()

        torch.manual_seed(0)
        drawn = F.dropout(torch.ones(4, 3).double(), 0.5)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        found = ggnvp(f, loss)(params, v, x, None)
        assert torch.equal(torch.get_rng_state(), after)
        wanted = matrices.ggn(f, lambda z, y: ((z - z.mean(0)).square() * drawn).sum(), params, x, None)
        assert_near(flat(found), wanted @ flat(v), 1e-8)

    @pytest.mark.parametrize("factor", [1, -1])
    def test_may_have_been_pooled(self, factor):
        """Three outputs of eight samples, with a loss of known structure."""

        def f(p, x):
            return (x @ p["w"]).tanh()[:6].unflatten(0, (3, 2)).mean(1)

        def loss(z, y):
            return factor * F.cross_entropy(z, y, reduction="none")

        args = ({"w": Numbers()(2, 4)}, Numbers(1)(8, 2), Numbers(2).below(4, 3))
        if factor > 0:
            assert_near(matrices.of(ggnvp(f, loss), *args), matrices.ggn(f, loss, *args), 1e-8)
        for reduced in (loss, lambda z, y: loss(z, y).sum()) if factor < 0 else ():
            with pytest.raises(ConvexityError):
                ggnvp(f, reduced).linearize(*args)

    def test_a_mixing_loss_that_is_not_convex_is_refused(self):
        f, params = model((3,))
        with pytest.raises(ConvexityError):
            ggnvp(f, lambda z, y: -z.var(0).sum()).linearize(params, Numbers(1)(4, 2), None)

    @given(order=st.permutations(range(3)), other=st.integers(0, 1))
    def test_may_lie_along_other_axes(self, order, other):
        f, params = model((2, 3))
        x, y = Numbers(1)(4, 2), Numbers(2)(4, 2, 3)
        at, back = order.index(0), [order.index(d) for d in range(3)]

        def last(p, x):
            return f(p, x.movedim(other, 0)).permute(order)

        args, dims = (params, x.movedim(0, other), y.permute(order)), {"in_dims": (other, at), "out_dims": at}
        wanted = matrices.ggn(f, F.mse_loss, params, x, y)
        assert_near(matrices.of(ggnvp(last, F.mse_loss, **dims), *args), wanted, 1e-8)
        alone = ggnvp(lambda p, x, y: F.mse_loss(last(p, x).permute(back), y.permute(back)), in_dims=(other, at))
        assert_near(matrices.of(alone, *args), wanted, 1e-8)
        each = composed(f, lambda z, y: F.mse_loss(z, y, reduction="none").flatten(1).sum(1))
        wanted = matrices.fisher(each, params, x, y)
        summed = ggnvp(last, lambda z, y: F.mse_loss(z, y, reduction="sum"), fisher="empirical", **dims)
        assert_near(matrices.of(summed, *args), wanted, 1e-8)


class TestOutputs:
    """Where a loss function is split."""

    @staticmethod
    def routed(p, x):
        """A candidate for outputs in the middle of the model, and one that is none."""
        gates = F.log_softmax(x @ p["gates"], 1).exp()
        z = torch.einsum("nk,kij,ni->nj", gates, p["experts"], x)
        return z, F.log_softmax(z * p["scale"], 1)[:, :2]

    @staticmethod
    def args():
        rand = Numbers()
        params = {"gates": rand(2, 3), "experts": rand(3, 2, 4), "scale": rand(4)}
        return params, rand(5, 2), rand.below(4, 5)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_with_others_on_the_way(self, reduction):
        def loss(z, y):
            value = F.cross_entropy(z[0], y, reduction=reduction)
            return value + (F.mse_loss(z[1], z[1].detach() + 1, reduction=reduction)).reshape(*value.shape, -1).sum(-1)

        def alone(p, x, y):
            z = self.routed(p, x)
            return loss((outputs(z[0]), outputs(z[1])), y)

        args = self.args()
        wanted = matrices.ggn(self.routed, loss, *args)
        assert_near(matrices.of(ggnvp(self.routed, loss), *args), wanted, 1e-8)
        assert_near(matrices.of(ggnvp(alone), *args), wanted, 1e-8)
        v = vectors(args[0])
        assert_near(flat(ggnvp(alone)(args[0], v, *args[1:])), wanted @ flat(v), 1e-7)
        v = vectors(args[0], 1)
        found = tree.leaves(ggnvp(alone, blocks=True)(args[0], v, *args[1:]))
        for b, x, y in zip(matrices.blocks(wanted, args[0]), tree.leaves(v), found, strict=True):
            assert_near(y.flatten(1), x.flatten(1) @ b.T, 1e-7)

    def test_losses_of_the_samples_need_none(self):
        """With candidates on the way, around which paths go."""

        def each(p, x, y):
            z, logs = self.routed(p, x)
            return F.cross_entropy(z, y, reduction="none") + p["scale"].square().sum() + logs.exp().sum(1).square()

        args = self.args()
        wanted = matrices.fisher(each, *args)
        assert_near(matrices.of(ggnvp(each, fisher="empirical"), *args), wanted, 1e-8)
        tracked = tree.map_leaves(lambda p: p.clone().requires_grad_(), args[0])
        assert_near(matrices.of(ggnvp(each, fisher="empirical"), tracked, *args[1:]), wanted, 1e-8)

    def test_losses_of_the_samples_need_not_be_followed(self):
        def f(p, x):
            return Hidden.apply(x @ p["w"] * F.dropout(torch.ones(3).double(), 0.5))

        def each(p, x):
            return f(p, x).exp().sum(1)

        params, x = {"w": Numbers()(2, 3)}, Numbers(1)(4, 2)
        torch.manual_seed(0)
        found = ggnvp(each, fisher="empirical").linearize(params, x)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        mask = F.dropout(torch.ones(3).double(), 0.5)
        assert torch.equal(torch.get_rng_state(), after)
        wanted = matrices.fisher(lambda p, x: (x @ p["w"] * mask).sin().exp().sum(1), params, x)
        v = vectors(params)
        assert_near(flat(found(v)), wanted @ flat(v), 1e-8)


class Hidden(torch.autograd.Function):
    """A sine that no mode of torch sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()
