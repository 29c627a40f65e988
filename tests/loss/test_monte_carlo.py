"""mc_samples: columns at drawn targets average to the exact ones, with one set of numbers however they are computed.

The numbers come from fixed seeds. By the central limit theorem a right program fails a comparison of means at a new
seed with a probability of about `RATE`: that is shared by all its entries (Bonferroni), and gives the `z` in `near`.
"""

import inspect
import math
from functools import partial
from itertools import product
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

import invfunc
from invfunc import diag_ggn, outputs, sqrt_ggn, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import kfoc
from invfunc.loss.drawn import Peel, by, peeled
from invfunc.loss.square_root import Elementwise, Softmax
from invfunc.reductions.estimates import Lot, drawn, variances
from invfunc.testing import assert_trees_close, dense_diag_ggn
from invfunc.testing.models import moved
from tests.criteria import ELEMENTWISE, after_logarithms, cross_entropies, elementwise, model
from tests.laws import composed
from tests.networks import LOSSES, network, total
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


# mc_samples of a loss that is not known: `sample` draws its targets. And what is refused


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
        [poisson, lambda z, y: F.mse_loss(z, y, reduction="none").sum(1).exp()],
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


# Random numbers come from an explicit generator: on any device, and only where something is drawn

PARAMS, X_GENERATOR, Y = {"w": Numbers()(3, 2), "b": Numbers(1)(2)}, Numbers(2)(4, 3), Numbers(3)(4, 2).sigmoid()
FUNCTIONS = {name: f for name, f in vars(invfunc).items() if inspect.isfunction(f)} | {"kfoc": kfoc}
DRAWING = [name for name, f in FUNCTIONS.items() if {"generator", "sample"} <= set(inspect.signature(f).parameters)]
ALWAYS = {"kfac", "kfoc", "ekfac"}  # unless another Fisher matrix is asked for
LOSSES_GENERATOR = {
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
    "cross entropy": F.cross_entropy,
}


def f(params, x):
    return (x @ params["w"]).tanh() + params["b"]


@pytest.mark.parametrize("name", DRAWING)
def test_is_refused_where_nothing_is_drawn(name):
    make = FUNCTIONS[name]
    cases = [{"fisher": "exact"}, {"fisher": "empirical"}] if name in ALWAYS else [{}]
    for options in cases:
        with pytest.raises(ArgumentError, match=rf"{name}\(.*nothing is drawn"):
            make(f, F.mse_loss, generator=seeded(3), **options)


@pytest.mark.parametrize("loss", LOSSES_GENERATOR)
@pytest.mark.parametrize("name", DRAWING)
def test_of_the_cpu_draws_the_same_numbers_everywhere(name, loss, device):
    def found(*args):
        drawn = {"fisher": "mc"} if name in ("eigenpairs", "ggnvp") else {}
        t = FUNCTIONS[name](f, LOSSES_GENERATOR[loss], mc_samples=3, generator=seeded(3), **drawn)
        result = t(args[0], *args[:1] * (name == "ggnvp"), *args[1:])
        return result.values if name == "eigenpairs" else result

    args = PARAMS, X_GENERATOR, Y
    there = found(*moved(args, torch.float64, device))
    assert all(leaf.device.type == device.type for leaf in tree.leaves(there))
    if name != "ekfac":  # whose eigenvectors have signs of their own
        assert_trees_close(moved(there, torch.float64, torch.device("cpu")), found(*args), 1e-9)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["rand", "randn"])
def test_draws_where_it_is(draw):
    there = by(seeded(3), draw, (2, 3), torch.float32, torch.device("meta"))
    assert there.is_meta and there.shape == (2, 3) and there.dtype == torch.float32
    here = by(seeded(3), draw, (2, 3), torch.float32, torch.device("cpu"))
    assert torch.equal(here, draw(2, 3, generator=seeded(3)))


def test_of_many_classes_are_drawn_for_some_samples_at_a_time(monkeypatch):
    f, params, x, y = lambda w, x: x @ w, Numbers(0)(4, 5), Numbers(1)(7, 3, 4), Numbers(2).below(5, 7, 3)

    def loss(z, y):
        return F.cross_entropy(z.mT, y)

    def found():
        generator = torch.Generator().manual_seed(0)
        return invfunc.sqrt_ggn(f, loss, mc_samples=2, generator=generator)(params, x, y)

    whole = found()
    monkeypatch.setattr("invfunc.thresholds.CACHE", {"cpu": 100})
    assert_trees_close(found(), whole, 1e-12)


# peel=: the largest columns as they are, the others mixed by signs; with_error=: how far the result may be off

TIGHT = 1e-12


