"""A checkpointed function compiled, and parts that are compiled."""

from shutil import which

import pytest
import torch
from torch import nn

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.invertible.test_composition import backward, slope
from tests.invertible_cases import FLOOR, RTOL, Sizes, twins


@pytest.mark.filterwarnings("ignore:an invertible block within torch.compile:invfunc.InvFuncWarning")
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


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
    "normed": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()),
}
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(not which("g++"), reason="no g++"))]


def in_place(net, backend):
    net.compile(backend=backend)
    return net


WAYS = {
    "module": lambda net, backend: torch.compile(net, backend=backend),
    "module in place": in_place,
    "function": lambda net, backend: torch.compile(lambda b: net(b).sin(), backend=backend),
}


@pytest.mark.filterwarnings("ignore:.*torch.compile:invfunc.InvFuncWarning")
class TestCompiledParts:
    """Parts of a block that are compiled give the gradients that they give as they were written."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def of_parameters(self, net, y):
        return torch.autograd.grad(y.square().sum(), list(net.parameters()))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("net", NETS.values(), ids=NETS)
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_have_the_gradients_of_what_is_not_compiled(self, way, net, backend):
        torch.manual_seed(0)
        net, x = net().double(), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        part = way(net, backend)
        pair = additive_coupling(lambda b: part(b), lambda a: part(a).cos(), split_dim=1)
        block = invertible_checkpoint(pair)
        found = self.of_parameters(net, block(block(x)))
        with torch.compiler.set_stance("force_eager"):
            wanted = self.of_parameters(net, pair(pair(x)))
        assert_trees_close(found, wanted, 1e-9)


def test_hooks_of_blocks_are_not_compiled_with_their_parts():
    """Parts that are compiled by themselves run with our hooks around; torch would compile these for each tensor."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    from invfunc._torch.functorch import memory_of
    from invfunc.blocks.run import BlockRun, _Collected

    torch._dynamo.reset()
    found = []
    for wrap in (invertible_checkpoint, lambda pair: pair):
        torch.manual_seed(0)
        parts = [torch.compile(nn.Sequential(nn.Linear(3, 3), nn.GELU()), backend="aot_eager") for _ in range(2)]
        block, x = wrap(additive_coupling(*parts)), torch.ones(2, 3, requires_grad=True)
        for _ in range(2):
            torch.stack(block(block((x.sin(), x.cos())))).square().sum().backward()
        found.append([x.grad, *(p.grad for part in parts for p in part.parameters())])
    assert_trees_close(*found, 1e-5)
    ours = BlockRun.pack, BlockRun.unpack, _Collected.pack, memory_of
    assert not any(_debug_get_cache_entry_list(fn.__code__) for fn in ours)
