"""Clipping by groups, and by any weight of the norms: the loop in all modes, no cotangent kept, and what is refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import invfunc
from invfunc import clipped_grad, thresholds
from invfunc.core.evaluate import Fold
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_clipped_grad
from tests.rows import automatic, in_blocks
from tests.strategies import Numbers

EXACT = 1e-10
NET = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
F, PARAMS = invfunc.functional(NET)
LAYERS: Any = {"0": 0.5, "1": 0.1, "3": 2.0}


def losses(params, x, y):
    """Of 60 positions, so that gradients are formed."""
    return (F(params, x) - y).square().sum((1, 2))


def batch(n=5):
    return Numbers(1)(n, 60, 3), Numbers(2)(n, 60, 2)


def layer_of(path):
    return path[2]


def wanted(weight=None, groups=layer_of):
    return loop_clipped_grad(losses, 0.5, groups=groups, weight=weight)(PARAMS, *batch())


def halves(t):
    return invfunc.streamed(t)(PARAMS, [tuple(x[:2] for x in batch()), tuple(x[2:] for x in batch())])


MODES = {
    "at once": lambda t: t(PARAMS, *batch()),
    "in blocks": lambda t: in_blocks(t)(PARAMS, *batch()),
    "chunked": lambda t: invfunc.chunked(t, chunk_size=2)(PARAMS, *batch()),
    "streamed": halves,
    "compiled": lambda t: invfunc.compiled(t)(PARAMS, *batch()),
    "padded": lambda t: invfunc.compiled(t, pad=(8,))(PARAMS, *batch()),
    "beside others": lambda t: invfunc.together(invfunc.variance(losses), t, clipped_grad(losses, 1.0))(
        PARAMS, *batch()
    )[1],
}


@pytest.mark.parametrize("weight", [None, automatic])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hooked", [0, thresholds.HOOKED], ids=["as they come", "at the end"])
def test_layers_are_those_of_the_loop(mode, weight, hooked, monkeypatch):
    monkeypatch.setattr(thresholds, "HOOKED", hooked)
    assert_trees_close(MODES[mode](clipped_grad(losses, 0.5, groups="layer", weight=weight)), wanted(weight), EXACT)


def test_each_group_has_its_own_bound_and_a_derivative_in_it():
    bounds: Any = {name: torch.tensor(bound, dtype=torch.double, requires_grad=True) for name, bound in LAYERS.items()}
    clipped, norms = clipped_grad(losses, bounds, groups="layer")(PARAMS, *batch())
    for name, bound in bounds.items():
        own, given = loop_clipped_grad(losses, bound, groups=layer_of)(PARAMS, *batch())
        assert_trees_close(norms[name], given[name], EXACT)
        for part in ("weight", "bias"):
            first, second = (g[f"{name}.{part}"].sum() for g in (clipped, own))
            slopes = [torch.autograd.grad(x, bound, retain_graph=True) for x in (first, second)]
            assert_trees_close(clipped[f"{name}.{part}"], own[f"{name}.{part}"], EXACT)
            assert_trees_close(slopes[0], slopes[1], EXACT, floor=1e-3)


def test_no_more_than_the_cotangents_of_a_layer_are_there(monkeypatch):
    monkeypatch.setattr(thresholds, "HOOKED", 0)
    there, take = [], Fold.take

    def counted(fold, shares, *rest):
        there.append(sum(use.d is not None for use in shares[0].run.uses))
        take(fold, shares, *rest)

    with mock.patch.object(Fold, "take", counted):
        clipped_grad(losses, 0.5, groups="layer")(PARAMS, *batch())
    assert there == [2, 2, 2]


def test_what_is_refused():
    learned = torch.tensor(0.1, dtype=torch.double, requires_grad=True)
    calls: dict[str, Any] = {
        r"groups has no name for \['0.bias'\], \['1.weight'\]": {"groups": {"0.weight": "first"}},
        r"max_norm is of the groups \['0'\], but the groups are \['0', '1', '3'\]": {
            "max_norm": {"0": 1.0},
            "groups": "layer",
        },
        "reads a tensor that requires a gradient": {"weight": lambda norm, most: most / (norm + learned)},
        r"of a tensor \(\) gives \(2,\)": {"weight": lambda norm, most: norm.expand(2)},
    }
    for told, options in calls.items():
        with pytest.raises(ArgumentError, match=told):
            clipped_grad(losses, options.pop("max_norm", 1.0), **options)(PARAMS, *batch())
    with pytest.raises(ArgumentError, match="max_norm has to be a number above 0"):
        clipped_grad(losses, {"0": 0.0}, groups="layer")
    with pytest.raises(ArgumentTypeError, match="weight has to be a function"):
        clipped_grad(losses, 1.0, weight=2)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ArgumentTypeError, match="but has to be"):
        clipped_grad(losses, 1.0, groups="layers")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="no loops of groups"):
        invfunc.certified(clipped_grad(losses, 1.0, groups="layer"), generator=0)