def softmax(logits, positions=1):
    """The columns at logits `[n, C, positions]`, and the Hessian `[n, C, C]` at each position."""
    n, _, t = logits.shape
    weight = (1 + Numbers(7)(1, t).abs()).expand(n, t)
    p = logits.softmax(1).movedim(2, 1)
    hessian = weight[..., None, None] * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    return Softmax(0, logits, weight, lambda columns: columns), hessian


def by_element(h):
    return Elementwise(0, h), torch.diag_embed(h)[:, None]


def gram(columns):
    """`sum_v s s^T` at each position, of columns `[M, n, C, *positions]`."""
    columns = columns if columns.ndim > 3 else columns[..., None]
    return torch.einsum("vnct,vndt->ntcd", columns, columns)


def half(shape, like):
    return torch.full(shape, 0.7, dtype=like.dtype)


def ways(values, count, peel):
    """The columns of one sample for all signs, which have the same chance each, as those of so many samples."""
    size = values[0].numel()
    patterns = torch.tensor([*product([0.25, 0.75], repeat=count * size)], dtype=torch.float64)
    patterns = patterns.reshape(-1, count, *values.shape[1:]).movedim(1, 0)
    same = values.expand(patterns.shape[1], *values.shape[1:])
    made = softmax(same)[0] if values.ndim == 3 else by_element(same)[0]
    return peeled(made, count, peel, lambda shape, like: patterns)


SIZED = st.sampled_from([0.1, 1.0, 10.0, 300.0])
PEELS = st.sampled_from([Peel(0), Peel(1), Peel("auto"), Peel("auto", 2), Peel(0, 2)])


class TestColumns:
    @given(st.integers(1, 5), SIZED, st.sampled_from([torch.float64, torch.float32]))
    def test_all_columns_are_a_square_root(self, classes, size, dtype):
        made, hessian = softmax((size * Numbers(classes)(2, classes, 1)).to(dtype).double())
        found, exact = peeled(made, 9, Peel("auto"), lambda shape, like: torch.rand(shape, dtype=like.dtype))
        assert exact.tolist() == [classes - 1] * 2 and len(found) == max(1, classes - 1)
        assert_trees_close(gram(found), hessian, TIGHT, 1.0)  # p - p^2 has no digits where p is 1
        h = Numbers(1)(3, classes).square() * size
        found, exact = peeled(*by_element(h)[:1], 9, Peel("auto"), lambda shape, like: torch.rand(shape).double())
        assert_trees_close(gram(found), by_element(h)[1], TIGHT)

    @given(st.sampled_from([(2, 2), (3, 2), (4, 1)]), SIZED, PEELS, st.booleans())
    def test_on_average_over_the_signs_it_is_the_hessian(self, sizes, size, peel, classes):
        c, count = sizes
        values = size * Numbers(2)(1, c, 1)
        values = values if classes else values[..., 0].square()
        hessian = (softmax(values) if classes else by_element(values))[1]
        peel = peel if peel.least <= count and peel.columns in ("auto", 0) else Peel("auto")
        assert_trees_close(gram(ways(values, count, peel)[0]).mean(0)[None], hessian, TIGHT, 1.0)

    def test_positions_are_mixed_and_right_on_average(self):
        values = Numbers(3)(1, 2, 3)
        hessian, (found, _) = softmax(values)[1], ways(values, 1, Peel("auto"))
        of_all = torch.einsum("nct,nds->ctds", found[0], found[0]) / found.shape[1]
        wanted = torch.einsum("tcd,ts->ctds", hessian[0], torch.eye(3, dtype=torch.float64))
        assert_trees_close(of_all, wanted, TIGHT)

    @given(st.integers(5, 7), st.integers(1, 3), st.sampled_from([0.1, 1.0, 3.0]))
    def test_auto_takes_what_leaves_the_least_error_to_the_trace(self, classes, count, size):
        made, hessian = softmax(size * Numbers(4)(3, classes, 1))
        whole = torch.einsum("ntcc->n", hessian)
        all_columns, _ = peeled(made, classes, Peel("auto"), half)
        left = whole - torch.cat([torch.zeros(1, 3), all_columns.square().sum((2, 3)).cumsum(0)])[:count]
        scores = (left / whole).square() / torch.arange(count, 0, -1)[:, None]
        _, exact = peeled(made, count, Peel("auto"), half)
        assert_trees_close(scores.gather(0, exact[None])[0], scores.amin(0), 1e-9, 1e-20)


