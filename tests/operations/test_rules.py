"""Fast path == generic path == the plain loop, for every rule and option and every way to read a parameter."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import batch_grad, diag_ggn, tree
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import forms, moves, strategies
from tests import layer_cases as cases
from tests.laws import OF_LOSSES, RTOL, assert_every_path_equals_the_loop, composed, squares
from tests.strategies import Numbers
from tests.torch_layers import LAYERS, refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel",
    "ignore:There is a performance drop",  # vmap of what has no batching rule in torch
    "ignore:Support for mismatched key_padding_mask and attn_mask is deprecated",
    "ignore:Support for mismatched src_key_padding_mask and src_mask is deprecated",
    "ignore:LSTM with projections is not supported with oneDNN",
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


# Every layer with every option against the plain loop; what mixes samples is refused by name


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=3)
@given(data=st.data())
def test_every_path_equals_the_loop_layers(layer, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(LAYERS[layer]), device, dtype, drawn=True)


@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")], ids=["Embedding", "Bag"])
@pytest.mark.parametrize("statistic", OF_LOSSES)
def test_sparse_gradients_have_the_same_shares(statistic, kind, device, dtype):
    dense, sparse = (cases.case(kind(3, 2, sparse=sparse), Numbers().below(3, 4, 2)) for sparse in (False, True))
    make, target = OF_LOSSES[statistic].make, dense.f(dense.params, *dense.inputs).cos()
    args = moved((dense.params, *dense.inputs, target), dtype, device)
    found, expected = (make(composed(case.f, squares))(*args) for case in (sparse, dense))
    assert_trees_close(found, expected, RTOL[dtype])


@pytest.mark.parametrize("name", refused())
def test_what_mixes_samples_is_refused_by_name(name):
    operation, case = refused()[name]
    f, before = case.f, tree.map_tensors(torch.clone, case.params)
    options: dict[str, Any] = {"in_dims": (*case.in_dims, 0)}
    target = f(tree.map_tensors(torch.clone, case.params), *case.inputs)
    for transform in (
        batch_grad(composed(f, squares), **options),
        batch_grad(composed(f, F.mse_loss), **options),
        diag_ggn(f, F.mse_loss, **options),
    ):
        with pytest.raises(SampleAxisError, match=f"`({operation})`"):
            transform(case.params, *case.inputs, target)
    assert all(map(torch.equal, tree.leaves(case.params), tree.leaves(before)))  # max_norm writes into the weight
