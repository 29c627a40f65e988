"""Backwards through a chain of layers with one matrix, averaged over the samples at each of them (KFRA)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from invfunc._torch.functorch import gradient_edge
from invfunc._torch.values import wide
from invfunc.core.columns import columns_at, split
from invfunc.core.hessian import CallsRun, OperationCall, Result, back
from invfunc.core.marks import named
from invfunc.core.shares import Shares
from invfunc.core.tables import POINTWISE
from invfunc.core.uses import WHOLE, Use, front
from invfunc.errors import ArgumentError
from invfunc.loss.square_root import joined_block
from invfunc.reductions.reduction import Quantity

Tensor = torch.Tensor


class ChainRun(CallsRun):
    """A run that notes every operation of samples."""

    every = True


def chain(
    run: ChainRun,
    names: Callable[[int], str],
    quantity: Quantity,
    folds: Sequence[Any],
    out: Tensor,
    of: list[list[Use]],
) -> None:
    """Reduce unit columns at the result of each layer, with the matrix that weighs their products.

    It starts with `sum_n hess loss_n`, and a layer with Jacobians J[n] makes `1/n sum_n J[n]^T G J[n]` of it.
    """
    for i, uses in enumerate(of):
        if len(uses) > 1:
            raise not_a_chain(f"{names(i)} is read more than once")
    with torch.enable_grad():
        each = columns_at(run, out, quantity)
        roots = split(run, out).roots
    if len(roots) > 1:
        raise not_a_chain("it has several outputs")
    z, count = roots[0].source, sum([columns.count for columns in each])
    if not count:  # as of outputs without entries
        return
    left = joined_block(each, 0, count, WHOLE, run.n).left[roots[0].ordinal]
    left = run.taken(wide(left.to(z.dtype)), WHOLE, 1).flatten(2)
    matrix = torch.einsum("vni,vnj->ij", left, left)
    waiting = {id(u): (i, u) for i, uses in enumerate(of) for u in uses}
    edge, calls = gradient_edge(z), [*run.calls]
    while call := next((c for c in calls if any(_same(y.own, edge) for y in c.results)), None):
        calls.remove(call)
        if len(call.inputs) > 1 or len(call.results) > 1:
            raise not_a_chain(f"`{named(call.func)}` reads or returns several tensors of the model")
        own = [waiting.pop(id(u)) for u in call.uses]
        if own:
            _reduce(run, names, folds, call.results[0], matrix, own)
        if not call.inputs:
            break
        matrix, edge = _through(run, call, matrix), call.edges[0]
        if any(_same(edge, e) for c in calls for e in c.edges):
            raise not_a_chain(f"what `{named(call.func)}` reads is read elsewhere too")
    if waiting:
        raise not_a_chain("a parameter is read beside it")


def _same(a: Any, b: Any) -> bool:
    return a.node is b.node and a.output_nr == b.output_nr


def _reduce(
    run: ChainRun,
    names: Callable[[int], str],
    folds: Sequence[Any],
    y: Result,
    matrix: Tensor,
    own: list[tuple[int, Use]],
) -> None:
    """Reduce the uses of one operation, given the matrix at its result."""
    if not len(matrix):  # a layer without entries
        return
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    columns = back(eye[:, None].expand(-1, run.n, -1), y.shape, y.axis, run.n).to(y.dtype)
    with torch.enable_grad():
        run.pull_columns(y.own, columns, [u for _, u in own])
    for i, use in own:
        use = copy.copy(use)
        use.matrix = matrix
        shares = Shares(run, i, [use], names)
        for fold in folds:
            fold.states[i] = fold.reduction.step(shares)


def _through(run: ChainRun, call: OperationCall, matrix: Tensor) -> Tensor:
    """The matrix at what an operation reads, given that at its result."""
    (copied,), (y,) = call.again(run)
    before, result = call.axes[0], call.results[0]
    if not isinstance(before, tuple) or not isinstance(result.axis, tuple):
        raise not_a_chain(f"`{named(call.func)}` sums over the samples")

    def each(x: Tensor, lead: int = 0) -> Tensor:
        """The part of each sample that was chosen, `[n, entries]`."""
        return run.taken(front(wide(run.strip(x)), before, run.n, lead), WHOLE, lead).flatten(1 + lead)

    with torch.enable_grad():
        if call.func in POINTWISE and copied.shape == y.shape:
            d = each(torch.autograd.grad(y, copied, torch.ones_like(y), create_graph=run.deep)[0])
            return matrix * (d.mT @ d) / len(d)

        def pulled(columns: Tensor) -> Tensor:
            """`J[n]^T columns[v, n]`."""
            given = back(columns, y.shape, result.axis, run.n).to(y.dtype)
            (found,) = run.rows(y, [copied], [given], run.deep) if len(given) else [None]
            return found if found is not None else torch.zeros_like(copied).expand(len(given), *copied.shape)

        once = front(wide(run.strip(pulled(matrix[:, None].expand(-1, run.n, -1)))), before, run.n, 1).flatten(2)
        return each(pulled(once.permute(2, 1, 0)), 1).mean(1)


def not_a_chain(why: str) -> ArgumentError:
    """The error for a function with branches, through which the recursion is not defined."""
    return ArgumentError(f"f is not a chain of layers: {why}. `kfac(fisher='exact')` is defined for any model.")
