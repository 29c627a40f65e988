"""What a call will take, and the search for the fewest chunks: sizes, buffers of kernels, trials."""

import json
import math
import mmap
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from invfunc import thresholds
from invfunc._torch.functorch import TorchDispatchMode
from invfunc.budget.beside import HEAP, HOLES, MARGIN, SLACK, in_pages
from invfunc.budget.duration import CALL, multiplications
from invfunc.budget.fingerprint import fingerprint
from invfunc.budget.footprint import Footprint, footprint
from invfunc.budget.scratch import KERNEL, PRODUCT, vectors
from invfunc.budget.search import TRIES, Measured, least, search
from invfunc.budget.size import free, in_bytes, size_of, told
from invfunc.linear_algebra.pairwise import product
from tests.crossed import FAR, thresholds_at
from tests.meter import Meter

from .taken import CONVOLUTIONS, OF_MATRICES, OLDER, ON_OLDER, ORDERS, PRODUCTS

ROOT = Path(__file__).parents[2]


@pytest.mark.quick
class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("512MiB", 512 * 2**20), ("2 GB", 2 * 10**9), ("1.5kib", 1536), ("100B", 100), (7, 7), ("1TiB", 2**40)],
    )
    def test_are_read(self, text, size):
        assert in_bytes(size_of(text)) == size

    def test_of_what_is_free(self):
        assert 0 < in_bytes(size_of(0.5)) < free() * 0.6

    @pytest.mark.parametrize("size", [1, 2**20, 2**20 + 1, 12345678])
    def test_that_are_told_can_be_given(self, size):
        assert size <= size_of(told(size)) <= size + 2**14


def counted(f, *args):
    return footprint(f, args, {}, [])


@pytest.mark.quick
class TestFootprint:
    def test_is_the_peak_of_what_is_alive(self):
        def f(x):
            y = x + 1
            z = y * 2
            del y
            return (z - 3).sum()

        assert counted(f, torch.zeros(1000)).counted == 2 * 4000 + 4

    @pytest.mark.parametrize("numbers", [2**13, 2**14], ids=["a hole", "none"])
    def test_has_the_holes_that_small_tensors_leave(self, numbers):
        """Of less than 64 KiB each, they are not given back one by one."""

        def f(x):
            small = [x.exp() for _ in range(50)]
            whole = torch.stack(small)
            del small
            return whole.exp()

        size = 4 * numbers
        holes = 50 * size if size < HEAP else 0  # beside both copies of all, or beside the small ones and one
        assert counted(f, torch.zeros(numbers)).counted == holes + max(
            2 * in_pages(50 * size), 50 * in_pages(size) + in_pages(50 * size) - holes
        )

    def test_has_the_result_and_no_arguments(self):
        found = counted(lambda x: (x.exp(), x.view(-1)), torch.zeros(10, 100))
        assert found.counted == 4000 and found.results == 8000
        assert found.peak == int(MARGIN * 4000) + HOLES * 4000 + SLACK  # small ones leave holes that others do not fill

    def test_has_whole_pages(self):
        """Of 64 KiB and more a tensor has pages of its own, with what malloc writes beside it."""
        assert counted(lambda x: [x.exp() for _ in range(100)], torch.zeros(2**14)).counted == 100 * 17 * 4096

    def test_of_what_is_on_no_device_is_nothing(self):
        assert counted(lambda x: torch.empty(10**6, device="meta"), torch.zeros(1)).counted == 0

    def test_has_what_libraries_keep(self):
        assert counted(lambda x: x @ x, torch.zeros(1000, 1000)).counted == in_pages(
            4 * 10**6
        )  # they have taken it beforehand
        found = counted(lambda x: x @ x, torch.zeros(1000, 1000, dtype=torch.float64))
        assert found.counted == in_pages(8 * 10**6) + min(24 * 10**6, torch.get_num_threads() * PRODUCT)
        many = counted(lambda x: F.conv2d(x, x.new_zeros(16, 16, 3, 3)), torch.zeros(4, 16, 32, 32))
        assert many.at == "convolution" and many.counted > 2 * 4 * 16 * 30 * 30 * 4

    @pytest.mark.parametrize(
        ("dtype", "each"), [(torch.float32, KERNEL), (torch.bfloat16, 2 * KERNEL), (torch.float64, 0)]
    )
    def test_has_the_code_that_is_written_for_each_kind_of_convolution(self, dtype, each):
        def f(x):
            weight = x.new_zeros(16, 16, 3, 3)
            return [F.conv2d(x, weight) for _ in range(5)], F.conv2d(x[:, :, 1:].contiguous(), weight)

        assert counted(f, torch.zeros(4, 16, 64, 64, dtype=dtype)).kept == 2 * each

    @pytest.mark.parametrize("least", [0, FAR], ids=["large", "small"])
    def test_has_the_copies_of_a_product_as_large_ones_are_laid_out(self, least):
        def f(x, y):  # of which small ones lie as y does
            return product("vi,nir->vinr", [x, y]).movedim(2, 1).flatten(0, 1).sum()

        x, y = torch.zeros(3, 40), torch.zeros(7, 40, 50)

        with thresholds_at(HUGE_PAGES=least):
            found = counted(f, x, y)
            with Meter() as meter:
                f(x, y)
        assert found.counted - 10 * mmap.PAGESIZE <= meter.peak() <= found.counted  # of whole pages

    def test_of_double_convolutions_has_all_patches(self):
        x = torch.zeros(8, 4, 16, 16, dtype=torch.float64)
        assert counted(lambda x: F.conv2d(x, x.new_zeros(4, 4, 5, 5)), x).counted > 8 * 4 * 25 * 12 * 12 * 8

    def test_changes_nothing(self):
        x, state = torch.ones(3), torch.random.get_rng_state()
        counted(lambda x: x.mul_(2) + torch.rand(3), x)
        assert torch.equal(x, torch.ones(3)) and torch.equal(state, torch.random.get_rng_state())


