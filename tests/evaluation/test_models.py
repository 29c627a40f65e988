"""Whole models against the plain loop; where the samples lie in them; what mixes samples; what is left behind."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, sum_grad_squared, variance
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.laws import assert_every_path_equals_the_loop, composed
from tests.modules import MODELS
from tests.strategies import SIZES, Numbers

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
EXACT = 1e-10


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_path_equals_the_loop(model, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(MODELS[model]), device, dtype, drawn=True)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss], ids=["cross_entropy", "mse_loss"])
def test_autocast(loss, device):
    """In bfloat16 inside, with results in the precision of the parameters."""
    w, v, x = (y.float().to(device) for y in (Numbers()(4, 1, 2, 2), Numbers(1)(3, 16), Numbers(2)(5, 1, 3, 3)))
    target = (Numbers(3).below(3, 5) if loss is F.cross_entropy else Numbers(3)(5, 3).float()).to(device)

    def f(params, x):
        return F.linear(F.conv2d(x, params[0]).sigmoid().flatten(1), params[1]).float()

    def low(params, x):
        with torch.autocast(device.type, torch.bfloat16):
            return f(params, x)

    expected = dense_diag_ggn(f, loss)((w, v), x, target)
    for found in diag_ggn(low, loss), diag_ggn(composed(low, loss)):
        assert_trees_close(found((w, v), x, target), expected, 5e-2)
        assert all(g.dtype == torch.float32 for g in found((w, v), x, target))


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


MIXING = {
    "batch_norm": ("batch_norm", lambda z: F.batch_norm(z, None, None, training=True)),
    "contrastive": ("matmul", lambda z: (z @ z.T)[:, :2]),
    "softmax over the batch": ("softmax", lambda z: z.softmax(0)),
    "centred": ("sub", lambda z: z - z.mean(0)),
    "standardised": ("std", lambda z: z / z.std(0)),
    "largest": ("amax", lambda z: z - z.amax(0)),
    "sorted": ("sort", lambda z: z.sort(0).values),
    "accumulated": ("cumsum", lambda z: z.cumsum(0)),
    "flipped": ("add", lambda z: z + z.flip(0)),
    "permuted": ("add", lambda z: z + z[[2, 0, 1]]),
    "neighbours": ("sub", lambda z: torch.cat([z[:1], z[1:] - z[:-1]])),
    "the first one": ("mul", lambda z: z * z[:1]),
    "by a mask": ("mul", lambda z: z * z[torch.tensor([True, False, True])].sum(0)),
    "in triangles": ("cumsum", lambda z: z[torch.tensor([0, 0, 1, 1, 2, 2])].cumsum(0)[::2]),
    "covariance": ("einsum", lambda z: torch.einsum("ni,nj,mj->mi", z, z, z)),
    "reshaped": ("reshape", lambda z: z.reshape(2, 3).T),
}


@pytest.mark.parametrize("operation, mix", MIXING.values(), ids=MIXING)
class TestMixedSamples:
    """An error that names the operation, whatever the loss returns."""

    args = Numbers()(4, 2), Numbers(1)(3, 4), Numbers(2)(3, 2)

    @pytest.mark.parametrize("reduce", [torch.mean, lambda z: z.sum(1)], ids=["mean", "[N]"])
    def test_first_order(self, operation, mix, reduce):
        def loss(w, x, y):
            return reduce((mix(x @ w) - y).square())

        for transform in (batch_grad, sum_grad_squared, variance):
            with pytest.raises(SampleAxisError, match=f"`_?{operation}_?`"):
                transform(loss)(*self.args)

    def test_ggn(self, operation, mix):
        with pytest.raises(SampleAxisError, match=f"`_?{operation}_?`"):
            diag_ggn(lambda w, x: mix(x @ w), F.mse_loss)(*self.args)
        with pytest.raises(SampleAxisError, match=f"`_?{operation}_?`"):
            diag_ggn(lambda w, x, y: F.mse_loss(mix(x @ w), y))(*self.args)
