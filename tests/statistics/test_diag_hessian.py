"""diag_hessian, of all and of each sample, against the dense Hessian: networks, layers, models, losses, both forms."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import diag_hessian, outputs, tree
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian, dense_diag_hessian
from invfunc.testing.models import moved
from tests.laws import composed, squares
from tests.networks import LOSSES, networks
from tests.rows import generic, in_blocks
from tests.strategies import Numbers
from tests.torch_layers import LAYERS

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched",
    "ignore:LSTM with projections is not supported with oneDNN",
    "ignore:Using padding='same' with even kernel",
    "ignore:enable_nested_tensor",
)
EXACT, FLOOR = 1e-8, 1e-3
PATHS = {"fast": lambda t: t, "blocks": in_blocks, "generic": generic}


def wave(z, y):
    """Neither convex nor known."""
    return (z.sin() * (z - y) + 0.1 * z.pow(3)).flatten(1).sum(1).mean()


def whole(batch):
    """The sum over the samples."""
    return tree.map_leaves(lambda d: d.sum(0), batch)


@contextmanager
def twice_differentiable():
    """In torch 2.13 fused attention has no second derivative, and that of weight norm is wrong."""

    def weight_norm(v, g, dim=0):
        return v * (g / torch.norm_except_dim(v, 2, dim))

    with sdpa_kernel(SDPBackend.MATH), mock.patch("torch._weight_norm", weight_norm):
        yield


def assert_exact(f, loss, args, path="fast", floor=FLOOR, **options):
    """All of them: of the batch and of each sample, of a model with its loss and of a loss function."""
    on = PATHS[path]
    with twice_differentiable():
        wanted = dense_batch_diag_hessian(f, loss)(*args)
    # a scalar loss that is not known does not say which part of it is of which sample
    marked = composed(f, loss if loss in LOSSES else lambda z, y: loss(outputs(z), y))
    for t in (diag_hessian(f, loss, per_sample=True, **options), diag_hessian(marked, per_sample=True, **options)):
        assert_trees_close(on(t)(*args), wanted, EXACT, floor)
    for t in (diag_hessian(f, loss, **options), diag_hessian(composed(f, loss), **options)):
        assert_trees_close(on(t)(*args), whole(wanted), EXACT, floor)


@settings(max_examples=12)
@given(net=networks(), loss=st.sampled_from([*LOSSES, wave]), path=st.sampled_from(list(PATHS)))
def test_of_any_network(net, loss, path):
    target = LOSSES[1].target if loss is wave else loss.target
    assert_exact(net.f, loss, (net.params, net.x, target(Numbers(1), net.n)), path)


def assert_case_exact(drawn, paths, device, dtype):
    """Some smooth loss of the outputs of each sample, on one path for each form."""
    given = moved((drawn.params, drawn.inputs), torch.float64, torch.device("cpu"))  # cuDNN's have no second
    target = drawn.f(given[0], *given[1]).detach().cos()
    args, options = (given[0], *given[1], target), dict[str, Any](in_dims=(*drawn.in_dims, 0))
    f = composed(drawn.f, squares)
    with twice_differentiable():
        wanted = dense_batch_diag_hessian(f)(*args)
    floor = max(1.0, *(d.abs().max().item() for d in tree.leaves(wanted) if d.numel()))  # of what cancels
    kinds = [
        diag_hessian(f, per_sample=True, **options),
        diag_hessian(drawn.f, lambda z, y: squares(z, y).sum(), **options),
    ]
    for t, expected, path in zip(kinds, [wanted, whole(wanted)], paths, strict=True):
        found = PATHS[path](t)(*moved(args, dtype, device))
        assert_trees_close(found, expected, EXACT if dtype == torch.float64 else 1e-3, FLOOR * floor)


TWICE = [name for name in LAYERS if name != "EmbeddingBag" and "activations" not in name]
"""Layers that have second derivatives in torch."""


@pytest.mark.parametrize("layer", TWICE)
@settings(max_examples=2)
@given(data=st.data())
def test_of_any_layer(layer, data, device, dtype):
    paths = ("fast", "blocks") if len(layer) % 2 else ("generic", "fast")
    assert_case_exact(data.draw(LAYERS[layer]), paths, device, dtype)


def skipping(p, x):
    h = x + (x @ p["w"]).tanh()
    return h + (h @ p["v"]).sigmoid()


def in_series(p, x):
    return ((x @ p["w"]).tanh() @ p["w"]).tanh() @ p["w"] + p["b"]


def in_parallel(p, x):
    return (x @ p["w"]).tanh() * (2 * x @ p["w"].T + p["b"]).sigmoid() + F.linear(x.cos(), p["w"])


def squared(p, x):
    return (x @ (p["w"] * p["w"])).tanh() @ p["v"].square().cumsum(0)


def masked(p, x):
    return (x @ p["w"].tril()).tanh() @ torch.where(p["v"] > 0, p["v"].exp(), p["v"])


def normed(p, x):
    w = p["w"] / p["w"].norm(dim=1, keepdim=True) * p["b"][:, None]
    return F.layer_norm(F.linear(x, w).sigmoid(), (3,), p["b"]) @ p["v"]


def low_rank(p, x):
    return (x @ (p["w"] + p["b"][:, None] @ p["b"][None])).tanh() @ p["v"]


def in_place(p, x):
    h = F.linear(x, p["w"], p["b"])
    h.mul_(2).add_(x)
    return F.linear(F.silu(h, inplace=True), p["v"]).exp_()


def by_einsum(p, x):
    return torch.einsum("ij,nj,kj->nik", p["w"], x, p["v"]).tanh().sum(2) * p["b"].exp()


def between_parameters(p, x):
    """Nonlinear in products of two parameters."""
    return torch.exp(p["b"] * 0.1) * (x @ p["w"]) * (x @ p["v"]).sin() / (1 + p["b"].square())


def looped(p, x):
    h = torch.zeros_like(x)
    for _ in range(3):
        h = (x @ p["w"] + h @ p["v"] + p["b"]).tanh()
    return h


def sample_by_sample(p, x):
    """A weight that is read again, by a copy of it for each sample."""
    return torch.stack([F.linear(F.linear(r, p["w"]).tanh(), p["w"], p["b"]) for r in x])


FUNCTIONS = [skipping, in_series, in_parallel, squared, masked, normed, low_rank, in_place, by_einsum, looped]
FUNCTIONS += [between_parameters, sample_by_sample]


def weights(rand):
    return {"w": rand(3, 3), "v": rand(3, 3), "b": rand(3)}


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_plain_functions(f, path):
    rand = Numbers(5)
    loss = wave if len(f.__name__) % 2 else LOSSES[1]
    assert_exact(f, loss, (weights(rand), rand(3, 3), rand(3, 3)), path)


class TestLosses:
    args = weights(Numbers()), Numbers(1)(4, 3), Numbers(2)(4, 3)

    def test_a_term_of_the_parameters_alone(self):
        """It has a second derivative, too, and no sample."""

        def f(p, x, y):
            return F.mse_loss(skipping(p, x), y) + sum(q.pow(4).sum() for q in tree.leaves(p))

        assert_trees_close(diag_hessian(f)(*self.args), dense_diag_hessian(f)(*self.args), EXACT)

    def test_a_factor_that_the_samples_share(self):
        """A factor of all samples needs no per-sample gradients."""

        def f(p, x, y):
            return p["b"].exp().sum() * F.mse_loss(skipping(p, x), y)

        assert_trees_close(diag_hessian(f)(*self.args), dense_diag_hessian(f)(*self.args), EXACT)

    def test_several_outputs(self):
        def f(p, x):
            h = (x @ p["w"]).tanh()
            return {"class": h @ p["v"], "more": [(h.square() * p["b"]).unsqueeze(1)]}

        def loss(z, y):
            return F.cross_entropy(z["class"], y["class"]) + 3 * (z["more"][0] - y["value"]).pow(4).sum()

        y = {"class": Numbers(3).below(3, 4), "value": Numbers(4)(4, 1, 3)}
        assert_exact(f, loss, (*self.args[:2], y))


def test_under_autocast_what_bends_is_run_again_in_the_same_precision():
    """A product is taken in float32, since half precision would overflow."""

    def f(w, x):
        return F.linear(x, w.mT).prod(1) * 1e-9

    def low(w, x):
        with torch.autocast("cpu", torch.float16):
            return f(w, x)

    w, x, y = (Numbers(i)(*shape).float() for i, shape in enumerate([(3, 4), (4, 3), (4,)]))
    args = 300 + w, 0.3 + 0.01 * x, y
    wanted = dense_diag_hessian(f, F.mse_loss)(*args)
    assert_trees_close(diag_hessian(low, F.mse_loss)(*args), wanted, 1e-2)
