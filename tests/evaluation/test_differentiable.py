"""Every statistic can be differentiated twice, in parameters and inputs, by every means; nothing of it stays behind."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap

import invfunc
from invfunc import RandomnessError, chunked, functional, tree
from invfunc.testing import assert_trees_close
from tests.laws import FLOOR, STATISTICS, arranged
from tests.networks import LOSSES, Network, network, total
from tests.strategies import Numbers

EXACT, DERIVED = 1e-10, 1e-8
SMOOTH = ["affine", "perceptron", "convolution", "tied", "derived"]
statistics = pytest.mark.parametrize("statistic", STATISTICS)


def of(kind, functions, **options):
    """A statistic and its oracle."""
    return kind.make(*functions, **options), kind.loop(*functions, **options)


def derivatives(t, params, x, *batch):
    """First and second derivatives of a number made of `t(params, x, *batch)`, in the parameters and in x."""
    params, x = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), (params, x))
    leaves = tree.leaves((params, x))
    value = total(t(params, x, *batch)) + 0 * total(leaves)  # a result may be constant
    first = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(total(first, 8) + 0 * total(leaves), leaves, materialize_grads=True)
    assert all(leaf.grad is None for leaf in leaves)
    return first, second


@statistics
class TestDerivatives:
    @pytest.mark.parametrize("called", SMOOTH)
    def test_by_autograd(self, statistic, called):
        kind, functions, args = arranged(statistic, network(called, 3), LOSSES[SMOOTH.index(called) % len(LOSSES)])
        t, loop = of(kind, functions)
        assert_trees_close(derivatives(t, *args), derivatives(loop, *args), DERIVED, FLOOR)

    def test_of_chunks_and_of_some_samples(self, statistic):
        kind, functions, args = arranged(statistic, network("perceptron", 3), LOSSES[0])
        t, loop = of(kind, functions, samples=[2, 0, 0])
        wanted = derivatives(loop, *args)
        for over in kind.axes:
            assert_trees_close(derivatives(chunked(t, 2, over=over), *args), wanted, DERIVED, FLOOR)

    @pytest.mark.parametrize("called", ["perceptron", "convolution"])
    def test_by_torch_func(self, statistic, called):
        kind, functions, (params, x, *batch) = arranged(statistic, network(called, 3), LOSSES[1])
        t, loop = of(kind, functions)
        first, second = derivatives(loop, params, x, *batch)

        def value(params, x):
            return total(t(params, x, *batch))

        slopes = grad(value, argnums=(0, 1))
        found = grad(lambda *at: total(tree.leaves(slopes(*at)), 8), argnums=(0, 1))
        assert_trees_close(tuple(tree.leaves(slopes(params, x))), first, DERIVED)
        assert_trees_close(tuple(tree.leaves(found(params, x))), second, DERIVED)
        tangents = tree.map_leaves(lambda leaf: Numbers(6)(*leaf.shape), (params, x))
        along = sum((a * b).sum() for a, b in zip(first, tree.leaves(tangents), strict=True))
        assert_trees_close(jvp(value, (params, x), tangents)[1], along, DERIVED)

    @pytest.mark.parametrize("called", SMOOTH)
    def test_under_vmap_over_parameters(self, statistic, called):
        kind, functions, (params, *batch) = arranged(statistic, network(called, 3), LOSSES[0])
        t, loop = of(kind, functions)
        points = [tree.map_leaves(lambda leaf, c=c: c * leaf, params) for c in (1, -0.5, 0)]
        stacked = tree.map_leaves(lambda *leaves: torch.stack(leaves), *points)
        fixed = [None] * len(batch)
        wanted = tree.map_leaves(lambda *found: torch.stack(found), *(loop(p, *batch) for p in points))
        assert_trees_close(vmap(t, (0, *fixed))(stacked, *batch), wanted, EXACT, FLOOR)
        slopes = vmap(grad(lambda p, *batch: total(t(p, *batch))), (0, *fixed))(stacked, *batch)
        wanted = [grad(lambda p: total(t(p, *batch)))(p) for p in points]
        assert_trees_close(slopes, tree.map_leaves(lambda *found: torch.stack(found), *wanted), EXACT, FLOOR)

    def test_are_there_only_where_something_requires_grad(self, statistic):
        kind, functions, args = arranged(statistic, network("perceptron", 3), LOSSES[0])
        t = kind.make(*functions)
        assert not any(leaf.requires_grad for leaf in tree.leaves(t(*args)))
        wanting = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), args[0])
        assert all(leaf.requires_grad for leaf in tree.leaves(t(wanting, *args[1:])))
        with torch.no_grad():
            assert not any(leaf.requires_grad for leaf in tree.leaves(t(wanting, *args[1:])))


def tensors_alive():
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # isinstance wakes lazy modules


@statistics
class TestNothingStays:
    def test_of_the_tensors_of_an_evaluation(self, statistic):
        """Neither of what is forgotten nor, in a cycle, until the garbage collector comes."""
        net, hidden = network("perceptron", 3), []

        def f(p, x):
            z = net.f(p, x)
            hidden.append(weakref.ref(z))
            return z

        kind, functions, (params, *batch) = arranged(statistic, Network("", f, net.params, net.x, 3), LOSSES[1])
        t = kind.make(*functions)
        params = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params)

        def step():
            torch.autograd.grad(total(t(params, *batch)), tree.leaves(params), materialize_grads=True)

        step()
        gc.collect()
        gc.disable()
        try:
            before = tensors_alive()
            for _ in range(3):
                step()
            assert tensors_alive() == before and hidden and all(ref() is None for ref in hidden)
        finally:
            gc.enable()
        assert all(leaf.grad is None and not leaf._backward_hooks for leaf in tree.leaves(params))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter reads /proc")
def test_memory_stays_where_it_was_over_many_evaluations():
    """backward through the variance, in a loop as one would regularise with it; in a process without other holes."""
    code = """