@pytest.fixture(scope="module")
def taken():
    """What operations take, and what is counted, by their kind."""
    program = [sys.executable, "-m", "tests.budget.taken"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    found = defaultdict(list)
    for kind, *sizes in map(json.loads, done.stdout.splitlines()):
        found[kind].append(sizes)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from /proc")
class TestScratch:
    """Each operation in a process of its own; the rules have some room, and a page is whole."""

    @pytest.mark.slow
    def test_of_convolutions_is_never_exceeded(self, taken):
        assert len(taken["convolution"]) == 3 * len(CONVOLUTIONS)
        for case, size, counted in taken["convolution"]:
            assert size <= counted + SLACK // 4, case
        if vectors():
            assert sum(size for _, size, _ in taken["convolution"]) > 0.65 * sum(c for *_, c in taken["convolution"])

    def test_of_convolutions_on_older_cpus_is_never_exceeded(self, taken):
        assert len(taken["older"]) == 3 * len(ON_OLDER) * len(OLDER)
        for case, size, counted in taken["older"]:
            assert size <= counted + SLACK // 4, case

    def test_of_convolutions_copies_what_is_in_another_order(self, taken):
        assert [of for of, *_ in taken["order"]] == [[*of] for of in ORDERS]
        for case, size, counted in taken["order"]:
            assert 0.6 * counted <= size <= counted + SLACK // 4, case

    def test_of_the_first_product_of_a_size_is_never_exceeded(self, taken):
        assert len(taken["product"]) == 2 * len(PRODUCTS)
        for case, size, counted in taken["product"]:
            assert size <= counted + SLACK, case

    def test_of_what_works_unseen_is_never_exceeded(self, taken):
        assert len(taken["matrix"]) == 2 * len(OF_MATRICES)
        for case, size, counted in taken["matrix"]:
            assert size <= counted + SLACK // 4, case


@pytest.mark.quick
class TestEarlyEnds:
    def test_above_a_limit_and_not_below(self):
        def f(x):
            ran.append(1)
            y = x.exp()
            ran.append(2)
            return y.exp() + y

        ran: list[int] = []
        x = torch.zeros(2**20)
        whole = counted(f, x)
        assert not footprint(f, (x,), {}, [], whole.peak).over and ran == [1, 2] * 2
        early = footprint(f, (x,), {}, [], 2**21)
        assert early.over and 2**21 < early.peak < whole.peak and ran == [1, 2, 1, 2, 1]

    def test_are_not_caught(self):
        def f(x):
            try:
                return x.exp()
            except Exception:
                return x

        assert footprint(f, (torch.zeros(2**20),), {}, [], 2**20).over


@pytest.mark.quick
class TestFingerprint:
    def of(self, f, *args):
        return fingerprint(f, args, {}, [])

    def test_is_the_same_for_other_numbers(self):
        f = torch.nn.functional.linear
        one = self.of(f, torch.ones(2, 3), torch.ones(4, 3))
        assert one is not None and one == self.of(f, torch.zeros(2, 3), torch.rand(4, 3))

    @pytest.mark.parametrize(
        "args",
        [
            (torch.ones(4, 3),),
            (torch.ones(3, 3).double(),),
            (torch.ones(3, 3).mT,),
            (torch.ones(3, 3, requires_grad=True),),
        ],
        ids=["shape", "dtype", "strides", "gradient"],
    )
    def test_knows_arguments(self, args):
        assert self.of(torch.exp, torch.ones(3, 3)) != self.of(torch.exp, *args)

    def test_knows_what_is_shared(self):
        x, y = torch.ones(3), torch.ones(3)
        assert self.of(torch.add, x, x) != self.of(torch.add, x, y)

    @pytest.mark.parametrize("what", ["depth", "exponent", "graph", "backward", "memory", "checkpoint"])
    def test_knows_what_a_closure_changes(self, what):
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin()

            @staticmethod
            def backward(ctx, slope):
                return slope.exp() if on else slope

        def f(p, x):
            if what == "depth":
                return [p * x for _ in range(1 + on)][-1]
            if what == "exponent":
                return p ** (2 + on)
            if what == "graph":
                with torch.set_grad_enabled(not on):
                    p = p.sin()
                return p * x
            if what == "backward":
                return Own.apply(p)
            if what == "memory":
                return (p if on else x) * x
            part = lambda p: p.sin().sin()  # noqa: E731
            return torch.utils.checkpoint.checkpoint(part, p, use_reentrant=False) if on else part(p)

        found = []
        for on in (False, True):  # noqa: B007
            found.append(self.of(f, torch.ones(3), torch.ones(3)))
        assert None not in found and found[0] != found[1]

    def test_knows_settings(self):
        one = self.of(torch.exp, torch.ones(3))
        with torch.no_grad():
            assert self.of(torch.exp, torch.ones(3)) != one
        with torch.autocast("cpu"):
            assert self.of(torch.exp, torch.ones(3)) != one

    def test_is_none_where_it_cannot_be_seen(self):
        assert self.of(lambda x: x if x.sum() > 0 else -x, torch.ones(3)) is None

    def test_changes_nothing_and_keeps_nothing(self):
        x, state = torch.ones(3), torch.random.get_rng_state()
        gone = ref(x)
        found = self.of(lambda x: x * 2 + torch.rand(3), x)
        assert torch.equal(x, torch.ones(3)) and torch.equal(state, torch.random.get_rng_state())
        del x
        assert gone() is None and found is not None


def searched(peak, lengths, budget, seen=None, work=lambda c: math.prod(c.values()), parts=lambda c: c):
    """The search of calls that take so much, those that were asked for and the least."""

    def predict(chunks, limit):
        if seen is not None:
            seen.append((dict(chunks), limit))
        if (size := peak(chunks)) is None:
            return None
        found = Footprint()
        found.counted, found.work, found.parts = math.ceil((size - SLACK) / MARGIN), work(chunks), dict(parts(chunks))
        found.over = limit is not None and found.peak > limit
        return found

    measured = Measured(predict)
    return search(measured, lengths, budget), least(measured, lengths)


@pytest.mark.quick
class TestSearch:
    def test_takes_the_call_whole_where_it_fits(self):
        found, _ = searched(lambda c: 10**7, {"samples": 8}, 10**7)
        assert found is not None and found.chunks == {}

    @given(
        st.integers(1, 70),
        st.one_of(st.none(), st.integers(1, 20)),
        st.lists(st.integers(0, 10**8), min_size=4, max_size=4),
        st.floats(0.02, 1.2),
    )
    def test_keeps_the_budget_and_finds_the_least(self, samples, outputs, sizes, part):
        def peak(c):
            a = math.ceil(samples / c.get("samples", 1)) / samples
            b = 1 / c.get("outputs", 1) if outputs is None else math.ceil(outputs / c.get("outputs", 1)) / outputs
            return int(2 * SLACK + sizes[0] + sizes[1] * a + sizes[2] * b + sizes[3] * a * b)

        lengths = {"samples": samples, "outputs": outputs}
        seen: list = []
        budget = int(part * peak({}))
        found, best = searched(peak, lengths, budget, seen)
        assert found is None or (found.peak <= budget and not found.footprint.over)
        assert found is not None or best.peak > budget
        assert searched(peak, lengths, best.peak)[0] is not None
        assert all(math.prod(c.values()) <= thresholds.TRIED_PASSES for c, _ in seen)
        assert len(seen) <= 2 + 4 * (1 + TRIES)

    @pytest.mark.parametrize("each", [10**5, 10**6])
    def test_finds_less_where_most_chunks_take_more(self, each):
        def peak(c):
            n = c.get("samples", 1)
            return SLACK + 10**8 // n + each * n

        found, best = searched(peak, {"samples": 200}, SLACK)
        assert found is None and best.peak <= 1.1 * min(peak({}), peak({"samples": 200}), peak({"samples": 14}))
        assert searched(peak, {"samples": 200}, best.peak)[0] is not None

    @pytest.mark.parametrize("samples", [7, 32, 100])
    @pytest.mark.parametrize("fewer", [3, 5, 9, 20, 60])
    def test_uses_the_budget(self, samples, fewer):
        """Of what falls with the size of a chunk, 0.6 of the size that would fit."""

        def peak(c):
            return SLACK + 10**8 * math.ceil(samples / c.get("samples", 1)) // samples

        budget = SLACK + 10**8 // fewer
        found, _ = searched(peak, {"samples": samples}, budget)
        sizes = [math.ceil(samples / n) for n in range(1, samples + 1) if peak({"samples": n}) <= budget]
        assert (found is None) == (not sizes)
        if found is not None:
            assert math.ceil(samples / found.chunks["samples"]) >= 0.6 * sizes[0]

    def test_divides_one_axis_after_the_other(self):
        def peak(c):
            return SLACK + 10**6 + 10**7 // c.get("samples", 1) + 10**7 // c.get("outputs", 1)

        found, _ = searched(peak, {"samples": 4, "outputs": None}, SLACK + 6 * 10**6)
        assert found is not None and found.chunks["outputs"] > 1

    def test_undoes_what_was_divided_in_vain(self):
        def peak(c):
            return SLACK + 10**6 + 10**5 // c.get("samples", 1) + 10**7 // c.get("outputs", 1)

        found, _ = searched(peak, {"samples": 8, "outputs": None}, SLACK + 3 * 10**6)
        assert found is not None and "samples" not in found.chunks

    def test_leaves_out_what_cannot_be_divided(self):
        def peak(c):
            return None if "samples" in c else SLACK + 10**7 // c.get("params", 1)

        found, _ = searched(peak, {"samples": 8, "params": 4}, SLACK + 3 * 10**6)
        assert found is not None and found.chunks == {"params": 4}

    @given(st.integers(2, 128), st.floats(0.0, 0.5), st.floats(0.0, 0.9), st.floats(0.03, 0.99))
    def test_asks_little_and_is_nearly_as_fast_as_can_be(self, samples, each, beside, part):
        """Of calls whose time and memory are those of the call in one piece, and a part of them for each chunk."""

        def peak(c):
            return SLACK + int(10**8 * (beside + (1 - beside) * math.ceil(samples / c.get("samples", 1)) / samples))

        def work(c):
            return 1 + each * (c.get("samples", 1) - 1)

        seen: list = []
        budget = int(part * peak({}))
        measured = Measured(lambda c, limit: predicted(c, peak(c), work(c), limit, seen))
        found = search(measured, {"samples": samples}, budget)
        fitting = [n for n in range(1, samples + 1) if peak({"samples": n}) <= budget - 3]
        assert len(seen) <= 2 + TRIES and (found is not None or not fitting)
        if found is not None and fitting:
            assert work(found.chunks) <= 1.3 * work({"samples": fitting[0]})

    def test_divides_what_takes_the_least_time(self):
        lengths = {"samples": 16, "outputs": None, "params": 4}
        half = lambda c: SLACK + 10**6 + 10**7 // max(1, *c.values(), 1)  # noqa: E731
        for axis in ("samples", "outputs"):
            work = lambda c: 1 + sum((0.01 if a == axis else 1) * n for a, n in c.items())  # noqa: B023, E731
            found, _ = searched(half, lengths, SLACK + 6 * 10**6, work=work)
            assert found is not None and [*found.chunks] == [axis]

    def test_says_no_more_chunks_than_there_are(self):
        def peak(c):
            return SLACK + 10**6 + 10**7 // min(10, c.get("outputs", 1))

        parts = lambda c: {"outputs": min(10, c.get("outputs", 1))}  # noqa: E731
        found, _ = searched(peak, {"outputs": None}, SLACK + 21 * 10**5, parts=parts)
        assert found is not None and found.chunks == {"outputs": 10}

    def test_knows_what_was_asked_with_another_budget(self):
        def asked(budgets, known):
            seen: list = []
            for part in budgets:
                peak = lambda c: SLACK + 10**8 // c.get("samples", 1)  # noqa: E731
                measured = Measured(lambda c, limit: predicted(c, peak(c), 1, limit, seen), known)  # noqa: B023
                assert search(measured, {"samples": 64}, SLACK + 10**8 // part) is not None
            return seen

        seen, alone = asked([3, 2, 5, 3], {}), asked([3], {})
        assert len(seen) < 3 * len(alone) and seen.count({}) == 1


def predicted(chunks, size, work, limit, seen):
    """What a call takes in some chunks, of so many bytes and so much time."""
    seen.append(chunks)
    found = Footprint()
    found.counted, found.work = math.ceil((size - SLACK) / MARGIN), work
    found.over = limit is not None and found.peak > limit
    return found


@pytest.mark.quick
class TestDuration:
    @pytest.mark.parametrize(
        "f",
        [
            lambda x: x.view(8, 8, 16) @ x.view(8, 16, 8),
            lambda x: x.view(64, 16) @ x.view(16, 64),
            lambda x: torch.addmm(x.view(64, 16)[:, :1], x.view(64, 16), x.view(16, 64)),
            lambda x: F.conv2d(x.view(2, 8, 8, 8), x[:576].view(8, 8, 3, 3)),
            lambda x: F.conv2d(x.view(2, 8, 8, 8), x[:144].view(8, 2, 3, 3), stride=2, groups=4),
            lambda x: F.conv_transpose2d(x.view(2, 8, 8, 8), x[:288].view(8, 4, 3, 3)),
            lambda x: torch.func.grad(lambda w: F.conv2d(x.view(2, 8, 8, 8), w).sum())(x[:576].view(8, 8, 3, 3)),
        ],
        ids=["bmm", "mm", "addmm", "convolution", "groups", "transposed", "derivative"],
    )
    def test_has_the_multiplications_that_torch_counts(self, f):
        class Counted(TorchDispatchMode):
            total = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                given = [x for x in args if isinstance(x, torch.Tensor)]
                made = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
                self.total += multiplications(func, given, made, args)
                return result

        x = torch.ones(1024)
        with FlopCounterMode(display=False) as theirs:
            f(x)
        with Counted() as ours:
            f(x)
        assert 2 * ours.total == theirs.get_total_flops() > 0

    def test_grows_with_chunks_and_not_with_views(self):
        x = torch.zeros(64, 1000)
        parts = [counted(lambda x, n=n: [(p + 1).sum() for p in x.chunk(n)], x).work for n in (1, 4, 16)]
        assert parts == sorted(parts) and parts[2] > 1.5 * parts[0]
        assert counted(lambda x: x.view(100, 640).exp(), x).work < counted(lambda x: x.exp(), x).work + CALL
