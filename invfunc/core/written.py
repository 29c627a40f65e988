"""Writes of f in place: samples stay where they are, and parameters among samples are uses of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from invfunc._torch.functorch import base_of, version
from invfunc.core.axes import numbers, read
from invfunc.core.marks import DERIVED, Filled, Known, Mark, Node, Run, Unsupported, know
from invfunc.core.uses import Expanded

SET = Tensor.__setitem__


def set_item(run: Run, args: tuple, data: list[Known], others: Any) -> None:
    """Write entries: what is written must have its samples where the tensor has them."""
    x, index, value = args
    if base_of(x) is not None and id(x) not in {id(y) for y, _ in data}:
        raise Unsupported("samples are written into a view of a tensor without samples")
    SET(x, index, value)
    run.ordered = True  # perhaps
    axes = {id(y): axis for y, axis in data}
    axis: Any = Unsupported("samples, or sums of them, or parameters are written among samples")
    if not others and run.n > 1:
        known = numbers(x.shape, axes[id(x)], run.n, x.device).clone() if id(x) in axes else None
        known = torch.full(x.shape, -1, device=x.device) if known is None else known
        if id(value) in axes:
            known[index] = numbers(value.shape, axes[id(value)], run.n, x.device)
        found = read(known, run.n)
        axis = found if found is not None and axes.get(id(x), found) == found else axis
    unchanged(run, x, axis)
    know(x, Mark(run.token, axis if run.n > 1 else (-1, 1, 1), x.requires_grad))


def set_derived(run: Run, args: tuple, params: list[Known], alone: bool) -> None:
    """Write parameters into a tensor without samples, as into a matrix of zeros, which is computed of them then."""
    x, index, value = args
    before = x.__dict__.get("_known")
    if base_of(x) is not None or (type(before) is Node and before.kind is not DERIVED):
        raise Unsupported("parameters are written into a view")
    if any([u.value is x or base_of(u.value) is x for u in run.uses]):
        raise Unsupported("a tensor of parameters is written after it was read")
    SET(x, index, value)
    know(x, Node(run.token, None, DERIVED, alone and all([node.alone for _, node in params])))


def set_parameter(run: Run, x: Tensor, index: Any, axis: Any, value: Tensor, node: Node) -> None:
    """Write a parameter among samples, as a mask token is: each entry is a use of it by the sample that it has."""
    before = x[index]
    at: Any = (-1, 1, 1)
    if run.n > 1:
        at = read(numbers(x.shape, axis, run.n, x.device)[index], run.n)
    if at is None:
        raise Unsupported("a parameter is written at places of samples that are not along one dim")
    run.ordered = True  # perhaps
    copy = run.alias(value.expand(before.shape))
    SET(x, index, copy)
    run.use(Expanded(node, value, at), copy)
    know(x, Mark(run.token, axis, x.requires_grad))


def unchanged(run: Run, x: Tensor, axis: Any) -> None:
    """Check that a tensor that was written has its samples where they were, as views of it do not learn of it."""
    before = x.__dict__.get("_known")
    if run.n > 1 and before is not None and type(before) is not Filled and version(x):
        lost = isinstance(axis, Unsupported)
        if type(before) is Node or before.axis != axis or (lost and base_of(x) is not None):  # pyright: ignore[reportAttributeAccessIssue]
            raise axis if lost else Unsupported("what is written moves the samples")


def into_view(x: Any) -> bool:
    """Tells whether a tensor of which nothing was known is a view, so that writing it writes another one."""
    known = getattr(x, "_known", None)
    return (known is None or type(known) is Filled) and isinstance(x, Tensor) and base_of(x) is not None
