"""Linearisations by plans: what no vector changes is computed once, and the products are those of autograd's."""

import copy
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import cg, eigsh

import invfunc
from invfunc import compiled, explain, linear_operator, tree
from invfunc.errors import ModifiedError
from invfunc.plans.backends import Backend
from invfunc.plans.calls import Calls
from invfunc.plans.halves import halves_of
from invfunc.testing.oracles import assert_trees_close
from tests.data_sets.test_streamed import linear, losses
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.calls import loss, quietly
from tests.strategies import Numbers, seeded

EXACT = 1e-12
PRODUCTS = {
    "hvp": lambda *f: invfunc.hvp(*f),
    "ggnvp": lambda *f: invfunc.ggnvp(*f),
    "ggnvp empirical": lambda *f: invfunc.ggnvp(*f, fisher="empirical"),
    "ggnvp drawn": lambda *f: invfunc.ggnvp(*f, mc_samples=2, generator=seeded(3), fisher="mc"),
    "hvp of blocks": lambda *f: invfunc.hvp(*f, blocks=True),
    "ggnvp of blocks": lambda *f: invfunc.ggnvp(*f, blocks=True),
    "hvp of positive blocks": lambda *f: invfunc.hvp(*f, blocks=True, modify="abs"),
}
each_product = pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)


def vector(params, seed=0, *lead):
    return tree.map_tensors(lambda p: Numbers(seed)(*lead, *p.shape), params)


def halves(c):
    return [entry.halves for entry in c.points.calls.entries.values()]


@pytest.fixture
def data():
    rand = Numbers(0)
    return {"w": rand(4, 5), "b": rand(5)}, rand(7, 4), torch.arange(7) % 5


@each_product
@pytest.mark.parametrize("family", NETWORKS)
def test_is_the_linearisation_by_autograd(make, family):
    """At several points, of one vector after the other, and of several at once."""
    net = network(family, 3)
    y = LOSSES[0].target(Numbers(1), 3)
    t, c = make(net.f, LOSSES[0]), compiled(make(net.f, LOSSES[0]))
    lead = [2] * t.lead
    for k in range(2):
        params = tree.map_tensors(lambda p, k=k: p * (1 + 0.1 * k), net.params)
        try:
            wanted = t.linearize(params, net.x, y)
        except invfunc.InvFuncError as error:
            with pytest.raises(type(error)):
                c.linearize(params, net.x, y)
            return
        found = c.linearize(params, net.x, y)
        assert repr(found) == repr(wanted).replace(repr(t), repr(c))
        for seed in range(2):
            v = vector(params, seed, *lead)
            assert_trees_close(found(v), wanted(v), EXACT)
        if not t.lead:
            v = vector(params, 5, 3)
            assert_trees_close(replace(found, lead=1)(v), replace(wanted, lead=1)(v), EXACT)
    assert halves(c) and not any(isinstance(h, str) for h in halves(c)), halves(c)


def in_place(w, x):
    """Memory that is written before and after what depends on the vector has read it."""
    h = (x @ w).sin()
    total = torch.zeros_like(h)
    for k in range(3):
        part = h.clone().mul_(k + 1)
        total += part.view(-1).cos_().view_as(h)
    rows = torch.zeros(2, *h.shape, dtype=h.dtype)
    rows[0], rows[1] = total, 2 * h
    return rows.prod(0)


def read_before(v, x):
    """Memory that is read for a vector, and written afterwards."""
    h = x.sin()
    early = v * h
    h.mul_(2)
    return early + v * h


def read_through_views(v, x):
    h = x.sin()
    rows = h.view(3, 2)
    early = v * rows[0, 0]
    rows[0].add_(1)
    return early + v * h.sum()


def written_for_each(v, x):
    """Memory in which a vector is added to what is there."""
    total = x.cos()
    total.view(3, 2)[1].add_(v[:2])
    return total * v + x


def written_once(v, x):
    total = torch.zeros_like(x)
    total += x
    return total * v, x.sin()


@pytest.mark.quick
@pytest.mark.parametrize("f", [read_before, read_through_views, written_for_each, written_once])
def test_the_parts_of_a_plan_are_the_whole_of_it(f):
    calls = Calls(f, f.__name__, "replay", 0)
    v, x = Numbers(0)(6), Numbers(1)(6)
    call, entry = calls.prepared((v, x), {})
    both = halves_of(entry.plan, 1, Backend("replay"), calls.say)
    for k in range(2):
        x = Numbers(k)(6)
        point = both.at([v, x], 1, entry.watch, [])
        for seed in range(3):
            v = Numbers(seed + 5)(6)
            assert_trees_close(point([v]), f(v, x), EXACT)


def dropping(w, x):
    return (F.dropout(x, 0.5) @ w).exp() * F.dropout(w, 0.5, inplace=False).sum()


def masked(w, x):
    return (x @ w)[x[:, 0] > 0].square()


