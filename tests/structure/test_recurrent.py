"""Recurrent layers, whose steps are taken at once: below a head, columns are narrow at each step."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from invfunc import diag_ggn, explain, functional, kfac
from tests.structure.test_columns import assert_as_dense
from tests.structures import always

CELLS = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
    "both directions": partial(nn.GRU, bidirectional=True),
    "two layers": partial(nn.LSTM, num_layers=2, bias=False),
}
STATISTICS = {
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


@pytest.mark.parametrize("called", STATISTICS)
@pytest.mark.parametrize("classes", [0, 5], ids=["last", "below a head"])
@pytest.mark.parametrize("cell", CELLS)
def test_it_is_that_of_all_columns(cell, classes, called):
    for n, embedded, packed in ((1, True, False), (3, False, False), (2, True, True)):
        f, args = reader(cell, n, classes, embedded, packed)
        assert_as_dense(partial(STATISTICS[called], f, F.mse_loss), args)
