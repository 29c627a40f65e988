"""mc_samples: columns at drawn targets average to the exact ones, with one set of numbers however they are computed.

The numbers come from fixed seeds. By the central limit theorem a right program fails a comparison of means at a new
seed with a probability of about `RATE`: that is shared by all its entries (Bonferroni), and gives the `z` in `near`.
"""

import math
from functools import partial
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from invfunc import diag_ggn, sqrt_ggn, tree
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from invfunc.testing.laws.rows import generic, in_blocks
from tests.criteria import ELEMENTWISE, after_logarithms, cross_entropies, elementwise
from tests.laws import composed
from tests.networks import LOSSES, network, networks, total
from tests.strategies import Numbers, seeded

RATE, DRAWS, EXACT = 1e-6, 4000, 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # torch's, about kl_div


def near(mean, spread, expected, draws):
    """The mean of draws with this standard deviation is within z standard errors of what is expected."""
    z = NormalDist().inv_cdf(1 - RATE / (2 * expected.numel()))
    bound = z * spread / math.sqrt(draws) + 1e-9 * (1 + expected.abs().max())
    return bool(((mean - expected).abs() <= bound).all())


def shifted(p, x):
    """A model whose Jacobian is the identity: the columns of its parameter are those of its outputs."""
    return p + x


def columns_of(loss, one, target, first_form=False, **options):
    """The columns of a loss at some outputs `[N, *one]`, times the root of their number, and the exact Hessians."""
    z, p = 0.7 * Numbers(8)(len(target), *one), torch.zeros(one).double()
    t = sqrt_ggn(composed(shifted, loss), **options) if first_form else sqrt_ggn(shifted, loss, **options)
    found = t(p, z, target).reshape(options["mc_samples"], len(z), -1)
    hessian = torch.func.hessian(lambda z: loss(z, target).sum())(z).reshape(len(z), z[0].numel(), len(z), -1)
    return found * len(found) ** 0.5, torch.stack([hessian[n, :, n] for n in range(len(z))])


def assert_average_to_the_hessian(s, hessian):
    mean = torch.einsum("vni,vnj->nij", s, s) / len(s)
    spread = (torch.einsum("vni,vnj->nij", s**2, s**2) / len(s) - mean**2).clamp(min=0).sqrt()
    assert near(mean, spread, hessian, len(s))


@settings(max_examples=6)
@given(criterion=st.one_of(cross_entropies(), elementwise(), after_logarithms()), first_form=st.booleans())
def test_columns_average_to_the_hessian(criterion, first_form):
    options = {"mc_samples": DRAWS, "generator": seeded(), "first_form": first_form}
    if "exp" in criterion.called:  # a function of the losses is not a known loss
        with pytest.raises(ArgumentError, match="sample="):
            columns_of(criterion.loss, criterion.one, criterion.target, **options)
        return
    assert_average_to_the_hessian(*columns_of(criterion.loss, criterion.one, criterion.target, **options))


@pytest.mark.quick
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_loss(name):
    loss, made, options = ELEMENTWISE[name]
    rand = Numbers(3)
    shapes = {"weight": (3, 2), "pos_weight": (2,)}
    given = {key: value(rand(*shapes[key])) if callable(value) else value for key, value in options.items()}
    one = partial(loss, **given)
    assert_average_to_the_hessian(*columns_of(one, (2,), made(rand(3, 2)), mc_samples=DRAWS, generator=seeded()))


def arranged(called, loss, n=4):
    net = network(called, n)
    return net.f, (net.params, net.x, loss.target(Numbers(1), n))


