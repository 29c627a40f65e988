"""Products through operations that torch cannot differentiate twice, or does wrongly: attention, recurrences, bags."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jvp

from invfunc import batch_grad, diag_ggn, diag_hessian, functional, ggnvp, hvp, tree
from invfunc.errors import ArgumentError
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.operations.operation import OPERATIONS, function_of
from invfunc.testing import assert_trees_close
from tests import matrices
from tests.matrices import assert_near, directions, flat
from tests.networks import total
from tests.operations.test_rules import having
from tests.strategies import Numbers


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = kind(4, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


class Implicit(nn.Module):
    """A system whose matrix is a parameter, and distances to prototypes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 3)
        self.prototypes = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return torch.stack([torch.cdist(z, self.prototypes) for z in torch.linalg.solve(self.weight, x.mT).mT])


def words(x):
    return (x[..., 0].abs() * 10).long() % 5


class Bag(nn.Module):
    def __init__(self, ragged=False, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 4, **options)
        self.ragged, self.last = ragged, options.get("include_last_offset", False)

    def forward(self, x):
        if not self.ragged:
            return self.bag(words(x)).sin()
        offsets = torch.tensor([0, 2, 2, 7] + [12] * self.last, device=x.device)
        scales = x[..., 1].flatten() if self.bag.mode == "sum" else None
        return self.bag(words(x).flatten(), offsets, scales).sin()


def normed(norm):
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 2))


MODELS = {
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "bag": Bag,
    "bag of sums": lambda: Bag(mode="sum", padding_idx=1),
    "bags of offsets": lambda: Bag(True),
    "sums of offsets": lambda: Bag(True, mode="sum", include_last_offset=True),
    "maxima of offsets": lambda: Bag(True, mode="max", padding_idx=1),
    "hardsigmoid": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Hardsigmoid(), nn.Linear(3, 2)),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()),
    "weight_norm along 1": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=1),
    "layer_norm": lambda: normed(nn.LayerNorm(4)),
    "layer_norm of two": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4), bias=False), nn.Tanh()),
    "group_norm": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.GroupNorm(2, 4), nn.Tanh()),
    "group_norm without a weight": lambda: nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.GroupNorm(2, 4, affine=False), nn.Tanh()
    ),
    "instance_norm": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, affine=True), nn.Tanh()),
    "batch_norm": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Tanh()),
    "batch_norm without a trace": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, affine=False), nn.Tanh()),
    "batch_norm in eval mode": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Tanh()).eval(),
    "rms_norm": lambda: normed(nn.RMSNorm(4)),
    "rnn of relu": lambda: Recurrent(partial(nn.RNN, nonlinearity="relu")),
    "implicit": Implicit,
}
models = pytest.mark.parametrize("called", MODELS)


def arranged(called, device="cpu"):
    """A module with drawn parameters, a batch and a target, and the loss as a function of the flat parameters."""
    rand = Numbers(1)
    with torch.random.fork_rng():  # a difference across a bend is none
        torch.manual_seed(0)
        module = MODELS[called]().double().to(device)
    f, params = functional(module)
    params = tree.map_leaves(lambda p: p + 0.3 * rand(*p.shape).to(p), params)
    x = rand(4, 3, 4).to(device)
    return f, params, x, rand(*f(params, x).shape).to(device)


def differences(of, params, along):
    """The derivatives of a function of the parameters in some directions, a row for each."""
    at, step, rows = flat(params), 1e-4, []
    for d in step * along.to(at):
        once, second_derivatives = (
            flat(of(matrices.shaped(at + k * d, params))) - flat(of(matrices.shaped(at - k * d, params)))
            for k in (1, 2)
        )
        rows.append((8 * once - second_derivatives) / (12 * step))
    return torch.stack(rows)


def plain_slopes(f, x, y):
    """By one pass back of torch."""

    def slopes(p):
        leaves, structure = tree.flatten(tree.map_leaves(lambda q: q.detach().requires_grad_(), p))
        return torch.autograd.grad(F.mse_loss(f(tree.unflatten(leaves, structure), x), y), leaves)

    return slopes


@models
def test_values_are_those_of_torch(device, called):
    f, params, x, _ = arranged(called, device)
    wanted = f(params, x)
    with TwiceDifferentiable():
        assert_trees_close(f(params, x), wanted, 1e-12)


@models
def test_the_hessian_is_the_derivative_of_the_gradient(device, called):
    f, params, x, y = arranged(called, device)
    along = directions(params)
    wanted = differences(plain_slopes(f, x, y), params, along).T
    assert_near(matrices.of(hvp(f, F.mse_loss), params, x, y, along=along), wanted, 1e-6)


