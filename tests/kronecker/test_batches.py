"""Factors of several batches: merged they are those of the whole, and averages are those of each factor."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad

from invfunc import chunked, ekfac, functional, kfac, kronecker, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from invfunc.testing.strategies import problems, splits
from tests.kronecker.test_matrix import EXACT
from tests.laws import RTOL
from tests.networks import total
from tests.strategies import Numbers

FAMILIES = ["affine", "perceptron", "convolution", "derived", "generic", "module", "attention", "recurrent", "graph"]
OPTIONS = st.fixed_dictionaries(
    {"weight_sharing": st.sampled_from(["expand", "reduce", "backpack"]), "joint": st.booleans()}
)


def parts(batch, lengths):
    """The batch in parts of these lengths."""
    n = sum(lengths)
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        yield tree.map_tensors(lambda t, a=start, b=stop: t[a:b] if len(t) == n else t, batch)


def reduction(loss):
    return "mean" if loss.reduction == "mean" else "sum"


@pytest.mark.quick
class TestMerge:
    @given(problem=problems(FAMILIES, n=(2, 5)), options=OPTIONS, draw=st.data())
    def test_is_that_of_all_samples(self, problem, options, draw, device, dtype):
        """Exact factors, and those of the shares, which have the square of the loss's scale."""
        lengths = draw.draw(splits(problem.model.n))
        made = [kfac(problem.model.f, problem.loss, unsupported="diagonal", fisher="exact", **options)]
        made += [kfac(problem.f, fisher="empirical", unsupported="diagonal", **options)]
        for one in made:
            params, batch = moved((problem.model.params, problem.batch), dtype, device)
            found = [one(params, *part) for part in parts(batch, lengths)]
            whole = one(params, *batch)
            assert_trees_close(kronecker.merge(*found, reduction=reduction(problem.loss)), whole, RTOL[dtype], 1e-6)

    @given(reduction=st.sampled_from(["mean", "sum"]), lengths=st.lists(st.integers(1, 3), min_size=3, max_size=4))
    def test_does_not_depend_on_the_order_or_on_steps(self, reduction, lengths):
        f, params, x, y = perceptron(sum(lengths))
        one = kfac(f, lambda z, y: F.mse_loss(z, y, reduction=reduction), joint=True, fisher="exact")
        found = [one(params, *part) for part in parts((x, y), lengths)]
        wanted, total = one(params, x, y), found[0]
        for more in found[1:]:
            total = kronecker.merge(total, more, reduction=reduction)
        assert_trees_close(total, wanted, EXACT)
        assert_trees_close(kronecker.merge(*reversed(found), reduction=reduction), wanted, EXACT)
        assert_trees_close(kronecker.merge(wanted, reduction=reduction), wanted, EXACT)
        assert {K.origin.n for K in total.values() if K is not None} == {sum(lengths)}

    @pytest.mark.parametrize("joint", [False, True])
    @pytest.mark.parametrize("first", [False, True])
    def test_a_batch_that_does_not_reach_a_parameter_counts(self, joint, first):
        params = {"w": Numbers(1)(3, 2), "b": Numbers(2)(3), "always": Numbers(3)(3)}

        def f(params, x):
            z = F.linear(x, params["w"], params["b"]) if x.sum() > 0 else 0 * x[:, :1]
            return z + params["always"]

        x, y = torch.ones(2, 2).double(), Numbers(4)(6, 3)
        x = torch.cat([x, torch.zeros(4, 2).double()])
        for reduction in ("mean", "sum"):
            one = kfac(f, lambda z, y, how=reduction: F.mse_loss(z, y, reduction=how), joint=joint, fisher="exact")
            there, not_there = one(params, x[:2], y[:2]), one(params, x[2:], y[2:])
            batches = [there, not_there] if first else [not_there, there]
            found = kronecker.merge(*batches, reduction=reduction)
            c = 1 / 3 if reduction == "mean" else 1.0
            A, B = there["w"].factors[::-1]
            assert_trees_close(found["w"].factors, (c * B, A), EXACT)
            assert_trees_close(found["always"].factors, one(params, x, y)["always"].factors, EXACT)
            assert (found["b"] is None) == joint

    def test_is_that_of_chunks_and_has_derivatives(self):
        f, params, x, y = perceptron(4)
        one = kfac(f, F.cross_entropy, fisher="exact")
        y = y.softmax(1)

        def merged(params):
            return kronecker.merge(*(one(params, *part) for part in parts((x, y), [1, 3])), reduction="mean")

        chunks = chunked(one, 2, over="samples")(params, x, y)
        assert_trees_close(merged(params), chunks, EXACT)
        assert {n: vars(K.origin) for n, K in merged(params).items()} == {n: vars(K.origin) for n, K in chunks.items()}
        found = grad(lambda params: total(merged(params)))(params)
        assert_trees_close(found, grad(lambda params: total(one(params, x, y)))(params), 1e-9)


