"""The exact GGN through a narrow layer, block by block of its entries: the same numbers in less memory."""

from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import functional
from invfunc.structure import narrow
from invfunc.testing import assert_trees_close
from tests.crossed import thresholds_at
from tests.structure.test_columns import EXACT, FLOOR, arranged, assert_as_dense
from tests.structures import NETWORKS, always

SMALL = st.sampled_from([{"cpu": 1}, {"cpu": 64}, {"cpu": 2**20}])
"""What is factored at once: a block, some, all."""


class Reader(nn.Module):
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
    f, params = functional(Reader(classes, attention, width).to(dtype))
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
    forward, seen = narrow.forward, []

    def wrong(z, x, given, n, entries):
        seen.append(entries)
        return forward(z, x, given, n, entries) * (1.001 if len(seen) == 5 else 1)

    with (
        thresholds_at(MOVED=8 * 19, CACHE={"cpu": 8 * 19}, FACTORED_COST=0.0),
        mock.patch.object(narrow, "forward", wrong),
    ):
        assert_as_dense(partial(invfunc.diag_ggn, f, F.cross_entropy), args)
    assert len(seen) == 6
