"""What a call by a plan is given, and what it gives: memory and objects of their own, nothing written or kept."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, tree
from invfunc.testing.oracles import assert_trees_close
from tests.networks import network
from tests.plans.calls import EXACT, given, hits, loss, of, quietly, same
from tests.strategies import Numbers


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
        t = invfunc.kfac(net.f, F.cross_entropy, fisher="exact")
        c, y = compiled(t), Numbers(1).below(3, 4)
        first, second = c(net.params, net.x, y), c(net.params, net.x, y)
        assert hits(c) == 1
        assert all(isinstance(k, invfunc.kronecker.Kronecker) for pair in second for k in pair)
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
