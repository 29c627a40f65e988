"""Backwards through a chain of layers with one matrix, averaged over the samples at each of them (KFRA)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge as edge_of

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.loss.square_root import Block, Columns, joined_block
from invfunc.operations.axis import Axis
from invfunc.operations.pointwise import entrywise
from invfunc.passes.run import Run
from invfunc.passes.second_order import recomputed
from invfunc.per_sample.cotangents import Columns as PulledBack
from invfunc.per_sample.cotangents import Cotangents, Samples
from invfunc.recording.scope import Scope
from invfunc.recording.steps import Step


def averaged(scope: Scope, run: Run, made: list[Columns], samples: Samples) -> PulledBack:
    """At each site the matrix G as unit columns on the left and `G e / n` on the right, the same for all samples.

    It starts with `sum_n hess loss_n`, and a layer with Jacobians J[n] makes `1/n sum_n J[n]^T G J[n]` of it.
    """
    if len(run.outputs) > 1:
        raise not_a_chain("it has several outputs")
    ((i, (z, axis)),) = run.outputs.items()
    n, edges = run.trace.n, run.trace.edges
    count = sum(c.count for c in made)
    block = joined_block(made, 0, count, run.part, n) if count else Block({i: axis.expose(scope.leave(z), n)[None][:0]})
    left = block.left[i][:, samples.all].flatten(2)
    right = left if block.right is None else block.right[i][:, samples.all].flatten(2)
    if block.weight is not None:
        right = right * block.weight[:, samples.all, None]
    matrix = torch.einsum("vni,vnj->ij", left, right)
    at, one = _origin(edge_of(z)), axis.expose(z, n).shape[1:]
    lefts: Cotangents = [None] * len(edges)
    rights: Cotangents = [None] * len(edges)
    steps = list(run.trace.steps)
    while True:
        for k, edge in enumerate(edges):
            if _origin(edge) == at:
                eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
                columns = (eye, matrix / samples.count)
                shaped = [c.reshape(len(c), 1, *one).expand(-1, n, *one) for c in columns]
                lefts[k], rights[k] = shaped
        here = next((s for s in steps if at in map(_origin, s.edges)), None)
        if here is None:
            break
        if len(here.inputs) > 1 or len(here.outputs) > 1:
            raise not_a_chain(f"`{here.call.name}` reads or returns several tensors of the model")
        matrix = _through(scope, here, matrix, n, samples)
        axis = here.call.place(here.inputs[0])
        assert isinstance(axis, Axis)
        at, one = here.origins[0], axis.expose(here.inputs[0], n).shape[1:]
        steps.remove(here)
        if any(at in s.origins for s in steps):
            raise not_a_chain(f"what `{here.call.name}` reads is read elsewhere too")
    if any(cotangent is None for cotangent in lefts):
        raise not_a_chain("a parameter is read beside it")
    return PulledBack(lefts, rights)


def _through(scope: Scope, step: Step, matrix: torch.Tensor, n: int, samples: Samples) -> torch.Tensor:
    (x,) = step.inputs
    copies, args, _, out = recomputed(scope, step)
    out = out if out is not None else args[0]  # of an indexed write
    copy, (y,) = copies[id(x)], [t for t in tree.tensors(out) if t.is_floating_point()]
    before, after = step.call.place(x), step.place
    if not isinstance(before, Axis) or not isinstance(after, Axis):
        raise not_a_chain(f"`{step.call.name}` sums over the samples")
    if entrywise(step.call.name) and x.shape == y.shape:
        (slope,) = scope.grad([y], [copy], [torch.ones_like(y)], batched=False)
        assert slope is not None
        d = before.expose(scope.leave(slope), n)[samples.all].flatten(1)
        return matrix * (d.mT @ d) / len(d)
    one = after.expose(y, n).shape[1:]
    size = before.expose(x, n)[0].numel()

    def pulled(columns: torch.Tensor) -> torch.Tensor:
        """`J[n]^T columns[v, n]` as `[v, n, size]`."""
        (found,) = scope.grad([y], [copy], [after.restore(columns.reshape(*columns.shape[:2], *one), n, 1)])
        if found is None:
            return columns.new_zeros(*columns.shape[:2], size)
        return before.expose(scope.leave(found), n, 1).flatten(2)

    once = pulled(matrix.unsqueeze(1).expand(-1, n, -1))
    return pulled(once.permute(2, 1, 0)).index_select(1, torch.arange(n, device=x.device)[samples.all]).mean(1)


def _origin(edge: Any) -> tuple[Any, int]:
    """Where a tensor comes from: its node, and which of its outputs it is."""
    return edge.node, edge.output_nr


def not_a_chain(why: str) -> ArgumentError:
    """The error for a function with branches, through which the recursion is not defined."""
    return ArgumentError(f"f is not a chain of layers: {why}. `kflr` is defined for any model.")
