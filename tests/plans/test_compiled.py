"""Calls that are repeated by a plan give what they give without it: of other numbers, in other modes and threads."""

import copy
import gc
import pickle
import threading
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

import invfunc
from invfunc import compiled, explain, thresholds, tree
from invfunc.plans import backends
from invfunc.testing.laws.rows import CASES, MODEL
from invfunc.testing.oracles import assert_trees_close
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.test_guards import given, hits, loss, of, quietly, same, whys
from tests.strategies import Numbers
from tests.structures import always

EXACT = 1e-12
FAMILIES = list(NETWORKS)


def called(row, form, family, seed=0):
    """A statistic of a network, and how it is called."""
    net = network(family, 4, seed)
    if form == MODEL:
        return row.make(net.f), (net.params, net.x)
    return row.of(net.f, LOSSES[0], form), (net.params, net.x, LOSSES[0].target(Numbers(seed), 4))


def other(args, k):
    """Arguments of the same shapes with other numbers; indices stay what they are."""
    return tree.map_tensors(lambda x: x * (1 + 0.1 * k) + 0.03 * k if x.is_floating_point() else x.roll(k, 0), args)


def outcome(call, args):
    """What comes of a call, and where it leaves torch's generator."""
    torch.manual_seed(1)
    try:
        result = call(*args)
    except invfunc.InvFuncError as error:
        result = type(error).__name__
    return result, torch.get_rng_state()


@pytest.mark.parametrize("case", CASES)
def test_is_the_call_itself_at_other_numbers(case):
    """Of one network each; the next case takes the next one."""
    row, form = CASES[case]
    family = FAMILIES[list(CASES).index(case) % len(FAMILIES)]
    t, args = called(row, form, family)
    c, refused = compiled(called(row, form, family)[0]), False
    for k in (0, 1, 2):
        (wanted, after), (found, ours) = outcome(t, other(args, k)), quietly(outcome, c, other(args, k))
        refused = isinstance(wanted, str)
        if refused:
            assert found == wanted
        else:
            assert_trees_close(found, wanted, EXACT)
        assert torch.equal(after, ours)
    draws_by_itself = "sketched_grad" in case and any("it draws from a generator that is not" in w for w in whys(c))
    assert refused or hits(c) > 0 or draws_by_itself, whys(c)


