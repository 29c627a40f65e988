"""Parts of a call that do the same are written down once: a plan of chunks is the call, whatever a part does."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, compiled, explain, tree
from invfunc.budget.peak import peak_of
from invfunc.plans import backends, cudagraphs
from invfunc.plans.backends import without_numbers
from invfunc.plans.parts import Passes
from invfunc.testing.oracles import assert_trees_close
from tests.crossed import thresholds_at
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.calls import hits, other, outcome, quietly, whys
from tests.plans.test_exported import program
from tests.strategies import Numbers, seeded

EXACT = 1e-12
FEW = {"REPEATED": 3}


def apart(f, loss):
    return lambda params, x, y: loss(f(params, x), y)


def both(f):
    return invfunc.together(invfunc.batch_grad(f), invfunc.variance(f))


STATISTICS = {
    "batch_grad": (lambda f, loss: invfunc.batch_grad(apart(f, loss)), "samples"),
    "batch_l2_grad": (lambda f, loss: invfunc.batch_l2_grad(apart(f, loss)), "samples"),
    "variance": (lambda f, loss: invfunc.variance(apart(f, loss)), "samples"),
    "clipped_grad": (lambda f, loss: invfunc.clipped_grad(apart(f, loss), 1.0), "samples"),
    "diag_ggn": (lambda f, loss: invfunc.diag_ggn(f, loss), "samples"),
    "diag_ggn by columns": (lambda f, loss: invfunc.diag_ggn(f, loss), "outputs"),
    "drawn": (lambda f, loss: invfunc.diag_ggn(f, loss, mc_samples=9, generator=seeded(1)), "outputs"),
    "diag_hessian": (lambda f, loss: invfunc.diag_hessian(apart(f, loss)), "samples"),
    "gram": (lambda f, loss: invfunc.gram(apart(f, loss)), "params"),
    "together": (lambda f, loss: both(apart(f, loss)), "samples"),
}


@pytest.fixture
def data():
    rand = Numbers(0)
    return {"w": rand(4, 5), "b": rand(5)}, rand(12, 4), torch.arange(12) % 5


def losses(params, x, y):
    return F.cross_entropy(torch.tanh(x @ params["w"]) + params["b"], y, reduction="none")


def model(params, x):
    return torch.tanh(x @ params["w"]) + params["b"]


def plans(c):
    return [entry.plan for entry in c.calls.entries.values() if entry.plan is not None]


def parts(c):
    """How often each part of each plan is called."""
    return [[*plan.repeats.values()] for plan in plans(c)]


def same_at(c, t, params, *batch, ways=3):
    """Compare calls at other numbers, which are the same operations, and so the same to the bit."""
    for k in range(ways):
        args = other((params, *batch), k)
        assert_trees_close(c(*args), t(*args), 0)


@given(st.data())
@settings(max_examples=8)
def test_chunks_are_the_call_itself(draw):
    """Of drawn networks and statistics, in drawn numbers of chunks: ragged ones, too, and ones of a single sample."""
    name, family = draw.draw(st.sampled_from([*STATISTICS])), draw.draw(st.sampled_from([*NETWORKS]))
    n = draw.draw(st.integers(4, 9))
    few, chunks = draw.draw(st.integers(1, 4)), draw.draw(st.integers(2, n))
    net, (make, over) = network(family, n, draw.draw(st.integers(0, 3))), STATISTICS[name]
    args = net.params, net.x, LOSSES[0].target(Numbers(1), n)
    t, c = (chunked(make(net.f, LOSSES[0]), chunks, over=over) for _ in range(2))
    c = compiled(c)
    with thresholds_at(REPEATED=few):
        for k in range(3):
            (wanted, after), (found, ours) = outcome(t, other(args, k)), quietly(outcome, c, other(args, k))
            if isinstance(wanted, str):
                assert found == wanted
                return
            assert_trees_close(found, wanted, EXACT)
            assert torch.equal(after, ours)
    assert hits(c) > 0, whys(c)


@given(st.data())
@settings(max_examples=5)
def test_chunks_of_chunks_are_the_call_itself(draw):
    """Along one axis or two, in any order, with loops of any length; also where parts do others."""
    n, name = draw.draw(st.integers(4, 8)), draw.draw(st.sampled_from(["tanh", "read", "drawn", "own"]))
    few, sizes = draw.draw(st.integers(1, 3)), draw.draw(st.tuples(st.integers(2, n), st.integers(2, 4)))
    over = draw.draw(st.permutations(["samples", "outputs"]))
    rand = Numbers(draw.draw(st.integers(0, 3)))
    params, x, y = {"w": rand(4, 4), "b": rand(4)}, rand(n, 4), torch.arange(n) % 4
    each = draw.draw(st.integers(2, 3))

    def f(params, x):
        count = iter(range(100))

        def of_part(params, x):
            z = x @ params["w"] + params["b"]
            if name == "read" and z.sum() > 0:
                z = z * 2
            if name == "drawn":
                z = z + torch.rand(4, dtype=x.dtype)
            return z * (1 + next(count) % 2) if name == "own" else z.tanh()

        def twice(params, x):
            return chunked(of_part, min(each, len(x)))(params, x) + params["b"]

        return chunked(twice, min(3, len(x)))(params, x)

    def t():
        if name in ("drawn", "read", "own"):  # of all samples at once
            return chunked(invfunc.batch_jacobian(f), sizes[1], over="outputs")
        first, second = (sizes[axis == "outputs"] for axis in over)
        return chunked(chunked(invfunc.diag_ggn(f, F.cross_entropy), first, over=over[0]), second, over=over[1])

    args = (params, x) if name in ("drawn", "read", "own") else (params, x, y)
    wanted, c = t(), compiled(t())
    with thresholds_at(REPEATED=few):
        for k in (0, 1, 0, 2):
            (one, after), (two, ours) = outcome(wanted, other(args, k)), quietly(outcome, c, other(args, k))
            if isinstance(one, str):
                assert two == one
                return
            assert_trees_close(two, one, EXACT)
            assert torch.equal(after, ours)


@pytest.mark.quick
class TestChunks:
    @pytest.mark.parametrize("name", STATISTICS)
    def test_are_one_part_that_is_called_for_each(self, name, data):
        params, x, y = data
        make, over = STATISTICS[name]
        t, c = (chunked(make(model, F.cross_entropy), 12, over=over) for _ in range(2))
        c = compiled(c)
        with thresholds_at(REPEATED=1 if over == "params" else 3):
            same_at(c, t, params, x, y)
        assert hits(c) == 2
        assert max(parts(c)[0]) >= {"outputs": 3, "params": 1, "samples": 10}[over]

    def test_of_two_lengths_are_two_parts(self, data):
        t = chunked(invfunc.batch_grad(losses), 8)
        c = compiled(t)
        with thresholds_at(**FEW):
            same_at(c, t, *data)
        assert sum(parts(c)[0]) == 7  # the first chunk makes room for all

    def test_are_written_where_they_are_if_they_are_few(self, data):
        t = chunked(invfunc.variance(losses), 6)
        c = compiled(t)
        same_at(c, t, *data)
        assert parts(c) == [[]]

    def test_do_not_make_a_plan_long(self, data, monkeypatch):
        monkeypatch.setattr("invfunc.thresholds.OPERATIONS", 2000)
        params, x, y = data
        t, args = chunked(invfunc.variance(losses), 48), (params, x.repeat(4, 1), y.repeat(4))
        c = compiled(t)
        same_at(c, t, *args)
        (plan,) = plans(c)
        assert plan.operations < 2000 and 40 <= max(plan.repeats.values()) < 48

    def test_are_a_loop(self, data, monkeypatch):
        """Four times as many chunks are at most one thing more for each of them: what its check has found."""
        params, x, y = data
        sizes, args = [], (params, x.repeat(4, 1), y.repeat(4))
        monkeypatch.setattr("invfunc.thresholds.OPERATIONS", 600)
        for n in (12, 48):
            t = chunked(invfunc.variance(losses), n)
            c = compiled(t)
            same_at(c, t, *args, ways=2)
            (plan,) = plans(c)
            (loop,) = [node for node in plan.module.graph.nodes if isinstance(node.target, Passes)]
            assert loop.target.count == n - 1 and loop.target.carried
            sizes.append(plan.operations)
        assert sizes[1] - sizes[0] <= 48 - 12

    @pytest.mark.parametrize("over", [("outputs", "samples"), ("samples", "outputs"), ("samples", "samples")])
    def test_nest_as_a_loop_within_a_loop(self, over, data, monkeypatch):
        monkeypatch.setattr("invfunc.thresholds.OPERATIONS", 2500)
        params, x, y = data
        several = {"outputs": 5, "samples": 4 if over[0] == over[1] else 12}
        t = invfunc.diag_ggn(model, F.cross_entropy)
        for axis in over:
            t = chunked(t, several[axis] - (axis == over[1] and over[0] == over[1]), over=axis)
        c = compiled(t)
        with thresholds_at(REPEATED=2):
            same_at(c, t, params, x, y)
        assert hits(c) == 2 and parts(c)[0]

    def test_have_results_that_are_given_free_one_by_one(self):
        """And not all behind the last one of them that is taken."""
        rand = Numbers(0)
        params, x = [rand(80, 60), rand(20, 80)], rand(100, 60)
        t = chunked(invfunc.batch_grad(lambda p, x: (x @ p[0].T @ p[1].T).square().sum(1)), 20)
        c = compiled(t)
        c(params, x)
        (plan,) = plans(c)
        given = [*params, x, *(source() for source in plan.sources)]
        assert peak_of(lambda: plan.call(*given), x.device) <= peak_of(lambda: t(params, x), x.device)

    def test_within_chunks_are_called_from_their_part(self, data):
        """Loops of a function, and of one within it: the inner one is once, in the part of the outer one."""
        params, x, _ = data

        def of_part(params, x):
            return chunked(model, 3)(params, x).square()

        t = invfunc.batch_l2_grad(lambda params, x: chunked(of_part, 4)(params, x).sum(1))
        c = compiled(t)
        with thresholds_at(REPEATED=2):
            same_at(c, t, params, x)
        (plan,) = plans(c)
        within = [node for part in plan.repeats for node in part.module.graph.nodes if isinstance(node.target, Passes)]
        assert within and max(plan.repeats.values()) >= 12

    def test_nest(self, data):
        params, x, y = data
        t = chunked(chunked(invfunc.diag_ggn(model, F.cross_entropy), 2, over="samples"), 5, over="outputs")
        c = compiled(t)
        with thresholds_at(**FEW):
            same_at(c, t, params, x, y)
        assert parts(c)[0]

    def test_of_a_function_within_f(self, data):
        params, x, _ = data

        def within(params, x):
            return chunked(model, 6)(params, x).square().sum(1)

        t = invfunc.batch_l2_grad(within)
        c = compiled(t)
        with thresholds_at(**FEW):
            same_at(c, t, params, x)
        assert parts(c)[0]

    def test_are_told_of(self, data):
        t = chunked(invfunc.batch_l2_grad(losses), 12)
        with thresholds_at(**FEW):
            told = explain(compiled(t))(*data)
        assert "of which one part" in told.plan and "is called 11 times" in told.plan
        assert "def part_" in told.code and "def forward(" in told.code


@pytest.mark.quick
class TestWhatAPartDoes:
    def test_is_what_it_did_in_that_part(self, data):
        """A number that is read in one chunk alone decides what is done there."""
        params, x, y = data

        def f(params, x, y):
            own = losses(params, x, y)
            return own * (3 if len(x) == 1 and x[0, 0] > 5 else 2) if x.shape[0] == 1 else own * 2

        t = chunked(invfunc.batch_grad(f), 12)
        c = compiled(t)
        with thresholds_at(**FEW):
            for _ in range(2):
                quietly(same_at, c, t, params, x, y)
            assert parts(c)[0]

    def test_is_looked_at_in_each(self, data):
        params, x, _ = data

        def within(params, x):
            def of_part(params, x):
                return model(params, x) * (2 if x.sum() > 0 else 1)

            return chunked(of_part, 6)(params, x).square().sum(1)

        t = invfunc.batch_grad(within)
        c = compiled(t)
        with thresholds_at(**FEW):
            for k in (0, 3, 5):
                here = x.abs()
                here[2 * k : 2 * k + 2] *= -1
                assert_trees_close(quietly(c, params, here), t(params, here), 0)
                assert_trees_close(quietly(c, params, here + 0), t(params, here), 0)
        assert hits(c) == 3 and parts(c)[0]

    def test_may_be_to_draw(self, data):
        """Also the same numbers twice."""
        params, x, _ = data

        def of_part(params, x):
            before = torch.get_rng_state()
            z = F.dropout(model(params, x), 0.5)
            torch.set_rng_state(before)
            return z + F.dropout(model(params, x).sin(), 0.5)

        t = invfunc.batch_grad(lambda params, x: chunked(of_part, 6)(params, x).square().sum(1))
        c = compiled(t)
        with thresholds_at(**FEW):
            for k in range(3):
                (wanted, after), (found, ours) = outcome(t, (params, x + k)), outcome(c, (params, x + k))
                assert_trees_close(found, wanted, 0)
                assert torch.equal(after, ours)
        assert hits(c) == 2

    def test_may_be_its_own(self, data):
        """Places, factors, constants, an operation: all differ from chunk to chunk."""
        params, x, _ = data
        count = [0.5, -0.0, 3.0, 0.25, 1e3, 2.0]

        def within(params, x):
            at = iter(range(6))

            def of_part(params, x):
                k = next(at)
                z = model(params, x) + torch.tensor([k, 1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
                z = z.sin() if k == 3 else z.cos()
                return (z * count[k]).square() + z[:, k % 5 : k % 5 + 1] * torch.arange(5) ** k

            return chunked(of_part, 6)(params, x).square().sum(1)

        t = invfunc.batch_l2_grad(within)
        c = compiled(t)
        with thresholds_at(**FEW):
            same_at(c, t, params, x)
        assert hits(c) == 2 and 5 in parts(c)[0]

    @pytest.mark.parametrize("which", [lambda k: k - 1, lambda k: k - 2, lambda k: k - 1 if k < 6 else 4])
    def test_may_be_to_take_what_an_earlier_one_gives(self, which, data):
        params, x, _ = data

        def within(params, x):
            found = []

            def of_part(params, x):
                found.append(model(params, x))
                return found[-1] * (found[max(0, which(len(found) - 1))] + found[0])

            return chunked(of_part, 12)(params, x).square().sum()

        t = invfunc.hvp(within)  # such a loss mixes the samples
        c = compiled(t)
        with thresholds_at(REPEATED=2):
            quietly(same_at, c, t, params, tree.map_tensors(torch.cos, params), x)
        assert hits(c) == 2

    def test_may_be_to_write_what_others_read(self, data):
        params, x, _ = data

        def within(params, x):
            total = torch.zeros(5, dtype=x.dtype)

            def of_part(params, x):
                z = model(params, x)
                total.add_(z.detach().sum(0))
                return z * total.clone()

            return chunked(of_part, 6)(params, x).square().sum(1) + total.sum()

        t = invfunc.batch_grad(within)
        c = compiled(t)
        with thresholds_at(**FEW):
            quietly(same_at, c, t, params, x)


def test_a_program_has_each_part(data):
    t = chunked(invfunc.batch_l2_grad(losses), 6)
    c = compiled(t)
    with thresholds_at(**FEW):
        c(*data)
        assert parts(c)[0]
        found = program(c, *data, strict=True)
    for k in range(2):
        args = other(data, k)
        assert_trees_close(found(*args), t(*args), EXACT)


def test_a_linearisation_has_what_no_vector_changes_once(data):
    params, x, y = data

    def within(params, x):
        return chunked(model, 6)(params, x)

    t, c = invfunc.ggnvp(within, F.cross_entropy), compiled(invfunc.ggnvp(within, F.cross_entropy))
    with thresholds_at(**FEW):
        found, wanted = c.linearize(params, x, y), t.linearize(params, x, y)
        for k in range(3):
            v = tree.map_tensors(lambda p, k=k: (p + k).cos(), params)
            assert_trees_close(found(v), wanted(v), EXACT)


def test_what_a_launch_could_not_do_is_looked_for_within_parts(data, monkeypatch):
    c = compiled(invfunc.batch_l2_grad(lambda params, x, y: chunked(model, 6)(params, x).square().sum(1)))
    with thresholds_at(**FEW):
        c(*data)
    (plan,) = plans(c)
    (part,) = plan.repeats
    within = {node.target for node in part.nodes} - {node.target for node in plan.module.graph.nodes}
    inputs = [*tree.tensors(data), *(source() for source in plan.sources)]
    assert not cudagraphs.warmed(plan.module, inputs)
    monkeypatch.setattr(cudagraphs, "hands_over", lambda target, given, made: target in within)
    assert within and "copies no numbers" in cudagraphs.warmed(plan.module, inputs)


class TestByInductor:
    def test_parts_are_compiled_without_the_numbers_that_differ(self, data):
        """Each compiled part would be compiled again for other numbers."""
        seen = list[type]()

        def compiler(module, **options):
            def run(*given):
                seen.extend(map(type, given))
                return module.forward(*given)

            return run

        t = chunked(invfunc.variance(losses), 12)
        c = compiled(t, backend="inductor")
        with thresholds_at(**FEW), mock.patch.object(torch, "compile", compiler):
            same_at(c, t, *data)
        assert {*seen} == {torch.Tensor} and hits(c) == 2

    def test_what_is_written_in_place_stays_in_order(self):
        graph, aten = torch.fx.Graph(), torch.ops.aten
        x, k = graph.placeholder("given_0"), graph.placeholder(f"{backends.NUMBER}_1")
        own = graph.call_function(aten.clone.default, (x,))
        graph.call_function(aten.mul_.Tensor, (own, 2))
        results: Any = {0: graph.call_function(aten.mul.Tensor, (own, k))}
        graph.output(results)
        module = torch.fx.GraphModule(torch.nn.Module(), graph)
        call = without_numbers(module, lambda own: own.forward)
        assert call(torch.tensor(3.0), 5)[0] == 30
