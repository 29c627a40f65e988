"""What a reconstruction loses is told of: small beside all of x, beside entries that are not numbers, or at a kink."""

import pytest
import torch
from torch import nn

from invfunc import (
    InverseError,
    additive_coupling,
    invertible_checkpoint,
    momentum,
)
from tests.recomputation.test_probe import WIDE, X, backward, deep, warned
from tests.strategies import Numbers

WEIGHT = Numbers(1)(5, 5)


class TestHidden:
    """Drift that is small beside all of x, or that stands beside what is no number."""

    @staticmethod
    def told(blocks, x):
        """What is told of, in a warning or in an error."""
        try:
            return " ".join(warned(lambda: backward(*blocks, x=x)))
        except InverseError as error:
            return str(error)

    @staticmethod
    def carrying(value, gamma=0.7):
        """Steps of a drifting recurrence, which carry an entry along."""
        step = momentum(lambda x: torch.tanh(x @ WEIGHT.to(x.dtype)), gamma=gamma)

        def f(x):
            return step(x[:2]) + x[2:]

        def f_inv(y):
            return step.inverse(*step.shared, y[:2]) + y[2:]

        carried = torch.zeros(5)
        carried[1] = value
        return [invertible_checkpoint(f, f_inv) for _ in range(40)], (X.float(), 0 * X.float(), carried)

    @pytest.mark.parametrize("value", [0.0, float("-inf"), float("inf"), float("nan")])
    def test_what_is_no_number_hides_nothing(self, value):
        blocks, x = self.carrying(value)
        assert "rounding errors drift" in self.told(blocks, x)

    @pytest.mark.parametrize("large", [1e3, 1e6, -1e9])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_large_channel_hides_nothing(self, large, dtype):
        step = momentum(lambda x: torch.tanh((x / scale) @ WEIGHT.to(dtype)) * moved, gamma=0.6)
        scale = torch.tensor([large, 1, 1, 1, 1], dtype=dtype)
        moved = torch.tensor([0, 1, 1, 1, 1], dtype=dtype)
        blocks = [invertible_checkpoint(step) for _ in range(24 if dtype is torch.float32 else 40)]
        x = (X.to(dtype) * scale, 0 * X.to(dtype))
        told = self.told(blocks, x)
        assert told
        if abs(large) * torch.finfo(dtype).eps ** 0.5 > 10:  # so that it is below what is told of all of x
            assert "small entries of x" in told

    @pytest.mark.parametrize("wrong", [1.0, float("nan"), 1e-2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_sample_of_many_is_not_missed(self, dtype, wrong):
        """Where the inverse fails for one sample, which is larger than the others, as an outlier is."""
        x = Numbers()(300, 64).to(dtype)
        x[217] *= 30

        def back(y):
            return torch.where(torch.arange(300)[:, None] == 217, (y / 2) * (1 + wrong), y / 2)

        block = invertible_checkpoint(lambda x: x * 2 + 0 * x.sin(), back)
        assert all(self.told([invertible_checkpoint(block.pair)], x) for _ in range(8))

    def test_a_large_channel_beside_what_comes_back_is_not_told_of(self):
        blocks, x = deep(20, torch.float32), WIDE.float().clone()
        x[:, 0] = 1e6
        calm = invertible_checkpoint(additive_coupling(torch.tanh, torch.tanh, split_dim=1))
        for dtype in (torch.float32, torch.float64):
            mixed = torch.cat([x[:, :1], WIDE.float()[:, :3]], 1).to(dtype)
            assert not warned(lambda mixed=mixed, dtype=dtype: backward(calm, calm, x=mixed, dtype=dtype))
        assert not warned(lambda: backward(*blocks, x=WIDE.float()))


class TestKinks:
    """Zeros come back with a rounding, and at a kink that is another gradient."""

    @staticmethod
    def told(first, bias, dtype):
        stem = nn.Sequential(nn.Linear(8, 32), first).to(dtype)
        parts = half(0, bias).to(dtype), half(1, bias).to(dtype)
        blocks = [invertible_checkpoint(additive_coupling(*parts, split_dim=1)) for _ in range(3)]
        x = stem(Numbers()(64, 8).to(dtype))
        for block in blocks:
            x = block(x)
        return warned(x.square().sum().backward)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_are_told_of(self, dtype):
        told = self.told(nn.ReLU(), 0.0, dtype)
        assert told and all("exactly 0 at the kink of `relu`" in text for text in told)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("first, bias", [(nn.Tanh(), 0.0), (nn.ReLU(), 0.1)])
    def test_without_zeros_there_are_none(self, first, bias, dtype):
        assert not self.told(first, bias, dtype)


def half(seed, bias):
    """A pre-activation unit: a bias, a relu and a linear map."""
    torch.manual_seed(seed)
    shift = nn.BatchNorm1d(16).eval()
    nn.init.constant_(shift.bias, bias)
    return nn.Sequential(shift, nn.ReLU(), nn.Linear(16, 16))
