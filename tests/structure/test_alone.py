"""The pattern is that of the operations of this call: what it saves, what a wrong one does, what it does not trust."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from invfunc import diag_ggn, ggn_trace
from invfunc.structure import labels, plan
from invfunc.structure.groups import Placed
from invfunc.structure.narrow import Bottleneck, paths
from invfunc.structure.rules import FACTS
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.laws import composed
from tests.strategies import Numbers
from tests.structure.test_columns import EXACT, assert_as_dense
from tests.structures import always

RAND = Numbers()


def pixels(z, y):
    return F.cross_entropy(z, y.argmax(1))


def steps(z, y):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1).argmax(1))


def convolutions(p, x):
    return F.conv2d(F.conv2d(x, p[0], padding=1).relu(), p[1], p[2], padding=1)


def u_net(p, x):
    h = F.conv2d(x, p[0], padding=1).tanh()
    low = F.conv2d(F.max_pool2d(h, 2), p[1]).relu()
    return F.conv2d(torch.cat([h, F.conv_transpose2d(low, p[2], stride=2)], 1), p[3])


def auto_encoder(p, x):
    for w in p[:2]:
        x = F.conv2d(x, w, stride=2, padding=1).relu()
    for w in p[2:]:
        x = F.conv_transpose2d(x.relu(), w, stride=2)
    return x


def perceptron(p, x):
    for w in p[:-1]:
        x = (x @ w).relu()
    return x @ p[-1]


CONVOLUTIONS = [RAND(2, 1, 3, 3), RAND(3, 2, 3, 3), RAND(3)]
U_NET = [RAND(2, 1, 3, 3), RAND(3, 2, 1, 1), RAND(3, 2, 2, 2), RAND(3, 4, 1, 1)]
AUTO_ENCODER = [RAND(2, 1, 3, 3), RAND(2, 2, 3, 3), RAND(2, 2, 2, 2), RAND(2, 1, 2, 2)]
COSTS = {
    "convolutions": (convolutions, CONVOLUTIONS, RAND(2, 1, 14, 14), F.mse_loss, 5),
    "convolutions, classes": (convolutions, CONVOLUTIONS, RAND(2, 1, 14, 14), pixels, 5),
    "u-net": (u_net, U_NET, RAND(2, 1, 12, 12), pixels, 4),
    "auto-encoder": (auto_encoder, AUTO_ENCODER, RAND(2, 1, 16, 16), F.mse_loss, 3),
    "perceptron": (perceptron, [RAND(60, 20), RAND(20, 3), RAND(3, 20), RAND(20, 60)], RAND(4, 60), F.mse_loss, 4),
    "tokens": (perceptron, [RAND(4, 6), RAND(6, 4), RAND(4, 200)], RAND(2, 5, 4), steps, 10),
}


@pytest.mark.parametrize("called", COSTS)
@pytest.mark.parametrize(
    "make", [diag_ggn, partial(diag_ggn, per_sample=True), ggn_trace], ids=["sum", "samples", "trace"]
)
@pytest.mark.parametrize("form", ["model", "loss"])
def test_it_takes_fewer_multiplications(called, make, form):
    f, params, x, loss, times = COSTS[called]
    functions = (f, loss) if form == "model" else (composed(f, loss),)
    args, counts = (params, x, Numbers(1)(*f(params, x).shape)), {}
    for method in ("dense", "auto"):
        with FlopCounterMode(display=False) as counter, always():
            make(*functions, method=method)(*args)
        counts[method] = counter.get_total_flops()
    assert times * counts["auto"] < counts["dense"]


def at_a_point(rule):
    """A rule for less than an entry depends on: as if there were no windows."""

    def wrong(step, out):
        rows = step.filled(step["input" if "input" in step else "self"]).flatten(1, -2).amax(1)
        rows = F.interpolate(rows[None], out.shape[-1])[0]
        return rows.view(len(rows), *[1] * (out.ndim - 1), -1).expand(-1, *out.shape)

    return wrong


def half(rule):
    """A rule that forgets the second half of the channels."""

    def wrong(step, out):
        rows = rule(step, out)
        rows[:, :, rows.shape[2] // 2 :] = -torch.inf
        return rows

    return wrong


def still(rule):
    """A rule as if an operation moved nothing."""
    return lambda step, out: step.filled(step["self"])


PLANTED = {
    "convolution": (at_a_point, lambda h: F.conv1d(h, torch.ones(2, 2, 3).to(h), padding=1)),
    "convolution, transposed": (at_a_point, lambda h: F.conv_transpose1d(h, torch.ones(2, 2, 2).to(h))),
    "avg_pool2d": (at_a_point, lambda h: F.avg_pool2d(h[:, :, None], (1, 3), 1)[:, :, 0]),
    "max_pool2d_with_indices": (at_a_point, lambda h: F.max_pool1d(h, 3, 1)),
    "upsample_linear1d": (at_a_point, lambda h: F.interpolate(h, scale_factor=2, mode="linear")),
    "flip": (still, lambda h: h + h.flip(-1)),
    "roll": (still, lambda h: h + h.roll(4, -1)),
    "cat": (half, lambda h: F.conv1d(torch.cat([h, F.pad(h, (3, -3))], 1), torch.ones(2, 4, 1).to(h))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_is_caught(name):
    """Of an operation between two layers; with the right rule the law holds."""
    plant, operation = PLANTED[name]
    rule = name.split(",")[0]

    def f(p, x):
        return F.conv1d(operation(F.conv1d(x, p[0], padding=1).tanh()).tanh(), p[1])

    rand = Numbers(7)
    params, x = [rand(2, 1, 3), rand(1, 2, 1)], rand(5, 1, 12).abs()
    args = (params, x, Numbers(1)(*f(params, x).shape))
    assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)
    labels._called.cache_clear()
    try:
        wrong = {rule: FACTS[rule]._replace(rule=plant(FACTS[rule].rule))}
        with mock.patch.dict(FACTS, wrong), pytest.raises(AssertionError, match="is off by"):
            assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)
    finally:
        labels._called.cache_clear()


@pytest.mark.quick
def test_wrong_cells_are_caught():
    rand = Numbers(7)
    real, args = Placed.cells, (CONVOLUTIONS, rand(2, 1, 6, 6), rand(2, 3, 6, 6))
    with mock.patch.object(Placed, "cells", lambda *given: real(*given).index_fill(1, torch.tensor([8]), -1)):
        with pytest.raises(AssertionError, match="is off by"):
            assert_as_dense(partial(diag_ggn, convolutions, F.mse_loss), args)


def around(p, x):
    """A narrow layer, with a way around it from the first parameter."""
    h = (x @ p[0]).relu()
    return (h @ p[1]) @ p[2] + h @ p[3]


@pytest.mark.quick
def test_a_wrong_bottleneck_is_caught():
    rand = Numbers(7)
    args = ([rand(12, 30), rand(30, 2), rand(2, 60), rand(30, 60)], rand(3, 12), rand(3, 60))
    assert_as_dense(partial(diag_ggn, around, F.mse_loss), args)

    def wrong(z, run, sites):
        narrow = Bottleneck(2, run.uses[2].a, 0, 2, frozenset({0, 1}))
        return paths(z, run, sites)[0], [narrow]

    with mock.patch.object(plan, "paths", wrong):
        with pytest.raises(AssertionError, match="is off by"):
            assert_as_dense(partial(diag_ggn, around, F.mse_loss), args)


BRANCHES = {
    "number of samples": lambda p, x: len(x) > 1,
    "values": lambda p, x: (x > 0).any(),
    "numbers": lambda p, x: x.max().item() > 0,
    "constants of samples": lambda p, x: torch.arange(3)[: len(x)].any(),
    "parameters": lambda p, x: p[0].sum() > 0,
}


@pytest.mark.parametrize("how", BRANCHES)
@pytest.mark.parametrize("form", ["model", "loss"])
def test_of_branches_that_one_sample_alone_would_not_take(how, form):
    rand = Numbers(7)
    x, params = rand(3, 1, 16), [rand(2, 1, 3), rand(1, 2, 1)]
    x[0] = -x[0].abs()

    def f(p, x):
        h = F.conv1d(x, p[0], padding=1).tanh()
        if BRANCHES[how](p, x):
            h = h + h.roll(5, -1) * (x > 0)
        return F.conv1d(h, p[1])

    for p in (params, [-params[0], params[1]]):
        args = (p, x, rand(3, 1, 16))
        with always():
            t = diag_ggn(f, F.mse_loss) if form == "model" else diag_ggn(composed(f, F.mse_loss))
            assert_trees_close(t(*args), dense_diag_ggn(f, F.mse_loss)(*args), EXACT)


def dropped(p, x):
    h = F.dropout(F.conv1d(x, p[0], padding=1).tanh(), 0.5)
    return F.conv1d(h + torch.rand_like(h), p[1], padding=1)


def shuffled(p, x):
    h = F.conv1d(x, p[0], padding=1).tanh()
    return F.conv1d(h + h[..., torch.randperm(16)], p[1], padding=1)


def added(p, x):
    """What it draws is added at the end, and changes no derivative."""
    z = F.conv1d(F.conv1d(x, p[0], padding=1).tanh(), p[1], padding=1)
    return z + torch.randn(len(x), 1, 1).to(z)


@pytest.mark.parametrize("f", [dropped, shuffled, added], ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", ["model", "loss"])
@pytest.mark.parametrize("n", [1, 3])
def test_random_numbers_are_those_of_one_call(f, form, n):
    rand = Numbers(7)
    params, args = [rand(2, 1, 3), rand(1, 2, 3)], (rand(n, 1, 16), rand(n, 1, 16))
    functions = (f, F.mse_loss) if form == "model" else (composed(f, F.mse_loss),)
    torch.manual_seed(3)
    wanted = dense_diag_ggn(f, F.mse_loss)(params, *args)
    torch.manual_seed(3)
    f(params, args[0])
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with always():
        assert_trees_close(diag_ggn(*functions)(params, *args), wanted, EXACT)
    assert torch.equal(torch.get_rng_state(), state)
