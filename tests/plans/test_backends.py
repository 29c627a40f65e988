"""The options of `compiled` and what runs its plans: which one is faster, how long one lives, what is told of it."""

import copy
import gc
import pickle
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, explain, thresholds
from invfunc.plans import backends
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import EXACT, dropping, given, hits, loss, of, same
from tests.strategies import Numbers


@pytest.mark.quick
class TestOptions:
    def test_recheck_finds_what_is_not_seen(self):
        import time

        c = compiled(invfunc.variance(lambda w, x: loss(w, x) * time.perf_counter()), recheck=3)
        c(*given()), c(*given()), c(*given())
        with pytest.raises(invfunc.errors.ReplayError, match="not seen"):
            c(*given())

    def test_recheck_leaves_generators_where_they_belong(self):
        t, c = invfunc.variance(dropping), compiled(invfunc.variance(dropping), recheck=1)
        for k in range(3):
            torch.manual_seed(k)
            wanted, after = t(*given(k)), torch.rand(2)
            torch.manual_seed(k)
            assert_trees_close((c(*given(k)), torch.rand(2)), (wanted, after), EXACT)

    def test_auto_takes_the_faster_and_gives_the_same(self):
        t, c = invfunc.variance(loss), compiled(invfunc.variance(loss), backend="auto")
        for k in range(14):
            same(c, t, *given(k))
        (entry,) = c.calls.entries.values()
        assert entry.choice.by_plan and hits(c) >= 6

    def test_explain_tells_of_the_plan_and_draws_nothing(self):
        c = compiled(invfunc.diag_ggn(lambda w, x: F.dropout(x @ w, 0.5), F.cross_entropy))
        args = Numbers()(3, 5), Numbers(1)(4, 3), torch.arange(4)
        before = torch.get_rng_state()
        found = explain(c)(*args)
        assert torch.equal(before, torch.get_rng_state())
        assert "a plan of" in str(found) and "operations" in found.plan and "at once" in found.plan
        assert "torch.ops.aten" in found.code and found.name == "compiled(diag_ggn(<lambda>, cross_entropy))"
        c(*args)
        assert hits(c) == 1

    def test_explain_tells_which_numbers_are_compared_and_where_they_are_read(self):
        def f(w, x):
            return loss(w, x) * (2.0 if x.sum() > 0 else 3.0)

        t, c = of(f)
        w, x = given()
        for batch in (x.abs(), -x.abs()):
            assert "that compares 1 numbers, read at" in explain(c)(w, batch).plan
            same(c, t, w, batch)
        assert "compares" not in explain(compiled(invfunc.variance(loss)))(w, x).plan

    def test_copies_and_pickles_have_plans_of_their_own(self):
        c = compiled(invfunc.variance(loss))
        c(*given()), c(*given())
        for again in (copy.deepcopy(c), pickle.loads(pickle.dumps(c))):
            assert not again.calls.entries and repr(again) == repr(c)
            same(again, c, *given())

    def test_many_shapes_are_told(self):
        t, c = of(loss)
        w, x = given(n=12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for n in range(1, 9):
                same(c, t, w, x[:n])
        with pytest.warns(invfunc.InvFuncWarning, match="more than 8 shapes"):
            c(w, x[:9])


@pytest.mark.skipif(backends._CLOCK is not time.thread_time, reason="the clock of threads is coarse here")
def test_auto_does_not_count_what_other_programs_take():
    def works(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def delayed():
        works(1e-4)
        time.sleep(4e-3)

    choice = backends.Choice()
    for _ in range(2 * thresholds.TIMED):
        choice.timed(delayed if choice.by_plan else lambda: works(1e-3), [torch.ones(1)])
    assert choice.by_plan and all(len(times) == thresholds.TIMED for times in choice.times)


@pytest.mark.parametrize("backend", ["replay", "auto", "inductor"])
def test_a_plan_is_gone_with_its_last_reference(backend):
    """And not when garbage is collected, which is rare, while what it keeps may be large."""
    compiled(invfunc.variance(loss))(*given())  # the first call of all leaves imports behind
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(torch, "compile", lambda module, **options: module.forward):
            c, hvp = compiled(invfunc.variance(loss), backend=backend), compiled(invfunc.hvp(sum_of), backend=backend)
            for k in range(3):
                c(*given(k))
            hvp.linearize(*given())(given()[0])
        held = [weakref.ref(x) for calls in (c.calls, hvp.points.calls) for x in (calls, plan_of(calls))]
        del c, hvp
        assert all(known() is None for known in held)
    finally:
        gc.enable()


def sum_of(w, x):
    return loss(w, x).sum()


def plan_of(calls):
    (entry,) = calls.entries.values()
    return entry.plan


@pytest.mark.slow
def test_inductor_is_the_call_up_to_rounding():
    t, c = invfunc.variance(loss), compiled(invfunc.variance(loss), backend="inductor")
    for k in range(3):
        assert_trees_close(c(*given(k)), t(*given(k)), 1e-9)
    assert hits(c) == 2 and not c.calls.warned
