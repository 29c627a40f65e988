"""The exact GGN by the structure of a network is that by all columns, whatever the network and the loss are."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import invfunc
from invfunc import diag_ggn, explain, functional, kfac, tree
from invfunc.errors import InvFuncError
from invfunc.structure import columns
from invfunc.testing import assert_trees_close, dense_diag_ggn
from invfunc.testing.models import moved
from tests.crossed import thresholds_at
from tests.laws import composed
from tests.strategies import Numbers
from tests.structures import NETWORKS, always, criteria_of

EXACT, FLOOR = 1e-9, 1e-6
"""The second is what counts as the largest entry of a leaf where all cancels, as of a shift before a norm."""
NOTHING = torch.zeros(())
STATISTICS = {
    "diag_ggn": invfunc.diag_ggn,
    "diag_ggn of each": partial(invfunc.diag_ggn, per_sample=True),
    "ggn_trace": invfunc.ggn_trace,
    "ggn_trace per parameter": partial(invfunc.ggn_trace, per_parameter=True),
    "exact kfac": partial(invfunc.kfac, fisher="exact"),
    "exact kfac, joint": partial(invfunc.kfac, joint=True, fisher="exact"),
    "exact kfac, reduce": partial(invfunc.kfac, weight_sharing="reduce", fisher="exact"),
}


def assert_as_dense(make, args, rtol=EXACT, floor=FLOOR, refusable=False):
    """The same by both methods, or the same error where there may be one."""
    try:
        wanted = make(method="dense")(*args)
    except InvFuncError as error:
        if not refusable:
            raise
        with pytest.raises(type(error)), always():
            make(method="auto")(*args)
        return
    with always():
        found = make(method="auto")(*args)
    found, wanted = (tree.map_leaves(lambda x: NOTHING if x is None else x, t) for t in (found, wanted))
    assert_trees_close(found, wanted, rtol, floor)


def arranged(data, net):
    """A criterion for a network, the functions in one of the two forms, and arguments."""
    z = net.f(net.params, *net.inputs)
    assume(z.abs().max() < 30)  # its exp is to be finite
    criterion = data.draw(criteria_of(tuple(z.shape)))
    functions = (composed(net.f, criterion.loss),) if data.draw(st.booleans()) else (net.f, criterion.loss)
    return functions, (net.params, *net.inputs, criterion.target)


@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=17)
@given(data=st.data())
def test_it_is_that_of_all_columns(kind, data, device, dtype):
    net = data.draw(NETWORKS[kind])
    functions, args = arranged(data, net)
    called = data.draw(st.sampled_from(list(STATISTICS)))
    derived = any("parametrizations" in name for name, _ in tree.named_leaves(net.params))  # as by weight_norm
    refusable = called.startswith("exact kfac") and derived
    refusable |= kind == "by data" and (called.startswith("exact kfac") or len(functions) == 1)
    assert_as_dense(partial(STATISTICS[called], *functions), moved(args, dtype, device), refusable=refusable)


# What was wrong or failed once in the exact GGN by structure


@pytest.mark.parametrize("constant", ["scale", "places", "index"])
def test_constants_for_places_in_the_batch(constant):
    rand = Numbers(3)
    scale, index = rand(9, 1), rand(9, 6).argsort(1)
    parts = {
        "scale": lambda h: h * scale[: len(h)],
        "places": lambda h: h * (1 + torch.arange(len(h)))[:, None],
        "index": lambda h: h.gather(1, index[: len(h)]),
    }

    def f(p, x):
        return parts[constant]((x @ p["a"].T).tanh() @ p["b"].T)

    args = ({"a": rand(2, 6), "b": rand(6, 2)}, rand(5, 6), rand(5, 6))
    assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)


def test_saturated_pixels_in_closed_form_and_single_precision():
    """1 - p of a p near 1 has no digits left."""
    w, x = torch.tensor([20.0, 2.0, -8.0]).reshape(3, 1, 1, 1), torch.ones(2, 1, 3, 3)
    make, args = diag_ggn(lambda w, x: F.conv2d(x, w), F.cross_entropy), (x, torch.zeros(2, 3, 3).long())
    with always():
        assert [part.way for part in explain(make)(w, *args).parts] == ["closed form"]
        found = make(w, *args)
    wanted = dense_diag_ggn(lambda w, x: F.conv2d(x, w), F.cross_entropy)(w.double(), x.double(), args[1])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "classes"), [(torch.bfloat16, 263), (torch.float16, 2051)])
def test_outputs_that_are_more_than_a_dtype_counts(dtype, classes):
    """Entries that are moved before the criterion are numbered, and the numbers are pulled back in its precision."""

    def loss(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    rand = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*size, generator=rand).to(dtype) for size in ((4, classes), (2, 1, 4)))
    y = torch.randint(classes, (2, 1), generator=rand)
    found, wanted = (diag_ggn(lambda w, x: x @ w, loss, method=method)(w, x, y) for method in ("auto", "dense"))
    assert (found - wanted).abs().max() <= 4 * torch.finfo(dtype).eps * wanted.abs().max()


# Recurrent layers, whose steps are taken at once: below a head, columns are narrow at each step

CELLS = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
    "both directions": partial(nn.GRU, bidirectional=True),
    "two layers": partial(nn.LSTM, num_layers=2, bias=False),
}
STATISTICS_RECURRENT = {
    "diag_ggn": diag_ggn,
    "diag_ggn of each": partial(diag_ggn, per_sample=True),
    "exact kfac": partial(kfac, fisher="exact"),
}


class Reader(nn.Module):
    """A class for each step, or what the layer gives; of sequences that are packed, or below another layer."""

    def __init__(self, cell, classes, embedded, packed):
        super().__init__()
        self.embed = nn.Linear(2, 3) if embedded else nn.Identity()
        self.layer = cell(3 if embedded else 2, 2, batch_first=True)
        self.head = nn.LazyLinear(classes) if classes else nn.Identity()
        self.packed = packed

    def forward(self, x):
        z = self.embed(x)
        if self.packed:
            z = pack_padded_sequence(z, [x.shape[1]] * len(x), batch_first=True)
        z, _ = self.layer(z)
        return self.head(pad_packed_sequence(z, batch_first=True)[0] if self.packed else z)


def reader(cell, n, classes, embedded=True, packed=False):
    torch.manual_seed(n)
    model, x = Reader(CELLS[cell], classes, embedded, packed).double(), torch.randn(n, 4, 2, dtype=torch.float64)
    z = model(x)
    f, params = functional(model)
    return f, (params, x, torch.randn_like(z))


@pytest.mark.quick
@pytest.mark.parametrize("cell", ["gru", "lstm", "tanh", "relu"])
def test_columns_are_narrow_below_a_head(cell):
    f, args = reader(cell, 2, 9)
    with always():
        told = explain(diag_ggn(f, F.mse_loss))(*args)
    ways = {name: part for part in told.parts for name in part.params}
    assert ways["params['head.weight']"].way == "closed form"
    assert ways["params['layer.weight_hh_l0']"].way == "narrow"


@pytest.mark.parametrize("called", STATISTICS_RECURRENT)
@pytest.mark.parametrize("classes", [0, 5], ids=["last", "below a head"])
@pytest.mark.parametrize("cell", CELLS)
def test_it_is_that_of_all_columns_recurrent(cell, classes, called):
    for n, embedded, packed in ((1, True, False), (3, False, False), (2, True, True)):
        f, args = reader(cell, n, classes, embedded, packed)
        assert_as_dense(partial(STATISTICS_RECURRENT[called], f, F.mse_loss), args)


# The exact GGN through a narrow layer, block by block of its entries: the same numbers in less memory

SMALL = st.sampled_from([{"cpu": 1}, {"cpu": 64}, {"cpu": 2**20}])
"""Sizes that are factored at once: a block, some, all."""


class ReaderBlocks(nn.Module):
    """A class for each token; with attention, tokens know of each other below the head."""

    def __init__(self, classes, attention, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True) if attention else None
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x):
        x = x if self.attention is None else x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(F.gelu(self.body(x))).mT


def read(classes, attention=False, tokens=6, dtype=torch.float64, width=8):
    torch.manual_seed(0)
    f, params = functional(ReaderBlocks(classes, attention, width).to(dtype))
    return f, (params, torch.randn(3, tokens, width, dtype=dtype), torch.randint(classes, (3, tokens)))


@settings(max_examples=25)
@given(data=st.data(), moved=st.sampled_from([0, 30, 200]), small=SMALL)
def test_blocks_give_what_all_at_once_gives(data, moved, small):
    net = data.draw(st.one_of(*NETWORKS.values()))
    functions, args = arranged(data, net)
    make = partial(invfunc.diag_ggn, *functions)
    with thresholds_at(MOVED=moved, CACHE=small, FACTORED_COST=0.0), always():
        found = make()(*args)
    with thresholds_at(FACTORED_COST=0.0), always():
        assert_trees_close(found, make()(*args), EXACT, FLOOR)


def test_a_wrong_derivative_is_noticed_in_every_block():
    """The check of what is moved forwards is about all blocks together; where it fails all columns are pulled back."""
    f, args = read(19)
    forward, seen = columns.forward, []

    def wrong(z, x, given, n, entries):
        seen.append(entries)
        return forward(z, x, given, n, entries) * (1.001 if len(seen) == 5 else 1)

    with (
        thresholds_at(MOVED=8 * 19, CACHE={"cpu": 8 * 19}, FACTORED_COST=0.0),
        mock.patch.object(columns, "forward", wrong),
    ):
        assert_as_dense(partial(invfunc.diag_ggn, f, F.cross_entropy), args)
    assert len(seen) == 6
