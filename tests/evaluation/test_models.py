"""Whole models against the plain loop; where the samples lie in them; what mixes samples; what is left behind."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import batch_grad, diag_ggn, functional, sum_grad_squared, variance
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.laws import assert_every_path_equals_the_loop, composed
from tests.modules import MODELS, Rectified
from tests.strategies import SIZES, Case, Numbers

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:enable_nested_tensor")
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

    @given(n=SIZES, classes=st.integers(2, 4))
    def test_samples_last(self, n, classes):
        rand = Numbers()
        w, x, label = rand(classes, 3), rand(3, n), rand.below(classes, n)

        def f(w, x):  # [3, N] -> [C, N]
            return (w @ x).sin()

        def loss(z, label):
            return F.cross_entropy(z.mT, label)

        found = diag_ggn(f, loss, in_dims=(1, 0), out_dims=1)(w, x, label)
        assert_trees_close(found, dense_diag_ggn(f, loss)(w, x, label), EXACT)

    def test_shared_arguments(self):
        rand = Numbers()
        w, x, shared, y = rand(3, 2), rand(4, 3), rand(4, 3), rand(4, 2)
        found = diag_ggn(lambda w, x, s: (x * s.sum()) @ w, F.mse_loss, in_dims=(0, None, 0))(w, x, shared, y)
        assert_trees_close(found, dense_diag_ggn(lambda w, x: (x * shared.sum()) @ w, F.mse_loss)(w, x, y), EXACT)

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


def test_mixing_data_alone_is_no_mixing():
    """What is computed from the inputs alone belongs to the sample into whose output it enters."""
    w, x, y = TestMixedSamples.args

    def standardised(x):
        return (x - x.mean(0)) / x.std(0)

    found = batch_grad(lambda w, x, y: (standardised(x) @ w - y).square().mean())(w, x, y)
    expected = batch_grad(lambda w, x, y: (x @ w - y).square().mean())(w, standardised(x), y)
    assert_trees_close(found, expected, EXACT)


class Cube(torch.autograd.Function):
    """An operation that only autograd sees, w^3 x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w, x):
        return w**3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        w, x = ctx.saved_tensors
        return (grad * 3 * w**2 * x).sum_to_size(w.shape), grad * w**3


UNKNOWN = {
    "einsum of a diagonal": lambda w, x: torch.einsum("ni,ii,io->no", x, w @ w.mT, w),
    "custom Function": lambda w, x: Cube.apply(w.sum(1), x),
}


@pytest.mark.parametrize("operation", UNKNOWN.values(), ids=UNKNOWN)
class TestOperationWithoutRule:
    """Functions are evaluated one sample at a time."""

    @settings(max_examples=3)
    @given(n=SIZES)
    def test_every_path_equals_the_loop(self, operation, n, device, dtype):
        rand = Numbers()
        case = Case("f", operation, rand(3, 2), (rand(n, 3),), (0,))
        assert_every_path_equals_the_loop(case, device, dtype, scalar=False)

    def test_of_a_scalar(self, operation):
        w, x = Numbers()(3, 2), Numbers(1)(4, 3)
        each = loop_batch_grad(lambda w, x: operation(w, x).square().flatten(1).mean(1) / 4)(w, x)
        assert_trees_close(batch_grad(lambda w, x: operation(w, x).square().mean())(w, x), each, 1e-10)


class Refused(Cube):
    """What torch.vmap refuses."""

    generate_vmap_rule = False


def test_what_vmap_refuses_is_evaluated_one_by_one():
    w, x, y = torch.ones(3), torch.rand(4, 3), torch.ones(4, 3)

    def losses(w, x):
        return Refused.apply(w, x).square().sum(1)

    assert_trees_close(batch_grad(losses)(w, x), loop_batch_grad(losses)(w, x), 1e-6)
    assert_trees_close(
        diag_ggn(Refused.apply, F.mse_loss)(w, x, y), dense_diag_ggn(Refused.apply, F.mse_loss)(w, x, y), 1e-6
    )


class TestNothingIsLeftBehind:
    """Models are read, not touched, and do not know of each other."""

    def models(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shared = nn.Linear(3, 3)
            one = nn.Sequential(shared, nn.ReLU(inplace=True), nn.BatchNorm1d(3).eval(), Rectified(3, 2))
            other = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 2))
        return one.double(), other.double()

    def everything(self, *models):
        """Whatever a module, its parameters and its buffers have: attributes, hooks, numbers, gradients, versions."""
        found = []
        for module in (m for model in models for m in model.modules()):
            found.append({name: (type(v), dict(v) if isinstance(v, dict) else v) for name, v in vars(module).items()})
            for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                found.append((id(x), x.tolist(), x.grad, x._version, x.requires_grad, dict(vars(x)), x._backward_hooks))
        return str(found)

    def test_module_and_inputs(self):
        one, other = self.models()
        x, y = Numbers()(4, 3).requires_grad_(), Numbers(1)(4, 2)
        before = self.everything(one, other)
        alone = []
        for model in (one, other):
            f, params = functional(model)
            alone.append((diag_ggn(f, F.mse_loss)(params, x, y), dense_diag_ggn(f, F.mse_loss)(params, x, y)))
        assert self.everything(one, other) == before
        assert x.grad is None and x._version == 0 and not x._backward_hooks
        for found, expected in alone:
            assert_trees_close(found, expected, EXACT)

    def test_two_models_at_once(self):
        (f, p), (g, q) = map(functional, self.models())
        x, y = Numbers()(4, 3), Numbers(1)(4, 2)

        def both(params, x):
            return f(params["f"], x) * g(params["g"], x)

        params = {"f": p, "g": q}
        found = diag_ggn(both, F.mse_loss)(params, x, y)
        assert_trees_close(found, dense_diag_ggn(both, F.mse_loss)(params, x, y), EXACT)


class TestParametersThatAreExpandedOverTheSamples:
    """They have an entry for each sample, and their shares are the sums of what each entry gets."""

    @given(n=st.integers(1, 3), reads=st.sampled_from(["query", "key and value"]))
    def test_in_attention(self, n, reads, device, dtype):
        w, x = Numbers()(1, 2, 3, 4), Numbers(1)(n, 2, 3, 4)

        def f(w, x):
            learned = w.expand(len(x), -1, -1, -1)
            if reads == "query":
                return F.scaled_dot_product_attention(learned, x, x.sin())
            return F.scaled_dot_product_attention(x, learned, learned.sin())

        assert_every_path_equals_the_loop(Case(reads, f, w, (x,), (0,)), device, dtype)

    @given(n=st.integers(1, 3))
    def test_in_grid_sample(self, n, device, dtype):
        image, grid = Numbers()(1, 2, 4, 4), Numbers(1)(n, 3, 3, 2).tanh()

        def f(image, grid):
            return F.grid_sample(image.expand(len(grid), -1, -1, -1), grid, align_corners=False)

        assert_every_path_equals_the_loop(Case("grid_sample", f, image, (grid,), (0,)), device, dtype)
