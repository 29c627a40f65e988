"""Fast path == generic path == the plain loop, for every rule and option and every way to read a parameter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc.errors import SampleAxisError
from tests import forms, moves, strategies
from tests.laws import assert_every_path_equals_the_loop

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop",  # vmap of what has no batching rule in torch
    "ignore:Using padding='same' with even kernel",
)


REFUSED = "einsum with a constant for each sample", "x @ w for each sample"
"""Products with parameters or constants that have an entry for each sample."""


@pytest.mark.parametrize("form", [form for form in forms.PRODUCTS if str(form) in REFUSED], ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_products_with_an_entry_for_each_sample_are_right_or_refused(form, data, device, dtype):
    try:
        assert_every_path_equals_the_loop(data.draw(strategies.formed(form)), device, dtype, drawn=True)
    except SampleAxisError as error:
        assert "an operation in which parameters have an entry for each sample" in str(error)


def followed(several):
    return [form for form in several if str(form) not in REFUSED]


@pytest.mark.parametrize(
    "form", followed(forms.PRODUCTS + forms.ELEMENTWISE + forms.OTHERS + forms.TIED + moves.MEETINGS), ids=str
)
@settings(max_examples=3)
@given(data=st.data())
def test_every_path_equals_the_loop(form, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(form)), device, dtype, drawn=True)


@pytest.mark.parametrize("move", followed(forms.MOVES + moves.SELECTIONS + moves.COMPUTATIONS), ids=str)
@settings(max_examples=2)
@given(data=st.data())
def test_samples_are_followed(move, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(move)), device, dtype, drawn=True)


@pytest.mark.quick
@given(case=strategies.linears())
def test_linear(case, device, dtype):
    try:
        assert_every_path_equals_the_loop(case, device, dtype, drawn=True)
    except SampleAxisError as error:
        assert "linear of a vector" in str(error)


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
