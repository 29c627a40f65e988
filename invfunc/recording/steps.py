"""Calls of the model to be run again: the nonlinear ones (not piecewise linear in what they read of it), or all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import base_of, storage_of, version
from invfunc.errors import ArgumentError, RandomnessError
from invfunc.operations.batch_axis import Call, Place
from invfunc.operations.calls import SELECTIONS
from invfunc.operations.equations import PARSERS, equation
from invfunc.recording.random import draws
from invfunc.recording.seen import Seen
from invfunc.recording.tags import Sampled

_PIECEWISE_LINEAR = SELECTIONS | set(
    "relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu abs absolute sign clamp clip "
    "maximum minimum max min amax amin fmax fmin sort topk msort kthvalue median nanmedian cummax cummin "
    "sum mean nansum nanmean cumsum diff trace diagonal diag diag_embed tril triu "
    "add sub rsub subtract neg negative positive sgn floor ceil round trunc fix "
    "cat stack concat hstack vstack dstack column_stack getitem setitem index_select gather take take_along_dim "
    "masked_select masked_fill fill where nan_to_num expand expand_as broadcast_to repeat repeat_interleave tile pad "
    "roll flip fliplr flipud rot90 unfold col2im pixel_shuffle pixel_unshuffle channel_shuffle meshgrid "
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_unpool2d "
    "max_unpool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate dropout dropout1d dropout2d "
    "dropout3d feature_dropout alpha_dropout feature_alpha_dropout l1_loss cpu cuda bernoulli block_diag copy movedim "
    "get:real".split()
)
"""Piecewise linear in all that they read."""
_LINEAR_IN_FIRST = set(
    "div divide true_divide linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "prelu embedding grid_sample nll_loss kl_div lerp".split()
)
"""Piecewise linear in their first argument, if it is all that they read of the model."""


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
    if not active or not torch.is_grad_enabled() or seen.name in _PIECEWISE_LINEAR:
        return False
    if seen.name in PARSERS:
        parsed = equation(seen.name, seen.args, seen.kwargs)
        operands = seen.read if parsed is None else parsed.operands
        return sum(x is y for x in operands for y in active) > 1
    first = seen.args[0] if seen.args else seen.kwargs.get("input")
    if len(active) == 1 and active[0] is first and sum(x is first for x in seen.read) == 1:
        if seen.name in _LINEAR_IN_FIRST:
            return False
        if seen.name == "batch_norm":  # with running statistics
            return bool(seen.args[5] if len(seen.args) > 5 else seen.kwargs.get("training", False))
    return True


def _active(seen: Seen) -> list[torch.Tensor]:
    found = {id(x): x for x in seen.read if isinstance(t := seen.tags.get(id(x)), Sampled) and t.active}
    return [x for x in found.values() if x.is_floating_point() and x.requires_grad]


def is_view(out: Any, seen: Seen) -> bool:
    """Whether the result is a view of what was read: then it selects entries, whatever the call is named."""
    memory = {storage_of(x) for x in seen.read}
    return not seen.writes and isinstance(out, torch.Tensor) and storage_of(out) in memory


def step(seen: Seen, call: Call, produced: list[torch.Tensor], place: Place) -> Step:
    """Remember a call, so that it can be run again."""
    if draws(seen.name, seen.args, seen.kwargs):
        raise RandomnessError(f"`{seen.name}` draws random numbers, so it cannot be run again for its derivatives.")
    if seen.writes and base_of(produced[0]) is not None:
        raise ArgumentError(
            f"`{seen.name}` writes into a view in place, so its second derivative cannot be followed; let it work on a "
            "copy."
        )
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
