"""The laws of pairs: each finds a fault, and holds for what is right."""

import pytest
import torch

import invfunc
from invfunc import layers, tree
from invfunc.testing import laws
from tests.strategies import Numbers
from tests.testing.test_laws_fail import spoilt

KEPT = []


def part(b, p):
    return torch.tanh(b @ p)


def scales(b, p):
    return (b @ p).tanh(), (b @ p).sin()


def two(*shape):
    return Numbers()(*shape), Numbers(1)(*shape)


PAIRS = {
    "additive": lambda: (invfunc.additive_coupling(part, part), two(3, 2), two(2, 2)),
    "affine": lambda: (invfunc.affine_coupling(scales, scales), two(3, 2), two(2, 2)),
    "leaky_relu": lambda: (layers.leaky_relu(), Numbers()(3, 2)),
    "batch_norm": lambda: (layers.batch_norm(), Numbers()(4, 3), two(3)),
    "chain": lambda: (invfunc.chain(layers.leaky_relu(), layers.identity()), Numbers()(3, 2), [None, None]),
    "functions": lambda: ((lambda x: 2 * x, lambda y: y / 2), Numbers()(3, 2)),
}


@pytest.mark.parametrize("called", PAIRS)
def test_hold_for_right_pairs(called):
    table = laws.check_pair(*PAIRS[called]())
    assert not table.refused and table.outcomes[0].state == "holds"


def test_an_inverse_that_forgets_an_argument_is_found_where_that_changes():
    """The block says so itself, which is no refusal."""
    with pytest.raises(AssertionError, match="InverseError"):
        laws.check_pair((lambda x, s: x * s, lambda y, s: y / 2), Numbers()(4, 6), torch.tensor(2.0).double())


def test_a_pair_of_nothing_is_an_error():
    with pytest.raises(invfunc.errors.ArgumentError, match="no numbers"):
        laws.check_pair((torch.exp, torch.sin), torch.zeros(0, 3).double())


def block_of(fault):
    """A checkpoint with a fault."""
    return lambda pair: lambda x, *args: fault(pair, x, *args)


def slower(pair, x, *args):
    return tree.map_tensors(lambda y: 1.1 * y - 0.1 * y.detach(), pair(x, *args))


def drawing(pair, x, *args):
    torch.rand(())
    return pair(x, *args)


def keeping(pair, x, *args):
    KEPT.append(x)
    return pair(x, *args)


BLOCKS = {
    "a checkpoint has the plain value": lambda pair, x, *args: spoilt(pair(x, *args)),
    "a checkpoint has the plain gradients": slower,
    "a checkpoint leaves states as f does": drawing,
    "nothing of a checkpoint stays alive": keeping,
}
ITSELF = {
    "the inverse restores": invfunc.Invertible(lambda x: 2 * x, lambda y: y / 3),
    "the log-determinant is that of the Jacobian": invfunc.Invertible(
        lambda x: 2 * x, lambda y: y / 2, log_det=lambda x: x.new_ones(len(x))
    ),
    "a pair writes no argument": invfunc.Invertible(lambda x: 2 * x.mul_(1), lambda y: y / 2),
}


def test_each_law_of_pairs_has_a_fault():
    assert {*BLOCKS, *ITSELF} == {name for name, law in laws.LAWS.items() if "a pair" in law.subjects}


@pytest.mark.parametrize("law", ITSELF)
def test_finds_a_fault_of_a_pair(law):
    with pytest.raises(AssertionError, match=f"a law does not hold: {law}"):
        laws.check_pair(ITSELF[law], Numbers()(3, 2), only=law)


@pytest.mark.parametrize("law", BLOCKS)
def test_finds_a_fault_of_a_checkpoint(law, monkeypatch):
    monkeypatch.setattr(invfunc, "invertible_checkpoint", block_of(BLOCKS[law]))
    with pytest.raises(AssertionError, match=f"a law does not hold: {law}"):
        laws.check_pair(*PAIRS["additive"](), only=law)
    KEPT.clear()


def remembering():
    """A pair whose inverse gives what it saw last."""
    seen = []

    def f(x):
        seen.append(x)
        return x.sin()

    return f, lambda y: seen[-1] + 0 * y


@pytest.mark.parametrize(
    "pair, x",
    [(remembering(), Numbers()(3, 2)), ((lambda x: x * x, lambda y: y), torch.zeros(3).double())],
    ids=["what was seen last", "at zero"],
)
def test_an_inverse_that_is_one_at_this_x_only_is_found(pair, x):
    with pytest.raises(AssertionError, match="of one y and of another"):
        laws.check_pair(pair, x)


@pytest.mark.parametrize("x", [3, torch.tensor([1.0, float("nan")])], ids=["a number", "NaN"])
def test_a_state_that_nothing_can_be_said_of_is_an_error(x):
    with pytest.raises(invfunc.InvFuncError, match="no tensors|not finite"):
        laws.check_pair((lambda x: 2 * x, lambda y: y / 2), x)
