"""Whole models against the plain loop; where the samples lie in them; what mixes samples; what is left behind."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import diag_ggn
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.laws import assert_every_path_equals_the_loop
from tests.modules import MODELS
from tests.strategies import SIZES, Numbers

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
EXACT = 1e-10


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_path_equals_the_loop(model, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(MODELS[model]), device, dtype, drawn=True)


class TestSampleAxis:
    """It is found wherever it is, and an axis that happens to be as long is not taken for it."""

    @given(n=SIZES, steps=SIZES)
    def test_time_first(self, n, steps, device, dtype):
        rand = Numbers()

        def f(params, x):  # [T, N, 3] -> [T, N, 2]
            return torch.cumsum(x, 0).tanh() @ params["w"] + params["b"]

        params = {"w": rand(3, 2), "b": rand(2)}
        args = [x.to(device) for x in (rand(steps, n, 3), rand(steps, n, 2))]
        params = {name: p.to(device) for name, p in params.items()}
        expected = dense_diag_ggn(f, F.mse_loss)(params, *args)
        assert_trees_close(diag_ggn(f, F.mse_loss, in_dims=1, out_dims=1)(params, *args), expected, EXACT)
        assert_trees_close(diag_ggn(f, F.mse_loss, in_dims=-2, out_dims=-2)(params, *args), expected, EXACT)

    def test_an_axis_of_the_same_length_is_not_taken_for_it(self):
        w, x, y = torch.ones(3, 2), torch.ones(4, 4, 3), torch.ones(4, 4, 2)
        with pytest.raises(ArgumentError, match="samples along axis 1, not 0; pass out_dims"):
            diag_ggn(lambda w, x: x @ w, F.mse_loss, in_dims=1)(w, x, y)
