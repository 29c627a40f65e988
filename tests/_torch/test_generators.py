"""Numbers without a pattern that are the same in each call."""

import pytest
import torch

from invfunc._torch.generators import uniform


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
