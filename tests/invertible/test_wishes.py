"""A test for each thing that users of MemCNN, RevTorch, FrEIA and torch.utils.checkpoint ask for."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import grad
from torch.nn.parallel import DistributedDataParallel

from invfunc import (
    ReplayError,
    additive_coupling,
    chain,
    invertible_checkpoint,
    layers,
    leapfrog,
    repeated,
    with_log_det,
)
from invfunc.recomputation.noted import slot_of
from invfunc.testing import assert_trees_close
from tests.invertible_same import g, gradients, leaves, squares
from tests.strategies import Numbers


class TestMemory:
    def test_dropped_graphs_are_freed_at_once(self):
        """Both: a graph that is dropped without a backward leaks."""
        was = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            for drop in ("without backward", "after backward", "after a partial one"):
                x, w = leaves()
                y = g(g(x * 1, w), w)
                held = weakref.ref(slot_of(y)._held)
                if drop == "after backward":
                    squares(y).backward()
                elif drop == "after a partial one":
                    gradients(y, w, retain_graph=True)
                del y
                assert held() is None, drop
        finally:
            if was:
                gc.enable()

    def test_does_not_grow_with_the_depth(self):
        """memcnn#41, #37: it grows; invtorch's Sequential too, in its peak."""
        counts = []
        for depth in (4, 20):
            x, w = Numbers()(2, 3).requires_grad_(), (0.1 * Numbers(1)(3)).requires_grad_()
            outputs, y = [], x
            for _ in range(depth):
                y = g(y, w)
                outputs.append(weakref.ref(slot_of(y)))
            held = sum(slot()._held is not None for slot in outputs)
            squares(y).backward(retain_graph=True)
            counts.append((held, sum(slot()._held is not None for slot in outputs)))
        assert counts[0] == counts[1] and counts[0][0] == 1


class TestWishes:
    def test_a_coupling_costs_two_evaluations(self):
        """memcnn#77, #52: slow where the inverse is trivial; a generic pair evaluates F three times."""
        calls = []

        def part(b, p):
            calls.append(p)
            return (b * p).tanh()

        h = invertible_checkpoint(additive_coupling(part, part))
        x, w = Numbers()(2, 3), Numbers(1)(3).requires_grad_()
        gradients(h(h((x, x), (w, w)), (w, w)), w)
        assert len(calls) == 2 * 4
        calls.clear()
        grad(lambda w: squares(h(h((x, x), (w, w)), (w, w))))(w.detach())
        assert len(calls) == 2 * 4

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
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def test_fully_sharded_modules(self, group):
        """The whole block may be sharded; of parts, the error says that."""

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

        mesh = init_device_mesh("cpu", (1,))
        parts, whole = Net(invertible_checkpoint), Net(invertible_checkpoint)
        for part in (parts.F, parts.G):
            fully_shard(part, mesh=mesh)
        with pytest.raises(
            ReplayError, match="by fully_shard of a part .* Shard the module that holds the whole block"
        ):
            of_parameters(parts)
        fully_shard(whole, mesh=mesh)
        assert_trees_close(of_parameters(whole), of_parameters(Net(lambda pair: pair)), 1e-9)

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

    def test_flows_with_their_log_determinants(self, same):
        """FrEIA#36: saving memory and log-determinants exclude each other."""
        flow = with_log_det(chain(layers.leaky_relu(0.5), layers.orthogonal_linear(), layers.leaky_relu(0.3)))

        def run(h, x, w):
            y, s = h((x, x.new_zeros(2)), [None, w.outer(w.sin()), None])
            return gradients((y, s.exp()), x, w), s

        def plain(state, params):
            for block, p in flow.composition.steps(params):
                state = block.pair(state) if p is None else block.pair(state, p)
            return state

        same(run, plain, invertible_checkpoint(flow))

    def test_reversible_solvers(self, same):
        """diffrax#300: the adjoint of a reversible solver, here of a particle in a field that is itself a gradient."""
        step = leapfrog(grad(lambda x, w: (w * x.cos()).sum()), 0.1)

        def plain(state, params):
            for p in params:
                state = step(state, p)
            return state

        def run(h, x, w):
            return gradients(h((x, x.sin()), [w] * 5), x, w)

        same(run, plain, repeated(step))
        same(
            lambda h, x, w: grad(lambda w: squares(h((x.detach(), x.detach().sin()), [w] * 5)))(w.detach()),
            plain,
            repeated(step),
        )
