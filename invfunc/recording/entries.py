"""What each sample adds to sums over the samples, and products of these with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM, Call
from invfunc.operations.equations import Equation
from invfunc.operations.operation import known

Added = Callable[[torch.Tensor], torch.Tensor | None]
"""What each sample adds to a tensor that is a sum over them, `[N, *sum]`, where that is known."""


def added(call: Call, of: Added) -> torch.Tensor | None:
    """What each sample adds to the result of a call that sums over them, or is linear in such sums."""
    if not isinstance(call.out, torch.Tensor):
        return None
    if any(not isinstance(place, Axis) or place.dim is None for _, place in call.samples):
        return None if known(call.name).piecewise else _linear(call, of)
    rule = known(call.name).entries
    return None if rule is None else rule(call)


def _linear(call: Call, of: Added) -> torch.Tensor | None:
    """The same of an operation that is linear in sums up to a constant, of which each sample has an equal part."""
    given = {id(x): place.expose(x, call.n) if isinstance(place, Axis) else of(x) for x, place in call.samples}
    values = [x for x in given.values() if x is not None]
    if len(values) < len(given):
        return None

    def run(*own: torch.Tensor) -> torch.Tensor:
        new = dict(zip(given, own, strict=True))
        args, kwargs = tree.map_tensors(lambda x: new.get(id(x), x), (call.args, call.kwargs))
        return call.func(*args, **kwargs)

    return torch.vmap(run)(*values) - run(*(torch.zeros_like(x[0]) for x in values)) * (1 - 1 / call.n)


def product(call: Call, _: Any, of: Added) -> Callable[[], torch.Tensor] | None:
    """A product of a sum over the samples with parameters as a sum of products of what each of them adds."""
    parsed = call.equation
    if parsed is None or isinstance(parsed.scale, torch.Tensor):
        return None
    entries = [of(x) for x in parsed.operands]
    sums = [x for x, place in call.samples if place is BATCH_SUM]
    if len(sums) != 1 or sum(x is not None for x in entries) != 1 or len({x.dtype for x in parsed.operands}) > 1:
        return None
    return lambda: _einsum(parsed, entries)


def _einsum(parsed: Equation, entries: list[Any]) -> torch.Tensor:
    operands = [x if own is None else own for x, own in zip(parsed.operands, entries, strict=True)]
    inputs = ["N" * (own is not None) + labels for labels, own in zip(parsed.inputs, entries, strict=True)]
    with torch.autocast(operands[0].device.type, enabled=False):
        found = torch.einsum(f"{','.join(inputs)}->N{parsed.output}", *operands).sum(0)
    found = found if parsed.scale == 1 else found * parsed.scale
    for x, factor in parsed.added:
        found = found + x * factor
    return found
