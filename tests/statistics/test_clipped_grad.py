"""clipped_grad and the norms of shares: bounds, no bound, shares of zero, what cancels, a bad bound."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import clipped_grad, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_clipped_grad
from tests.networks import networks, samples_loss
from tests.statistics.test_first_order import EXACT, drawn, losses, reduced, reductions
from tests.strategies import Numbers


@pytest.mark.quick
class TestClipping:
    @given(networks(), losses, reductions, st.floats(0.3, 1.5))
    def test_bounds_each_share_and_no_other(self, net, loss, reduction, part):
        f, args = samples_loss(net, loss), drawn(net, loss)
        scaled = (lambda *a: f(*a) / net.n) if reduction is torch.mean else f
        bound = part * loop_clipped_grad(scaled, torch.inf)(*args)[1].mean().item()
        clipped, norms = clipped_grad(reduced(f, reduction), bound)(*args)
        assert_trees_close((clipped, norms), loop_clipped_grad(scaled, bound)(*args), EXACT)
        assert sum(g.square().sum() for g in tree.leaves(clipped)).sqrt() <= net.n * bound * (1 + EXACT)
        squared = sum(tree.leaves(invfunc.batch_l2_grad(scaled)(*args)))
        assert_trees_close(norms.square(), squared, EXACT)

    @pytest.mark.parametrize("bound", [1.0, torch.inf])
    def test_of_a_zero_share_is_zero_and_so_is_its_slope(self, bound):
        """The norm has no slope at zero: that of its square is taken, and nothing is NaN."""
        w, x = Numbers()(3, 2), Numbers(1)(4, 3)
        x[1] = 0

        def f(w, x):
            return (x @ w).sin().sum(1)

        def slopes(make):
            given = w.clone().requires_grad_(), x.clone().requires_grad_()
            clipped, norms = make(f, bound)(*given)
            return torch.autograd.grad(clipped.cos().sum() + norms.sum(), given)

        found = slopes(clipped_grad)
        assert clipped_grad(f, bound)(w, x)[1][1] == 0
        assert_trees_close(found, slopes(loop_clipped_grad), EXACT)
        assert all(g.isfinite().all() for g in found)

    bad_tensors = [torch.zeros(()), torch.tensor(torch.nan), torch.ones(1), torch.tensor(True), torch.tensor(1j)]

    @pytest.mark.parametrize("bound", [0, -1.0, float("nan"), -torch.inf, "1", None, [1.0], *bad_tensors], ids=repr)
    def test_refuses_a_bound_that_is_none(self, bound):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"clipped_grad\(mse_loss.*max_norm"):
            clipped_grad(F.mse_loss, bound)
