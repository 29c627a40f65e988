"""Numbers without a pattern that are the same in each call."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invfunc._torch.generators import scattered, uniform


@pytest.mark.quick
@given(st.integers(1, 5000), st.integers(0, 100))
def test_scattered_numbers_are_different_ones_and_the_same_in_each_call(count, seed):
    found = scattered(count, seed)
    assert found.unique().numel() == count and 0 <= found.min() and found.max() < 2**32
    assert torch.equal(found, scattered(count, seed)) and torch.equal(found[: count // 2], scattered(count // 2, seed))


@pytest.mark.quick
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_scattered_numbers_have_no_pattern(seed):
    """As even ones: mean, spread, and no correlation with their neighbours, their places or those of another seed."""
    x = uniform(10**5, seed)
    assert abs(x.mean()) < 0.01 and abs(x.square().mean() - 1 / 3) < 0.01
    others = torch.stack([x, x.roll(1), torch.arange(10**5).float(), scattered(10**5, seed + 1) / 2**31])
    assert (torch.corrcoef(others)[0, 1:].abs() < 0.02).all()


@pytest.mark.quick
def test_numbers_are_the_same_whatever_the_default_dtype():
    """Half precision as the default: 2**32 is infinite in it."""
    wanted, before = uniform(1000, 1), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        found = uniform(1000, 1)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, wanted) and found.abs().max() <= 1
