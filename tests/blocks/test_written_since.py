"""What is written between forward and backward is told, or has no effect."""

import pytest
import torch
from torch.func import grad

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.errors import ModifiedError
from tests.invertible_same import f, f_inv, g, gradients, leaves, squares


def closed(f, w):
    return lambda x, unused: f(x, w)


@pytest.mark.quick
class TestWrittenSince:
    """Parameters that are written between forward and backward: an error, never a number of the new ones."""

    @pytest.mark.parametrize("where", ["argument", "closed over", "shared", "of a dropped block", "kept"])
    @pytest.mark.parametrize("partial", [False, True], ids=["at once", "after a partial gradient"])
    def test_is_an_error(self, where, partial):
        x, w = leaves()
        h, args = g, (w,)
        if where == "closed over":
            h, args = invertible_checkpoint(closed(f, w), closed(f_inv, w)), (None,)
        elif where == "kept":
            h = invertible_checkpoint(f, None)
        elif where == "shared":
            coupling = additive_coupling(lambda b, p: (b * p).tanh(), lambda a, q: (a * q).sin())
            h, args = invertible_checkpoint(coupling), ((w, w),)
        y = h((x * 1, x * 2) if where == "shared" else x * 1, *args)
        if where == "of a dropped block":
            h(y, *args)
        s = squares(y)
        del y
        if partial:
            torch.autograd.grad(s, w, retain_graph=True)
        with torch.no_grad():
            w.mul_(3)
        with pytest.raises((ModifiedError, RuntimeError), match="modified by an inplace operation"):
            torch.autograd.grad(s, (x, w))

    def test_is_an_error_where_a_part_closes_over_what_is_left_of_a_partial_gradient(self):
        x, w = leaves()
        left, right = invertible_checkpoint(lambda x: (x * w, x * w.detach()), None)(x * 1)
        torch.autograd.grad(left.sum(), w, retain_graph=True)
        with torch.no_grad():
            w.mul_(3)
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            torch.autograd.grad(right.sum(), x)

    @pytest.mark.parametrize("wrap", [lambda f, f_inv: f, invertible_checkpoint], ids=["plain", "block"])
    def test_is_an_error_where_an_optimiser_writes_it_in_the_backward_pass(self, wrap):
        """As soon as its gradient is there; what reads it without one still needs what it held."""
        x, w = leaves()

        def step(w):
            with torch.no_grad():
                w.sub_(w.grad)

        w.register_post_accumulate_grad_hook(step)
        y = wrap(lambda x: (x * w.detach()).tanh() * w, None)(x * 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.detach().mul_(2)])
    @pytest.mark.parametrize("inside", [False, True])
    def test_outputs_that_are_written_before_the_next_block(self, same, write, inside):
        """Without a gradient, so that the graph stays as it is; also inside of torch.func."""

        def run(h, x, w):
            if inside:
                return grad(lambda w: squares(self.twice(h, x.detach(), w, write)))(w.detach())
            return gradients(self.twice(h, x * 1, w, write), w)

        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            same(run)

    @staticmethod
    def twice(h, x, w, write):
        y = h(x, w)
        with torch.no_grad():
            write(y)
        return h(y, w)
