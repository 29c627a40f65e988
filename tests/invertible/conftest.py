"""What the laws of invertible functions share."""

from functools import partial

import pytest

from tests.invertible_same import assert_same


@pytest.fixture
def same(dtype, device):
    """`assert_same` where the laws are tested."""
    return partial(assert_same, dtype, device)
