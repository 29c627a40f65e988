"""The pattern is that of the operations of this call: what it saves, what a wrong one does, what it does not trust."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import diag_ggn, kfac
from invfunc.structure import labels, plan
from invfunc.structure.columns import Bottleneck, paths
from invfunc.structure.labels import FACTS
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.crossed import thresholds_at
from tests.laws import composed
from tests.strategies import Numbers
from tests.structure.test_columns import EXACT, arranged, assert_as_dense
from tests.structures import MOVED, NETWORKS, always


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
        with mock.patch.dict(FACTS, wrong), pytest.raises(AssertionError, match="not close"):
            assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)
    finally:
        labels._called.cache_clear()


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
        with pytest.raises(AssertionError, match="not close"):
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


# Kronecker factors from columns that share passes, of all kinds of networks and losses: those of all columns

FORMS = {"expand": {}, "joint": {"joint": True}, "reduce": {"weight_sharing": "reduce"}}


@settings(max_examples=40)
@given(data=st.data(), few=st.booleans())
@pytest.mark.parametrize("form", list(FORMS))
def test_it_is_that_of_all_columns(form, data, few):
    net = data.draw(st.one_of(*NETWORKS.values()))
    functions, args = arranged(data, net)
    make = partial(kfac, *functions, unsupported="diagonal", fisher="exact", **FORMS[form])
    with thresholds_at(NARROWEST=0 if few else 3):
        assert_as_dense(make, args, refusable=net.called in MOVED or net.called == "by data")


HEADS = {
    "a layer": lambda p, h: F.linear(h, p["head"], p["bias"]),
    "a product": lambda p, h: h @ p["head"].T,
    "the other way round": lambda p, h: h @ p["turned"] + p["bias"],
    "one by one": lambda p, h: F.conv1d(h.mT, p["head"][..., None], p["bias"]).mT,
    "scaled": lambda p, h: 0.5 * F.linear(h, p["head"], p["bias"]),
    "moved": lambda p, h: F.linear(h, p["head"]).flip(-1),
    "its first rows": lambda p, h: F.linear(h, p["head"], p["bias"])[..., :7],
    "a part": lambda p, h: F.linear(h, p["head"][:7], p["bias"][:7]),
    "a row for each token": lambda p, h: F.linear(h, p["head"]) + p["tokens"],
    "in groups": lambda p, h: F.conv1d(torch.cat([h, h.cos()], 2).mT, p["head"][..., None], groups=2).mT,
    "mixed": lambda p, h: F.linear(h, p["head"]).cumsum(-1),
    "over tokens": lambda p, h: F.linear(h, p["head"]).cumsum(1),
    "read twice": lambda p, h: F.linear(h, p["head"]) + F.linear(h.roll(1, 1), p["head"]),
    "raised": lambda p, h: F.linear(h, p["head"].exp()),
    "repeated": lambda p, h: F.linear(h, p["head"]) + p["bias"][0],
}
CRITERIA = {
    "tokens": lambda z, y: F.cross_entropy(z.mT, y),
    "some are ignored": lambda z, y: F.cross_entropy(z.mT, y, ignore_index=1, label_smoothing=0.1, reduction="sum"),
    "weighted": lambda z, y: F.cross_entropy(z.mT, y, weight=torch.arange(1, z.shape[-1] + 1).to(z)),
    "entries": lambda z, y: F.binary_cross_entropy_with_logits(z, (z > 0).to(z)),
}


def of_tokens(head, criterion, dtype=torch.float64, size=1.0):
    rand = Numbers(4)
    params = {"first": rand(3, 4), "head": rand(8, 3), "bias": rand(8), "turned": rand(3, 8), "tokens": rand(5, 8)}
    params = {name: size * p.to(dtype) for name, p in params.items()}
    x, y = rand(2, 5, 4).to(dtype), rand.below(7, 2, 5)
    return lambda p, x: HEADS[head](p, F.linear(x, p["first"]).tanh()), CRITERIA[criterion], (params, x, y)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("head", HEADS)
def test_heads_of_tokens(head, criterion, form):
    f, loss, args = of_tokens(head, criterion)
    make = partial(kfac, f, loss, unsupported="diagonal", fisher="exact", **FORMS[form])
    assert_as_dense(make, args)
    exact = partial(kfac, f, loss, fisher="exact", unsupported="diagonal", **FORMS[form])
    with always():
        assert_trees_close(exact()(*args), make()(*args), 1e-12)
