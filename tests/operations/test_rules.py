"""Fast path == generic path == the plain loop, for every rule and option and every way to read a parameter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forms, moves, strategies
from tests.laws import assert_every_path_equals_the_loop

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop",  # vmap of what has no batching rule in torch
    "ignore:Using padding='same' with even kernel",
)


@pytest.mark.parametrize(
    "form", forms.PRODUCTS + forms.ELEMENTWISE + forms.OTHERS + forms.TIED + moves.MEETINGS, ids=str
)
@settings(max_examples=3)
@given(data=st.data())
def test_every_path_equals_the_loop(form, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(form)), device, dtype, drawn=True)


@pytest.mark.parametrize("move", forms.MOVES + moves.SELECTIONS + moves.COMPUTATIONS, ids=str)
@settings(max_examples=2)
@given(data=st.data())
def test_samples_are_followed(move, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(move)), device, dtype, drawn=True)


@pytest.mark.quick
@given(case=strategies.linears())
def test_linear(case, device, dtype):
    assert_every_path_equals_the_loop(case, device, dtype, drawn=True)


@given(case=strategies.matmuls())
def test_matmul(case, device, dtype):
    assert_every_path_equals_the_loop(case, device, dtype, drawn=True)


@pytest.mark.parametrize("d", [1, 2, 3], ids="{}d".format)
@given(data=st.data())
def test_convolution(d, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.convolutions(d)), device, dtype, drawn=True)


@pytest.mark.parametrize("d", [1, 2, 3], ids="{}d".format)
@given(data=st.data())
def test_transposed_convolution(d, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.transposed_convolutions(d)), device, dtype, drawn=True)
