"""Plans that run as CUDA graphs: what surrounds a launch on every machine, with a replay in its place; all on CUDA."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import strategies as st

import invfunc
from invfunc import compiled, tree
from invfunc.plans import cudagraphs
from invfunc.plans.cudagraphs import Graphed, copied, each_once, hands_over
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import given, hits, loss
from tests.strategies import Numbers

EXACT = 1e-12
ATEN = torch.ops.aten


def replayed(run, fixed):
    """In place of a capture: a launch runs the function, and writes into the same results again."""
    found = run(*fixed)

    def replay():
        for old, new in zip(tree.tensors((found,)), tree.tensors((run(*fixed),)), strict=True):
            each_once(old).copy_(each_once(new))

    return replay, found, lambda: lambda: None


@pytest.fixture
def standing(monkeypatch):
    """`compiled` whose plans run as if the CPU had CUDA graphs."""
    monkeypatch.setattr(cudagraphs, "KIND", "cpu")
    monkeypatch.setattr(cudagraphs, "capture", replayed)

    def of(t):
        c = compiled(t)
        c.calls.backend = "cudagraphs"
        return c

    return of


def graphs(c):
    """What runs the plans of calls."""
    return [entry.plan.call for entry in c.calls.entries.values() if entry.plan is not None]


@pytest.mark.quick
class TestWithAReplayInPlaceOfALaunch:
    def test_is_the_call_itself_at_other_numbers_and_shapes(self, standing):
        t = invfunc.diag_ggn(lambda w, x: torch.tanh(x @ w), F.mse_loss)
        c = standing(t)
        for n in (4, 5):
            for k in range(4):
                args = Numbers(k)(3, 2), Numbers(k + 9)(n, 3), Numbers(k + 5)(n, 2)
                assert_trees_close(c(*args), t(*args), EXACT)
        assert hits(c) == 6 and not c.calls.warned and all(g.captured is not None for g in graphs(c))

    def test_products_and_their_linearisations(self, standing):
        p = invfunc.hvp(loss)
        c = standing(p)
        for k in range(3):
            w, x = given(k)
            vectors = Numbers(k + 7)(*w.shape), Numbers(k + 8)(*w.shape)
            at = c.linearize(w, x)
            for v in vectors:
                assert_trees_close(c(w, v, x), p(w, v, x), EXACT)
                assert_trees_close(at(v), p(w, v, x), EXACT)

    def test_a_later_call_leaves_results_as_they_were(self, standing):
        c = standing(invfunc.batch_grad(loss))
        c(*given(0))
        first = c(*given(1))
        before = tree.map_tensors(torch.clone, first)
        c(*given(2))
        assert_trees_close(first, before, 0.0)

    def test_a_guard_is_read_after_the_launch(self, standing):
        t = invfunc.variance(lambda w, x: loss(w, x) if w.sum() > 0 else loss(w, x).exp())
        c, (w, x) = standing(t), given(0)
        for sign in (1, 1, -1, -1, 1):
            assert_trees_close(c(sign * w.abs(), x), t(sign * w.abs(), x), EXACT)
        assert hits(c) == 2 and not c.calls.warned

    def test_what_is_closed_over_is_that_of_now(self, standing):
        weight = torch.ones(3, dtype=torch.float64)
        t = invfunc.variance(lambda w, x: loss(w * weight.sum(), x))
        c = standing(t)
        for k in range(3):
            weight.data.mul_(2)
            assert_trees_close(c(*given(k)), t(*given(k)), EXACT)
        assert hits(c) == 2

    def test_threads_do_not_read_results_of_each_other(self, standing):
        t = invfunc.variance(loss)
        c, wrong = standing(t), []
        c(*given(0))

        def calls(k):
            wanted = t(*given(k))
            wrong.extend(k for _ in range(20) if not torch.equal(tree.tensors((c(*given(k)),))[0], wanted))

        threads = [threading.Thread(target=calls, args=(k,)) for k in range(4)]
        [x.start() for x in threads], [x.join() for x in threads]
        assert not wrong

    def test_dies_with_its_plan_without_the_collector(self, standing):
        c = standing(invfunc.variance(loss))
        c(*given(0)), c(*given(1))
        (graph,) = graphs(c)
        place = weakref.ref(next(x for x in graph.captured.places if x is not None))
        gc.disable()
        try:
            del c, graph
            assert place() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        ("f", "why"),
        [
            (lambda w, x: loss(w, F.dropout(x, 0.5)), "draws no random numbers"),
            (lambda w, x: loss(w, x) * x[x > -9.0].sum(), "no shapes that depend on numbers"),
        ],
    )
    def test_says_why_a_plan_is_replayed(self, standing, f, why):
        t = invfunc.variance(f)
        c = standing(t)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for k in range(3):
                torch.manual_seed(k)
                wanted, after = t(*given(k)), torch.get_rng_state()
                torch.manual_seed(k)
                assert_trees_close(c(*given(k)), wanted, EXACT)
                assert torch.equal(after, torch.get_rng_state())
        (text,) = [str(w.message) for w in said if "replay" in str(w.message)]
        assert why in text

    def test_a_capture_that_fails_is_told_once_and_replayed(self, standing, monkeypatch):
        def fails(run, fixed):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        monkeypatch.setattr(cudagraphs, "capture", fails)
        t = invfunc.variance(loss)
        c = standing(t)
        c(*given(0))
        with pytest.warns(invfunc.InvFuncWarning, match=r"by `replay`: .*not permitted when stream is capturing\)\.$"):
            assert_trees_close(c(*given(1)), t(*given(1)), EXACT)
        assert_trees_close(c(*given(2)), t(*given(2)), EXACT)
        assert hits(c) == 2 and len(c.calls.warned) == 1


@pytest.mark.quick
class TestPieces:
    @drawn(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3), st.integers(0, 2))
    def test_copies_have_the_same_strides_and_numbers(self, dims, offset):
        size, stride = [n for n, _ in dims], [s for _, s in dims]
        x = torch.arange(64.0).as_strided(size, stride, offset)
        own = copied(x)
        assert own.stride() == x.stride() and torch.equal(own, x)
        assert x.numel() == 0 or own.data_ptr() != x.data_ptr()

    def test_copies_to_the_cpu_are_told_from_copies_to_a_device(self):
        cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
        assert hands_over(ATEN._to_copy.default, [cuda], [cpu])
        assert hands_over(ATEN.copy_.default, [cpu, cuda], [cpu])
        assert not hands_over(ATEN._to_copy.default, [cpu], [cuda])
        assert not hands_over(ATEN._to_copy.default, [cuda], [cuda])
        assert not hands_over(ATEN.add.Tensor, [cpu, cuda], [cuda])

    def test_arguments_on_a_cpu_are_told(self):
        x = torch.ones(2)
        graph = torch.fx.symbolic_trace(lambda x: x + 1)
        told = []
        assert torch.equal(Graphed(graph, told.append)(x), x + 1)
        assert told == ["it runs by `replay`: a CUDA graph takes tensors of one CUDA device, not of cpu."]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
    def test_without_cuda_it_is_an_error(self):
        with pytest.raises(invfunc.errors.ArgumentError, match="needs a CUDA device.* 'replay' or 'inductor'"):
            compiled(invfunc.variance(loss), backend="cudagraphs")


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    return device


def of_model(device, k=0, n=6):
    torch.manual_seed(k)
    params = {"w": torch.randn(5, 3, device=device), "b": torch.randn(3, device=device)}
    return params, torch.randn(n, 5, device=device), torch.randint(0, 3, (n,), device=device)


def model(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


class TestOnCUDA:
    @pytest.mark.parametrize(
        "t",
        [
            invfunc.variance(lambda p, x, y: F.cross_entropy(model(p, x), y, reduction="none")),
            invfunc.diag_ggn(model, F.cross_entropy),
            invfunc.kfac(model, F.cross_entropy, fisher="exact"),
        ],
        ids=["variance", "diag_ggn", "exact kfac"],
    )
    def test_is_the_call_itself(self, cuda, t):
        c, earlier = compiled(t, backend="cudagraphs"), []
        for n in (6, 7):
            for k in range(4):
                args = of_model(cuda, k, n)
                found, wanted = c(*args), t(*args)
                earlier.append((found, wanted))
        for found, wanted in earlier:
            assert_trees_close(found, wanted, 1e-5)
        assert all(graph.captured is not None for graph in graphs(c)), c.calls.warned

    def test_a_capture_that_fails_leaves_the_stream_as_it_was(self, cuda):
        def waits(p, x, y):
            return F.cross_entropy(model(p, x), y, reduction="none") * torch.linalg.eigvalsh(x.T @ x).sum()

        t, before = invfunc.variance(waits), torch.cuda.current_stream()
        c = compiled(t, backend="cudagraphs")
        for k in range(3):
            args = of_model(cuda, k)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_trees_close(c(*args), t(*args), 1e-4)
        assert torch.cuda.current_stream() == before
        self.test_is_the_call_itself(cuda, invfunc.diag_ggn(model, F.cross_entropy))