PRODUCTS = {
    "hvp": lambda f: invfunc.hvp(f, F.cross_entropy),
    "ggnvp": lambda f: invfunc.ggnvp(f, F.cross_entropy),
    "fvp": lambda f: invfunc.fvp(f, F.cross_entropy),
    "fvp drawn": lambda f: invfunc.fvp(f, F.cross_entropy, mc_samples=2, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("make", [invfunc.diag_ggn, invfunc.batch_diag_ggn, invfunc.kflr])
def test_columns_by_structure_are_planned_where_they_are_checked_by_numbers(make):
    """Of a token head, which the loss transposes: that is looked at by numbers that are the same in each call."""
    sizes, rand = ((12, 24), (24, 3), (3, 24), (24, 40)), Numbers(0)
    params = {f"w{i}": rand(b, a) / a**0.5 for i, (a, b) in enumerate(sizes)}

    def f(p, x):
        for w in p.values():
            x = F.linear(torch.tanh(x), w)
        return x

    def loss(z, y):
        return F.cross_entropy(z.mT, y)

    c, t = compiled(make(f, loss)), make(f, loss)
    with always():
        for k in range(3):
            given = params | {"w0": params["w0"] + k}, rand(4, 6, 12), torch.arange(24).reshape(4, 6) + k
            assert "by the structure" in str(explain(t)(*given))
            assert_trees_close(c(*given), t(*given), EXACT)
            assert_trees_close(c(*given), make(f, loss, method="dense")(*given), 1e-10)
    assert hits(c) == 5


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_the_call_itself(make):
    net = network("perceptron", 4)
    y = Numbers(1).below(3, 4)
    t, c = make(net.f), compiled(make(net.f))
    for k in range(3):
        params, x = other((net.params, net.x), k)
        v = tree.map_tensors(torch.cos, params)
        assert_trees_close(c(params, v, x, y), t(params, v, x, y), EXACT)
    assert hits(c) == 2


@pytest.mark.quick
class TestArguments:
    @pytest.mark.filterwarnings("ignore:.*more than 8 shapes")
    def test_of_other_shapes_trees_and_types_have_plans_of_their_own(self):
        def f(p, x, *more, **named):
            return loss(tree.tensors((p,))[0], x) * (2 if more else 1) * named.get("by", 1)

        t, c = of(f)
        w, x = given()
        for _ in range(2):
            same(c, t, w, x)
            same(c, t, {"w": w}, x)
            same(c, t, [w], x)
            same(c, t, w, x[:2])
            same(c, t, w, x.T.contiguous().T)
            same(c, t, w.float(), x.float())
            same(c, t, w, x, by=2)
            same(c, t, w, x, by=2.0)
            same(c, t, w, x, by=True)
            same(c, t, w, x, by=-0.0)
            assert c(w, x, by=float("nan")).isnan().all()
            same(c, t, w, x, by=torch.tensor(3.0))
        assert hits(c) == 12

    def test_that_are_objects_are_looked_at(self):
        class By:
            factor = 2.0

        by = By()
        t, c = of(lambda w, x, by: loss(w, x) * by.factor)
        for factor in (2.0, 2.0, 3.0, 3.0):
            by.factor = factor
            same(lambda w, x: c(w, x, by=by), lambda w, x: t(w, x, by=by), *given())
        assert hits(c) >= 1

    def test_that_are_the_same_tensor_or_share_memory_are_told_apart(self):
        def f(p, x):
            return loss(p["a"], x) * (1 if p["a"] is p["b"] else 2) + (x @ p["b"])

        t, c = of(f)
        w, x = given()
        both = torch.cat([w, w + 1])
        for _ in range(2):
            for a, b in [(w, w), (w, w.clone()), (both[:3], both[3:]), (both[:3], both[2:5]), (w, w + 1)]:
                same(c, t, {"a": a, "b": b}, x)
        assert hits(c) == 6  # two pairs have a plan in common

    def test_are_never_written_and_never_returned(self):
        t = invfunc.reduced(invfunc.variance(loss), lambda path, v: v)
        c = compiled(t)
        for k in range(3):
            args = given(k)
            before = [(x.clone(), x._version) for x in args]
            found = c(*args)
            assert all(torch.equal(x, old) and x._version == v for x, (old, v) in zip(args, before, strict=True))
            kept = found.clone()
            c(*given(k + 1))
            assert torch.equal(found, kept)
            found.zero_()
        same(c, t, *given())

    def test_in_which_f_writes_run_eagerly(self):
        log = torch.zeros(3, dtype=torch.float64)

        def writes(w, x):
            log.add_(1)
            return loss(w, x)

        c = compiled(invfunc.variance(writes))
        with pytest.warns(invfunc.InvFuncWarning, match="writes into"):
            c(*given())
        once = log.clone()
        c(*given())
        assert torch.equal(log, 2 * once)

    def test_and_results_are_not_kept_alive(self):
        c = compiled(invfunc.grad_and_variance(loss))
        for _ in range(3):
            args = given()
            alive = [weakref.ref(x) for x in args]
            result = c(*args)
            alive += [weakref.ref(x) for x in result]
            del args, result
            gc.collect()
            assert all(x() is None for x in alive)
        assert hits(c) == 2


@pytest.mark.quick
class TestResults:
    def test_have_memory_of_their_own(self):
        def f(p, x):
            return loss(p["w"], x)

        t = invfunc.together(invfunc.variance(f), invfunc.batch_grad(f))
        c = compiled(t)
        w, x = given()
        params = {"w": w, "unread": w + 1}
        for _ in range(3):
            found = c(params, x)
            places = {leaf.untyped_storage().data_ptr() for leaf in tree.tensors(found)}
            assert len(places) == 4
            assert_trees_close(found, t(params, x), EXACT)
            for leaf in tree.tensors(found):
                leaf.fill_(7)

    def test_are_objects_of_their_own(self):
        net = network("perceptron")
        t = invfunc.kflr(net.f, F.cross_entropy)
        c, y = compiled(t), Numbers(1).below(3, 4)
        first, second = c(net.params, net.x, y), c(net.params, net.x, y)
        assert hits(c) == 1
        assert all(isinstance(k, invfunc.Kronecker) for pair in second for k in pair)
        assert first is not second and first[0][0] is not second[0][0]
        v = torch.ones_like(net.params[0][0])
        assert torch.equal(first[0][0] @ v, second[0][0] @ v)

    def test_with_aux_are_those_of_now(self):
        def f(w, x):
            return loss(w, x), {"mean": x.mean(), "note": "text", "n": len(x)}

        t = invfunc.variance(f, has_aux=True)
        c = compiled(t)
        for k in range(3):
            found, aux = c(*given(k))
            wanted, expected = t(*given(k))
            assert_trees_close((found, aux["mean"]), (wanted, expected["mean"]), EXACT)
            assert aux["note"] == "text" and aux["n"] == 4
        assert hits(c) == 2

    def test_with_objects_that_cannot_be_made_again_are_those_of_the_call(self):
        class Aux:
            def __init__(self, x):
                self.x = x

        c = compiled(invfunc.variance(lambda w, x: (loss(w, x), Aux(x.mean())), has_aux=True))
        for k in range(3):
            _, x = given(k)
            assert torch.equal(quietly(c, *given(k))[1].x, x.mean())

    def test_of_odd_constants(self):
        def f(w, x):
            masked = (x @ w).masked_fill(x[:, 0] > 0, float("-inf")).exp() + torch.full_like(x[:, 0], -0.0)
            signs = torch.copysign(torch.ones(4, dtype=x.dtype), torch.tensor([-0.0, 0.0, -1.0, 1.0]))
            return masked + signs * loss(w, x).clamp(max=float("inf")) * 1e-300 / 3e-300 + torch.zeros(3)[1] ** 0

        t, c = of(f)
        for k in range(3):
            same(c, t, *given(k))
        assert hits(c) == 2

    def test_of_numbers_of_python_are_those_of_now(self):
        t = invfunc.reduced(invfunc.variance(loss), lambda path, v: v.sum().item())
        c = compiled(t)
        for k in range(6):
            assert quietly(c, *given(k)) == t(*given(k))


@pytest.mark.quick
class TestModes:
    def test_of_differentiation(self):
        t, c = of(loss)
        w, x = given()
        c(w, x), c(w, x)
        slope = grad(lambda w: c(w, x).sum())(w)
        assert_trees_close(slope, grad(lambda w: t(w, x).sum())(w), EXACT)
        assert_trees_close(vmap(c, (0, None))(torch.stack([w, 2 * w]), x), torch.stack([t(w, x), t(2 * w, x)]), EXACT)
        assert_trees_close(jvp(lambda w: c(w, x), (w,), (w,)), jvp(lambda w: t(w, x), (w,), (w,)), EXACT)
        leaf = w.clone().requires_grad_()
        with pytest.warns(invfunc.InvFuncWarning, match="differentiable"):
            found = c(leaf, x)
        assert_trees_close(torch.autograd.grad(found.sum(), leaf)[0], slope, EXACT)
        with torch.no_grad():
            for _ in range(2):
                found = c(leaf, x)
                assert not found.requires_grad
                assert_trees_close(found, t(w, x), EXACT)
        with torch.inference_mode():
            for _ in range(2):
                assert c(w, x).is_inference() == t(w, x).is_inference()
        assert not c(w, x).is_inference()

    def test_of_the_default_device(self):
        t, c = of(lambda w, x: loss(w, x) * torch.ones(3).sum())
        for _ in range(2):
            same(c, t, *given())
            with torch.device("cpu"):
                same(c, t, *given())
            with torch.device("meta"), pytest.raises(Exception, match="meta"):
                c(*given())
        assert hits(c) == 2

    def test_that_find_anomalies_see_the_call_itself(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(c, t, *given())
        assert hits(c) == 1

    def test_closed_over_tensors_that_begin_to_want_gradients(self):
        held = torch.ones(3, dtype=torch.float64)
        t, c = of(lambda w, x: loss(w * held, x))
        c(*given()), c(*given())
        assert hits(c) == 1
        held.requires_grad_()
        assert quietly(c, *given()).requires_grad == t(*given()).requires_grad

    def test_of_autocast_and_default_dtypes(self):
        def f(w, x):
            return F.linear(x, w).square().sum(1) * torch.tensor(0.1)

        t, c = of(f)
        w, x = torch.randn(2, 3), torch.randn(4, 3)
        for _ in range(2):
            for on in (False, True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                    same(c, t, w, x)
        assert hits(c) == 2
        plain = c(w.double(), x.double())
        torch.set_default_dtype(torch.float64)
        try:
            exact = c(w.double(), x.double())
            same(c, t, w.double(), x.double())
        finally:
            torch.set_default_dtype(torch.float32)
        assert not torch.equal(plain, exact)

    def test_statistics_and_fake_tensors_around_it(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch._subclasses.FakeTensorMode() as mode:
            fake = c(*map(mode.from_tensor, given()))
        assert fake.shape == (3,)
        same(c, t, *given())

    def test_threads(self):
        t, c = of(loss)
        wanted = [t(*given(k)) for k in range(8)]
        found = [None] * 8

        def work(k):
            for _ in range(4):
                found[k] = c(*given(k))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_trees_close(found, wanted, EXACT)


def dropping(w, x):
    return (F.dropout(x, 0.5) @ w).square()


def forking(w, x):
    with torch.random.fork_rng():
        noise = torch.rand(3)
    return loss(w, x + noise + torch.rand(3))


def seeding(w, x):
    torch.manual_seed(4)
    return loss(w, x + torch.rand(3))


def rewinding(w, x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return loss(w, x + first + torch.rand(3) + torch.randn(3))


def pythons(w, x):
    import random

    return loss(w, x) * random.random()


@pytest.mark.quick
class TestRandomNumbers:
    @pytest.mark.parametrize("f", [dropping, forking, seeding, rewinding])
    @pytest.mark.parametrize("make", [invfunc.variance, invfunc.sum_grad_squared, invfunc.diag_hessian])
    def test_are_those_of_the_call(self, f, make):
        def summed(w, x):
            return f(w, x).mean()

        t = make(f) if make is not invfunc.diag_hessian else make(lambda w, x: f(w, x), lambda z, y: F.mse_loss(z, y))
        c = compiled(t)
        more = () if make is not invfunc.diag_hessian else (torch.ones(4, dtype=torch.float64),)
        for k in range(4):
            torch.manual_seed(k)
            wanted, after = t(*given(k), *more), torch.rand(2)
            torch.manual_seed(k)
            assert_trees_close((quietly(c, *given(k), *more), torch.rand(2)), (wanted, after), EXACT)
        assert hits(c) == (0 if f is seeding else 3)

    def test_of_python_are_not_those_of_another_call(self):
        c = compiled(invfunc.variance(pythons))
        assert not torch.equal(quietly(c, *given()), quietly(c, *given()))

    def test_are_drawn_once_where_a_guard_misses(self):
        def f(w, x):
            return dropping(w, x) * (2 if x.sum() > 0 else 3)

        t, c = of(f)
        for k in range(4):
            w, x = given(k)
            for inputs in (x.abs(), -x.abs()):
                torch.manual_seed(k)
                wanted, after = t(w, inputs), torch.rand(2)
                torch.manual_seed(k)
                assert_trees_close((quietly(c, w, inputs), torch.rand(2)), (wanted, after), EXACT)

    def test_of_a_generator_go_on(self):
        def drawn(g):
            return invfunc.diag_ggn(lambda w, x: x @ w, F.cross_entropy, mc_samples=2, generator=g)

        a, b = (torch.Generator().manual_seed(3) for _ in range(2))
        t, c = drawn(a), compiled(drawn(b))
        w, x, y = Numbers()(3, 5), Numbers(1)(4, 3), torch.arange(4)
        for _ in range(4):
            assert_trees_close(c(w, x, y), t(w, x, y), EXACT)
            assert torch.equal(a.get_state(), b.get_state())
        assert hits(c) == 3


@pytest.mark.quick
class TestErrors:
    def test_are_those_of_the_call(self):
        t, c = (wrap(invfunc.variance(lambda w, x, y: F.cross_entropy(x @ w, y))) for wrap in (lambda t: t, compiled))
        w, x = Numbers()(3, 5), Numbers(1)(4, 3)
        good, bad = torch.arange(4), torch.tensor([0, 1, 2, 9])
        same(c, t, w, x, good)
        same(c, t, w, x, good)
        for _ in range(2):
            with pytest.raises(IndexError, match="out of bounds"):
                c(w, x, bad)
            same(c, t, w, x, good)
        with pytest.raises(invfunc.ArgumentTypeError, match=r"variance\(<lambda>\)\(w, x\): f takes"):
            c(w, x)

    def test_of_checks_of_numbers(self):
        """A loss that is convex at some outputs only."""
        t = invfunc.diag_ggn(lambda w, x: x @ w, lambda z, y: invfunc.outputs(z).pow(3).sum())
        c = compiled(t)
        w, x, y = torch.ones(3, 2), torch.ones(4, 3), torch.zeros(4)
        same(c, t, w, x, y)
        same(c, t, w, x, y)
        assert hits(c) == 1
        for call in (t, c):
            with pytest.raises(invfunc.ConvexityError):
                call(w, -x, y)
        same(c, t, w, 2 * x, y)

    def test_of_singular_matrices(self):
        c = compiled(invfunc.variance(lambda w, x: (x @ torch.linalg.inv(w)).square().sum(1)))
        w, x = torch.eye(3) + 0.1, torch.ones(4, 3)
        c(w, x), c(w, x)
        assert hits(c) == 1
        with pytest.raises(torch.linalg.LinAlgError):
            c(torch.zeros(3, 3), x)

    def test_name_what_can_be_compiled(self):
        with pytest.raises(invfunc.ArgumentTypeError, match=r"compiled\(loss\): it is of type function"):
            compiled(loss)
        with pytest.raises(invfunc.ArgumentTypeError, match="of type Streamed"):
            compiled(invfunc.streamed(invfunc.diag_ggn(loss, F.mse_loss)))
        for around in (
            lambda c: invfunc.chunked(c, 2),
            lambda c: invfunc.together(c, c),
            lambda c: invfunc.reduced(c, torch.sum),
            lambda c: invfunc.certified(c, generator=0),
            compiled,
        ):
            with pytest.raises(invfunc.ArgumentTypeError):
                around(compiled(invfunc.variance(loss)))
        with pytest.raises(invfunc.ArgumentError, match="'replay', 'inductor', 'cudagraphs', 'auto'"):
            compiled(invfunc.variance(loss), backend="fast")
        with pytest.raises(invfunc.ArgumentError, match="recheck"):
            compiled(invfunc.variance(loss), recheck=-1)


@pytest.mark.quick
class TestOptions:
    def test_recheck_finds_what_is_not_seen(self):
        import time

        c = compiled(invfunc.variance(lambda w, x: loss(w, x) * time.perf_counter()), recheck=3)
        c(*given()), c(*given()), c(*given())
        with pytest.raises(invfunc.ReplayError, match="not seen"):
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


def test_inductor_is_the_call_up_to_rounding():
    t, c = invfunc.variance(loss), compiled(invfunc.variance(loss), backend="inductor")
    for k in range(3):
        assert_trees_close(c(*given(k)), t(*given(k)), 1e-9)
    assert hits(c) == 2 and not c.calls.warned


def test_a_call_within_a_budget_says_what_to_compile():
    within = invfunc.chunked(invfunc.batch_grad(loss), memory="8MiB")
    with pytest.raises(invfunc.ArgumentTypeError, match=r"has no plan; .* compiled\(chunked\(t, n\)\)"):
        compiled(within)
