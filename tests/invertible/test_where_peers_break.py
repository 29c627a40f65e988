"""A test for each way in which MemCNN or invtorch break, and for each thing that their users ask for."""

import pytest
import torch
import torch.distributed as dist

from invfunc import additive_coupling, invertible_checkpoint
from tests.invertible_same import gradients
from tests.process_group import alone

READS = {
    "x + g(x)": lambda h, x, w: x + h(x, w),
    "g(x) + x": lambda h, x, w: h(x, w) + x,
    "x * g(x)": lambda h, x, w: x * h(x, w),
    "g(g(x)) - g(x)": lambda h, x, w: h(h(x, w), w) - h(x, w),
    "both outputs": lambda h, x, w: (lambda y: h(y, w) - y)(h(x, w)),
    "print": lambda h, x, w: (lambda y: (repr(x), str(y), y)[2])(h(x, w)),
    "base of a view": lambda h, x, w: (lambda y: y + x.sum())(h(x.view(6).view(2, 3), w)),
    "base of an expanded one": lambda h, x, w: h(x.sum(0, keepdim=True).expand(2, 3), w) * x,
}


class TestCrashes:
    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
    def test_x_is_read_after_the_call(self, same, read, leaf):
        """Both: the process dies, as the storage of x is gone."""
        same(lambda h, x, w: gradients(read(h, x if leaf else x.sin(), w), x, w))


class TestErrors:
    @pytest.mark.parametrize("op", ["relu", "exp", "sigmoid", "tanh", "sqrt", "softmax"])
    def test_an_op_that_saves_its_output_stands_before(self, same, op):
        """Both (memcnn#70): "modified by an inplace operation", as they free what relu saved."""

        def before(x):
            return x.softmax(-1) if op == "softmax" else getattr(torch, op)(x.abs() if op == "sqrt" else x)

        same(lambda h, x, w: gradients(h(before(h(before(x), w)), w), x, w))


class TestWishes:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_nan_and_infinity_go_where_they_go_without(self, same, bad):
        """memcnn#29: the loss becomes NaN out of finite numbers; here only where it does so without."""

        def run(h, x, w):
            x = torch.where(x > x.max() - 1e-6, bad, x)
            found = gradients(h(h((x, x.sin().nan_to_num()), (w, w)), (w, w)), w)[0]
            return torch.where(found.isfinite(), found, 0), found.isnan().to(x)

        def part(b, p):
            return (b * p).tanh()

        pair = additive_coupling(part, part)
        same(run, pair, invertible_checkpoint(pair, keep=True))

    @pytest.fixture
    def group(self):
        """A process group of this process alone."""
        if not dist.is_available() or dist.is_initialized():
            pytest.skip("needs a process group of its own")
        with alone():
            yield