def branching(w, x):
    return (x @ w).square() * (2.0 if x.sum() > 0 else w.sum())


@pytest.mark.quick
class TestOneVectorAfterTheOther:
    @pytest.mark.parametrize("f", [loss, in_place, dropping, masked, branching])
    def test_of_functions_that_write_and_draw_and_branch(self, f):
        t, c = invfunc.hvp(lambda w, x: f(w, x).sum()), compiled(invfunc.hvp(lambda w, x: f(w, x).sum()))
        for k in range(4):
            w, x = Numbers(k)(3), Numbers(k + 9)(6, 3)
            torch.manual_seed(k)
            wanted, after = t.linearize(w, x), torch.rand(2)
            torch.manual_seed(k)
            found = quietly(c.linearize, w, x)
            assert torch.equal(torch.rand(2), after)
            for seed in range(3):
                v = Numbers(seed)(3)
                assert_trees_close(found(v), wanted(v), EXACT)
                both = torch.stack([v, w])
                assert_trees_close(replace(found, lead=1)(both), replace(wanted, lead=1)(both), EXACT)

    @pytest.mark.parametrize("f", [dropping, masked])
    def test_what_a_backend_refuses_is_replayed(self, f):
        """The compiler draws other numbers than torch, and takes shapes for those that it has seen."""
        t, c = (
            invfunc.hvp(lambda w, x: f(w, x).sum()),
            compiled(invfunc.hvp(lambda w, x: f(w, x).sum()), backend="inductor"),
        )
        w, x = Numbers(1)(3), Numbers(2)(6, 3)
        torch.manual_seed(1)
        wanted = t.linearize(w, x)
        torch.manual_seed(1)
        with mock.patch.object(torch, "compile", side_effect=AssertionError("it compiles")):
            found = quietly(c.linearize, w, x)
        assert len(halves(c)) == 1 and not isinstance(halves(c)[0], str)
        assert_trees_close(found(w), wanted(w), EXACT)

    def test_the_first_part_is_not_done_again(self, data):
        c = compiled(invfunc.ggnvp(linear, F.cross_entropy))
        c.linearize(*data)
        (both,) = halves(c)
        first, second = (
            {n.target for n in part.graph.nodes if n.op == "call_function"}
            for part in (both.once.__self__, both.each.__self__)
        )
        assert torch.ops.aten._log_softmax.default in first and torch.ops.aten._log_softmax.default not in second

    def test_vectors_are_of_any_layout_and_kept_apart(self, data):
        params, *args = data
        c, t = compiled(invfunc.hvp(losses)), invfunc.hvp(losses)
        found, wanted = c.linearize(params, *args), t.linearize(params, *args)
        v = {"w": Numbers(1)(5, 4).T, "b": params["b"]}
        a, b = found(v), found(v)
        assert_trees_close(a, wanted(v), EXACT)
        for x in tree.tensors(a):
            x.zero_()
        assert_trees_close(b, wanted(v), EXACT)
        assert_trees_close(found(v), wanted(v), EXACT)

    def test_where_nothing_depends_on_a_parameter_zeros_are_new(self):
        c = compiled(invfunc.hvp(lambda p, x: loss(p["w"], x)))
        params = {"w": Numbers(0)(3), "unread": Numbers(1)(2)}
        found = c.linearize(params, Numbers(2)(4, 3))
        for _ in range(2):
            given = found(params)
            assert not given["unread"].any()
            given["unread"].fill_(7)

    def test_transforms_around_see_autograd(self, data):
        params, *args = data
        for make in (
            lambda: invfunc.hvp(losses),
            lambda: invfunc.ggnvp(linear, F.cross_entropy, mc_samples=2, generator=seeded(3), fisher="mc"),
        ):
            t, c = make(), compiled(make())
            wanted, found = t.linearize(params, *args), c.linearize(params, *args)
            several, v = vector(params, 5, 3), vector(params, 6)
            assert_trees_close(torch.func.vmap(found)(several), torch.func.vmap(wanted)(several), EXACT)
            slopes = [torch.func.grad(lambda v, m=m: m(v)["w"].sum())(v) for m in (found, wanted)]
            assert_trees_close(*slopes, EXACT)

    def test_parameters_that_were_written_are_refused(self, data):
        params, *args = tree.map_tensors(torch.clone, data)
        found = compiled(invfunc.hvp(losses)).linearize(params, *args)
        v = vector(params)
        args[0].mul_(2)
        with pytest.raises(ModifiedError, match="Linearise again"):
            found(v)

    def test_what_f_reads_is_what_it_was(self, data):
        """Of other numbers of vectors, too, for which the plan comes later."""
        params, *args = data
        scale = {"by": 2.0}
        f = lambda p, x, y: losses(p, x, y) * scale["by"]  # noqa: E731
        wanted, found = (t.linearize(params, *args) for t in (invfunc.hvp(f), compiled(invfunc.hvp(f))))
        scale["by"] = 3.0
        v = vector(params, 5, 3)
        assert_trees_close(replace(found, lead=1)(v), replace(wanted, lead=1)(v), EXACT)
        with pytest.raises(ModifiedError, match="another one since"):
            torch.func.vmap(found)(v)

    def test_what_has_no_plan_is_recorded_and_says_so(self, data):
        params, *args = data
        f = lambda p, x, y: losses(p, x, y) * float(x.detach().numpy().shape[1])  # noqa: E731
        c, t = compiled(invfunc.hvp(f)), invfunc.hvp(f)
        with pytest.warns(invfunc.InvFuncWarning, match=r"compiled\(hvp\(<lambda>\)\).linearize: it runs .*numpy"):
            found = c.linearize(params, *args)
        assert_trees_close(found(params), t.linearize(params, *args)(params), EXACT)
        leaf = tree.map_tensors(lambda p: p.clone().requires_grad_(), params)
        slope = quietly(compiled(invfunc.hvp(losses)).linearize, leaf, *args)(params)["w"]
        assert slope.requires_grad

    def test_with_aux(self, data):
        params, *args = data
        f = lambda p, x, y: (losses(p, x, y), {"mean": x.mean(), "note": "text"})  # noqa: E731
        t, c = invfunc.hvp(f, has_aux=True), compiled(invfunc.hvp(f, has_aux=True))
        for _ in range(2):
            (a, aux), (b, wanted) = c.linearize(params, *args), t.linearize(params, *args)
            assert_trees_close(a(params), b(params), EXACT)
            assert torch.equal(aux["mean"], wanted["mean"]) and aux["note"] == "text"
            assert_trees_close(c(params, params, *args)[0], t(params, params, *args)[0], EXACT)

    def test_recheck_compares(self, data):
        import time

        params, *args = data
        f = lambda p, x, y: losses(p, x, y) * time.perf_counter()  # noqa: E731
        found = compiled(invfunc.hvp(f), recheck=2).linearize(params, *args)
        found(params)
        with pytest.raises(invfunc.errors.ReplayError, match="not seen"):
            found(params)

    def test_copies_have_plans_of_their_own(self, data):
        params, *args = data
        c = compiled(invfunc.hvp(losses))
        wanted = c.linearize(params, *args)(params)
        for again in (copy.deepcopy(c), pickle.loads(pickle.dumps(c))):
            assert not again.points.calls.entries
            assert_trees_close(again.linearize(params, *args)(params), wanted, EXACT)


