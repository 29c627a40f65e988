"""Parts that do the same are counted once: the count is that of all parts, or a little more."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import chunked
from invfunc._alike import added, alike
from invfunc.budget.footprint import Footprint, footprint
from invfunc.testing.laws.rows import CASES
from tests.strategies import Numbers

N = 5
ROWS = (
    *("diag_ggn, of a loss", "sqrt_ggn drawn, of a model and its loss", "variance, of a loss", "batch_grad, of a loss"),
    *("kfac, of a model and its loss", "ekfac, of a model and its loss", "clipped_grad, of a loss", "gram, of a loss"),
)


def model(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["v"])


def batch():
    rand = Numbers()
    return {"w": rand(60, 3), "b": rand(60), "v": rand(6, 60)}, rand(N, 3), torch.arange(N) % 3


class Flat(Footprint):
    """Counts without holes between tensors, too."""

    flat = 0

    def use(self, size, at=""):
        self.flat = max(self.flat, size + self.kept)
        super().use(size, at)


def both(f, args, drawn=()):
    """What a call takes, counted part by part, and with those that are alike once; without holes between tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("invfunc.budget.footprint.in_pages", lambda size: size)
        with patch.context() as within:
            within.setattr("invfunc.budget.footprint.counted", lambda _: nullcontext())
            within.setattr("invfunc.budget.footprint.Footprint", Flat)
            each = footprint(f, args, {}, drawn)
        assert each.counted <= footprint(f, args, {}, drawn).counted
        each.counted = each.flat
        patch.setattr("invfunc.budget.footprint.HEAP", 0)
        return each, footprint(f, args, {}, drawn)


def check(each, once, loose=1.0):
    assert each.counted <= once.counted <= loose * each.counted
    assert each.results == once.results


class TestCounts:
    @pytest.mark.slow
    @pytest.mark.parametrize("case", ROWS)
    def test_of_statistics_are_never_below(self, case):
        row, form = CASES[case]
        t = row.of(model, F.cross_entropy, form)
        for axis in t.axes:
            each, once = both(chunked(t, 4, over=axis), batch(), [d.generator for d in t.drawings])
            check(each, once, loose=1.2)
            assert 0.9 * each.work <= once.work <= (1 + 1e-9) * each.work

    @pytest.mark.quick
    @given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["cat", "sum"]))
    def test_of_plain_functions_are_those_of_all_parts(self, length, n, fold):
        f = chunked(lambda p, x: (p * x[:, None] * x[:, :, None]).exp().sum(0 if fold == "sum" else 1), n, fold=fold)
        check(*both(f, (torch.ones(20), torch.zeros(length, 20))), loose=1.0 if length % n == 0 else 1.2)

    @pytest.mark.quick
    @given(
        st.lists(st.integers(1, 3), min_size=1, max_size=9),
        st.lists(st.sampled_from(["temporary", "append", "sum", "cat", "retain"]), max_size=5),
    )
    def test_of_what_parts_do_are_never_below(self, sizes, steps):
        def f(x):
            kept, whole, sums = [], [x[:0]], [x[0]]

            def joined(part):
                whole[0] = torch.cat([whole[0], part])

            def summed(part):
                sums[0] = sums[0] + part

            for size in alike("parts", sizes, lambda size: size):
                part = x[:size].exp()
                for step in steps:
                    if step == "temporary":
                        part = (part + 1).cos()
                    elif step == "retain":
                        kept.append(part.sin())
                    elif step == "append":
                        added("parts", kept.append, part)
                    else:
                        added("parts", summed if step == "sum" else joined, part.sum(0) if step == "sum" else part)
                del part
            return torch.cat([*whole, sums[0][None]]), kept

        each, once = both(f, (torch.zeros(3, 50),))
        assert once.counted >= each.counted
        if "retain" not in steps:  # which has its memory, but not its tensors
            assert once.results == each.results and once.counted <= 1.5 * each.counted


@pytest.mark.quick
def test_parts_that_are_alike_run_once():
    ran = []

    def f(x):
        for size in alike("parts", [2, 3, 2, 3, 2, 3, 2, 3], lambda size: size):
            ran.append(size)
            x[:size].exp()

    footprint(f, (torch.zeros(3),), {}, [])
    assert ran == [2, 3, 2]
    f(torch.zeros(3))
    assert ran[3:] == [2, 3] * 4
