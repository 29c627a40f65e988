"""The laws of transforms and of operations: each finds a fault, and holds for what is right."""

from functools import partial

import pytest
import torch

import invfunc
from invfunc import thresholds, tree
from invfunc.testing import dense_diag_ggn, laws, loop_variance
from invfunc.testing.models import FAMILIES
from tests.strategies import Numbers
from tests.testing.test_laws_fail import drawn, faulty, when


def spoiling(fault):
    """A maker of variances that go wrong."""

    def t(f):
        return lambda *args: fault(invfunc.variance(f)(*args))

    return t


TRANSFORMS = {
    "it equals its oracle": spoiling(lambda v: 1.01 * v),
    "grad of it is that of its oracle": spoiling(lambda v: v.detach()),
    "vmap of it is the loop": spoiling(lambda v: v * (1 + invfunc._torch.functorch.transforming())),
    "chunks, blocks and paths do not matter to it": lambda f: faulty(
        invfunc.variance(f), when(lambda t: t.options.plan.splits)
    ),
    "it leaves all as it was": spoiling(lambda v: drawn(None, v)),
}


def test_each_law_of_transforms_and_operations_has_a_fault():
    assert {*TRANSFORMS, *OPERATIONS} == {
        name for name, law in laws.LAWS.items() if law.subject in ("a transform", "an operation")
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

    def test_an_oracle_that_raises_is_told(self):
        def broken(f):
            def loop(*args):
                raise RuntimeError("it is broken")

            return loop

        with pytest.raises(AssertionError, match="the oracle of f raises RuntimeError: it is broken"):
            laws.check_transform(invfunc.variance, broken, self.f, *self.args)

    def test_an_oracle_that_cannot_be_differentiated_is_told(self):
        def through_numpy(f):
            return lambda *args: torch.from_numpy(loop_variance(f)(*args).numpy())

        table = laws.check_transform(invfunc.variance, through_numpy, self.f, *self.args)
        states = {outcome.law.name: outcome.state for outcome in table.outcomes}
        assert states["it equals its oracle"] == "holds"
        assert states["grad of it is that of its oracle"] == "does not apply"
        assert "its oracle cannot be differentiated: RuntimeError: Can't call numpy()" in " ".join(str(table).split())


class TestFamilies:
    """Without a function of the user's, one of each family is taken."""

    def test_hold_for_right_ones(self):
        law = "it equals its oracle"
        for t, oracle in ((invfunc.variance, loop_variance), (invfunc.diag_ggn, dense_diag_ggn)):
            table = laws.check_transform(t, oracle, only=law)
            assert "one function of each of 11 families" in str(table) and table.outcomes[0].state == "holds"
            assert table.outcomes[0].tried == list(FAMILIES)

    def test_a_wrong_one_is_found_for_the_first_that_shows_it(self):
        def t(f):
            return lambda p, *batch: tree.map_tensors(lambda v: v + (v.ndim == 4), invfunc.variance(f)(p, *batch))

        with pytest.raises(AssertionError, match=r"p = Problem\(model=Model\(family='convolution', n=2, seed=0"):
            laws.check_transform(t, loop_variance, only="it equals its oracle")


def product(rule, fn=lambda x, weight: x @ weight):
    """An operation with a rule for its weight."""
    op = invfunc.operation(fn)
    op.share_of("weight")(rule)
    return op


def right(cotangent, x, weight):
    return "vno,ni->io", cotangent, x


OPERATIONS = {
    "an operation keeps the samples apart": product(right, lambda x, weight: (x - x.mean(0)) @ weight),
    "an operation and its rules draw and write nothing": product(
        lambda s, x, weight: right(s.add_(0), x, weight),
    ),
    "a rule gives the gradients of autograd": product(
        lambda s, x, weight: right(s if len(s) == 1 else s.flip(0) * 0.9, x, weight)
    ),
    "a rule is the same in float32": product(
        lambda s, x, weight: right(s, x if x.dtype == torch.float64 else x.bfloat16().to(x), weight)
    ),
    "a rule is linear in the cotangent": product(lambda s, x, weight: right(s.clamp(-50, 50), x, weight)),
    "a rule can be differentiated": product(lambda s, x, weight: right(s, x.detach(), weight)),
}


class TestOperations:
    """What a wrong rule, or an operation that mixes, is told."""

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

    def test_a_rule_that_is_wrong_for_several_columns_only(self):
        with pytest.raises(AssertionError, match=r"columns at \[(.|\n)*samples: \[0\], of 4"):
            laws.check_operation(OPERATIONS["a rule gives the gradients of autograd"], *self.args)

    def test_two_samples_show_what_mixes(self):
        with pytest.raises(AssertionError, match=r"keeps the samples apart(.|\n)*samples: \[0, 1\], of 4"):
            laws.check_operation(OPERATIONS["an operation keeps the samples apart"], *self.args)

    @pytest.mark.parametrize("args, samples", [((), (0,)), (args, (2,)), ((3.0, args[1]), (0,)), (args, (0, 1))])
    def test_arguments_without_samples_are_told(self, args, samples):
        with pytest.raises(invfunc.errors.ArgumentError, match="no positions of the|as many samples along axis 0"):
            laws.check_operation(product(right), *args, samples=samples)

    def test_rows_say_whose_rule_they_are_of(self):
        op = invfunc.operation(lambda x, scale, shift: x * scale + shift)
        op.share_of("scale")(lambda s, x, scale, shift: ("vni,ni->i", s, x))
        op.share_of("shift")(lambda s, x, scale, shift: ("vni->i", s))
        told = str(laws.check_operation(op, Numbers()(4, 3), Numbers(1)(3), Numbers(2)(3)))
        assert "fast equals generic, 'scale'" in told and "fast equals generic, 'shift'" in told

    def test_a_wrong_equation_is_told_first(self):
        told = str(laws.check_operation(product(lambda s, x, weight: ("vno,ni->oi", s, x)), *self.args))
        assert "the rule of operation(<lambda>)" in told.partition("\nrefused: ")[2].partition("\nrefused: ")[0]
