"""The laws of pairs, of transforms and of operations: each finds a fault, and holds for what is right."""

import sys
from functools import partial

import pytest
import torch

import invfunc
from invfunc import layers, thresholds, tree
from invfunc.testing import dense_diag_ggn, laws, loop_variance
from tests.strategies import Numbers
from tests.testing.test_laws_fail import KEPT, faulty, spoilt, when


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
    "a checkpoint has the plain gradients in torch.func": slower,
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
    assert {*BLOCKS, *ITSELF} == {name for name, law in laws.LAWS.items() if law.subject == "a pair"}


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

    def wrong(self, fault):
        def t(f):
            def call(*args):
                return fault(invfunc.variance(f)(*args), *args)

            return call

        return t

    FAULTS = {
        "it equals its oracle": lambda v, *args: 1.01 * v,
        "grad of it is that of its oracle": lambda v, *args: v.detach(),
        "vmap of it is the loop": lambda v, *args: v if v.requires_grad or args[0].abs().max() < 9 else 2 * v,
        "it leaves all as it was": lambda v, *args: drawing(lambda v: v, v),
    }

    @pytest.mark.parametrize("law", ["it equals its oracle", "grad of it is that of its oracle"])
    def test_a_wrong_one_is_found(self, law):
        with pytest.raises(AssertionError, match=f"a law does not hold: {law}(.|\n)*samples: "):
            laws.check_transform(self.wrong(self.FAULTS[law]), loop_variance, self.f, *self.args, only=law)

    @pytest.mark.parametrize(
        "where",
        [lambda t: t.options.plan.splits, lambda t: not t.options.fast, lambda t: thresholds.CACHE["cpu"] < 100],
        ids=["chunks", "generic", "blocks"],
    )
    def test_one_that_is_wrong_on_some_way_is_found(self, where):
        def t(f):
            return faulty(invfunc.variance(f), when(where))

        law = "chunks, blocks and paths do not matter to it"
        assert not laws.check_transform(invfunc.variance, loop_variance, self.f, *self.args, only=law).failed
        with pytest.raises(AssertionError, match=f"a law does not hold: {law}"):
            laws.check_transform(t, loop_variance, self.f, *self.args, only=law)

    def test_one_that_draws_is_found(self):
        law = "it leaves all as it was"
        with pytest.raises(AssertionError, match="generators"):
            laws.check_transform(self.wrong(self.FAULTS[law]), loop_variance, self.f, *self.args, only=law)

    def test_one_that_vmap_changes_is_found(self):
        def t(f):
            return lambda *args: invfunc.variance(f)(*args) * (1 + invfunc._functorch.transforming())

        with pytest.raises(AssertionError, match="vmap of it is the loop"):
            laws.check_transform(t, loop_variance, self.f, *self.args, only="vmap of it is the loop")


def missing(*args):
    raise invfunc.MissingExtraError


class TestDrawnTransforms:
    """Without a function of the user's, they are drawn."""

    def test_hold_for_right_ones(self):
        law = "it equals its oracle"
        for t, oracle in ((invfunc.variance, loop_variance), (invfunc.diag_ggn, dense_diag_ggn)):
            table = laws.check_transform(t, oracle, only=law)
            assert "that hypothesis drew" in str(table) and table.outcomes[0].state == "holds"

    def test_a_wrong_one_is_found_for_a_small_model(self):
        def t(f):
            return lambda p, *batch: tree.map_tensors(lambda v: v + (v.ndim == 2), invfunc.variance(f)(p, *batch))

        with pytest.raises(AssertionError, match=r"p = Problem\(model=Model\(family='affine', n=1, seed=0"):
            laws.check_transform(t, loop_variance, only="it equals its oracle")

    def test_without_hypothesis_there_is_a_fixed_family(self, monkeypatch):
        monkeypatch.setattr(sys.modules["invfunc.testing.laws.check_transform"], "_drawn", missing)
        table = laws.check_transform(invfunc.variance, loop_variance, only="it equals its oracle")
        assert "one function of each of 11 families (hypothesis is missing)" in str(table)


class TestOperations:
    """What a wrong rule, or an operation that mixes, is told."""

    args = Numbers()(4, 3), Numbers(1)(3, 2)

    @staticmethod
    def product(rule):
        op = invfunc.operation(lambda x, weight: x @ weight)
        op.share_of("weight")(rule)
        return op

    def test_a_right_rule(self):
        table = laws.check_operation(self.product(lambda s, x, weight: ("vno,ni->io", s, x)), *self.args, seconds=300)
        assert not table.failed and {outcome.state for outcome in table.outcomes} == {"holds"}

    def test_a_rule_that_is_wrong_for_several_columns(self):
        rule = self.product(lambda s, x, weight: ("vno,ni->io", s if len(s) == 1 else s.flip(0) * 0.9, x))
        with pytest.raises(AssertionError, match=r"columns at \[(.|\n)*samples: \[0\], of 4"):
            laws.check_operation(rule, *self.args)

    def test_a_rule_that_is_wrong_in_float32(self):
        def rule(s, x, weight):
            return "vno,ni->io", s, x if x.dtype == torch.float64 else x.bfloat16().to(x)

        with pytest.raises(AssertionError, match="float32"):
            laws.check_operation(self.product(rule), *self.args)

    def test_an_operation_that_mixes(self):
        op = invfunc.operation(lambda x, weight: (x - x.mean(0)) @ weight)
        with pytest.raises(AssertionError, match=r"keeps the samples apart(.|\n)*samples: \[0, 1\], of 4"):
            laws.check_operation(op, *self.args)
