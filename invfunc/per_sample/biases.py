"""Which bias belongs to which weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc.operations.batch_axis import Call
from invfunc.operations.operation import known
from invfunc.recording.tags import ParameterUse


@dataclass(frozen=True)
class Role:
    """That of a parameter which the same operations read together with another one, and no others do."""

    called: str
    """A "weight" or a "bias"."""
    other: int
    """The number of the other one."""


def _channels(call: Call) -> int:
    """How many entries a bias has that is not broadcast."""
    dims = call.arg("weight").ndim
    return call.out.shape[1 - dims] if dims > 1 else 1


def _layers(weight: torch.Tensor, uses: list[ParameterUse]) -> list[Call]:
    """The calls that read a parameter, if it is the weight of all of them."""
    calls = [use.call for use in uses if use.call is not None and use.param is weight]
    calls = [c for c in calls if known(c.name).biased and c.arg("weight") is weight]
    return calls if len(calls) == len(uses) else []


def roles(params: list[torch.Tensor], uses: list[ParameterUse]) -> dict[int, Role]:
    """The roles of weights and biases: parameters that the same operations read together, and no others."""
    number = {id(x): i for i, x in enumerate(params)}
    of: dict[int, list[ParameterUse]] = {}
    for use in uses:
        for i in use.derived.leaves:
            of.setdefault(i, []).append(use)
    found = {}
    for i, some in of.items():
        calls = _layers(params[i], some)
        biases = {number.get(id(c.arg("bias"))) for c in calls}
        if len(biases) != 1:
            continue
        (bias,) = biases
        if bias is None or bias == i or any(params[bias].numel() != _channels(c) for c in calls):
            continue
        if {id(t.call) for t in of.get(bias, [])} == {id(c) for c in calls}:
            found |= {i: Role("weight", bias), bias: Role("bias", i)}
    return found
