"""Estimates from products with random vectors: unbiased, with the error that they tell, exact where they are to be."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import diag_ggn, estimate_diagonal, estimate_trace, ggn_trace, ggnvp, hvp, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from invfunc.reductions.estimate import Estimate
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import matrices
from tests.matrices import assert_near, flat
from tests.networks import LOSSES, network, networks, total
from tests.strategies import Numbers, seeded

DISTRIBUTIONS = ["rademacher", "gaussian"]
distributions = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
estimators = pytest.mark.parametrize("estimator", [estimate_trace, estimate_diagonal], ids=lambda t: t.__name__)


def of_matrix(params, v, matrix):
    """The product of a dense matrix."""
    return matrices.shaped(matrix @ flat(v), params)


class TestValues:
    @given(net=networks(), distribution=st.sampled_from(DISTRIBUTIONS), probes=st.integers(2, 5))
    def test_are_the_mean_over_the_vectors_and_its_error(self, device, dtype, net, distribution, probes):
        """By the formula of the docstrings, with the vectors as the matrix has seen them."""
        args = moved((net.params, net.x, LOSSES[0].target(Numbers(1), net.n)), dtype, device)
        product, seen, rtol = ggnvp(net.f, LOSSES[0]), [], {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]

        def watched(params, v, *batch):
            seen.append((v, product(params, v, *batch)))
            return seen[-1][1]

        options = {"probes": probes, "distribution": distribution}
        trace = estimate_trace(watched, generator=seeded(1, device), **options)(*args)
        values = torch.stack([(flat(v) * flat(y)).sum() for v, y in seen])
        assert isinstance(trace, Estimate) and trace.value.shape == () and trace.value.dtype == dtype
        assert_near(trace.value, values.mean(), rtol)
        assert_near(trace.standard_error, values.std() / probes**0.5, rtol, values.abs().max().item())
        seen.clear()
        diagonal = estimate_diagonal(watched, generator=seeded(1, device), **options)(*args)
        values = torch.stack([flat(v) * flat(y) for v, y in seen])
        assert tree.flatten(diagonal.value)[1] == tree.flatten(diagonal.standard_error)[1] == tree.flatten(args[0])[1]
        assert_near(flat(diagonal.value), values.mean(0), rtol)
        assert_near(flat(diagonal.standard_error), values.std(0) / probes**0.5, rtol)
        assert_near(flat(diagonal.value).sum(), trace.value, rtol, values.abs().max().item())
        again = estimate_diagonal(product, generator=seeded(1, device), **options)(*args)
        assert_trees_close(again, diagonal, 100 * rtol, 1e-2)  # linearised once, with the same numbers

    @distributions
    def test_are_unbiased(self, distribution):
        """Off by more than 6 standard errors of 1000 probes: less than once in 10^6 seeds, for all 18 numbers."""
        net = network("perceptron", 5)
        args = (net.params, net.x, LOSSES[0].target(Numbers(1), 5))
        options = {"probes": 1000, "generator": seeded(), "distribution": distribution}
        trace, error = estimate_trace(ggnvp(net.f, LOSSES[0]), **options)(*args)
        wanted = ggn_trace(net.f, LOSSES[0])(*args)
        assert 0 < error < 0.2 * wanted and abs(trace - wanted) < 6 * error
        estimate = estimate_diagonal(ggnvp(net.f, LOSSES[0]), **options)(*args)
        wanted = flat(diag_ggn(net.f, LOSSES[0])(*args))
        assert (abs(flat(estimate.value) - wanted) <= 6 * flat(estimate.standard_error) + 1e-12).all()

    @distributions
    def test_tell_their_error(self, distribution):
        """Of 200 estimates, 95 % are within 2 (1.96) of their standard errors: off by 5 deviations of that count."""
        matrix = torch.ones(6, 6).double() + torch.eye(6).double()
        at = estimate_trace(of_matrix, probes=60, generator=seeded(), distribution=distribution)
        found = [at(torch.zeros(2, 3).double(), matrix) for _ in range(200)]
        within = sum(abs(value - matrix.trace()) <= 1.96 * error for value, error in found)
        assert abs(within - 190) <= 5 * math.sqrt(200 * 0.95 * 0.05)

    @given(st.integers(1, 3))
    def test_signs_are_exact_for_a_diagonal_matrix(self, probes):
        diagonal, params = Numbers()(5), {"a": torch.zeros(2).double(), "b": torch.zeros(3).double()}
        options = {"probes": probes, "generator": seeded()}
        trace = estimate_trace(of_matrix, **options)(params, diagonal.diag())
        assert_near(trace.value, diagonal.sum(), 1e-14)
        found = estimate_diagonal(of_matrix, **options)(params, diagonal.diag())
        assert torch.equal(flat(found.value), diagonal)
        if probes == 1:
            assert trace.standard_error.isnan() and flat(found.standard_error).isnan().all()
        else:
            assert trace.standard_error < 1e-14 and not flat(found.standard_error).any()

    @estimators
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_are_summed_in_float32(self, estimator, dtype):
        """A bfloat16 sum of ones stops at 256."""
        params = torch.zeros(1000, dtype=dtype)
        found = estimator(lambda params, v: v, probes=400, generator=seeded())(params)
        wanted = 1000.0 if estimator is estimate_trace else torch.ones(1000)
        assert found.value.dtype == found.standard_error.dtype == dtype
        assert_near(found.value.float(), torch.as_tensor(wanted), 1e-2)

    @estimators
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_are_averaged_in_float32(self, estimator, dtype):
        """A mean in bfloat16 stands still after some hundred vectors, and so do the squares around it."""
        seen: list[torch.Tensor] = []

        def product(params, v):
            y = v + v.roll(1) / 2
            values = v.float() * y.float()
            seen.append(values.sum() if estimator is estimate_trace else values)
            return y

        found = estimator(product, probes=400, generator=seeded())(torch.zeros(8, dtype=dtype))
        values = torch.stack(seen)
        assert_near(found.value.float(), values.mean(0), torch.finfo(dtype).eps)
        assert_near(found.standard_error.float(), values.std(0) / 400**0.5, torch.finfo(dtype).eps)

    def test_draw_from_the_generator_alone(self):
        before, generator = torch.get_rng_state(), seeded()
        estimate_trace(of_matrix, probes=2, generator=generator)(torch.zeros(3), torch.eye(3))
        assert torch.equal(torch.get_rng_state(), before)
        state = generator.get_state()
        assert not torch.equal(state, seeded().get_state())
        values = [
            estimate_trace(of_matrix, probes=2, generator=g, distribution="gaussian")(torch.zeros(3), torch.eye(3))
            for g in (generator, seeded(), seeded())
        ]
        assert values[0] != values[1] == values[2]

    def test_a_function_that_draws_is_the_same_for_all_vectors(self):
        def f(w, x):
            return (F.dropout(x, 0.5) * w).exp().sum()

        torch.manual_seed(0)
        found = estimate_trace(hvp(f), probes=5, generator=seeded())(torch.zeros(3), torch.ones(4, 3))
        assert found.standard_error == 0


class TestCompositions:
    @estimators
    def test_derivatives_are_those_of_the_formula(self, estimator):
        net = network("perceptron", 3)
        batch = (net.x, LOSSES[0].target(Numbers(1), 3))

        def value(p, product=None):
            product = product or hvp(net.f, LOSSES[0])
            return total(estimator(product, probes=3, generator=seeded())(p, *batch))

        def dense(params, v, *batch):
            return torch.func.grad(
                lambda p: (flat(torch.func.grad(lambda p: LOSSES[0](net.f(p, batch[0]), batch[1]))(p)) * flat(v)).sum()
            )(params)

        wanted = torch.func.grad(lambda p: value(p, dense))(net.params)
        assert_trees_close(torch.func.grad(value)(net.params), wanted, 1e-8)
        tracked = tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params)
        slopes = torch.autograd.grad(value(tracked), tree.leaves(tracked))
        assert_trees_close(list(slopes), tree.leaves(wanted), 1e-8)
        several = tree.map_leaves(lambda p: torch.stack([p, 2 * p]), net.params)
        both = torch.vmap(value)(several)
        assert_near(both, torch.stack([value(net.params), value(tree.map_leaves(lambda p: 2 * p, net.params))]), 1e-10)

    @estimators
    def test_no_derivative_is_nan_where_the_error_is_zero(self, estimator):
        params = torch.ones(3).double()
        slope = torch.func.grad(lambda p: total(estimator(lambda p, v: p * v, probes=3, generator=seeded())(p)))(params)
        assert slope.isfinite().all()

    def test_a_compiled_function_may_use_it(self):
        generator = seeded()

        def step(p):
            found = estimate_trace(lambda p, v: p * v, probes=3, generator=generator)(p.sin())
            return p - found.value

        p = Numbers()(3)
        assert_near(torch.compile(step, backend="eager")(p), p - p.sin().sum(), 1e-12)

    def test_aux_is_dropped(self):
        product = hvp(lambda w, x: ((x * w).square().sum(), "aux"), has_aux=True)
        found = estimate_trace(product, probes=1, generator=seeded())(torch.ones(2), torch.ones(2))
        assert found.value == 4

    def test_progress(self, capsys):
        found = estimate_trace(of_matrix, probes=3, generator=seeded(), progress=True)(torch.zeros(2), torch.eye(2))
        assert found.value == 2 and "estimate_trace(of_matrix)" in capsys.readouterr().err


class TestRefusals:
    @estimators
    @pytest.mark.parametrize(
        "options, kind, text",
        [
            ({"probes": 0}, ArgumentError, r"probes=0\): probes has to be at least 1"),
            ({"probes": 2.0}, ArgumentTypeError, r"probes=2.0\): probes is of type float"),
            ({"probes": True}, ArgumentTypeError, "probes is of type bool"),
            ({"generator": None}, ArgumentTypeError, "generator is of type NoneType.*generator=torch.Generator"),
            ({"generator": 0}, ArgumentTypeError, "generator is of type int"),
            ({"distribution": "uniform"}, ArgumentError, r"distribution='uniform'\): .*'rademacher', 'gaussian'"),
        ],
        ids=str,
    )
    def test_of_options(self, estimator, options, kind, text):
        with pytest.raises(kind, match=rf"{estimator.__name__}\(of_matrix.*{text}"):
            estimator(of_matrix, **{"probes": 2, "generator": seeded()} | options)

    @estimators
    def test_of_products(self, estimator):
        options = {"probes": 2, "generator": seeded()}
        with pytest.raises(ArgumentTypeError, match=rf"{estimator.__name__}\(f\): f is of type int"):
            estimator(3, **options)
        with pytest.raises(ArgumentError, match="several vectors"):
            estimator(invfunc.ggnvp(of_matrix, blocks=True), **options)
        with pytest.raises(ArgumentError, match=r"product has no product\['a'\]; it has to be a tree.* like params"):
            estimator(lambda params, v: v["a"], **options)({"a": torch.ones(2)})
        with pytest.raises(ArgumentTypeError, match=r"params\['a'\] has dtype torch.int64"):
            estimator(of_matrix, **options)({"a": torch.ones(2).long()}, torch.eye(2))
        with pytest.raises(ArgumentError, match=rf"{estimator.__name__}\(of_matrix\)\(params\): params has no tensors"):
            estimator(of_matrix, **options)({})

    @estimators
    def test_of_a_generator_on_another_device(self, estimator):
        params, matrix = {"a": torch.zeros(2, device="meta")}, torch.eye(2, device="meta")
        for found in estimator(lambda params, v, m: {"a": m @ v["a"]}, probes=2, generator=seeded())(params, matrix):
            assert all(leaf.is_meta for leaf in tree.leaves(found))

    @estimators
    def test_of_progress_without_tqdm(self, estimator, monkeypatch):
        monkeypatch.setitem(sys.modules, "tqdm", None)
        at = estimator(of_matrix, probes=1, generator=seeded(), progress=True)
        with pytest.raises(MissingExtraError, match=rf"{estimator.__name__}\(.*tqdm is missing: .*invfunc\[progress\]"):
            at(torch.zeros(2), torch.eye(2))
