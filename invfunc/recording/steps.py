"""Calls of the model to be run again: the nonlinear ones (not piecewise linear in what they read of it), or all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of, version
from invfunc.errors import RandomnessError
from invfunc.operations.batch_axis import Call, Place
from invfunc.operations.equations import equation
from invfunc.operations.operation import linear
from invfunc.recording.seen import Seen
from invfunc.recording.tags import Sampled

Remember = Callable[[Seen], bool]
"""Whether a call becomes a step."""


@dataclass(eq=False)
class Step:
    """A call that is remembered, with the tensors of the model that it read, and where its results came out."""

    call: Call
    inputs: list[torch.Tensor]
    versions: list[int]
    outputs: list[torch.Tensor]
    """Tensors without values that stand for the results."""
    edges: list[Any]
    origins: list[tuple[Any, int]]
    """Where the inputs came from: the node, and which of its outputs."""
    place: Place
    """Where the samples are in the result."""
    autocast: torch.dtype | None


def any_step(seen: Seen) -> bool:
    """Whether a call reads anything of the model."""
    return bool(_active(seen)) and torch.is_grad_enabled()


def nonlinear(seen: Seen) -> bool:
    """Whether a call has a second derivative in what it reads of the model."""
    active = _active(seen)
    if not active or not torch.is_grad_enabled():
        return False
    parsed = equation(seen.name, seen.args, seen.kwargs)
    read = seen.read if parsed is None or not parsed.operands else parsed.operands
    return not linear(seen.func, seen.args, seen.kwargs, read, active)


def _active(seen: Seen) -> list[torch.Tensor]:
    found = {id(x): x for x in seen.read if isinstance(t := seen.tags.get(id(x)), Sampled) and t.active}
    return [x for x in found.values() if x.is_floating_point() and x.requires_grad]


def is_view(out: Any, seen: Seen) -> bool:
    """Whether the result is a view of what was read: then it selects entries, whatever the call is named."""
    memory = {storage_of(x) for x in seen.read}
    return not seen.writes and isinstance(out, torch.Tensor) and storage_of(out) in memory


def step(seen: Seen, call: Call, produced: list[torch.Tensor], place: Place) -> Step:
    """Remember a call, so that it can be run again."""
    if seen.function.draws(seen.args, seen.kwargs):
        raise RandomnessError(f"`{seen.name}` draws random numbers, so it cannot be run again for its derivatives.")
    inputs, outputs = _active(seen), [x for x in produced if x.is_floating_point() and x.requires_grad]
    device = inputs[0].device.type
    return Step(
        replace(call, out=tree.map_tensors(_shape_of, call.out)),
        inputs,
        [version(x) for x in inputs],
        [_shape_of(x) for x in outputs],
        [torch.autograd.graph.get_gradient_edge(x) for x in outputs],
        [_origin(x, kept=seen.writes and x is call.args[0]) for x in inputs],
        place,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )


def _origin(x: torch.Tensor, kept: bool) -> tuple[Any, int]:
    """The node that made a tensor (or made what it is a copy of, if `kept`), and which of its outputs it is."""
    edge = torch.autograd.graph.get_gradient_edge(x)
    return edge.node.next_functions[0] if kept else (edge.node, edge.output_nr)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor without values that stands for one whose values need not be kept."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
