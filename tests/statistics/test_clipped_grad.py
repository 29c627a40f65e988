"""clipped_grad and the norms of shares: bounds, no bound, shares of zero, what cancels, a bad bound."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import clipped_grad, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_batch_l2_grad, loop_clipped_grad
from tests.networks import LOSSES, network, networks, samples_loss
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

    @pytest.mark.parametrize("bound", [torch.inf, float("inf"), 1e6, 10**6], ids=repr)
    def test_without_a_bound_is_the_gradient(self, bound):
        net, loss = network("perceptron"), LOSSES[0]
        f, args = samples_loss(net, loss), drawn(net, loss)
        wanted = torch.func.grad(lambda *a: f(*a).sum())(*args)
        assert_trees_close(clipped_grad(f, bound)(*args)[0], wanted, EXACT)

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

    def test_has_a_derivative_in_its_bound(self):
        net, loss = network("perceptron"), LOSSES[0]
        f, args = samples_loss(net, loss), drawn(net, loss)
        bound = loop_clipped_grad(f, torch.inf)(*args)[1].median() * 1.01  # not at a norm, where it has a kink

        def value(bound, make=clipped_grad):
            return sum(g.cos().sum() for g in tree.leaves(make(f, bound)(*args)[0]))

        wanting = bound.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(value(wanting, loop_clipped_grad), wanting)
        assert wanted != 0
        assert_trees_close(value(bound), value(bound.item()), EXACT)
        assert_trees_close(torch.autograd.grad(value(wanting), wanting)[0], wanted, EXACT)
        assert_trees_close(torch.func.grad(value)(bound), wanted, EXACT)
        assert_trees_close(torch.func.jvp(value, (bound,), (torch.ones_like(bound),))[1], wanted, EXACT)
        parts = invfunc.chunked(clipped_grad(f, wanting), 2, over="samples")(*args)[0]
        (found,) = torch.autograd.grad(sum(g.cos().sum() for g in tree.leaves(parts)), wanting)
        assert_trees_close(found, wanted, EXACT)
        several = torch.stack([bound / 2, bound, 2 * bound])
        assert_trees_close(torch.vmap(value)(several), torch.stack([value(b) for b in several]), EXACT)

    bad_tensors = [torch.zeros(()), torch.tensor(torch.nan), torch.ones(1), torch.tensor(True), torch.tensor(1j)]

    @pytest.mark.parametrize("bound", [0, -1.0, float("nan"), -torch.inf, "1", None, [1.0], *bad_tensors], ids=repr)
    def test_refuses_a_bound_that_is_none(self, bound):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"clipped_grad\(mse_loss.*max_norm"):
            clipped_grad(F.mse_loss, bound)


class TestNorms:
    """Of a share whose positions cancel: their products, of both signs, would have lost it in float32."""

    @pytest.mark.parametrize("apart", [0, 1e-5, 1e-3])
    @pytest.mark.parametrize("width, positions", [(3, 2), (64, 2), (100, 3)])
    def test_are_neither_negative_nor_lost(self, width, positions, apart):
        w, x = Numbers()(width, width).float(), Numbers(1)(20, 1, width) + apart * Numbers(2)(20, positions, width)
        signs = torch.tensor([1.0, -1, 0] if positions == 3 else [1.0, -1])

        def f(w, x):
            return (x @ w * signs[:, None].to(x)).sum((1, 2))

        args = (w, x.float())
        wanted = loop_batch_l2_grad(f)(w.double(), args[1].double())
        norms = clipped_grad(f, 1.0)(*args)[1]
        for found in (invfunc.batch_l2_grad(f)(*args), invfunc.gram(f)(*args).diag(), norms.square()):
            assert (found >= 0).all()
            if apart == 1e-3:  # below, the numbers of x themselves do not say more
                assert_trees_close(found, wanted, 1e-2)