FORWARD_MODE = {"mse_loss", "huber_loss", "soft_margin_loss"}
"""Losses whose law is in `tests/evaluation/test_memory_of_results.py`."""
FORMS = having("twice")
SPELLED = {"__abs__", "absolute"}
"""Other names of abs, whose law is below."""


def test_every_form_in_which_it_is_right_has_a_model():
    met: set[str] = set()

    def told(name, instead):
        return lambda *args, **kwargs: met.add(name) or instead(*args, **kwargs)

    with ExitStack() as stack:
        entries = {name: replace(OPERATIONS[name], twice=told(name, OPERATIONS[name].twice)) for name in FORMS}
        stack.enter_context(mock.patch.dict(OPERATIONS, entries))
        stack.callback(function_of.cache_clear)
        function_of.cache_clear()
        for called in MODELS:
            f, params, x, y = arranged(called)
            hvp(f, F.mse_loss)(params, params, x, y)
    assert FORMS - FORWARD_MODE - SPELLED - met == set()


def test_an_operation_without_a_second_derivative_is_named():
    f, params, x, y = arranged("bag")
    model, _ = functional(Bag(scale_grad_by_freq=True).double())
    for product in (hvp(model, F.mse_loss), ggnvp(model, F.mse_loss)):
        with pytest.raises(ArgumentError, match="cannot differentiate .* twice .*embedding_bag.* other operations"):
            product(params, params, x, y)


# Norms, differentiated twice: in the precision of torch, in any order in memory, and where torch is wrong


def standard(h, mean, variance):
    return (h - mean) * (variance + 1e-5).rsqrt()


MEAN, VARIANCE = Numbers(7)(3), Numbers(8)(3).square() + 0.5
ALONE = {
    "batch norm": lambda h: F.batch_norm(h, MEAN, VARIANCE),
    "batch norm in train mode": lambda h: F.batch_norm(h, None, None, training=True),
    "instance norm": F.instance_norm,
    "instance norm of running statistics": lambda h: F.instance_norm(h, MEAN, VARIANCE, use_input_stats=False),
}


def ordered(h, order):
    """The same tensor, with its dimensions in this order in memory."""
    return h.permute(order).contiguous().permute(*torch.tensor(order).argsort().tolist())


@given(data=st.data(), n=st.integers(1, 3), size=st.lists(st.integers(1, 2), min_size=0, max_size=3))
@pytest.mark.parametrize("called", ["batch norm", "instance norm of running statistics"])
def test_what_is_normalised_may_lie_in_memory_in_any_order(called, data, n, size):
    """Torch's own derivative depends on it where a size is one."""
    size = size if "batch" in called else [*size, 2][:3]
    orders = [data.draw(st.permutations(range(2 + len(size)))) for _ in range(2)]

    def model(norm, p, x):
        z = norm(ordered(torch.tanh(x * p["w"].view(3, *[1] * len(size))), orders[0]))
        return ordered(z * z.detach().cos(), orders[1]).tanh().transpose(0, 1).sin().transpose(0, 1)

    def written_out(h):
        return standard(h, *(t.view(3, *[1] * len(size)) for t in (MEAN, VARIANCE)))

    rand = Numbers()
    params, x, y = {"w": rand(3)}, rand(n, 3, *size), rand(n, 3, *size)
    f, g = partial(model, ALONE[called]), partial(model, written_out)
    for make in (diag_ggn, diag_hessian):
        assert_trees_close(make(f, F.mse_loss)(params, x, y), make(g, F.mse_loss)(params, x, y), 1e-9)
    for make in (ggnvp, hvp):
        v = {"w": rand(3)}
        assert_trees_close(make(f, F.mse_loss)(params, v, x, y), make(g, F.mse_loss)(params, v, x, y), 1e-9)


NORMS = {
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,), w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w),
    "instance_norm": lambda x, w: F.instance_norm(x.unflatten(1, (2, 3)), weight=w[:2]).flatten(1),
    "batch_norm": lambda x, w: F.batch_norm(x, x.new_ones(6), x.new_full((6,), 2.0), w),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_scale_of_a_norm_has_one_second_derivative(norm):
    """Of its per-sample gradients, forward over reverse and reverse over forward: torch's fused norms have two."""
    rand = Numbers(3)
    params, v, x = {"w": rand(6), "v": rand(4, 6)}, {"w": rand(6), "v": rand(4, 6)}, rand(3, 4)

    def value(params):
        return total(batch_grad(lambda p, x: norm(x @ p["v"], p["w"]).sin().sum(-1))(params, x))

    ahead = jvp(grad(value), (params,), (v,))[1]
    assert_trees_close(grad(lambda p: jvp(value, (p,), (v,))[1])(params), ahead, 1e-10)
