"""Residual blocks that run backwards with a bit for each entry: to the bit, and as the plain network in the mean."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import invertible_checkpoint, with_log_det
from invfunc.errors import ArgumentError, ArgumentTypeError, RangeError
from invfunc.pairs import Grid, bdia, drift
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

WEIGHTS = [Numbers(i)(6, 6) / 3 for i in range(4)]


def layer(x, w):
    return torch.tanh(x @ w)


def plus(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def start(grid, n=5):
    return grid.enter((Numbers(7)(n, 6), Numbers(8)(n, 6)))


@pytest.mark.quick
class TestBits:
    @settings(max_examples=12)
    @given(st.data())
    def test_every_one_comes_back(self, data):
        """Of any numbers of the grid, negative and odd ones too, at any fraction and for either gamma."""
        dtype, count = data.draw(st.sampled_from([(torch.float32, 24), (torch.float64, 53)]))
        fraction, shape = data.draw(st.integers(0, 12)), data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        grid, largest = Grid(fraction, dtype), 2 ** (count - 4)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        units = [torch.randint(-largest, largest, shape, generator=generator) for _ in "wx"]
        state = tuple(u.to(dtype) * 2.0**-fraction for u in units)
        own = data.draw(st.sampled_from([(True,), (False,), (plus(shape[0], seed=fraction),)]))
        pair = bdia(torch.sin, grid)
        y, bits = pair.forward(*pair.shared, state, own)
        assert_trees_close(pair.inverse(*pair.shared, y, bits, own), state, 0)
        assert bits.dtype == torch.uint8 and bits.nbytes == -(-state[0].numel() // 8)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_drifts(self, dtype):
        grid = Grid(16, dtype)
        steps = [(plus(5, seed=i), w.to(dtype) / 4) for i, w in enumerate(WEIGHTS * 25)]
        assert drift(bdia(layer, grid), start(grid), steps) == [0.0] * 100


class TestMean:
    def test_of_both_signs_is_the_plain_block(self):
        """And y is the formula, up to the unit of the grid."""
        grid = Grid(30, torch.float64)
        w, x = start(grid)
        both = [bdia(layer, grid)((w, x), (sign, WEIGHTS[0]))[1] for sign in (True, False)]
        assert_trees_close(sum(both) / 2, x + layer(x, WEIGHTS[0]), 2.0**-28)
        for gamma, y in zip((0.5, -0.5), both, strict=True):
            assert_trees_close(y, gamma * w + (1 - gamma) * x + (1 + gamma) * layer(x, WEIGHTS[0]), 2.0**-28)

    def test_signs_are_of_samples(self):
        grid, signs = Grid(), torch.tensor([True, False, True, True, False])
        state, pair = start(grid), bdia(layer, grid)
        y = pair(state, (signs, WEIGHTS[0].float()))[1]
        each = [pair(state, (bool(sign), WEIGHTS[0].float()))[1][n] for n, sign in enumerate(signs)]
        assert_trees_close(y, torch.stack(each), 1e-6)


class TestGradient:
    GRID = Grid(30, torch.float64)

    def loss(self, step, x, weights, signs):
        state = self.GRID.enter((x, x + layer(x, weights[0])))
        for i, w in enumerate(weights[1:]):
            state = step(state, (signs[i], w))
        return state[1].sin().sum()

    def test_f_is_evaluated_twice_and_a_bit_an_entry_is_kept(self):
        calls, peaks = [], []

        def counted(x, w):
            calls.append(1)
            return layer(x, w)

        grid, w = Grid(), WEIGHTS[0].float()
        state = start(grid, 4000)
        for steps in (8, 16):
            calls.clear()
            leaf, signs = w.clone().requires_grad_(), [plus(4000, seed=i) for i in range(steps)]
            block = invertible_checkpoint(bdia(counted, grid))
            with nothing_collected(), Meter() as meter:
                y = tuple(t * 1 for t in state)
                for sign in signs:
                    y = block(y, (sign, leaf))
                y[1].sum().backward()
                del y
                peaks.append(meter.peak())
            assert len(calls) == 2 * steps
        assert peaks[1] - peaks[0] < 1.05 * 8 * state[0].numel() / 8


X = torch.zeros(2, 3)
PAIR = bdia(torch.sin)
REFUSED = [
    (lambda: bdia(torch.sin, 16), r"^bdia\(sin, grid=16\): grid is a Grid"),
    (lambda: PAIR((X, X)), r"^bdia\(sin\): the second argument has to be \(plus, p\).*is NoneType"),
    (
        lambda: PAIR((X, X), (0.5,)),
        r"plus is of torch.float32 and shape \[\], but has a boolean for .* torch.rand\(N\) < 0.5, or one",
    ),
    (lambda: PAIR((X, X), (plus(3),)), r"torch.bool and shape \[3\], but has a boolean for each.*\[2, 3\], torch"),
    (lambda: PAIR((X + 0.3, X), (True,)), "not on the grid"),
    (lambda: PAIR((X - 100.0, X + 200), (False,)), "leave the range"),
    (lambda: PAIR((X.double(), X), (True,)), r"a state of torch.float64 is not on the grid"),
    (lambda: with_log_det(PAIR), "has no log_det"),
]


@pytest.mark.parametrize(("fn", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_what_is_refused(fn, reason):
    with pytest.raises((ArgumentError, ArgumentTypeError, RangeError), match=reason):
        fn()
