"""chunked(t, memory=...): the same result within the bytes that are given, and a size of chunks that is kept."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import chunked, chunks, explain, functional
from invfunc.errors import ArgumentError, ArgumentTypeError, BudgetError, InvFuncError
from invfunc.statistic import Statistic
from invfunc.testing.oracles import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.rows import CASES, made_of
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


class TestResults:
    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES)
    def test_are_those_of_the_statistic(self, case):
        row, form = CASES[case]
        t = made_of(row, model, F.cross_entropy, form)
        if isinstance(t, Statistic) and not t.axes:
            with pytest.raises(ArgumentError, match="cannot be computed in parts"):
                chunked(t, memory="1GiB")
            return
        if not isinstance(t, Statistic):  # a function of one
            return
        wanted = made_of(row, model, F.cross_entropy, form)(*given())
        assert_trees_close(chunked(t, memory="1GiB")(*given()), wanted, 1e-10)

    def test_do_not_depend_on_the_budget(self):
        t, args = invfunc.diag_ggn(model, F.cross_entropy), wide(64)
        wanted, least, whys = t(*args), least_of(t, args), set()
        for factor in (1.0, 1.5, 1e3):
            within = chunked(t, memory=int(factor * least))
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

    @pytest.mark.parametrize("factor", [1.0, 1.3])
    @pytest.mark.parametrize(
        "t",
        [
            invfunc.diag_ggn(model, F.cross_entropy),
            invfunc.batch_grad(loss),
            invfunc.kfac(model, F.cross_entropy, fisher="exact"),
        ],
        ids=["diag_ggn", "batch_grad", "kfac"],
    )
    def test_live_bytes_are_within(self, t, factor):
        args = wide(40)
        within = chunked(t, memory=int(factor * least_of(t, args)))
        within(*args)
        (found,) = within.choices.values()
        with nothing_collected(), Meter() as meter:
            within.make(found.chunks(40), False)(*args)
        assert meter.peak() <= found.need <= within.size

    def test_errors_tell_the_least_and_why(self):
        with pytest.raises(BudgetError, match=r"does not fit 0.01MiB.*in up to 256 chunks.*memory='"):
            chunked(invfunc.variance(loss), memory=1000)(*wide())
        assert issubclass(BudgetError, (InvFuncError, MemoryError))

    def test_explain_tells_them(self):
        text = str(explain(chunked(invfunc.variance(loss), memory="1GiB"))(*given()))
        assert "chunked(variance(loss), memory='1GiB'): in one piece, at most 2." in text and "1024.00MiB" in text


@pytest.mark.quick
class TestChoices:
    @pytest.fixture
    def measured(self, monkeypatch):
        """The calls that were measured."""
        found, own = [], chunks.peak_of
        monkeypatch.setattr("invfunc.chunks.peak_of", lambda *args: found.append(1) or own(*args))
        return found

    def test_serve_all_batches_that_are_smaller(self, measured):
        """As those of Poisson sampling are."""
        t = invfunc.variance(loss)
        for memory in ("1GiB", least_of(t, wide(48))):
            within = chunked(t, memory=memory)
            within(*wide(48))
            before = len(measured)
            for n in (47, 13, 1, 30):
                args = wide(n)
                assert_trees_close(within(*args), t(*args), 1e-10)
            assert len(measured) == before > 0
            p, x, y = wide(48)
            within({name: 2 * w for name, w in p.items()}, x + 1, y)
            assert len(measured) == before

    def test_of_one_piece_serve_up_to_twice_as_many_samples(self, measured):
        within = chunked(invfunc.variance(loss), memory="1GiB")
        for n, anew in ((10, True), (20, False), (21, True), (42, False), (43, True)):
            before = len(measured)
            within(*wide(n))
            assert (len(measured) > before) == anew, n

    @pytest.mark.parametrize("what", ["dtype", "gradient", "strides", "grad mode", "width"])
    def test_are_made_anew_where_more_may_be_taken(self, measured, what):
        p, x, y = given()
        within = chunked(invfunc.variance(loss), memory="1GiB")
        within(p, x, y)
        before = len(measured)
        if what == "dtype":
            p, x = {name: w.float() for name, w in p.items()}, x.float()
        if what == "gradient":
            p = {name: w.requires_grad_() for name, w in p.items()}
        if what == "strides":
            p = {name: w.mT.contiguous().mT if w.ndim == 2 else w for name, w in p.items()}
        if what == "width":
            p = {"w": p["w"].repeat(2, 1), "b": p["b"].repeat(2), "v": p["v"].repeat(1, 2)}
        with torch.set_grad_enabled(what != "grad mode"):
            within(p, x, y)
        assert len(measured) > before

    def test_are_for_a_budget(self, measured):
        t, args = invfunc.variance(loss), wide(32)
        within = chunked(t, memory="1GiB")
        within(*args)
        before = len(measured)
        less = replace(within, size=least_of(t, args))
        assert_trees_close(less(*args), t(*args), 1e-10)
        assert len(measured) > before and "chunks of samples" in explain(less)(*args).why

    def test_keep_no_tensor(self):
        within = chunked(invfunc.variance(loss), memory="1GiB")
        p, x, y = given()
        gone = [weakref.ref(t) for t in (*p.values(), x, y)]
        within(p, x, y)
        del p, x, y
        gc.collect()
        assert within.choices and not any(r() is not None for r in gone)


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
@pytest.mark.parametrize(("name", "size"), [("diag_ggn of images", 32), ("kfac of sentences", 10)])
def test_calls_of_a_process_take_no_more_than_was_promised(name, size):
    program = [sys.executable, "-m", "tests.budget.first_call", name, f"{size}MiB"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    *taken, promised, why = json.loads(done.stdout)
    assert 0.3 * promised <= max(taken) <= promised <= size * 2**20, (taken, why)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
def test_chunks_of_samples_bound_the_memory_of_activations():
    program = [sys.executable, "-m", "tests.budget.first_call"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout)
    result, whole = taken.pop("result of rows"), taken.pop("whole")
    taken["rows"] -= result
    assert max(taken.values()) < 9 < whole / 5, taken
