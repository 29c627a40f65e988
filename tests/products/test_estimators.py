"""Estimates from products with random vectors: unbiased, with the error that they tell, exact where they are to be."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import estimate_diagonal, estimate_trace, ggnvp, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.reductions.estimates import Estimate
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import matrices
from tests.matrices import assert_near, flat
from tests.networks import LOSSES, networks
from tests.strategies import Numbers, seeded

DISTRIBUTIONS = ["rademacher", "gaussian"]
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
        gaussian = partial(estimate_trace, of_matrix, probes=2, distribution="gaussian")
        values = [gaussian(generator=g)(torch.zeros(3), torch.eye(3)) for g in (generator, seeded(), seeded())]
        assert values[0] != values[1] == values[2]


class TestRefusals:
    @estimators
    @pytest.mark.parametrize(
        "options, kind, text",
        [
            ({"probes": 0}, ArgumentError, r"probes=0\): probes has to be at least 1"),
            ({"probes": True}, ArgumentTypeError, "probes is of type bool"),
            ({"generator": None}, ArgumentTypeError, "generator is missing, .*generator=torch.Generator"),
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
