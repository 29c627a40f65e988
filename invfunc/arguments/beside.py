"""Two batches as one: the samples of another one behind those of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.arguments.problem import BoundProblem, batch_size
from invfunc.errors import ArgumentError


def beside(problem: BoundProblem, others: tuple, names: Sequence[str]) -> BoundProblem:
    """The problem of both batches; the samples of the other one are all chosen, and the last."""
    at = [i for i, dim in problem.dims.items() if dim is not None]
    if len(others) != len(at):
        raise ArgumentError(
            f"others has {len(others)} entries, but there are {len(at)} batch arguments: "
            f"({', '.join(names[i] for i in at)}). Give one for each; what all samples share is not among them."
        )
    args, theirs = list(problem.args), dict(zip(at, others, strict=True))
    called = [f"others[{at.index(i)}]" if i in theirs else names[i] for i in range(len(args))]
    given = tuple(theirs.get(i, x) for i, x in enumerate(args))
    count = batch_size(given, {i: problem.dims[i] for i in at}, called)
    for i, other in theirs.items():
        (mine, form), (more, other_form) = tree.flatten(args[i]), tree.flatten(other)
        if form != other_form:
            raise ArgumentError(f"{called[i]} has another structure than {names[i]}.")
        joined = [_behind(x, y, problem.dims[i], called[i]) for x, y in zip(mine, more, strict=True)]
        args[i] = tree.unflatten(joined, form)
    n = problem.n + count
    chosen = None if problem.samples is None else [*problem.samples, *range(problem.n, n)]
    return replace(problem, args=tuple(args), n=n, samples=chosen, others=count)


def _behind(x: Any, other: Any, dim: int | None, name: str) -> Any:
    """A batch tensor with the samples of another behind its own."""
    if not isinstance(x, torch.Tensor):
        return x
    assert dim is not None
    mine, theirs = ([*t.shape[: dim % t.ndim], *t.shape[dim % t.ndim + 1 :]] for t in (x, other))
    if mine != theirs or x.dtype != other.dtype or x.device != other.device:
        raise ArgumentError(
            f"{name} has shape {tuple(other.shape)}, {other.dtype} and is on {other.device}, beside "
            f"{tuple(x.shape)}, {x.dtype} on {x.device}: but for the number of samples they have to agree, as both "
            "batches are joined. Pad the shorter samples."
        )
    return torch.cat([x, other], dim)
