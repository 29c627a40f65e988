"""What it takes to find the structure of a function."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import diag_ggn, explain, functional, thresholds
from invfunc._torch.functorch import TorchDispatchMode
from invfunc.operations.receptive_fields.propagation import Following, Labels
from invfunc.operations.receptive_fields.regions import core
from invfunc.sparsity.pattern import Pattern
from tests.crossed import thresholds_at
from tests.structures import always

WIDTH, SIDE = 32, 12


def held(pattern):
    """The bytes of all labels and boxes."""
    rows = [region.rows for labels in pattern.labels.labels for region in labels.regions.values()]
    rows += [boxes for frame in pattern.frames for boxes in frame.boxes.values()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in rows}.values())


@pytest.mark.quick
@pytest.mark.parametrize("last", [nn.Conv2d(WIDTH, 2, 3, padding=1), nn.ConvTranspose2d(WIDTH, 2, 2, 2)])
def test_labels_take_less_than_the_activations_of_a_sample(last):
    """There is one label for all channels at a position, and none of what is not there any more."""
    layers = [nn.Conv2d(2, WIDTH, 3, padding=1), nn.ReLU()]
    layers += [m for _ in range(3) for m in (nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3, 1, 1))]
    f, params = functional(nn.Sequential(*layers, last))
    x, seen = torch.rand(2, 2, SIDE, SIDE), []
    complete = Pattern.complete

    def looked(self, alone):
        seen.append(held(self))
        return complete(self, alone)

    with mock.patch.object(Pattern, "complete", looked), always():
        explain(diag_ggn(f, F.mse_loss))(params, x, f(params, x))
    assert 0 < seen[0] < 11 * 4 * WIDTH * SIDE**2  # what four convolutions gave, and what follows on them


def test_labels_of_dead_memory_are_dropped():
    labels, x = Labels(), torch.ones(1, 3, 8)
    labels.enter(x, [torch.arange(8.0)])
    with Following(labels):
        y = x
        for _ in range(20):
            y = y.sin() + y
    assert len(labels.regions) == 2
    assert labels.of(y) is not None
    del x, y
    assert not labels.regions


def test_labels_outlive_tensors_whose_memory_is_used():
    labels, x = Labels(), torch.ones(4, 6)
    labels.enter(x, [torch.arange(6.0)])
    with Following(labels):
        y = (2 * x)[1:, 2:]
        z = y.detach().view(3, 4)[:, 1]
    del y
    found = labels.of(z)
    assert found is not None and found[1].tolist() == [[3.0] * 3]


def test_what_is_the_same_along_a_dimension_is_there_once():
    rows = torch.arange(6.0).reshape(1, 1, 6).expand(2, 5, 6)
    assert core(rows).shape == (2, 1, 6) and torch.equal(core(rows).expand(2, 5, 6), rows)
    labels, x = Labels(), torch.ones(5, 6)
    labels.enter(x, [torch.arange(6.0)])
    x[2:4] += 1  # followed or not, a part of the memory can be read and written
    with Following(labels):
        x[1] = x[0].flip(0)
        y = x.mT.reshape(-1).clone()
    rows = labels.of(y)
    assert rows is not None
    wanted = torch.arange(6.0).expand(5, 6).clone()
    wanted[1] = wanted[1].flip(0)
    assert torch.equal(rows[1, 0], wanted.T.reshape(-1)) and torch.equal(rows[0, 0], -wanted.T.reshape(-1))


class Patches(TorchDispatchMode):
    """Keeps how many numbers the patches have that are made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.im2col.default:
            self.sizes.append(out.numel())
        return out


def test_what_the_last_layer_reads_is_squared_for_as_many_samples_as_fit():
    f, params = functional(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.ConvTranspose2d(4, 3, 3)))
    x, budget = torch.rand(8, 3, 16, 16), 2**16
    with thresholds_at(CACHE={"cpu": budget}), always(), Patches() as patches:
        assert "closed form" in {p.way for p in explain(diag_ggn(f, F.mse_loss))(params, x, x).parts}
        diag_ggn(f, F.mse_loss)(params, x, x)
    assert patches.sizes and max(patches.sizes) <= budget / thresholds.SHARES
