"""A test for each way in which MemCNN or invtorch break, and for each thing that their users ask for."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import grad
from torch.nn.parallel import DistributedDataParallel

from invfunc import InvFuncError, additive_coupling, invertible_checkpoint, layers
from invfunc.testing import assert_trees_close
from tests.invertible_same import f, f_inv, gradients, leaves, squares
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

    def test_identity(self, same):
        """MemCNN: frees the storage that y shares with x."""
        pair = layers.identity()
        same(lambda h, x, w: gradients(h(x * w) + h(h(x)), x, w), pair, invertible_checkpoint(pair))

    def test_under_no_grad_nothing_happens_to_x(self, same):
        """MemCNN: wipes its input even there."""
        for mode in (torch.no_grad, torch.inference_mode):

            def run(h, x, w, mode=mode):
                with mode():
                    y = h(x, w)
                assert y.grad_fn is None
                return y.clone(), x

            same(run)


class TestErrors:
    @pytest.mark.parametrize("op", ["relu", "exp", "sigmoid", "tanh", "sqrt", "softmax"])
    def test_an_op_that_saves_its_output_stands_before(self, same, op):
        """Both (memcnn#70): "modified by an inplace operation", as they free what relu saved."""

        def before(x):
            return x.softmax(-1) if op == "softmax" else getattr(torch, op)(x.abs() if op == "sqrt" else x)

        same(lambda h, x, w: gradients(h(before(h(before(x), w)), w), x, w))

    def test_an_unused_parameter(self, same):
        """MemCNN: an error about a tensor that was not used."""
        unused = invertible_checkpoint(lambda x, w, v: f(x, w), lambda y, w, v: f_inv(y, w))

        def run(h, x, w):
            v = w.clone().requires_grad_()
            found = gradients(h(x, w, v), x, w, v, allow_unused=True)
            assert found[2] is None
            return found[:2], grad(lambda v: squares(h(x.detach(), w.detach(), v)))(v.detach())

        same(run, unused.pair, unused)


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

    def test_fully_sharded_modules(self, group):
        """The whole block may be sharded; of parts, it is right or the error says so."""

        class Net(nn.Module):
            def __init__(self, wrap):
                super().__init__()
                torch.manual_seed(0)
                self.F, self.G = (nn.Linear(3, 3).double() for _ in range(2))
                self.block = wrap(additive_coupling(lambda b: self.F(b).tanh(), self.G))

            def forward(self, x):
                return self.block(self.block((x, x.sin())))

        def of_parameters(net):
            squares(net(leaves()[0].detach())).backward()
            return {name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for name, p in net.named_parameters()}

        mesh, wanted = init_device_mesh("cpu", (1,)), of_parameters(Net(lambda pair: pair))
        parts, whole = Net(invertible_checkpoint), Net(invertible_checkpoint)
        fully_shard(whole, mesh=mesh)
        assert_trees_close(of_parameters(whole), wanted, 1e-9)
        for part in (parts.F, parts.G):
            fully_shard(part, mesh=mesh)
        try:
            found = of_parameters(parts)
        except InvFuncError as error:
            assert "whole block" in str(error)
        else:
            assert_trees_close(found, wanted, 1e-9)

    def test_distributed_data_parallel(self, same, group):
        """memcnn#69, #44, transformers#7160: hooks that fire twice, or never."""

        class Net(nn.Module):
            def __init__(self, wrap):
                super().__init__()
                self.parts, self.wrap = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), wrap

            def forward(self, x):
                state = (x, x.sin())
                for i in (0, 2):
                    pair = additive_coupling(*(lambda b, m=m: m(b).tanh() for m in self.parts[i : i + 2]))
                    state = self.wrap(pair)(state)
                return torch.cat(state)

        def run(wrap, x, w):
            net = Net(wrap).to(x)
            twin = DistributedDataParallel(copy.deepcopy(net))
            for _ in range(2):
                squares(twin(x.detach())).backward()
            squares(net(x.detach())).backward()
            return [p.grad for p in twin.parameters()], [2 * p.grad for p in net.parameters()]

        same(run, lambda pair: pair, invertible_checkpoint)
