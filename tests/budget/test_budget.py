"""Sizes of memory, the meter of a call, and the search for the largest chunk."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invfunc.budget import free, in_bytes, peak_of, size_of, told
from invfunc.chunks import TRIES, Budgeted, BudgetedCall, needed
from invfunc.errors import BudgetError

CPU = torch.device("cpu")


@pytest.mark.quick
class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("512MiB", 512 * 2**20), ("2 GB", 2 * 10**9), ("1.5kib", 1536), ("100B", 100), (7, 7), ("1TiB", 2**40)],
    )
    def test_are_read(self, text, size):
        assert in_bytes(size_of(text), CPU) == size

    def test_of_what_is_free(self):
        assert 0 < in_bytes(size_of(0.5), CPU) < free() * 0.6

    @pytest.mark.parametrize("size", [1, 2**20, 2**20 + 1, 12345678])
    def test_that_are_told_can_be_given(self, size):
        assert size <= size_of(told(size)) <= size + 2**14


@pytest.mark.quick
class TestPeak:
    def test_is_what_is_alive_at_once(self):
        def f():
            y = x + 1
            z = y * 2
            del y
            return (z - 3).sum()

        x = torch.zeros(1000)
        assert peak_of(f, CPU) == 2 * 4000 + 4

    def test_counts_views_once_and_arguments_never(self):
        x = torch.zeros(1000)
        assert peak_of(lambda: [x.view(10, 100), x[5:], x.mul_(2)], CPU) == 0
        assert peak_of(lambda: [y := x.exp(), y[5:], y.mT if y.ndim > 1 else y], CPU) == 4000

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_on_cuda_is_that_of_the_allocator(self):
        x = torch.zeros(2**20, device="cuda")
        assert peak_of(lambda: (x + 1) * 2, x.device) == 2 * x.nbytes


def searched(peak, lengths, budget, axes=None):
    """The choice for a call that takes so much in numbers of chunks, for n of its samples; and the calls measured."""
    seen = []
    size = (lengths.get("samples", 8), 2)
    t = SimpleNamespace(axes=axes or [*lengths], choices={}, size=budget)

    def measured(call, chunks, n):
        seen.append((chunks, n))
        return peak(chunks, n)

    t.peak = measured
    call = BudgetedCall((torch.zeros(2), torch.zeros(size)), {}, None, {1: 0}, {"samples": 8, **lengths})
    return Budgeted._measured(t, call, budget), seen  # pyright: ignore[reportArgumentType]


def of_chunks(each, fixed=0):
    """Bytes of a call that are some of each sample in a chunk, and some that are always there."""
    return lambda chunks, n: fixed + each * math.ceil(n / chunks.get("samples", 1))


@pytest.mark.quick
class TestSearch:
    @given(st.integers(1, 5000), st.integers(1, 10**6), st.integers(0, 10**8), st.integers(1, 5000))
    def test_keeps_the_budget_and_uses_it(self, n, each, fixed, fits):
        peak = of_chunks(each, fixed)
        budget = needed(fixed + each * fits) + 1
        found, seen = searched(peak, {"samples": n}, budget)
        chunks = found.chunks(n)
        assert needed(peak(chunks, n)) <= found.need <= budget and len(seen) <= 3 + TRIES
        assert found.sizes["samples"] >= 0.6 * min(n, fits)

    def test_divides_what_is_left_where_one_sample_is_too_much(self):
        def peak(chunks, n):
            return 10**6 + 10**7 // chunks.get("outputs", 1) * math.ceil(n / chunks.get("samples", 1))

        found, _ = searched(peak, {"samples": 4, "outputs": 10}, needed(4 * 10**6))
        assert found.chunks(4) == {"samples": 4, "outputs": 5} and found.chunks(2) == {"samples": 2, "outputs": 5}

    def test_that_finds_nothing_tells_the_least(self):
        with pytest.raises(BudgetError) as error:
            searched(of_chunks(10**6, 10**7), {"samples": 8}, 10**6)
        assert error.value.least == needed(11 * 10**6)
        searched(of_chunks(10**6, 10**7), {"samples": 8}, error.value.least)
