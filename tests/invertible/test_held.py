"""States that somebody holds are told, all of them, and no others."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from invfunc import additive_coupling, chain, invertible_checkpoint, layers, tree
from invfunc.pairs import held_states
from tests.invertible.test_memory import live
from tests.invertible_cases import FORMS, Sizes, squash, twins, unsquash
from tests.meter import nothing_collected
from tests.networks import total
from tests.strategies import Numbers

WIDTH, WATCHED = 4, 6
FEW = 3


def layer(b, w):
    return torch.tanh(b @ w)


def half(x, w):
    return x[1], x[0] + layer(x[1], w)


def other_half(y, w):
    return y[1] - layer(y[0], w), y[0]


def squashed(x, w):
    return squash(x, {"s": w[0], "c": w[1]})


def unsquashed(y, w):
    return unsquash(y, {"s": w[0], "c": w[1]})


BLOCKS = {
    "coupling": invertible_checkpoint(additive_coupling(layer, layer)),
    "half": invertible_checkpoint(half, other_half),
    "tensor": invertible_checkpoint(squashed, unsquashed),
    "unflatten": invertible_checkpoint(layers.unflatten(1, (WIDTH // 2, 2))),
    "flatten": invertible_checkpoint(layers.flatten()),
}
OF_A_PAIR, OF_A_TENSOR = ["coupling", "half"], ["tensor", "unflatten"]
HOLDS = {
    "itself": lambda t: t,
    "a view": lambda t: t[:1],
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.detach().numpy()[1:],
    "what saved it": lambda t: t.sin(),
}
IN_LEVELS = ["itself", "a view", "detached", "what saved it"]


@st.composite
def programs(draw):
    """Samples, whether torch.func is around, blocks, and who holds which of the outputs of each."""
    within = draw(st.booleans())
    holds = st.sampled_from(IN_LEVELS if within else list(HOLDS)) | st.none() | st.none()
    kinds = st.sampled_from(draw(st.sampled_from([OF_A_PAIR, OF_A_TENSOR])))
    blocks = draw(st.lists(st.tuples(kinds, holds, holds), min_size=1, max_size=7))
    return Program(within, blocks)


class Program:
    """Blocks one after the other, of whose outputs somebody holds some.

    What is to be told are the outputs whose memory is held, but for those in the memory of x or of the last y.
    """

    def __init__(self, within, blocks):
        self.within, self.program = within, blocks
        self.x, self.w = Numbers(7)(FEW, WIDTH), 0.2 * Numbers(5)(WIDTH, WIDTH)
        self.kept = []
        self.given, self.held, self.last = {}, set(), set()
        """The last output in each memory; the memory that is held, and that of x and the last y."""

    def __repr__(self):
        return f"{'grad' if self.within else 'backward'}, {self.program}"

    def run(self, w):
        pair, number = self.program[0][0] in OF_A_PAIR, 0
        state = (self.x * w[0, 0], self.x.cos()) if pair else self.x * w[0, 0]
        memory = ["x[0]", "x[1]"] if pair else ["x"]
        self.last.update(memory)
        for kind, *holds in self.program:
            for name in (kind, "flatten") if kind == "unflatten" else (kind,):
                state = BLOCKS[name](state, *self.arguments(name, w))
                memory = self.outputs(name, number, memory)
                number += 1
            for t, of, how in zip(tree.tensors(state), memory, holds, strict=False):
                if how is not None:
                    self.kept.append(HOLDS[how](t))
                    self.held.add(of)
        self.last.update(memory)
        return state

    def arguments(self, name, w):
        return () if "flatten" in name else ((w, w),) if name == "coupling" else (w,)

    def outputs(self, name, number, memory):
        """The memory that the outputs of a block are in: of some that of its x, of others their own."""
        every = ["y"] if len(memory) == 1 else ["y[0]", "y[1]"]
        own = [f"{number} {output}" for output in every]
        memory = [memory[1], own[1]] if name == "half" else memory if "flatten" in name else own
        self.given |= {of: (number, output) for output, of in zip(every, memory, strict=True)}
        return memory

    def check(self, found):
        wanted = {self.given[of] for of in self.held - self.last}
        assert {(s.number, s.output) for s in found.held} == wanted
        size = self.x.nbytes
        assert all(s.bytes == size for s in found.held)
        assert found.held.bytes == size * len(self.held - self.last)

    def lets_go(self, found):
        self.kept.clear()
        assert found.held == []
        assert found.held.bytes == 0


class TestHeld:
    def check(self, program):
        def value(w):
            with held_states() as found:
                y = program.run(w)
                program.check(found)
            program.lets_go(found)
            return total(y)

        with nothing_collected():
            if program.within:
                grad(value)(program.w)
            else:
                value(program.w.clone().requires_grad_()).backward()

    @given(programs())
    def test_what_is_held_is_told_and_nothing_else(self, program):
        self.check(program)

    @pytest.mark.parametrize("form", FORMS)
    def test_blocks_hold_nothing_themselves(self, form):
        """Of calls that are checked or not, and of small tensors, which are checked together."""
        net = twins(form, Sizes())
        for _ in range(WATCHED):
            with nothing_collected(), held_states() as found:
                y = net.g(net.x, live(net.params))
                assert found.held == []
                kept = {t.untyped_storage()._cdata: t.nbytes for t in tree.tensors(y)}
                assert found.kept.bytes >= sum(kept.values())
                total(y).backward()
                del y
            assert found.held == found.kept == []

    def test_blocks_within_a_block(self):
        """States of the last block within are those of the block around it."""
        inner = chain(*[BLOCKS["tensor"]] * 2)
        outer = invertible_checkpoint(lambda x, w: inner(x, [w, w]), lambda y, w: unsquashed(unsquashed(y, w), w))
        w = Numbers(5)(WIDTH, WIDTH).requires_grad_()
        with held_states() as found:
            first = outer(Numbers(7)(FEW, WIDTH), w)
            y = outer(first, w)
            del w
        (state,) = found.held
        assert (state.number, state.block) == (0, repr(outer.pair))
        del first
        assert found.held == []
        assert y.grad_fn is not None


class TestKept:
    def test_states_that_anchors_keep(self):
        net = chain(*[BLOCKS["tensor"]] * 7, anchor_every=3)
        with held_states() as found:
            y = net(Numbers(7)(FEW, WIDTH), [Numbers(5)(WIDTH, WIDTH).requires_grad_()] * 7)
        assert [s.number for s in found.kept] == [2, 5, 6]
        assert found.kept.bytes == 3 * y.nbytes
        assert found.held == []


def test_contexts_note_the_blocks_that_are_called_in_them_by_their_own_thread():
    w, x = Numbers(5)(WIDTH, WIDTH).requires_grad_(), Numbers(7)(FEW, WIDTH)
    states = [x]

    def go_on():
        states.append(BLOCKS["tensor"](states[-1], w))

    with held_states() as around:
        go_on()
        with held_states() as within:
            go_on()
            other = threading.Thread(target=go_on)
            other.start()
            other.join()
        go_on()
    go_on()
    assert [[s.number for s in found.held] for found in (around, within)] == [[0, 1, 3], [1]]


def test_nothing_is_told_where_no_memory_is_saved():
    with held_states() as found, torch.no_grad():
        BLOCKS["tensor"](Numbers(7)(FEW, WIDTH), Numbers(5)(WIDTH, WIDTH))
    assert repr(found) == "no block that saves memory was called"
    assert found.held == found.kept == []
