"""Two batches as one: the samples of another one behind those of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost
from invfunc._torch.values import anywhere
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.recording.checks import same_values
from invfunc.recording.problem import Problem, batch_size


def beside(problem: Problem, others: tuple, names: Sequence[str]) -> Problem:
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


def check_batches(problem: Problem, joined: torch.Tensor, alone: Callable[[slice], torch.Tensor] | None) -> None:
    """Check that samples have the same losses or outputs in the joined batch as where f sees a batch alone, if there
    is need to look."""
    if not joined.ndim:
        raise ArgumentError(
            "f returned one number, a loss of both batches together, which does not say how it is scaled in each of "
            "them. Return the losses [N] of the samples, as with reduction='none', and scale the products."
        )
    edge, dim = problem.n - problem.others, problem.out_dims if joined.ndim > 1 else 0
    for start, stop in ((0, edge), (edge, problem.n)):
        if alone is not None and not same_values(alone(slice(start, stop)), joined.narrow(dim, start, stop - start)):
            raise ArgumentError(
                "f gives samples something else where both batches are joined, so it depends on their number or on the "
                "place of a sample. Pass what belongs to a sample as a batch argument."
            )


def check_fewer(problem: Problem, whole: Any, alone: Callable[[slice], Any]) -> bool:
    """Check that some samples have the same losses or outputs `alone` as in the `whole` batch; whether this has told
    anything of f.

    These are a few around the largest loss, or more where f does not take so few: losses that are zero or only rounding
    would not show a factor that depends on the number of samples.
    """
    if not isinstance(whole, torch.Tensor) or not whole.ndim or (n := problem.n) < 2:
        return True
    dim, low = problem.out_dims if whole.ndim > 1 else 0, _lowest(problem, whole)
    sizes = whole.detach().abs().nan_to_num(0, 0, 0).movedim(dim, 0).reshape(whole.shape[dim], -1).amax(1)
    if not anywhere(sizes > 0):
        return False
    size, place = sizes.amax(), int(innermost(sizes).argmax()) % n
    for few in sorted({min(2, n // 2), n // 2, n - 1}):
        first = min(place, n - few)
        part = alone(slice(first, first + few))
        if isinstance(part, torch.Tensor) and part.ndim:
            joined = whole.narrow(dim, first, few)
            if not same_values((part / size).to(low), (joined / size).to(low)):  # which is in the range of any dtype
                raise SampleAxisError(
                    "f gives a sample something else beside fewer ones, so that batches cannot be joined: it has a "
                    "factor that depends on how many there are. Take losses without that factor, as with "
                    "reduction='none'."
                )
            break
    return True


def _lowest(problem: Problem, z: torch.Tensor) -> torch.dtype:
    """The dtype with the fewest digits in which f may have computed z, whatever that is given in."""
    kind, found = problem.leaves[0].device.type, [z.dtype, *(x.dtype for x in problem.tensors())]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        found.append(torch.get_autocast_dtype(kind))
    low = [dtype for dtype in found if dtype.is_floating_point and not z.is_complex()]
    return max(low, key=lambda dtype: torch.finfo(dtype).eps, default=z.dtype)
