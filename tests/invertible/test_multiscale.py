"""Flows of which a half leaves at each scale: the loop of the docstring, and back, with log-determinants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import Invertible, affine_coupling, chain, invert, layers, tree, with_log_det
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs import multiscale
from invfunc.testing import assert_trees_close, laws
from tests.strategies import Numbers

EXACT = 1e-10


def scaled(b: torch.Tensor, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return b * p, (b * p).sin()


def looped(flows: list, x: torch.Tensor, params: list, split_dim: int) -> tuple:
    *others, last = [(lambda x, f=f, p=p: f(x) if p is None else f(x, p)) for f, p in zip(flows, params, strict=True)]
    left = []
    for flow in others:
        x, half = flow(x).tensor_split(2, split_dim)
        left.append(half)
    return (last(x), *reversed(left))


@st.composite
def cases(draw) -> tuple[list, torch.Tensor, list, int]:
    """Flows of some kinds, an input that can be halved so often, and parameters."""
    rand, n, count, dim = Numbers(), draw(st.integers(1, 3)), draw(st.integers(2, 3)), draw(st.sampled_from([1, -1]))
    step = affine_coupling(scaled, scaled, split_dim=2)
    kinds = {
        "coupling": (step, lambda: (rand(), rand())),
        "chain": (chain(step, layers.leaky_relu(0.5)), lambda: [(rand(), rand()), None]),
        "layer": (layers.leaky_relu(0.3), lambda: None),
        "inverted": (invert(step), lambda: (rand(), rand())),
    }
    chosen = [kinds[draw(st.sampled_from([*kinds]))] for _ in range(count)]
    x = rand(n, 2**count, 2**count)
    return [flow for flow, _ in chosen], x, [make() for _, make in chosen], dim


@pytest.mark.quick
@settings(max_examples=10)
@given(cases())
def test_is_the_loop_and_back(case):
    flows, x, params, dim = case
    scales = multiscale(*flows, split_dim=dim)
    out = scales(x, params)
    assert_trees_close(out, looped(flows, x, params, dim), EXACT)
    assert_trees_close(scales.inverse(out, params), x, EXACT)
    assert_trees_close(invert(scales)(out, params), x, EXACT)


@settings(max_examples=3)
@given(cases())
def test_carries_the_log_determinant_of_the_jacobian(case):
    flows, x, params, dim = case
    scales, s = multiscale(*flows, split_dim=dim), Numbers(4)(len(x))
    out, total = with_log_det(scales)((x, s), params)
    for n, one in enumerate(x):
        jacobian = torch.func.jacrev(lambda x: torch.cat([z.flatten() for z in scales(x[None], params)]))(one)
        wanted = torch.linalg.slogdet(jacobian.reshape(one.numel(), -1)).logabsdet
        assert_trees_close(total[n] - s[n], wanted, EXACT, floor=1.0)
    assert_trees_close(invert(with_log_det(scales))((out, total), params), (x, s), EXACT)


def test_has_the_laws_of_pairs():
    step = affine_coupling(scaled, scaled, split_dim=2)
    x, params = Numbers()(2, 4, 4), [(Numbers(1)(), Numbers(2)()), [(Numbers(3)(), Numbers(4)())]]
    table = laws.check_pair(multiscale(step, chain(step)), x, params, seconds=5)
    assert not table.failed and not table.refused


class TestErrors:
    x = Numbers()(2, 3, 4)
    hiding = layers.batch_norm()

    @pytest.mark.parametrize(
        ("call", "error", "text"),
        [
            (lambda: multiscale(), ArgumentError, "there are no flows"),
            (lambda: multiscale(torch.tanh), ArgumentTypeError, "flow 0.*has to be an Invertible"),
            (lambda: multiscale(layers.identity(), split_dim="1"), ArgumentTypeError, "split_dim is an axis"),
            (lambda: multiscale(TestErrors.hiding), ArgumentError, r"batch_norm\(\) hides something"),
            (
                lambda: multiscale(layers.identity(), layers.identity(), split_dim=3)(TestErrors.x),
                ArgumentError,
                r"of shape \[2, 3, 4\], which has no two halves",
            ),
            (
                lambda: multiscale(layers.identity(), layers.identity())(TestErrors.x, [None]),
                ArgumentError,
                r"multiscale\(identity\(\), identity\(\)\)\(x, params\): params is 1 entries.*the 2 blocks",
            ),
            (
                lambda: with_log_det(multiscale(Invertible(torch.exp, torch.log), layers.identity())),
                ArgumentError,
                "has no log_det",
            ),
        ],
    )
    def test_what_does_not_fit_is_an_error(self, call, error, text):
        with pytest.raises(error, match=text):
            call()

    def test_a_single_flow_is_itself(self):
        assert tree.tensors(multiscale(layers.leaky_relu(0.5))(self.x))[0].shape == self.x.shape
