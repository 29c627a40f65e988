"""A checkpointed function compiled, and against finite differences."""

import pytest
import torch

from invfunc import tree
from invfunc.testing import assert_trees_close
from tests.invertible_cases import FLOOR, RTOL, Sizes, twins
from tests.test_invertible_composition import backward, live, slope


class TestCompiled:
    """torch.compile takes f as it is; peers have no fullgraph."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("form", ["additive", "functions of a tensor", "repeated"])
    def test_value_and_gradient(self, form, backend, dtype, device):
        pair = twins(form, Sizes(depth=2)).to(dtype, device)
        compiled = torch.compile(pair.g, backend=backend, fullgraph=True)
        found, wanted = (backward(h, pair.x, pair.params) for h in (compiled, pair.f))
        assert_trees_close(found, wanted, RTOL[dtype], FLOOR)

    def test_grad_within(self, dtype, device):
        pair = twins("additive", Sizes(depth=2)).to(dtype, device)
        compiled = torch.compile(slope(pair.g), backend="aot_eager", fullgraph=True)
        assert_trees_close(compiled(pair.x, pair.params), slope(pair.f)(pair.x, pair.params), RTOL[dtype], FLOOR)


class TestNumerically:
    """Against finite differences, which know nothing of autograd."""

    @pytest.mark.parametrize("form", ["additive", "functions of a dict", "no inverse", "hidden", "chain"])
    def test_gradcheck_and_gradgradcheck(self, form, device):
        pair = twins(form, Sizes(depth=2)).to(torch.float64, device)
        leaves, structure = tree.flatten(live(pair.x, pair.params))

        def flat(*leaves):
            return tuple(tree.leaves(pair.g(*tree.unflatten(leaves, structure))))

        assert torch.autograd.gradcheck(flat, leaves, fast_mode=True, nondet_tol=1e-9)
        assert torch.autograd.gradgradcheck(flat, leaves, fast_mode=True, nondet_tol=1e-9)
