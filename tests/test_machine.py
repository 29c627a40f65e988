"""A little of `python -m tests.machine`, with the same programs each time."""

import pytest
from hypothesis import HealthCheck, settings

from tests.machine.compositions import Compositions

TestCompositions = pytest.mark.slow(Compositions.TestCase)
TestCompositions.settings = settings(
    max_examples=25, stateful_step_count=8, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
