"""Kronecker factors from columns that share passes, of all kinds of networks and losses: those of all columns."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import kfac
from invfunc.testing import assert_trees_close
from tests.crossed import thresholds_at
from tests.strategies import Numbers
from tests.structure.test_columns import arranged, assert_as_dense
from tests.structures import MOVED, NETWORKS, always

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
