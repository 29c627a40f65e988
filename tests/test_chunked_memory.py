"""chunked(t, memory=...): the same result, never more than promised, and errors where nothing can be promised."""

import gc
import json
import pickle
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import budgeted, chunked, explain, functional
from invfunc.budget.beside import FIRST, LATER
from invfunc.budget.footprint import Footprint
from invfunc.budgeted import Fingerprints
from invfunc.errors import ArgumentError, ArgumentTypeError, BudgetError, InvFuncError
from invfunc.loaded import _toured
from invfunc.statistic import Statistic
from invfunc.testing.laws.rows import CASES
from invfunc.testing.oracles import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

ROOT = Path(__file__).parents[1]
N = 6


def model(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["v"])


def loss(p, x, y):
    return F.cross_entropy(model(p, x), y)


def given(n=N):
    rand = Numbers()
    return {"w": rand(5, 3), "b": rand(5), "v": rand(3, 5)}, rand(n, 3), torch.arange(n) % 3


def wide(n=8):
    """A batch whose activations are most of what a call takes."""
    rand = Numbers()
    return {"w": rand(2000, 3), "b": rand(2000), "v": rand(3, 2000)}, rand(n, 3), torch.arange(n) % 3


def least_of(t, args):
    with pytest.raises(BudgetError) as told:
        chunked(t, memory=1)(*args)
    return told.value.least


def sized(within, size):
    """The same function within another budget, which knows what was asked of the calls."""
    return replace(within, size=int(size), choices={}, fingerprints=Fingerprints())


@pytest.fixture(scope="module")
def columns():
    """A statistic with its arguments, within a budget that is too small, and the least that it takes beside what Python
    keeps of the search."""
    t, args = invfunc.diag_ggn(model, F.cross_entropy), wide(64)
    within = chunked(t, memory=1)
    with pytest.raises(BudgetError):
        within(*args)
    (known,) = within.trials.values()
    return t, args, within, FIRST.size + min(found.peak for found in known.values() if not found.over)


class TestResults:
    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES)
    def test_are_those_of_the_statistic(self, case):
        row, form = CASES[case]
        t = row.of(model, F.cross_entropy, form)
        if isinstance(t, Statistic) and not t.axes:
            with pytest.raises(ArgumentError, match="cannot be computed in parts"):
                chunked(t, memory="1GiB")
            return
        if not isinstance(t, Statistic):  # a function of one
            return
        wanted = row.of(model, F.cross_entropy, form)(*given())
        assert_trees_close(chunked(t, memory="1GiB")(*given()), wanted, 1e-10)

    @pytest.mark.parametrize(
        "make",
        [partial(invfunc.kfac, fisher="exact"), partial(invfunc.kfac, fisher="empirical")],
        ids=["exact", "kfac"],
    )
    def test_of_an_embedding(self, make):
        f, params = functional(torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10)).double())
        t, batch = make(f, F.cross_entropy), (torch.arange(6) % 4, torch.arange(6))
        assert_trees_close(chunked(t, memory="1GiB")(params, *batch), t(params, *batch), 1e-12)

    @pytest.mark.quick
    def test_of_a_loss_whose_classes_have_weights(self):
        def weighted(z, y):
            return F.nll_loss(F.log_softmax(z, 1), y, weight=z.new_tensor([1.0, 2.0, 3.0]))

        for t in (
            invfunc.diag_ggn(model, weighted),
            invfunc.diag_ggn(lambda p, x, y: weighted(model(p, x), y)),
            invfunc.kfac(model, weighted, fisher="exact"),
        ):
            assert_trees_close(chunked(t, memory="1GiB")(*given()), t(*given()), 1e-10)

    @pytest.mark.quick
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_of_recurrent_layers(self, kind):
        class Last(nn.Module):
            def forward(self, x):
                return x[0][:, -1]

        f, params = functional(nn.Sequential(kind(3, 4, batch_first=True), Last(), nn.Linear(4, 3)).double())
        t, batch = invfunc.diag_ggn(f, F.cross_entropy), (Numbers()(N, 5, 3), torch.arange(N) % 3)
        assert_trees_close(chunked(t, memory="1GiB")(params, *batch), t(params, *batch), 1e-10)

    def test_do_not_depend_on_the_budget(self, columns):
        t, args, small, least = columns
        wanted, whys = t(*args), set()
        for factor in (1.05, 1e3):
            within = sized(small, factor * least)
            whys.add(explain(within)(*args).why.split(",")[0])
            assert_trees_close(within(*args), wanted, 1e-10)
        assert len(whys) > 1 and "in one piece" in whys

    def test_of_drawn_columns_are_those_of_one_call(self):
        def drawn():
            generator = torch.Generator().manual_seed(0)
            return generator, invfunc.diag_ggn(model, F.cross_entropy, mc_samples=2, generator=generator)

        (one, plain), (other, t) = drawn(), drawn()
        before = torch.random.get_rng_state()
        assert_trees_close(chunked(t, memory="1GiB")(*given()), plain(*given()), 1e-10)
        assert torch.equal(one.get_state(), other.get_state())
        assert torch.equal(before, torch.random.get_rng_state())

    @pytest.mark.quick
    def test_of_several_statistics_come_together(self):
        t = invfunc.together(invfunc.diag_ggn(loss), invfunc.variance(loss))
        assert_trees_close(chunked(t, memory="1GiB")(*given()), t(*given()), 1e-10)

    @pytest.mark.quick
    def test_of_plain_functions_are_folded(self):
        args = wide()
        within = chunked(model, memory=least_of(model, args[:2]))
        assert_trees_close(within(*args[:2]), model(*args[:2]), 1e-10)
        gradient = chunked(memory="1GiB", fold="mean")(torch.func.grad(loss))
        assert_trees_close(gradient(*given()), torch.func.grad(loss)(*given()), 1e-10)

    @pytest.mark.quick
    def test_of_a_module_leave_it_as_it_was(self):
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3).eval(), nn.Flatten(), nn.Linear(12, 2)).double()
        before = {name: x.clone() for name, x in net.state_dict().items()}
        f, params = functional(net)
        args = params, Numbers()(3, 1, 4, 4), torch.tensor([0, 1, 1])
        t = invfunc.diag_ggn(f, F.cross_entropy)
        assert_trees_close(chunked(t, memory="1GiB")(*args), t(*args), 1e-10)
        assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


