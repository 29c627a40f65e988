"""peel=: the largest columns as they are, the others mixed by signs; with_error=: how far the result may be off."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.loss.drawn import Peel, peeled
from invfunc.loss.square_root import Elementwise, Softmax
from invfunc.reductions.estimates import Lot, drawn, variances
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-12


def softmax(logits, positions=1):
    """The columns at logits `[n, C, positions]`, and the Hessian `[n, C, C]` at each position."""
    n, _, t = logits.shape
    weight = (1 + Numbers(7)(1, t).abs()).expand(n, t)
    p = logits.softmax(1).movedim(2, 1)
    hessian = weight[..., None, None] * (torch.diag_embed(p) - p[..., :, None] * p[..., None, :])
    return Softmax(0, logits, weight, lambda columns: columns), hessian


def elementwise(h):
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
    made = softmax(same)[0] if values.ndim == 3 else elementwise(same)[0]
    return peeled(made, count, peel, lambda shape, like: patterns)


SIZED = st.sampled_from([0.1, 1.0, 10.0, 300.0])
PEELS = st.sampled_from([Peel(0), Peel(1), Peel("auto"), Peel("auto", 2), Peel(0, 2)])


class TestColumns:
    @given(st.integers(1, 5), SIZED, st.sampled_from([torch.float64, torch.float32]))
    def test_all_columns_are_a_square_root(self, classes, size, dtype):
        made, hessian = softmax((size * Numbers(classes)(2, classes, 1)).to(dtype).double())
        found, exact = peeled(made, 9, Peel("auto"), lambda shape, like: torch.rand(shape, dtype=like.dtype))
        assert exact.tolist() == [classes - 1] * 2 and len(found) == max(1, classes - 1)
        assert_trees_close(gram(found), hessian, EXACT, 1.0)  # p - p^2 has no digits where p is 1
        h = Numbers(1)(3, classes).square() * size
        found, exact = peeled(*elementwise(h)[:1], 9, Peel("auto"), lambda shape, like: torch.rand(shape).double())
        assert_trees_close(gram(found), elementwise(h)[1], EXACT)

    @given(st.sampled_from([(2, 2), (3, 2), (4, 1)]), SIZED, PEELS, st.booleans())
    def test_on_average_over_the_signs_it_is_the_hessian(self, sizes, size, peel, classes):
        c, count = sizes
        values = size * Numbers(2)(1, c, 1)
        values = values if classes else values[..., 0].square()
        hessian = (softmax(values) if classes else elementwise(values))[1]
        peel = peel if peel.least <= count and peel.columns in ("auto", 0) else Peel("auto")
        assert_trees_close(gram(ways(values, count, peel)[0]).mean(0)[None], hessian, EXACT, 1.0)

    def test_positions_are_mixed_and_right_on_average(self):
        values = Numbers(3)(1, 2, 3)
        hessian, (found, _) = softmax(values)[1], ways(values, 1, Peel("auto"))
        of_all = torch.einsum("nct,nds->ctds", found[0], found[0]) / found.shape[1]
        wanted = torch.einsum("tcd,ts->ctds", hessian[0], torch.eye(3, dtype=torch.float64))
        assert_trees_close(of_all, wanted, EXACT)

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
        assert_trees_close(squares.sum(0).mean(), (h[0] * slope.square()).sum(), EXACT)
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
