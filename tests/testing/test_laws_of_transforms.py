"""The laws of transforms and of operations: each finds a fault, and holds for what is right."""

from functools import partial

import pytest
import torch

import invfunc
from invfunc import layers, tree
from invfunc.testing import laws, loop_variance
from invfunc.testing.laws.compare import alive, difference, generators, state
from tests.evaluation.test_memory_of_results import shared
from tests.networks import LOSSES, network
from tests.rows import CASES, made_of
from tests.strategies import Numbers
from tests.testing.test_laws_find import spoilt


def spoiling(fault):
    """A maker of variances that go wrong."""

    def t(f):
        return lambda *args: fault(invfunc.variance(f)(*args))

    return t


TRANSFORMS = {
    "it equals its oracle": spoiling(lambda v: 1.01 * v),
    "grad of a statistic is that of its loop": spoiling(lambda v: v.detach()),
    "vmap over parameters is the loop": spoiling(lambda v: v * (1 + invfunc._torch.functorch.transforming())),
}


def test_each_law_of_transforms_and_operations_has_a_fault():
    assert {*TRANSFORMS, *OPERATIONS} == {
        name for name, law in laws.LAWS.items() if {*law.subjects} & {"a transform", "an operation"}
    }


class TestTransforms:
    """Of a statistic of one's own."""

    args = Numbers()(3), Numbers(1)(4, 3)

    @staticmethod
    def f(w, x):
        return (x @ w).tanh()

    @staticmethod
    def thrice(of, f):
        return lambda *args: tree.map_tensors(lambda v: 3 * v, of(f)(*args))

    def test_hold_for_right_ones(self):
        for t in (invfunc.variance, partial(self.thrice, invfunc.variance)):
            oracle = loop_variance if t is invfunc.variance else partial(self.thrice, loop_variance)
            table = laws.check_transform(t, oracle, self.f, *self.args)
            assert not table.refused and table.outcomes[0].state == "holds"

    @pytest.mark.parametrize("law", TRANSFORMS)
    def test_finds_its_fault(self, law):
        assert not laws.check_transform(invfunc.variance, loop_variance, self.f, *self.args, only=law).failed
        with pytest.raises(AssertionError, match=f"a law does not hold: {law}(.|\n)*samples: "):
            laws.check_transform(TRANSFORMS[law], loop_variance, self.f, *self.args, only=law)

    def test_an_oracle_that_cannot_be_differentiated_is_told(self):
        def through_numpy(f):
            return lambda *args: torch.from_numpy(loop_variance(f)(*args).numpy())

        table = laws.check_transform(invfunc.variance, through_numpy, self.f, *self.args)
        states = {outcome.law.name: outcome.state for outcome in table.outcomes}
        assert states["it equals its oracle"] == "holds"
        assert states["grad of a statistic is that of its loop"] == "does not apply"
        assert "Can't call numpy()" in " ".join(str(table).split())


@pytest.mark.parametrize("case", CASES)
def test_every_statistic_leaves_all_as_it_was_and_may_be_chunked(case):
    """Arguments, generators, memory of its own, and nothing that stays alive."""
    row, form = CASES[case]
    net = network("perceptron", 3)
    args, make = (net.params, net.x, LOSSES[0].target(Numbers(1), 3)), partial(made_of, row, net.f, LOSSES[0], form)
    before = state(args), generators()
    result = make()(*args)
    assert difference((state(args), generators()), before).error == 0
    assert not shared(result, args) and not alive(lambda given: make()(*given), args)
    for turn, over in enumerate(getattr(make(), "axes", ())):
        split = {"chunk_size": 1} if turn % 2 else {"n": 2}
        assert difference(invfunc.chunked(make(), over=over, **split)(*args), result).error < 1e-9


def product(rule, fn=lambda x, weight: x @ weight):
    """An operation with a rule for its weight."""
    op = invfunc.operation(fn)
    op.share_of("weight")(rule)
    return op


def right(cotangent, x, weight):
    return "vno,ni->io", cotangent, x


OPERATIONS = {
    "an operation keeps the samples apart": product(right, lambda x, weight: (x - x.mean(0)) @ weight),
    "an operation and its rules draw and write nothing": product(lambda s, x, weight: right(s.add_(0), x, weight)),
    "a rule gives the gradients of autograd": product(
        lambda s, x, weight: right(s if len(s) == 1 else s.flip(0) * 0.9, x, weight)
    ),
    "a rule is linear in the cotangent": product(lambda s, x, weight: right(s.clamp(-50, 50), x, weight)),
    "a rule can be differentiated": product(lambda s, x, weight: right(s, x.detach(), weight)),
}


class TestOperations:
    """Messages about a wrong rule, or an operation that mixes."""

    args = Numbers()(4, 3), Numbers(1)(3, 2)

    def test_a_right_rule(self):
        table = laws.check_operation(product(right), *self.args, seconds=300)
        assert not table.failed and {outcome.state for outcome in table.outcomes} == {"holds"}

    @pytest.mark.parametrize("law", OPERATIONS)
    def test_finds_its_fault(self, law):
        with pytest.raises(AssertionError, match=f"a law does not hold: {law}(.|\n)*of 4"):
            laws.check_operation(OPERATIONS[law], *self.args)

    def test_a_rule_that_gradients_do_not_go_through(self):
        for fault in (lambda s, x, weight: right(s.detach(), x, weight), lambda s, x, weight: right(s.data, x.data, 0)):
            with pytest.raises(AssertionError, match="a rule can be differentiated"):
                laws.check_operation(product(fault), *self.args)

    def test_one_that_does_not_return_a_tensor_with_the_samples_is_told_so(self):
        for fn, kind in ((lambda x, weight: (x, weight), "a tuple"), (lambda x, weight: weight, r"shape \[3, 2\]")):
            with pytest.raises(invfunc.InvFuncError, match=f"check_operation(.*): it returns {kind}"):
                laws.check_operation(product(right, fn), *self.args)


# The laws of pairs: each finds a fault, and holds for what is right

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
