"""What a call will take, and the search for the fewest chunks: sizes, buffers of kernels, trials."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import thresholds
from invfunc.budget.footprint import MARGIN, SLACK, Footprint, footprint
from invfunc.budget.scratch import PRODUCT
from invfunc.budget.search import search
from invfunc.budget.size import free, in_bytes, size_of, told


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

    def test_has_the_result_and_no_arguments(self):
        found = counted(lambda x: (x.exp(), x.view(-1)), torch.zeros(10, 100))
        assert found.counted == 4000 and found.results == 8000
        assert found.peak == int(MARGIN * 4000) + SLACK

    def test_of_what_is_on_no_device_is_nothing(self):
        assert counted(lambda x: torch.empty(10**6, device="meta"), torch.zeros(1)).counted == 0

    def test_has_what_libraries_keep(self):
        found = counted(lambda x: x @ x, torch.zeros(1000, 1000))
        assert found.counted == 4 * 10**6 + PRODUCT * torch.get_num_threads()
        many = counted(lambda x: F.conv2d(x, x.new_zeros(16, 16, 3, 3)), torch.zeros(4, 16, 32, 32))
        assert many.at == "convolution" and many.counted > 2 * 4 * 16 * 30 * 30 * 4

    def test_of_double_convolutions_has_all_patches(self):
        x = torch.zeros(8, 4, 16, 16, dtype=torch.float64)
        assert counted(lambda x: F.conv2d(x, x.new_zeros(4, 4, 5, 5)), x).counted > 8 * 4 * 25 * 12 * 12 * 8

    def test_changes_nothing(self):
        x, state = torch.ones(3), torch.random.get_rng_state()
        counted(lambda x: x.mul_(2) + torch.rand(3), x)
        assert torch.equal(x, torch.ones(3)) and torch.equal(state, torch.random.get_rng_state())


def trial(peak, work=1):
    found = Footprint()
    found.counted, found.work = int((peak - SLACK) / MARGIN), work
    return found


@pytest.mark.quick
class TestSearch:
    def measure(self, peak, seen=None):
        def measured(chunks):
            if seen is not None:
                seen.append(dict(chunks))
            return trial(SLACK + peak(chunks), sum(chunks.values()))

        return measured

    def test_takes_the_call_whole_where_it_fits(self):
        found, _ = search(self.measure(lambda c: 10**6), {"samples": 8}, SLACK + 10**6)
        assert found is not None and found.chunks == {}

    def test_takes_few_chunks(self):
        found, _ = search(self.measure(lambda c: 64 * 10**6 // c.get("samples", 1)), {"samples": 64}, SLACK + 8 * 10**6)
        assert found is not None and 8 <= found.chunks["samples"] <= 10

    def test_divides_one_axis_after_the_other(self):
        def peak(c):
            return 10**6 + 10**7 // c.get("samples", 1) + 10**7 // c.get("outputs", 1)

        found, _ = search(self.measure(peak), {"samples": 4, "outputs": None}, SLACK + 6 * 10**6)
        assert found is not None and found.chunks["samples"] == 4 and found.chunks["outputs"] > 1

    def test_finds_the_least(self):
        seen: list = []
        found, least = search(self.measure(lambda c: 10**7 // c.get("samples", 1), seen), {"samples": 8}, 1)
        assert found is None and least.chunks == {"samples": 8}
        assert search(self.measure(lambda c: 10**7 // c.get("samples", 1)), {"samples": 8}, least.peak)[0] is not None

    def test_ends(self):
        seen: list = []
        search(self.measure(lambda c: 10**8 // sum(c.values(), 1), seen), {"samples": 10**6, "outputs": None}, 1)
        assert all(c.get("samples", 1) * c.get("outputs", 1) <= thresholds.TRIED_PASSES for c in seen)
        seen.clear()
        search(self.measure(lambda c: 10**8, seen), {"samples": 10**6, "outputs": None}, 1)
        assert len(seen) == 5

    def test_leaves_out_what_cannot_be_divided(self):
        def measured(chunks):
            return None if "samples" in chunks else trial(SLACK + 10**7 // chunks.get("params", 1))

        found, _ = search(measured, {"samples": 8, "params": 4}, SLACK + 3 * 10**6)
        assert found is not None and found.chunks == {"params": 4}
