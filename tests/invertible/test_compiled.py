"""A checkpointed function compiled, and against finite differences."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from shutil import which

import pytest
import torch
from torch import nn

from invfunc import InvFuncWarning, additive_coupling, invertible_checkpoint, tree
from invfunc._torch import eager
from invfunc.testing import assert_trees_close
from tests.invertible.test_composition import backward, live, slope
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


def kept(call, *args):
    """A result, and the bytes that are held behind a call, besides what is given."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        y = call(*args)
    return y, sum(event.self_cpu_memory_usage for event in seen.key_averages())


class TestMemory:
    """What a warning says that saves memory does so."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        eager._said.cache_clear()
        yield
        torch._dynamo.reset()
        eager._said.cache_clear()

    @staticmethod
    def net(wrap, depth):
        def f(x, w):
            a, b = x.chunk(2, -1)
            return torch.cat([b + (a @ w).tanh(), a], -1)

        def f_inv(y, w):
            b, a = y.chunk(2, -1)
            return torch.cat([a, b - (a @ w).tanh()], -1)

        block = wrap(invertible_checkpoint(f, f_inv))

        def net(x, weights):
            for w in weights:
                x = block(x, w)
            return x.sin()

        return net, [torch.randn(16, 16) / 4 for _ in range(depth)]

    def test_of_blocks_in_a_compiled_net_a_warning_tells(self):
        net, weights = self.net(lambda block: block, 3)
        weights = [w.requires_grad_() for w in weights]
        compiled, x = torch.compile(net, backend="aot_eager", fullgraph=True), torch.randn(8, 32)
        with torch.no_grad():
            torch.compile(net, backend="aot_eager", fullgraph=True)(x, weights)  # where nothing is kept
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", InvFuncWarning)
            for n in (8, 8, 4):
                compiled(x[:n], weights)
        (only,) = [w for w in told if issubclass(w.category, InvFuncWarning)]
        assert "torch.compiler.disable(invertible_checkpoint(f, f_inv))" in str(only.message)

    def test_and_what_it_says_helps(self):
        torch.manual_seed(0)
        sizes = {}
        for depth in (4, 12):
            plain, weights = self.net(lambda block: block, depth)
            out, _ = self.net(torch.compiler.disable, depth)
            weights, x, slopes = [w.requires_grad_() for w in weights], torch.randn(256, 32), []
            for way, net in (("inside", plain), ("outside", out)):
                compiled = torch.compile(net, backend="aot_eager")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", InvFuncWarning)
                    compiled(x, weights).sum().backward()
                    y, sizes[way, depth] = kept(compiled, x, weights)
                slopes.append(torch.autograd.grad(y.sum(), weights))
            assert_trees_close(slopes[1], slopes[0], 1e-4)
        own = sizes["outside", 4]
        assert sizes["outside", 12] <= 1.5 * own < sizes["inside", 4] and sizes["inside", 12] > 2 * sizes["inside", 4]


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


NETS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "deeper": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()),
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

    @pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
    def test_inside_of_torch_func(self, transform):
        part = torch.compile(lambda b, w: (b @ w).tanh(), backend="aot_eager")
        pair = additive_coupling(part, part, split_dim=-1)
        block, w = invertible_checkpoint(pair), torch.randn(4, 4, dtype=torch.float64)
        x = torch.randn(3, 5, 8, dtype=torch.float64)

        def run(g):
            return transform(lambda x: g(g(x, (w, w)), (w, w.T)).sin().sum())(x)

        with torch.compiler.set_stance("force_eager"):
            wanted = run(pair)
        assert_trees_close(run(block), wanted, 1e-9)

    def test_are_told_of_once(self):
        part = torch.compile(torch.tanh, backend="eager")
        block = invertible_checkpoint(additive_coupling(lambda b: part(b), torch.sin))
        plain = invertible_checkpoint(additive_coupling(torch.tanh, torch.sin))
        x = torch.ones(2, requires_grad=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            plain(block(block((x, x))))
        assert [w.category for w in told] == [InvFuncWarning]
        assert str(told[0].message).startswith(f"{block!r}: a function that torch.compile made is evaluated as it was")

    def test_are_compiled_again_afterwards_in_any_thread(self):
        compiled = []

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        part = torch.compile(torch.tanh, backend=backend)
        block = invertible_checkpoint(additive_coupling(part, part))

        def run(_):
            x = torch.ones(2, requires_grad=True)
            for _ in range(20):
                sum(block((x, x))).sum().backward()

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, range(3)))
        assert not compiled
        part(torch.ones(2))
        assert len(compiled) == 1
