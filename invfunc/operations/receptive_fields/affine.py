"""Which operations are affine in their labelled arguments, all at once, with coefficients that have no label."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from invfunc._torch.values import differentiable
from invfunc.operations.operation import Operation
from invfunc.operations.receptive_fields.step import Step


def affine(step: Step, entry: Operation, written: Iterable[torch.Tensor]) -> bool:
    """Whether what a call gives is affine in its labelled arguments."""
    if entry.piecewise or not all(map(differentiable, written)):
        return False
    if entry.unless in step and step[entry.unless]:
        return False
    if entry.linear == "all":
        return all(map(differentiable, step.labelled))
    if entry.linear == "each":
        added = [step[name] for name in entry.added if name in step]
        return len([x for x in step.labelled if not any(x is y for y in added)]) <= 1
    if entry.linear == "no":
        return False
    return all(any(x is y for y in step.args[: entry.linear]) for x in step.labelled)
