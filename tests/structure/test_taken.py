"""Exact columns by the structure of a function: the core takes it, with few passes, and the result is that of all."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import diag_ggn, testing
from invfunc.structure.look import Frame
from invfunc.structure.plan import Structure
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers
from tests.structures import always


def ways_of(make, args):
    """The result, and the ways that were taken to it."""
    found, way = [], Structure.way

    def noted(self):
        found.append((way(self), self))
        return found[-1][0]

    with always(), mock.patch.object(Structure, "way", noted):
        result = make(*args)
    return result, found


def auto_encoder(side):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.ConvTranspose2d(2, 1, 3)
    f, params = invfunc.functional(nn.Sequential(*layers).double())
    x = Numbers(1)(2, 1, side, side)
    return f, (params, x, Numbers(2)(2, 1, side, side))


@pytest.mark.quick
@pytest.mark.parametrize(
    "make",
    [diag_ggn, partial(invfunc.diag_ggn, per_sample=True), invfunc.ggn_trace],
    ids=["sum", "samples", "trace"],
)
def test_passes_do_not_grow_with_an_image(make):
    passes = []
    for side in (8, 12):
        f, args = auto_encoder(side)
        result, ((way, structure),) = ways_of(make(f, F.mse_loss), args)
        passes.append(sum(reach.passes for stage in way.stages for reach in stage.reaches))
        assert len(way.closed) == 2 and not way.dense
        assert_trees_close(result, make(f, F.mse_loss, method="dense")(*args), 1e-9)
    assert passes == [9, 9]


def test_a_narrow_layer_leaves_as_many_columns_as_it_is_wide():
    torch.manual_seed(0)
    f, params = invfunc.functional(nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, 20)).double())
    args = params, Numbers(1)(4, 20), Numbers(2)(4, 20)
    result, ((way, _),) = ways_of(diag_ggn(f, F.mse_loss), args)
    assert [stage.end and stage.end.rank * stage.end.count for stage in way.stages] == [3, None]
    assert_trees_close(result, testing.dense_diag_ggn(f, F.mse_loss)(*args), 1e-9)


def masked(p, x):
    """A scale for each channel between two layers, of which the first may reach the last by its own place only."""
    h = F.conv1d(x, p["first"], padding=1).tanh().masked_fill(x > 0.5, 0.1)
    return F.conv1d(h * p["scale"], p["second"])


def pooled(p, x):
    """Two first layers, of which one sees pairs of positions, whose centres lie between these."""
    low = F.conv1d(F.max_pool1d(x, 2), p["first"], padding=1).tanh()
    return F.conv1d(low.repeat_interleave(2, -1) + F.conv1d(x, p["other"], padding=1).tanh(), p["second"])


@pytest.mark.parametrize("f", [masked, pooled], ids=lambda f: f.__name__)
def test_sites_beside_and_behind_each_other(f):
    rand = Numbers(1)
    params = {"first": rand(2, 1, 3), "other": rand(2, 1, 3), "second": rand(2, 2, 3), "scale": rand(2, 1)}
    args = params, rand(3, 1, 16), rand(3, 2, 14)
    result, ((_, structure),) = ways_of(diag_ggn(f, F.mse_loss), args)
    for frame in structure.look.frames:
        for boxes in frame.boxes.values():
            assert torch.equal(boxes, boxes.floor()), "boxes are told apart as whole numbers"
    assert_trees_close(result, testing.dense_diag_ggn(f, F.mse_loss)(*args), 1e-9)


def test_a_table_is_told_apart_by_the_rows_that_are_read():
    def f(p, i):
        return F.conv1d((p["table"][i] + p["places"]).tanh().mT, p["head"], padding=1)

    rand = Numbers(1)
    params = {"table": rand(7, 3), "places": rand(5, 3), "head": rand(2, 3, 3)}
    i = torch.tensor([[1, 2, 1, 0, 6], [3, 3, 3, 1, 2]])
    args = params, i, rand(2, 2, 5)
    for make in (diag_ggn, partial(invfunc.diag_ggn, per_sample=True)):
        result, ((way, _),) = ways_of(make(f, F.mse_loss), args)
        assert not way.dense
        assert_trees_close(result, make(f, F.mse_loss, method="dense")(*args), 1e-9)


def test_a_fault_of_the_look_is_not_taken_for_a_refusal_of_f():
    f, args = auto_encoder(6)
    with always(), mock.patch.object(Frame, "used", None), pytest.raises(TypeError, match="not callable"):
        diag_ggn(f, F.mse_loss)(*args)


def test_factors_of_a_vector_with_an_entry_for_each_place():
    """Its entries meet at one position, where columns of one group are to be alone."""

    def f(p, x):
        return F.conv1d((x * p["scale"]).tanh(), p["kernel"])

    rand = Numbers(1)
    args = {"scale": rand(14), "kernel": rand(2, 1, 3)}, rand(2, 1, 14), rand(2, 2, 12)
    result, _ = ways_of(invfunc.kfac(f, F.mse_loss, fisher="exact"), args)
    assert_trees_close(result, invfunc.kfac(f, F.mse_loss, method="dense", fisher="exact")(*args), 1e-9)
