"""Values that become numbers or shapes lose their labels, and are told of; nothing else is touched."""

import pytest
import torch
import torch.nn.functional as F

from invfunc.operations.receptive_fields.propagation import Following, Labels
from tests.operations.test_labels import coordinates, followed

LOST = {
    "item": lambda x: x.sum().item(),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "float": lambda x: float(x.flatten()[0]),
    "an index": lambda x: x[..., x.argmax() % 2],
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=2),
    "where": lambda x: torch.where(x > 0),
    "a mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "sparse": lambda x: x.to_sparse(),
    "repeat_interleave": lambda x: x.flatten().repeat_interleave(x.long().flatten()),
}
KEPT = {
    "shapes": lambda x: x.new_zeros(x.shape).view(len(x), x.numel()),
    "a mask of constants": lambda x: x[torch.ones_like(x) > 0],
    "a number of a constant": lambda x: x * torch.ones(1).item(),
    "comparisons": lambda x: torch.where(x > x.mean(), x, 0),
    "an index of tensors": lambda x: x.flatten()[x.flatten().argsort()],
}


def lost(f, x):
    """The operation by which a function loses labels."""
    labels = Labels()
    labels.enter(x, coordinates(x))
    with (following := Following(Labels(), labels)):
        f(x + 1)
    return following.lost


@pytest.mark.parametrize("name", LOST)
def test_values_that_become_numbers_or_shapes_are_told(name, device, dtype):
    assert lost(LOST[name], 2 * torch.rand(1, 2, 3, device=device, dtype=dtype))


@pytest.mark.parametrize("name", KEPT)
def test_and_others_are_not_lost(name, device, dtype):
    x = torch.rand(1, 2, 3, device=device, dtype=dtype)
    assert lost(KEPT[name], x) is None


def test_labels_are_those_of_the_memory(device, dtype):
    """Views and writes see each other; `set` and `enter` write a part; of what was overwritten nothing is left."""
    x = torch.rand(1, 2, 4, device=device, dtype=dtype)
    labels = Labels()
    labels.enter(x, coordinates(x))
    with Following(labels):
        y = torch.zeros(2, 4, device=device, dtype=dtype)
        view = y.T[1:3]
        y[0] = x[0, 1]
        z = y.relu()
        y[:, 2:].zero_()
        y[1].add_(1)
    none = -torch.inf
    assert labels.of(view)[1, 0].tolist() == [[1, none], [none, none]]
    assert labels.of(z)[1, 0].tolist() == [[0, 1, 2, 3], [none] * 4]
    labels.set(view, torch.full((2, 1, 2, 2), 9.0, device=device))
    assert labels.of(y)[1, 0].tolist() == [[0, 9, 9, none], [none, 9, 9, none]]
    labels.enter(y[0], [torch.arange(4.0, device=device)])
    assert labels.of(y)[1, 0].tolist() == [[0, 1, 2, 3], [none, 9, 9, none]]
    assert labels.of(torch.zeros(1)) is None


def test_grad_mode_and_random_numbers_stay_as_they_are(device, dtype):
    x = torch.rand(1, 2, 6, device=device, dtype=dtype, requires_grad=True)
    w = torch.rand(2, 2, 3, device=device, dtype=dtype, requires_grad=True)

    def f(x):
        return F.max_pool1d(F.dropout(F.conv1d(x, w)), 2)

    torch.manual_seed(0)
    y, labels = followed(f, x)
    torch.manual_seed(0)
    assert torch.equal(y, f(x)) and y.requires_grad and not labels.of(y).requires_grad
    with torch.no_grad():
        torch.manual_seed(0)
        again, others = followed(f, x)
    assert torch.equal(labels.of(y), others.of(again))
