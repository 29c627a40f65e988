"""Graphs that are made and run backwards in several threads."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from invfunc import Grid, additive_coupling, chain, functional, invertible_checkpoint, momentum
from invfunc.recomputation import straight_found
from invfunc.recomputation.hooks import HookedBlock
from invfunc.recomputation.straight_hooks import StraightBlock
from invfunc.testing import assert_trees_close
from tests.invertible_same import gradients
from tests.strategies import Numbers


def in_threads(*runs):
    """The results of functions that run at the same time."""
    results, barrier = {}, threading.Barrier(len(runs))

    def one(i, run):
        barrier.wait()
        try:
            results[i] = run()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[i] for i in range(len(runs))]


class TestThreads:
    def test_forward_in_one_and_backward_in_another(self, same):
        def run(h, x, w):
            (y,) = in_threads(lambda: h(h(x, w), w))
            return in_threads(lambda: gradients(y, x, w))

        same(run)

    def test_each_with_its_own_graph(self, same):
        def run(h, x, w):
            def own():
                return [gradients(h(h(x.sin(), w), w), x, w) for _ in range(20)]

            return in_threads(own, own, own)

        same(run)

    def test_all_with_one_graph(self, same):
        def run(h, x, w):
            y = h(h(h(x.sin(), w), w), w)
            return in_threads(*[lambda: [gradients(y, x, w, retain_graph=True) for _ in range(20)]] * 3)

        same(run)

    @pytest.mark.parametrize("watched", [True, False])
    def test_what_others_take_out_is_computed_again(self, watched, same, monkeypatch):
        """As soon as one thread shares what it has computed again, others may have taken it all."""
        kind, name = (HookedBlock, "_saved") if watched else (StraightBlock, "_found")
        monkeypatch.setattr(straight_found, "_WATCHED", 10**9 if watched else 4)
        same(lambda h, x, w: [gradients(h(h(x.sin(), w), w), x, w) for _ in range(6)])
        shared = property(lambda block: {}, lambda block, found: None)
        monkeypatch.setattr(kind, name, shared, raising=False)
        same(lambda h, x, w: gradients(h(h(x.sin(), w), w), x, w))

    def test_random_numbers_of_one_are_not_those_of_another(self):
        """Where each has a generator; the global one goes to whoever comes first."""

        def drawn(x, w, generator):
            return x + (torch.rand(x.shape, generator=generator, dtype=x.dtype) < 0.5) * (x * w).tanh()

        h = invertible_checkpoint(drawn, None)

        def own(seed):
            x, w = Numbers(seed)(50, 50).requires_grad_(), Numbers(1)(50).requires_grad_()
            found = []
            for call in (h, drawn):
                generator = torch.Generator().manual_seed(seed)
                found.append([gradients(call(call(x, w, generator), w, generator), w)[0] for _ in range(20)])
            return sum(not torch.allclose(ours, plain) for ours, plain in zip(*found, strict=True))

        assert in_threads(*(partial(own, i) for i in range(3))) == [0, 0, 0]


class Reversible(nn.Module):
    """Its blocks are couplings of its own modules, called with their own parameters or with given ones."""

    BLOCKS = {
        "modules": lambda F, G: additive_coupling(F, G),
        "exact": lambda F, G: additive_coupling(F, G, exact=Grid(12)),
        "chain": lambda F, G: chain(additive_coupling(F, G), momentum(F)),
        "given": lambda F, G: additive_coupling(F, G),
    }

    def __init__(self, kind, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.F, self.G, self.kind = nn.Linear(3, 3), nn.Linear(3, 3), kind
        self.block = wrap(self.BLOCKS[kind](self.F, self.G))

    def forward(self, x):
        given = [dict(part.named_parameters()) for part in (self.F, self.G)] if self.kind == "given" else None
        state = Grid(12).enter((x.cos(), x)) if self.kind == "exact" else (x.cos(), x)
        a, b = self.block(self.block(state, given), given)
        return a * b


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", Reversible.BLOCKS)
def test_functional_modules_with_blocks_of_their_own_parts(kind):
    """They are copied for a call with all that the blocks are made of."""
    model, x = Reversible(kind, invertible_checkpoint), Numbers()(4, 3).float()
    f, params = functional(model)

    def own(factor):
        point = {name: p * factor for name, p in params.items()}
        return [torch.func.grad(lambda p: f(p, x).square().sum())(point) for _ in range(5)]

    factors = (0.5, 1.0, 1.5)
    for factor, found in zip(factors, in_threads(*(partial(own, factor) for factor in factors)), strict=True):
        plain = Reversible(kind, lambda pair: pair)
        plain.load_state_dict({name: p * factor for name, p in params.items()})
        plain(x).square().sum().backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        for one in found:
            assert_trees_close(one, wanted, 1e-4)