class TestErrors:
    @pytest.mark.parametrize("peel", [Peel(0, 2), Peel(1, 2), Peel("auto", 2)], ids=str)
    def test_the_variance_is_right_on_average(self, peel):
        """Over all signs, the mean of the estimated variances is the variance of the sum."""
        h, slope = Numbers(6)(1, 4).square(), Numbers(8)(4)
        columns, exact = ways(h, 3, peel)
        squares = (columns @ slope).square()
        found = variances(squares, drawn([Lot(0, 3, exact)], slice(None), squares))
        assert_trees_close(squares.sum(0).mean(), (h[0] * slope.square()).sum(), TIGHT)
        assert_trees_close(found.mean(), squares.sum(0).var(correction=0), 1e-10)

    def test_small_numbers_have_errors_too(self):
        values = 1e-30 * torch.tensor([[1.0], [3.0]])
        of_both = variances(values, {(0, 2): torch.ones(2, 1, dtype=torch.bool)})
        assert_trees_close(of_both.sqrt(), torch.tensor([2e-30], dtype=torch.float64), 1e-6)


def options(seed=0, **more):
    return {"generator": torch.Generator().manual_seed(seed), **more}


def repeated(statistic, args, times, **more):
    """The value and the error of an estimate, many times."""
    generator = torch.Generator().manual_seed(0)
    found = [statistic(generator=generator, with_error=True, **more)(*args) for _ in range(times)]
    flat = [[torch.cat([x.flatten() for x in invfunc.tree.tensors((part,))]) for part in one] for one in found]
    return (torch.stack(part) for part in zip(*flat, strict=True))


def of_classes(sure, n=48, classes=12):
    """A classifier that is more or less sure, and data."""
    rand = Numbers(0)
    params = {"v": rand(5, 8), "w": sure * rand(8, classes)}
    target = torch.arange(n) % classes
    return lambda p, x: torch.tanh(x @ p["v"]) @ p["w"], params, rand(n, 5), target


class TestEstimates:
    @pytest.mark.parametrize("sure, gains", [(0.1, 0.9), (1.0, 1.5), (3.0, 10.0)])
    def test_of_a_classifier_it_is_nearer_than_drawn_targets(self, sure, gains):
        f, *args = of_classes(sure)
        exact = invfunc.diag_ggn(f, F.cross_entropy)(*args)
        exact = torch.cat([x.flatten() for x in exact.values()])

        def of(**more):
            return invfunc.diag_ggn(f, F.cross_entropy, mc_samples=8, **more)

        plain, _ = repeated(of, args, 40)
        value, error = repeated(of, args, 40, peel="auto")
        gain = (plain - exact).square().mean(0) / (value - exact).square().mean(0)
        assert gain.median() > gains
        inside = ((value - exact).abs() <= 2 * error).double().mean()
        assert 0.83 <= inside <= 0.97, inside

    def test_the_trace_has_the_error_of_all_parameters_at_once(self):
        f, *args = of_classes(1.0)
        exact = invfunc.ggn_trace(f, F.cross_entropy)(*args)

        def of(**more):
            return invfunc.ggn_trace(f, F.cross_entropy, mc_samples=4, peel="auto", **more)

        value, error = repeated(of, args, 100)
        assert 0.9 <= ((value - exact).abs() <= 2 * error).double().mean() <= 0.99


class TestOptions:
    def test_what_is_wrong_with_them(self):
        f, *args = of_classes(1.0)
        of = partial(invfunc.diag_ggn, f, F.cross_entropy)
        for more, text in (
            ({"peel": 1}, "pass mc_samples=1"),
            ({"peel": 0}, "pass mc_samples=1"),
            ({"with_error": True}, "pass mc_samples=2"),
            ({"mc_samples": 1, "with_error": True, **options()}, "with_error=True, .*at least 2"),
            ({"mc_samples": 3, "peel": 3, **options()}, "peel is between 0 and 2"),
            ({"mc_samples": 3, "peel": 2, "with_error": True, **options()}, "peel is between 0 and 1"),
            ({"mc_samples": 3, "peel": -1, **options()}, "peel is between 0 and 2"),
            ({"mc_samples": 3, "peel": 1, "sample": print, **options()}, "cannot be peeled"),
        ):
            with pytest.raises(ArgumentError, match=text):
                of(**more)
        for peel in ("all", True, 1.0):
            with pytest.raises(ArgumentTypeError, match="'auto' or an int"):
                of(mc_samples=3, peel=peel, **options())
        for more in ({"peel": 1}, {"mc_samples": 2}):
            with pytest.raises(ArgumentError, match="so leave mc_samples, generator, sample and peel out"):
                invfunc.kfac(f, F.cross_entropy, fisher="exact", **more)
        with pytest.raises(ArgumentError, match="samples have 15 positions"):
            more = torch.zeros(4, 3), torch.zeros(2, 15, 4), torch.zeros(2, 15).long()
            invfunc.diag_ggn(lambda w, x: (x @ w).mT, F.cross_entropy, mc_samples=3, peel=1, **options())(*more)