import torch, invfunc
from invfunc.testing import peak_memory, return_freed_memory

return_freed_memory()
torch.set_num_threads(1)
params = [torch.randn(300, 300).requires_grad_() for _ in range(2)]
x = torch.randn(32, 300)
t = invfunc.variance(lambda p, x: ((x @ p[0]).tanh() @ p[1]).square().mean(1))

def steps(count):
    for _ in range(count):
        sum(v.square().sum() for v in t(params, x)).backward(inputs=params)
        for p in params:
            p.grad = None

steps(2)
once, often = (peak_memory(lambda: steps(count))[1] for count in (1, 50))
assert once > 4 * 300**2 and often < once + 10 * 4 * 300**2, (once, often)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def noisy(p, x):
    return F.dropout(F.dropout(x @ p["a"], 0.4).tanh() @ p["b"], 0.4)


@statistics
class TestRandomNumbers:
    """They are those of one call of f on the whole batch, from the same state to the same state."""

    net = Network("noisy", noisy, {"a": Numbers()(3, 5), "b": Numbers(1)(5, 3)}, Numbers(2)(4, 3), 4)

    @staticmethod
    def seeded(t, *args):
        torch.manual_seed(3)
        return t(*args), torch.get_rng_state()

    @pytest.mark.parametrize("samples", [None, [2, 0, 0]], ids=["all", "some"])
    def test_are_those_of_one_call(self, statistic, samples):
        kind, functions, args = arranged(statistic, self.net, LOSSES[1])
        t, loop = of(kind, functions, samples=samples)
        wanted, after = self.seeded(loop, *args)
        for over in (None, *kind.axes):
            divided = t if over is None else chunked(t, 2, over=over)
            if over == "samples":
                with pytest.raises(RandomnessError):
                    divided(*args)
            else:
                found, state = self.seeded(divided, *args)
                assert_trees_close(found, wanted, EXACT)
                assert torch.equal(state, after)

    def test_of_derivatives_are_those_of_one_call_too(self, statistic):
        kind, functions, args = arranged(statistic, self.net, LOSSES[1])
        t, loop = of(kind, functions)
        found = self.seeded(lambda *args: derivatives(t, *args), *args)[0]
        assert_trees_close(found, self.seeded(lambda *args: derivatives(loop, *args), *args)[0], DERIVED)

    def test_of_a_module_are_those_of_its_mode(self, statistic):
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
        f, params = functional(model)
        net = Network("module", f, params, self.net.x, 4)
        for train in (True, False):
            model.train(train)
            kind, functions, args = arranged(statistic, net, LOSSES[1])
            t, loop = of(kind, functions)
            (found, state), (wanted, after) = self.seeded(t, *args), self.seeded(loop, *args)
            assert_trees_close(found, wanted, EXACT)
            assert torch.equal(state, after)
        assert all(p.grad is None for p in model.parameters())


@statistics
def test_two_models_at_once_do_not_know_of_each_other(statistic):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shared = nn.Linear(3, 3)
        models = [nn.Sequential(shared, nn.Tanh(), nn.Linear(3, 3)), nn.Sequential(shared, nn.Sigmoid(), shared)]
    (f, p), (g, q) = (functional(model.double()) for model in models)
    x = Numbers()(4, 3)

    def both(params, x):
        inner = invfunc.batch_l2_grad(lambda q, x: g(q, x).square().sum(1))(q, x.detach())["0.weight"]
        return f(params["f"], x) * g(params["g"], x) * inner[:, None]  # the statistic of one inside the other

    kind, functions, args = arranged(statistic, Network("both", both, {"f": p, "g": q}, x, 4), LOSSES[1])
    t, loop = of(kind, functions)
    assert_trees_close(t(*args), loop(*args), EXACT)
    assert all(leaf.grad is None for model in models for leaf in model.parameters())
