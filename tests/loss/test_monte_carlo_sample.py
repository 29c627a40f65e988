"""mc_samples of a loss that is not known: `sample` draws its targets. And what is refused."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, outputs, sqrt_ggn, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.criteria import model
from tests.laws import composed
from tests.loss.test_monte_carlo import EXACT, near, shifted
from tests.strategies import Numbers, seeded


def categorical(z, y):
    """The cross entropy, not as one of torch's losses."""
    return z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]


def draw_class(z, generator):
    return torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]


def poisson(z, y):
    return (z.exp() - y * z).flatten(1).sum(1)


def draw_count(z, generator):
    return torch.poisson(z.exp(), generator=generator)


def both(z, y):
    return categorical(z["class"], y["class"]) + 3 * poisson(z["count"], y["count"])


def draw_both(z, generator):
    """With three counts for each, as the loss counts them thrice."""
    counts = sum(draw_count(z["count"], generator) for _ in range(3)) / 3
    return {"class": draw_class(z["class"], generator), "count": counts}


def heads(p, x):
    z = (x @ p["w"] + p["b"]).sin()
    return {"class": z[:, :3], "count": z[:, 3:].unflatten(1, (1, 2))}


CASES = {
    "categorical": (*model((3,)), categorical, draw_class, Numbers(2).below(3, 4)),
    "poisson": (*model((2, 2)), poisson, draw_count, Numbers(2)(4, 2, 2).exp().floor()),
    "several outputs": (
        heads,
        model((5,))[1],
        both,
        draw_both,
        {"class": Numbers(2).below(3, 4), "count": Numbers(3)(4, 1, 2).exp().floor()},
    ),
}
X = Numbers(1)(4, 2)


@pytest.mark.parametrize("f, params, loss, sample, y", CASES.values(), ids=CASES)
class TestLossesOfTheUser:
    def test_the_columns_average_to_the_exact_ones(self, f, params, loss, sample, y):
        """The model's predictive is of the exponential family, so that the Hessian is the variance of the slope."""
        root = sqrt_ggn(f, loss, mc_samples=2000, generator=seeded(), sample=sample)(params, X, y)
        exact = dense_diag_ggn(f, loss)(params, X, y)
        for s, wanted in zip(*map(tree.leaves, (root, exact)), strict=True):
            draws = 2000 * s.square().sum(1)
            assert near(draws.mean(0), draws.std(0), wanted, 2000)


def test_a_sampler_goes_before_what_is_known():
    """Of a loss that is known, too: here its targets are always the same."""
    target = Numbers(4)(4, 3)

    def loss(z, y):
        return F.mse_loss(z, y, reduction="none").sum(1)

    z, y = Numbers(8)(4, 3), Numbers(2)(4, 3)
    t = sqrt_ggn(shifted, loss, mc_samples=2, generator=seeded(), sample=lambda z, g: target)
    found = t(torch.zeros(3).double(), z, y)
    assert_trees_close(found, (2 * (z - target) / 2**0.5).expand(2, 4, 3), EXACT)


MAKERS = [diag_ggn, sqrt_ggn]


@pytest.mark.parametrize("make", MAKERS)
class TestRefusals:
    f = staticmethod(model((3,))[0])
    args = model((3,))[1], X, Numbers(2)(4, 3)

    @pytest.mark.parametrize("m", [0, -2], ids=str)
    def test_too_few(self, make, m):
        with pytest.raises(ArgumentError, match=rf"{make.__name__}.*mc_samples.*{m}"):
            make(self.f, F.mse_loss, mc_samples=m, generator=seeded())(*self.args)

    @pytest.mark.parametrize("m", [1.5, "2", True], ids=repr)
    def test_no_number(self, make, m):
        with pytest.raises(ArgumentTypeError, match=rf"{make.__name__}.*mc_samples.*{type(m).__name__}"):
            make(self.f, F.mse_loss, mc_samples=m, generator=seeded())(*self.args)

    def test_no_generator(self, make):
        with pytest.raises(ArgumentTypeError, match=rf"{make.__name__}.*missing.*torch\.Generator"):
            make(self.f, F.mse_loss, mc_samples=2)(*self.args)

    @pytest.mark.parametrize("generator", [0, "cpu", torch.Generator], ids=["a seed", "a device", "the class"])
    def test_what_is_no_generator(self, make, generator):
        with pytest.raises(ArgumentTypeError, match=rf"{make.__name__}.*generator.*{type(generator).__name__}"):
            make(self.f, F.mse_loss, mc_samples=2, generator=generator)(*self.args)

    @pytest.mark.parametrize("sample", [3, "normal"], ids=repr)
    def test_a_sampler_that_is_no_function(self, make, sample):
        with pytest.raises(ArgumentTypeError, match=rf"{make.__name__}.*sample.*{type(sample).__name__}"):
            make(self.f, poisson, mc_samples=2, generator=seeded(), sample=sample)(*self.args)

    @pytest.mark.parametrize(
        "loss",
        [
            poisson,
            lambda z, y: F.mse_loss(z, y, reduction="none").sum(1).exp(),
        ],
        ids=["not known", "a function of losses"],
    )
    def test_a_loss_without_a_known_predictive(self, make, loss):
        options = {"mc_samples": 2, "generator": seeded()}
        with pytest.raises(ArgumentError, match="sample="):
            make(self.f, loss, **options)(*self.args)
        with pytest.raises(ArgumentError, match="sample="):
            make(lambda p, x, y: loss(outputs(self.f(p, x)), y), **options)(*self.args)

    def test_a_sampler_without_a_loss(self, make):
        with pytest.raises(ArgumentError, match=rf"{make.__name__}.*loss"):
            f = composed(self.f, lambda z, y: poisson(outputs(z), y))
            make(f, mc_samples=2, generator=seeded(), sample=draw_count)(*self.args)

    @pytest.mark.parametrize("reduce", [torch.sum, torch.mean], ids=["sum", "mean"])
    def test_a_sampler_with_a_scalar_loss(self, make, reduce):
        """Its scale is not known: the column is its root times the slope of the loss of one sample."""

        def loss(z, y):
            return reduce(poisson(z, y))

        with pytest.raises(ArgumentError, match=r"\[N\]"):
            make(self.f, loss, mc_samples=2, generator=seeded(), sample=draw_count)(*self.args)