@pytest.mark.quick
class TestPromises:
    def test_the_least_that_is_told_is_enough(self):
        for t in (invfunc.variance(loss), invfunc.gram(loss)):
            args = wide(4)
            least = least_of(t, args)
            chunked(t, memory=least)(*args)
            with pytest.raises(BudgetError):
                chunked(t, memory=least // 2)(*args)

    @pytest.mark.slow
    def test_the_least_is_found_by_all_runs_of_a_call_with_it(self, monkeypatch):
        """So that what Python keeps of them counts in it."""
        ran, own = [], budgeted.footprint
        monkeypatch.setattr("invfunc.budgeted.footprint", lambda t, *args: ran.append(repr(t)) or own(t, *args))
        monkeypatch.setattr("invfunc.budgeted._kept_since", lambda *_: 0)  # which differs between the two calls
        t, args = invfunc.diag_ggn(model, F.cross_entropy), wide(12)
        least = least_of(t, args)
        before = {call.replace("memory=1)", f"memory={least})") for call in ran}
        ran.clear()
        chunked(t, memory=least)(*args)
        assert set(ran) <= before

    def test_live_bytes_are_within(self, columns):
        _, args, small, least = columns
        for factor in (1.05, 1.5):
            within = sized(small, factor * least)
            within.fitting(args, {}, within.names(3))
            found = within.fitting(args, {}, within.names(3))
            with nothing_collected(), Meter() as meter:
                within.make(found.trial.chunks, False)(*args)
            assert meter.peak() <= found.trial.peak < found.promised <= found.budget == int(factor * least)

    def test_what_a_search_keeps_counts_in_its_call_alone(self, monkeypatch):
        t, args = invfunc.variance(loss), given()
        kept = [5 * 2**20]
        monkeypatch.setattr("invfunc.budgeted._kept_since", lambda *_: kept[0])
        within = chunked(t, memory="6MiB")
        with pytest.raises(BudgetError, match=r"4.00MiB for what libraries load.*5.00MiB that Python keeps") as told:
            within(*args)
        assert told.value.least > 8 * 2**20
        kept[0] = 0  # as it is in use before the next call
        assert_trees_close(within(*args), t(*args), 1e-10)

    def test_errors_tell_the_least_and_why(self):
        with pytest.raises(BudgetError, match=r"does not fit 0.01MiB.*result has.*most is in use at `\w+`.*memory='"):
            chunked(invfunc.variance(loss), memory=1000)(*wide())
        assert issubclass(BudgetError, (InvFuncError, MemoryError))

    def test_an_axis_can_be_chosen(self):
        with pytest.raises(BudgetError) as told:
            chunked(invfunc.diag_ggn(model, F.cross_entropy), memory=1, over="outputs")(*wide())
        assert "chunks of outputs" in str(told.value) and "chunks of samples" not in str(told.value)

    def test_explain_tells_them(self):
        text = str(explain(chunked(invfunc.variance(loss), memory="1GiB"))(*given()))
        assert "chunked(variance(loss), memory='1GiB'): in one piece, at most 4." in text and "1024.00MiB" in text


@pytest.mark.quick
class TestChoices:
    @pytest.fixture
    def predicted(self, monkeypatch):
        """The runs without numbers that were made."""
        found, own = [], budgeted.footprint
        monkeypatch.setattr("invfunc.budgeted.footprint", lambda *args: found.append(1) or own(*args))
        return found

    def test_are_kept_for_other_numbers(self, predicted):
        within = chunked(invfunc.variance(loss), memory="1GiB")
        within(*given())
        (p, x, y), before = given(), len(predicted)
        within({name: 2 * w for name, w in p.items()}, x + 1, y)
        assert len(predicted) == before > 0

    @pytest.mark.parametrize("what", ["", "list", "memory", "number"])
    def test_need_no_look_at_f_while_it_reads_the_same(self, monkeypatch, what):
        looks, own = [], budgeted.fingerprint
        monkeypatch.setattr("invfunc.budgeted.fingerprint", lambda *args: looks.append(1) or own(*args))
        closed, some, read = torch.ones(1), [1.0], [2]
        within = chunked(
            invfunc.variance(lambda p, x, y: loss(p, x, y) * closed.sum() * some[0] * read[0]), memory="1GiB"
        )
        within(*given())
        within(*given())
        assert len(looks) == 1
        if what == "list":
            some[0] = 3.0
        if what == "memory":
            closed.data = torch.ones(2**10)
        if what == "number":
            read[0] = 3
        found = within(*given())
        assert len(looks) == 1 + bool(what)
        assert_trees_close(found, within.f(*given()), 1e-10)

    @pytest.mark.parametrize("what", ["samples", "dtype", "gradient", "strides", "grad mode", "closure", "module"])
    def test_are_made_anew_where_more_may_be_taken(self, predicted, what):
        wide, net = [False], nn.Dropout(0.0).eval()

        def f(p, x, y):
            z = F.linear(x, p["w"], p["b"])
            return F.cross_entropy(net(z * z if wide[0] else z), y)

        p, x, y = given()
        within = chunked(invfunc.variance(f), memory="1GiB")
        within(p, x, y)
        before, wide[0] = len(predicted), what == "closure"
        if what == "samples":
            x, y = x[:3], y[:3]
        if what == "dtype":
            p, x = {name: w.float() for name, w in p.items()}, x.float()
        if what == "gradient":
            p = {name: w.requires_grad_() for name, w in p.items()}
        if what == "strides":
            x = x.mT.contiguous().mT
        net.train(what == "module")
        net.p = 0.5 * (what == "module")
        with torch.set_grad_enabled(what != "grad mode"):
            try:
                within(p, x, y)
            except InvFuncError:
                assert what == "module"  # what draws cannot be divided here
        assert len(predicted) > before

    def test_keep_no_tensor(self):
        within = chunked(invfunc.variance(loss), memory="1GiB")
        p, x, y = given()
        gone = [weakref.ref(t) for t in (*p.values(), x, y)]
        within(p, x, y)
        del p, x, y
        gc.collect()
        assert within.choices and not any(r() is not None for r in gone)

    def test_are_for_a_budget(self, predicted, columns):
        _, args, small, least = columns
        within = sized(small, 1.05 * least)
        within(*args)
        within(*args)  # with less in reserve
        (same, made), before = next(iter(within.choices.items())), len(predicted)
        more = replace(made.later, footprint=larger(made.budget))
        for kept in [replace(made, budget=made.budget // 2), replace(made, later=more)]:
            within.choices[same] = kept  # as if much less, or more, had been free then
            within(*args)
            assert within.choices[same] == made and made.later.chunks
            assert len(predicted) == before  # from what is known of the same call

    def test_have_more_room_after_the_first_call_of_a_process(self, predicted):
        t, args = invfunc.variance(loss), wide(32)
        within = chunked(t, memory=int(1.1 * least_of(t, args)))
        names, chosen, before = within.names(3), [], 0
        for run in (False, False, True, False):
            if run:
                within(*args)
            chosen.append(within.fitting(args, {}, names))
            before = before or len(predicted)
        assert before == len(predicted)  # the first call has searched for both
        first, same, second, third = (c.trial.peak for c in chosen)
        assert first == same < second == third
        assert [c.reserve for c in chosen] == [FIRST, FIRST, LATER, LATER]
        assert_trees_close(within(*args), t(*args), 1e-10)
        assert not pickle.loads(pickle.dumps(within.fingerprints)).ran  # in another process nothing has


def larger(budget):
    """What a call takes that takes more than a budget."""
    found = Footprint()
    found.counted = 2 * budget
    return found


@pytest.mark.quick
class TestWhatCannotBePromised:
    @pytest.mark.parametrize(
        "f",
        [
            lambda p, x, y: F.cross_entropy(model(p, x)[x.sum(1) > 0], y[x.sum(1) > 0]),
            lambda p, x, y: loss(p, x, y) * (2 if x.sum() > 0 else 1),
            lambda p, x, y: torch.from_numpy(x.numpy()).sum() + loss(p, x, y),
        ],
        ids=["a mask", "a branch", "numpy"],
    )
    def test_depends_on_numbers(self, f):
        with pytest.raises(ArgumentError, match=r"cannot be predicted: .*chunked\(t, n\)"):
            chunked(invfunc.batch_grad(f), memory="1GiB")(*given())

    def test_is_inside_of_a_transform(self):
        p, x, y = given()
        t = chunked(invfunc.variance(loss), memory="1GiB")
        with pytest.raises(ArgumentError, match="torch.func"):
            torch.func.grad(lambda p: t(p, x, y)["w"].sum())(p)

    def test_calls_a_function_of_the_caller(self):
        with pytest.raises(ArgumentError, match="without numbers"):
            chunked(invfunc.reduced(invfunc.variance(loss), lambda name, x: x), memory="1GiB")

    def test_is_within_a_transform_of_its_own(self):
        within = chunked(invfunc.variance(loss), memory="1GiB")
        reduced = lambda t: invfunc.reduced(t, lambda name, x: x)  # noqa: E731
        for around in (invfunc.streamed, invfunc.distributed, invfunc.together, reduced):
            with pytest.raises(ArgumentTypeError, match=r"a budget covers one call alone.*chunked\(t, n\)"):
                around(within)
        loader = invfunc.streamed(invfunc.variance(loss))
        for inner in (within, loader, invfunc.distributed(invfunc.variance(loss))):
            for options in ({"n": 2}, {"memory": 0.5}):
                with pytest.raises(ArgumentTypeError, match="of the whole batch. Chunk what is in it"):
                    chunked(inner, **options)

    def test_is_an_error_of_the_call_as_it_was_written(self):
        with pytest.raises(InvFuncError, match=r"^chunked\(batch_jacobian\(model\), memory='1GiB'\)\("):
            chunked(invfunc.batch_jacobian(model), memory="1GiB")(*given())

    def test_is_an_error_of_the_statistic_itself(self):
        with pytest.raises(InvFuncError, match="the samples"):
            chunked(invfunc.variance(lambda p, x: model(p, x).std(0).sum()), memory="1GiB")(*given()[:2])


@pytest.mark.quick
class TestArguments:
    @pytest.mark.parametrize("memory", ["512", "MiB", "-1MiB", "0MiB", 0, -5, 0.0, 1.5, float("nan")])
    def test_that_are_no_size(self, memory):
        with pytest.raises(ArgumentError, match="memory="):
            chunked(invfunc.variance(loss), memory=memory)

    @pytest.mark.parametrize("memory", [True, [1], torch.ones(())])
    def test_of_another_kind(self, memory):
        with pytest.raises(ArgumentTypeError, match="memory="):
            chunked(invfunc.variance(loss), memory=memory)

    def test_are_one_of_three(self):
        with pytest.raises(ArgumentError, match="one of them"):
            chunked(invfunc.variance(loss), 2, memory="1MiB")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
@pytest.mark.parametrize(("name", "size"), [("diag_ggn of images", 32), ("kfac of sentences", 10)])
def test_the_first_calls_of_a_process_take_no_more_than_was_promised(name, size):
    program = [sys.executable, "-m", "tests.budget.first_call", name, f"{size}MiB"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    *taken, promised, why = json.loads(done.stdout)
    assert max(taken) <= size * 2**20, (taken, why)
    assert 0.4 * (promised - 2**20) <= max(taken[1:]) <= promised <= size * 2**20, why


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
def test_chunks_of_samples_bound_the_memory_of_activations():
    program = [sys.executable, "-m", "tests.budget.first_call"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout)
    result, whole = taken.pop("result of rows"), taken.pop("whole")
    taken["rows"] -= result
    assert max(taken.values()) < 9 < whole / 5, taken


@pytest.mark.quick
class TestLibraries:
    def test_are_loaded_without_a_trace(self):
        before = torch.random.get_rng_state()
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), torch.inference_mode():
            _toured.__wrapped__()
        assert torch.equal(before, torch.random.get_rng_state())

    def test_are_not_loaded_within_a_transform(self, monkeypatch):
        found = []
        monkeypatch.setattr("invfunc.loaded._toured", lambda: found.append(1))
        torch.func.vmap(lambda x: chunked(model, memory="1GiB") and x)(torch.zeros(2))
        assert not found
        chunked(model, memory="1GiB")
        assert found == [1]
