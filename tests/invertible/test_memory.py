"""Memory of a checkpointed network: counted in bytes of storages, so the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint

from invfunc import additive_coupling, chain, invertible_checkpoint, tree
from tests.invertible_cases import FORMS, Sizes, Twins, branch, branch_params, stacked, twins
from tests.meter import Meter, nothing_collected
from tests.networks import total
from tests.strategies import Numbers

SHALLOW, DEEP = 5, 15
STACKED = ["functions of a dict", "leapfrog", "nested"]
WHOLE = ["repeated", "repeated, stacked", "reversible_step"]


# Networks of any depth


def network(form: str, depth: int) -> Twins:
    """Wide batches and few parameters, so that activations are what counts."""
    s = Sizes(n=1024, left=4, right=4, depth=depth, act="gelu")
    if form != "chain":
        return twins(form, s)
    pair, rand = additive_coupling(branch(s.act), branch(s.act)), Numbers()
    params = [(branch_params(rand, 4, 4), branch_params(rand, 4, 4)) for _ in range(depth)]
    return Twins(form, stacked(pair), chain(*[pair] * depth), (rand(s.n, 4), rand(s.n, 4)), params)


def live(params: Any) -> Any:
    return tree.map_leaves(lambda t: t.clone().requires_grad_(), params)


def backward(h, x, p, times=1):
    p = live(p)
    loss = total(h(x, p))
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return [t.grad for t in tree.leaves(p)]


def around(h, x, p):
    p = live(p)
    checkpoint(lambda x, p: total(h(x, p)), x, p, use_reentrant=False).backward()
    return [t.grad for t in tree.leaves(p)]


def pulled(h, x, p):
    y, pull = vjp(lambda p: h(x, p), p)
    return pull(y)


def both(x: Any) -> Any:
    return tree.map_leaves(lambda t: torch.stack([t, 2 * t]), x)


def two_numbers(y: Any) -> torch.Tensor:
    return torch.stack([total(y), total(y, 1)])


WAYS = {
    "backward": backward,
    "backward twice, retained": lambda h, x, p: backward(h, x, p, times=2),
    "grad": lambda h, x, p: grad(lambda p: total(h(x, p)))(p),
    "vmap of grad": lambda h, x, p: vmap(grad(lambda p, x: total(h(x, p))), (None, 0))(p, both(x)),
    "grad of vmap": lambda h, x, p: grad(lambda p: total(vmap(h, (0, None))(both(x), p)))(p),
    "jacrev": lambda h, x, p: jacrev(lambda p: two_numbers(h(x, p)))(p),
    "vjp": pulled,
    "torch's checkpoint around": around,
}


@pytest.fixture(autouse=True, scope="module")
def warm():
    """torch imports a part of itself at the first call under a mode."""
    for way in WAYS.values():
        net = network("additive", 2)
        with Meter():
            way(net.g, net.x, net.params)


def peak(h: Callable, network: Twins, way: Callable) -> int:
    """Of what is neither a gradient nor a parameter; nothing is left behind."""
    p = tree.map_leaves(lambda t: t.float(), network.params)
    x = tree.map_leaves(lambda t: t.float(), network.x)
    with nothing_collected(), Meter() as meter:
        gradients = way(h, x, p)
        found = meter.peak(without=gradients)
        del gradients
        assert meter.live() == 0
    return found


CASES = [
    (form, way)
    for i, form in enumerate(["additive", "chain", *STACKED, *WHOLE])
    for k, way in enumerate(WAYS)
    if i < 1 or way == "backward twice, retained" or (i + k) % 3 == 0
]
"""The first form meets all ways, and every way meets some of the other forms."""


@pytest.mark.parametrize(("form", "way"), CASES)
def test_memory_does_not_grow_with_depth(form, way):
    shallow, deep = (peak(net.g, net, WAYS[way]) for net in (network(form, depth) for depth in (SHALLOW, DEEP)))
    assert deep <= 1.05 * shallow


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_memory_of_the_function_itself_grows(way):
    """The meter sees it."""
    shallow, deep = (peak(net.f, net, WAYS[way]) for net in (network("additive", depth) for depth in (SHALLOW, DEEP)))
    assert deep >= 2 * shallow


class TestFreed:
    """Without the garbage collector, and without a backward."""

    @pytest.mark.parametrize("form", FORMS)
    def test_a_graph_that_is_dropped_frees_everything(self, form):
        net = twins(form, Sizes())
        for h in (net.g, lambda x, p: vjp(net.g, x, p), lambda x, p: grad(lambda p: total(net.g(x, p)))(p)):
            with Meter():  # torch keeps frames of the first call of an operation under a mode
                h(net.x, live(net.params))
            p = live(net.params)
            with nothing_collected(), Meter() as meter:
                result = h(net.x, p)
                assert meter.live() > 0
                del result
                assert meter.live() == 0

    @pytest.mark.parametrize("form", FORMS)
    def test_a_retained_graph_that_is_dropped_frees_everything(self, form):
        net = twins(form, Sizes())
        backward(net.g, net.x, net.params, times=2)
        with nothing_collected(), Meter() as meter:
            p = live(net.params)
            loss = total(net.g(net.x, p))
            torch.autograd.grad(loss, tree.leaves(p), create_graph=True, materialize_grads=True)
            loss.backward(retain_graph=True)
            del loss, p
            assert meter.live() == 0

    def test_an_output_alone_is_held(self):
        """A stack of blocks whose end is held keeps nothing but that, and its parameters."""
        net = network("additive", 8)
        with nothing_collected(), Meter() as meter:
            y = net.g(net.x, live(net.params))
            held = sum(t.nbytes for t in tree.leaves((y, net.params)))
            assert held <= meter.live() <= held + 1000


class TestEvaluations:
    """Calls of the expensive functions: one forwards and one backwards, which serves the inverse too."""

    def counted(self, make: Callable) -> tuple[Callable, list]:
        calls = []

        def layer(b: torch.Tensor, p: Any) -> torch.Tensor:
            calls.append(1)
            return (b @ p["w"] + p["b"]).tanh() * p["s"]

        return make(layer), calls

    @pytest.mark.parametrize("way", [WAYS[name] for name in ("backward", "grad", "vmap of grad", "vjp")])
    @pytest.mark.parametrize("make", [stacked, lambda g: invertible_checkpoint(chain(*[g] * 5))])
    def test_a_coupling_evaluates_twice_a_step(self, make, way):
        pair, calls = self.counted(lambda F: additive_coupling(F, F))
        net = network("additive", 5)
        way(make(invertible_checkpoint(pair)), net.x, net.params)
        assert len(calls) == 5 * 2 * 2  # blocks, functions, directions

    def test_without_gradients_once(self):
        pair, calls = self.counted(lambda F: additive_coupling(F, F))
        net = network("additive", 5)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                stacked(invertible_checkpoint(pair))(net.x, net.params)
        assert len(calls) == 2 * 5 * 2

    def test_a_pair_of_functions_evaluates_three_times(self):
        """Forward, inverse and forward again; the first block finds its x in memory."""

        def make(layer):
            return lambda x, p: (x[1], x[0] + layer(x[1], p)), lambda y, p: (y[1] - layer(y[0], p), y[0])

        functions, calls = self.counted(make)
        net = network("additive", 5)
        backward(stacked(invertible_checkpoint(*functions)), net.x, [p[0] for p in net.params])
        assert len(calls) == 3 * 5 - 1
