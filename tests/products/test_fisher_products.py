"""Products with the Fisher matrix, empirical and drawn, against the matrices."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, ggnvp
from invfunc.testing.models import moved
from tests import matrices
from tests.laws import composed
from tests.matrices import assert_near, directions, flat
from tests.networks import LOSSES, network, networks, samples_loss
from tests.strategies import Numbers, seeded

RTOL = {torch.float64: 1e-8, torch.float32: 1e-4}


class TestEmpirical:
    @given(net=networks(), loss=st.sampled_from(LOSSES))
    def test_the_empirical_fisher_matrix(self, device, dtype, net, loss):
        each = samples_loss(net, loss)
        args = moved((net.params, net.x, loss.target(Numbers(1), net.n)), dtype, device)
        along = directions(net.params).to(device, dtype)
        wanted, rtol = matrices.fisher(each, *args) @ along.T, RTOL[dtype]
        for product in (
            ggnvp(each, fisher="empirical"),
            ggnvp(net.f, lambda z, y: each_of(loss, z, y), fisher="empirical"),
            ggnvp(net.f, lambda z, y: loss(z, y, "sum"), fisher="empirical"),
            ggnvp(lambda *a: each(*a).sum(), fisher="empirical"),
        ):
            assert_near(matrices.of(product, *args, along=along), wanted, rtol)
        mean = matrices.of(ggnvp(lambda *a: each(*a).mean(), fisher="empirical"), *args, along=along)
        assert_near(mean * net.n**2, wanted, rtol)


def each_of(loss, z, y):
    losses = loss(z, y, "none")
    return losses if losses.ndim == 1 else losses.sum(1)


def both_orders(x):
    return torch.cat([x, x.roll(1, 0)])


MOVED = {
    "repeated": lambda x: x[torch.tensor([0, 0, 2, 3, 0])],
    "in another order": lambda x: x[torch.tensor([2, 0, 1, 3])],
    "two views": both_orders,
    "scripted": torch.jit.script(torch.nn.Identity()),
}


@pytest.mark.parametrize("way", MOVED)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_samples_may_go_to_other_places(way, back):
    """The empirical Fisher matrix is that of the shares, which are the sums over the places of each sample."""
    rand = Numbers()
    params, x, y = {"w": rand(3, 2), "b": rand(2)}, rand(4, 3), rand(4, 2)

    def loss(params, x, y):
        z = torch.tanh(MOVED[way](x) @ params["w"] + params["b"])
        y = MOVED[way](y)
        return F.mse_loss(z.flip(0), y.flip(0)) if back else F.mse_loss(z, y)

    shares = batch_grad(loss)(params, x, y)
    g = torch.cat([shares[name].flatten(1) for name in params], 1)
    assert_near(matrices.of(ggnvp(loss, fisher="empirical"), params, x, y), g.T @ g, 1e-9)


def test_terms_in_two_orders():
    params, x, y = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)

    def loss(w, x, y):
        return F.mse_loss(x @ w, y) + F.mse_loss((x.flip(0) @ w).tanh(), y.flip(0))

    g = batch_grad(loss)(params, x, y).flatten(1)
    assert_near(matrices.of(ggnvp(loss, fisher="empirical"), params, x, y), g.T @ g, 1e-9)


class TestDrawn:
    """Means over 40 matrices, off by more than 8 of their standard errors: less than once in 10^6 seeds."""

    @staticmethod
    def mean_and_error(product, along, *args):
        found = torch.stack([matrices.of(product, *args, along=along) for _ in range(40)])
        return found.mean(0), found.std(0) / 40**0.5

    @pytest.mark.parametrize("loss", LOSSES[:4], ids=str)
    def test_average_to_the_ggn(self, loss):
        net = network("affine", 3)
        args, generator = (net.params, net.x, loss.target(Numbers(1), 3)), seeded()
        along = directions(net.params)
        wanted = matrices.ggn(net.f, loss, *args) @ along.T
        for given_as in ((net.f, loss), (composed(net.f, loss),)):
            mean, error = self.mean_and_error(
                ggnvp(*given_as, mc_samples=20, generator=generator, fisher="mc"), along, *args
            )
            assert ((mean - wanted).abs() <= 8 * error + 1e-12).all()
            assert_near(mean, wanted, 0.3)

    @staticmethod
    def negative_log(z, y):
        return (z - y).square().sum(1) / 8

    @pytest.mark.parametrize("loss", LOSSES[:4], ids=str)
    def test_drawn_columns_are_those_of_the_same_seed(self, loss):
        net = network("perceptron", 4)
        args, drawn = (net.params, net.x, loss.target(Numbers(1), 4)), {"mc_samples": 3}
        diagonal = diag_ggn(net.f, loss, generator=seeded(1), **drawn)(*args)
        for given_as in ((net.f, loss), (composed(net.f, loss),)):
            product = ggnvp(*given_as, generator=seeded(1), fisher="mc", **drawn)
            assert_near(matrices.of(product, *args).diagonal(), flat(diagonal), 1e-10)