@pytest.mark.quick
class TestAround:
    def test_scipys_solvers(self, data):
        params, *args = data
        t, c = invfunc.ggnvp(linear, F.cross_entropy), compiled(invfunc.ggnvp(linear, F.cross_entropy))
        A, B = linear_operator(t)(params, *args), linear_operator(c)(params, *args)
        b = Numbers(3)(25).numpy()
        assert repr(linear_operator(c)) == "linear_operator(compiled(ggnvp(linear, cross_entropy)))"
        found, wanted = cg(B, b, maxiter=5)[0], cg(A, b, maxiter=5)[0]
        assert abs(found - wanted).max() <= 1e-9 * abs(wanted).max()
        assert abs(eigsh(B, 1)[0] / eigsh(A, 1)[0] - 1) < 1e-9
        assert len(halves(c)) == 1

    def test_estimates(self, data):
        params, *args = data
        made = [
            invfunc.estimate_trace(p, probes=4, generator=seeded(1))(params, *args)
            for p in (invfunc.hvp(losses), compiled(invfunc.hvp(losses)))
        ]
        assert_trees_close(*made, EXACT)

    def test_a_statistic_is_no_product(self):
        with pytest.raises(invfunc.errors.ArgumentTypeError, match="it is a statistic"):
            linear_operator(compiled(invfunc.variance(loss)))
        assert not hasattr(compiled(invfunc.variance(loss)), "linearize")

    def test_what_is_compiled_is_the_product(self, data):
        params, *args = data
        product = invfunc.hvp(losses)
        for linearised in (product.linearize, product.linearize(params, *args)):
            with pytest.raises(
                invfunc.errors.ArgumentTypeError, match=r"Compile the product: compiled\(hvp\(losses\)\)\.lin"
            ):
                compiled(linearised)

    def test_explain_tells_the_plan_of_a_product(self, data):
        params, *args = data
        c = compiled(invfunc.ggnvp(linear, F.cross_entropy))
        found = explain(c)(params, params, *args)
        assert found.name == repr(c) and "torch.ops.aten" in found.code
        assert str(found).splitlines()[1:] == [f"  {found.plan}"] and found.plan.startswith("a plan of")
        c(params, vector(params), *args)
        with pytest.raises(invfunc.errors.ArgumentTypeError, match="has to be a statistic"):
            explain(invfunc.hvp(losses))
