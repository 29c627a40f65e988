"""Checks, where rows changed places, that each is of the sample that it is taken for.

Cotangents that are scaled sample by sample have to arrive at every row scaled as its sample was: else the row is of
another sample, or of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invfunc._torch.precision import double_on
from invfunc._torch.values import anywhere
from invfunc.errors import SampleAxisError
from invfunc.loss.outputs import ModelOutput
from invfunc.operations.axis import Axis, Everyone
from invfunc.recording import Trace
from invfunc.recording.scope import Scope

_LARGEST = {torch.float16: 4}
"""The largest exponent of a scale. Scales are powers of two: products with them are exact in every precision."""
Placed = tuple[torch.Tensor, Axis]


@dataclass
class Row:
    """Something that has rows of samples: an edge of the graph, its axis, and the call that it belongs to."""

    edge: torch.Tensor | torch.autograd.graph.GradientEdge
    axis: Axis
    name: str


@dataclass
class End:
    """Something of which each row is known to be of its sample, and what is sent back from there."""

    value: torch.Tensor
    axis: Axis
    sent: torch.Tensor

    def scaled(self, scales: torch.Tensor) -> torch.Tensor:
        """What is sent back, scaled sample by sample."""
        return self.sent * _at(self.axis, self.sent, scales)


def check_uses(scope: Scope, trace: Trace, outputs: Sequence[Placed]) -> None:
    """Check the rows of the parameter uses of a run, given its outputs."""
    names = {use.site: use.call.name if use.call is not None else "a parameter" for use in trace.uses}
    check_rows(scope, trace, outputs, [Row(trace.edges[i], trace.axes[i], name) for i, name in names.items()])


def check_roots(scope: Scope, trace: Trace, result: torch.Tensor, roots: Sequence[ModelOutput]) -> None:
    """Check the rows of the outputs of a model, given the loss."""
    check_rows(scope, trace, [(result, Axis(0))], [Row(r.value, r.axis, r.called) for r in roots])


def check_rows(scope: Scope, trace: Trace, outputs: Sequence[Placed], rows: Sequence[Row]) -> None:
    """Check that what belongs to a sample in some rows reaches nothing but what belongs to it in the outputs.

    A scalar is the sum of what the trace saw summed over the samples.
    """
    if not trace.displaced or trace.n == 1:
        return
    ends = [*_ends(outputs), *_summed(scope, trace, outputs)]
    rows = [row for row in rows if not isinstance(row.axis, Everyone) and not row.axis.whole]
    if not ends or not rows:
        return
    plain = _arrived(scope, ends, [end.sent for end in ends], rows)
    for scales in _all_scales(trace.n, [*(end.sent for end in ends), *(c for c in plain if c is not None)]):
        _compare(rows, plain, _arrived(scope, ends, [end.scaled(scales) for end in ends], rows), scales)


def _ends(outputs: Sequence[Placed]) -> list[End]:
    """Those outputs that have rows, with a cotangent of our own for each."""
    return [End(z, axis, some_cotangent(z)) for z, axis in outputs if z.ndim and z.requires_grad]


def _summed(scope: Scope, trace: Trace, outputs: Sequence[Placed]) -> list[End]:
    """What was summed over the samples, with what the scalars among the outputs send back to it."""
    total = [z for z, _ in outputs if not z.ndim and z.requires_grad]
    if not total or not trace.sums:
        return []
    found = scope.grad(total, [z for z, _ in trace.sums], [torch.ones_like(z) for z in total], batched=False)
    return [End(z, axis, c.detach()) for (z, axis), c in zip(trace.sums, found, strict=True) if c is not None]


def _arrived(
    scope: Scope, ends: Sequence[End], sent: list[torch.Tensor], rows: Sequence[Row]
) -> list[torch.Tensor | None]:
    found = scope.grad([end.value for end in ends], [r.edge for r in rows], sent, batched=False, create_graph=False)
    return [None if c is None else c.detach() for c in found]


def _all_scales(n: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A scale for each sample, a few times over: no two samples have the same every time."""
    most = min(_LARGEST.get(c.dtype, 32) for c in like)
    scales = [sign * 2.0**k for k in range(-most, most) for sign in (1, -1)]
    count, given = len(scales), torch.tensor(scales, device=like[0].device)
    number = torch.arange(n, device=given.device)
    return [given[number // count**k % count] for k in range(n) if count**k < n]


def _at(axis: Axis, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scale of each row."""
    scales = scales.to(x.dtype)
    if axis.dim is None:
        assert axis.rows is not None
        return scales[axis.rows[0]]
    along = scales[axis.of_entries(x.shape[axis.dim], len(scales)).to(x.device)]
    return along.reshape([-1 if d == axis.dim else 1 for d in range(x.ndim)])


def _compare(
    rows: Sequence[Row],
    plain: Sequence[torch.Tensor | None],
    scaled: Sequence[torch.Tensor | None],
    scales: torch.Tensor,
) -> None:
    for row, a, b in zip(rows, plain, scaled, strict=True):
        if (a is None) is not (b is None) or (a is not None and b is not None and _other(row.axis, a, b, scales)):
            raise SampleAxisError(
                f"at `{row.name}`, rows that changed places are not of the samples that they are taken for, or of "
                "several. Put the batch arguments in that order before they are passed."
            )


def _other(axis: Axis, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the cotangents `b` of some rows are other than `a` scaled as their samples were."""
    eps = torch.finfo(a.dtype).eps
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    a, b = (x.double() if x.dtype == torch.float64 else x.float() for x in (a, b))
    b = b / _at(axis, b, scales)
    others = [d for d in range(a.ndim) if d != axis.dim]
    size = torch.maximum(a.abs(), b.abs()).nan_to_num(0, 0, 0)
    own = size.amax(others, keepdim=True) if others and size.numel() else size
    near = (a - b).abs() <= eps**0.5 * own + eps**0.75 * (size.amax() if size.numel() else 0)
    return anywhere(~(near | ~a.isfinite() | ~b.isfinite()))


def some_cotangent(z: torch.Tensor) -> torch.Tensor:
    """A fixed cotangent, whose numbers depend only on its shape, and are in no relation to each other."""
    numbers = torch.arange(1.0, z.numel() + 1, device=z.device, dtype=double_on(z.device))
    return numbers.cos().reshape(z.shape).to(z.dtype)