@pytest.mark.quick
class TestAverage:
    @given(decay=st.sampled_from([0.0, 0.3, 0.95, 1.0]))
    def test_is_that_of_each_factor(self, decay):
        f, params, x, y = perceptron(4)
        old, new = (kfac(f, F.mse_loss, joint=True, fisher="exact")(params, *part) for part in parts((x, y), [3, 1]))
        found = kronecker.ema(old, new, decay)
        wanted = tree.map_leaves(lambda a, b: a if a is None else decay * a + (1 - decay) * b, old, new)
        assert_trees_close(found, wanted, EXACT)
        v = {name: torch.ones_like(p) for name, p in params.items()}
        assert_trees_close(kronecker.solve(found, v, 0.1), kronecker.solve(wanted, v, 0.1), EXACT)


def perceptron(n):
    f, params = functional(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)).double())
    return f, {name: Numbers(2)(*p.shape) for name, p in params.items()}, Numbers(3)(n, 2), Numbers(4)(n, 3)


exact = partial(kfac, fisher="exact")


def of(make, *args, **options):
    """Factors of a small perceptron."""
    f, params, x, y = perceptron(4)
    return make(f, F.mse_loss, *args, **options)(params, x, y)


def tied():
    return kfac(lambda w, x: (x @ w).tanh() @ w.mT, F.mse_loss, fisher="exact")(
        Numbers(1)(3, 2), Numbers(2)(4, 3), Numbers(3)(4, 3)
    )


def merge(*factors, reduction="sum"):
    return lambda: kronecker.merge(*(make() for make in factors), reduction=reduction)


def inverses():
    return {name: K.inverse(0.1, "pi") for name, K in of(exact).items() if len(K.factors) == 2}


PLAIN, EIGEN = (lambda: of(exact)), (lambda: of(ekfac, fisher="exact"))
# fmt: off
WRONG = {
    "no reduction": (lambda: kronecker.merge(PLAIN()), TypeError, "reduction"),
    "another reduction": (merge(PLAIN, reduction="none"), ArgumentError, "'none' ... 'sum' or 'mean'"),
    "nothing": (merge(), ArgumentError, "no factors"),
    "of ekfac": (merge(EIGEN, EIGEN), ArgumentError, "factors['0.weight'] has eigenvalues ... kronecker.eigen"),
    "average of ekfac": (lambda: kronecker.ema(EIGEN(), EIGEN(), 0.5), ArgumentError, "['0.weight'] has eigenvalues"),
    "of kfra": (merge(lambda: of(kfra)), ArgumentError, "factors['0.weight'] is not a sum over samples"),
    "of averages": (merge(lambda: kronecker.ema(PLAIN(), PLAIN(), 0.5)), ArgumentError, "not a sum over samples"),
    "of inverses": (merge(inverses), ArgumentError, "not a sum over samples"),
    "of two roles": (merge(tied), ArgumentError, "not a sum over samples ... two roles"),
    "of selected samples": (merge(lambda: of(exact, samples=[0, 2]), reduction="mean"), ArgumentError, "samples="),
    "and of others": (merge(PLAIN, lambda: of(exact, samples=[0]), reduction="mean"), ArgumentError, "samples="),
    "of both again": (merge(lambda: merge(PLAIN, lambda: of(exact, samples=[0]))(), PLAIN, reduction="mean"),
        ArgumentError, "samples="),
    "of shares and columns": (merge(PLAIN, lambda: of(kfac, fisher="empirical")), ArgumentError, "empirical ... GGN"),
    "another tree": (merge(PLAIN, lambda: {"w": of(exact)["0.weight"]}), ArgumentError, "factors[0]['0.weight']"),
    "other options": (merge(PLAIN, lambda: of(exact, joint=True)), ArgumentError, "['0.weight'] ... of one form"),
    "None against factors": (merge(lambda: of(exact) | {"0.bias": None}, PLAIN), ArgumentError, "['0.bias'] ... form"),
    "no matrix": (merge(lambda: {"w": 1}), ArgumentTypeError, "factors[0]['w'] is of type int"),
    "a large decay": (lambda: kronecker.ema(PLAIN(), PLAIN(), 1.5), ArgumentError, "decay ... 0 to 1"),
    "a negative decay": (lambda: kronecker.ema(PLAIN(), PLAIN(), torch.tensor(-0.1)), ArgumentError, "decay"),
    "a decay of no number": (lambda: kronecker.ema(PLAIN(), PLAIN(), "0.9"), ArgumentTypeError, "decay ... str"),
}
# fmt: on


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG.values(), ids=WRONG)
def test_errors_name_the_place(wrong, kind, text):
    with pytest.raises(kind, match=".*".join(map(re.escape, text.split(" ... ")))):
        wrong()