class TestOfNetworks:
    @settings(max_examples=5)
    @given(net=networks(), loss=st.sampled_from(LOSSES[:4]), first_form=st.booleans())
    def test_the_diagonal_is_near_the_exact_one(self, net, loss, first_form):
        def f(p, x):
            return net.f(p, x).sin()  # far from what is rare

        args = (net.params, net.x, loss.target(Numbers(1), net.n))
        given = (composed(f, loss),) if first_form else (f, loss)
        each = sqrt_ggn(*given, mc_samples=1000, generator=seeded(1))(*args)
        diagonal = diag_ggn(*given, mc_samples=1000, generator=seeded(2))(*args)
        exact = dense_diag_ggn(f, loss)(*args)
        for s, d, wanted in zip(*map(tree.leaves, (each, diagonal, exact)), strict=True):
            draws = 1000 * s.square().sum(1)
            assert near(draws.mean(0), draws.std(0), wanted, 1000)
            assert near(d, draws.std(0), wanted, 1000)

    @pytest.mark.parametrize("first_form", [True, False])
    @pytest.mark.parametrize("one", [True, False], ids=["of one output", "of several"])
    def test_of_a_sum_of_known_losses(self, one, first_form):
        """Each has its draws: the columns of one are beside those of the other."""

        def heads(p, x):
            h = (x @ p["trunk"]).tanh()
            z = (h @ p["a"]).sin()
            return (z, z) if one else (z, h.square() @ p["b"])

        def loss(z, y):
            return F.cross_entropy(z[0], y[0]) + 3 * F.mse_loss(z[1], y[1], reduction="sum")

        rand = Numbers()
        params = {"trunk": rand(2, 3), "a": rand(3, 3), "b": rand(3, 3)}
        args = params, rand(4, 2), (rand.below(3, 4), rand(4, 3))
        given = (composed(heads, loss),) if first_form else (heads, loss)
        found = diag_ggn(*given, mc_samples=DRAWS, generator=seeded())(*args)
        assert_trees_close(found, dense_diag_ggn(heads, loss)(*args), 0.1)  # more than five standard errors

    @settings(max_examples=8)
    @given(
        net=networks(),
        loss=st.sampled_from(LOSSES[:4]),
        path=st.sampled_from([in_blocks, generic]),
        m=st.integers(1, 3),
    )
    def test_one_seed_gives_one_set_of_numbers(self, net, loss, path, m):
        args = (net.params, net.x, loss.target(Numbers(1), net.n))

        def each(make, of=lambda t: t):
            return of(make(net.f, loss, mc_samples=m, generator=seeded()))(*args)

        root, batch, whole = each(sqrt_ggn), each(partial(diag_ggn, per_sample=True)), each(diag_ggn)
        assert all(s.shape == (m, net.n, *p.shape) for s, p in zip(*map(tree.leaves, (root, net.params)), strict=True))
        assert_trees_close(tree.map_leaves(lambda s: s.square().sum(0), root), batch, EXACT)
        assert_trees_close(tree.map_leaves(lambda d: d.sum(0), batch), whole, EXACT)
        assert_trees_close(each(diag_ggn, path), whole, EXACT)
        assert_trees_close(each(sqrt_ggn, path), root, EXACT)


class TestGenerator:
    @pytest.mark.parametrize("loss", LOSSES[:4], ids=repr)
    def test_it_goes_on_and_the_global_one_stays(self, loss):
        f, args = arranged("perceptron", loss)
        generator = seeded()
        t, state = diag_ggn(f, loss, mc_samples=2, generator=generator), torch.get_rng_state()
        first, second = t(*args), t(*args)
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(generator.get_state(), seeded().get_state())
        assert any((a != b).any() for a, b in zip(*map(tree.leaves, (first, second)), strict=True))
        torch.manual_seed(3)
        generator.manual_seed(0)
        assert_trees_close(t(*args), first, 0)

    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_derivatives_are_those_with_the_draws_fixed(self, loss):
        """Against a central difference, whose error is that of rounding and of the third derivative."""
        f, (params, x, y) = arranged("perceptron", loss)

        def value(p):
            return total(diag_ggn(f, loss, mc_samples=2, generator=seeded())(p, x, y))

        slope, along = grad(value)(params), tree.map_leaves(lambda p: Numbers(5)(*p.shape), params)
        ends = [value(tree.map_leaves(lambda p, a, h=h: p + h * a, params, along)) for h in (1e-5, -1e-5)]
        wanted = (ends[0] - ends[1]) / 2e-5
        found = sum((g * a).sum() for g, a in zip(*map(tree.leaves, (slope, along)), strict=True))
        assert_trees_close(found, wanted, 1e-6)
