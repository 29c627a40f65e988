"""Products of functions whose samples are mixed, moved or pooled, and where a loss function is split."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import ggnvp, hvp
from invfunc.errors import ConvexityError
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
