"""The way a result for all samples is made up of those for parts of them, if it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Literal

import torch

from invfunc import tree
from invfunc._torch.values import HALF, anywhere, fake, near, same_values, wide
from invfunc._torch.weak import WeakIdMap
from invfunc.arguments.problem import BoundProblem
from invfunc.errors import RandomnessError, SampleAxisError

Kind = Literal["each", "mean", "sum"]
"""One by one, as their mean or their sum."""
Some = Callable[[BoundProblem, list[int]], tuple[list[torch.Tensor], bool]]
"""What f gives for the samples at some places, `[k, ...]`, and whether it drew random numbers."""
_KNOWN: WeakIdMap[dict[Hashable, Kind]] = WeakIdMap()
_KEPT, FEW = 64, 8
"""Of how many calls it is known, and how many samples are looked at."""
_GIVE = "Pass what belongs to a sample, such as a mask or indices, as a batch argument."


def kind_of(problem: BoundProblem, size: int, some: Some, f: Callable, what: Hashable) -> Kind:
    """The way parts of at most so many samples make up the result, or an error; looked at once for what is asked of a
    function, and arguments of these shapes."""
    key, known = (what, size, *_described(problem)), _KNOWN.get(f) or {}
    if key not in known:
        kind = _kind(problem, size, some)
        if fake(problem.leaves[0]):
            return kind
        known = dict([*known.items(), (key, kind)][-_KEPT:])
        with suppress(TypeError):  # a function of a kind that has no weak references
            _KNOWN.set(f, known)
    return known[key]


def _described(problem: BoundProblem) -> Iterator[Hashable]:
    yield from (problem.out_dims, *problem.dims.items())
    for x in tree.leaves((problem.args, problem.kwargs)):
        yield (x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x)


def _kind(problem: BoundProblem, size: int, some: Some) -> Kind:
    """A few samples from all over the batch, and either half of them alone.

    Where a parameter has the same numbers at two places, as zeros and ones have, values would not show that f reads it
    by the place of a sample: such ones are `told_apart`, and computed in single precision if f runs in half.
    """
    n, k = problem.n, min(problem.n, max(2, min(size, FEW)))
    places, device = [n * i // k for i in range(k)], problem.leaves[0].device.type
    casts, apart, found = torch.is_autocast_enabled(device), told_apart(problem), list[tuple[list, bool]]()
    if casts or any(x.dtype in HALF for x in problem.tensors):
        with suppress(Exception), torch.autocast(device, enabled=False) if casts else nullcontext():
            found = [some(widened(apart), each) for each in (places, places[::2], places[1::2])]
    found = found or [some(apart, each) for each in (places, places[::2], places[1::2])]
    drew = any(drew for _, drew in found)
    kinds: list[Kind] = [_joined(*z, k=k, drew=drew) for z in zip(*(values for values, _ in found), strict=True)]
    return kinds[0] if kinds else "each"


def _joined(whole: torch.Tensor, even: torch.Tensor, odd: torch.Tensor, *, k: int, drew: bool) -> Kind:
    """The way a result for k samples is made up of those for the even and for the odd ones alone."""
    if whole.ndim:
        if not drew and not (same_values(even, whole[::2]) and same_values(odd, whole[1::2])):
            raise SampleAxisError(
                "f gives samples other outputs in a part of the batch than in the whole, so it cannot be chunked over "
                "samples: it mixes them, uses the length of the batch, or reads something by the place of a sample (as "
                f"`p[: len(x)]` does). Chunk over outputs or params. {_GIVE}"
            )
        return "each"
    if drew:
        raise RandomnessError(
            "f draws random numbers and returns one number, which may be the mean over its samples or the sum, so it "
            "cannot be chunked over samples. Return the [N] losses of the samples."
        )
    if fake(whole):  # which says nothing of the numbers
        return "mean"
    mean = near(whole, even * (1 - k // 2 / k) + odd * (k // 2 / k), size := even.abs() + odd.abs())
    if mean == near(whole, even + odd, size):
        raise neither()
    return "mean" if mean else "sum"


def not_in_parts(error: Exception) -> SampleAxisError:
    """The error for an f that raises one of its own on some of the samples."""
    told = str(error).strip().split("\n")[0]
    return SampleAxisError(
        f"f does not run on a part of the batch ({told}), so it cannot be chunked over samples. {_GIVE}"
    )


def neither() -> SampleAxisError:
    """The error for a loss that is one number, and none of its samples."""
    return SampleAxisError(
        "the loss is one number, and on a part of the batch neither the mean nor the sum over its samples (does it "
        "divide by weights, or by a count of its data?), so it cannot be chunked over samples. Return the [N] losses "
        "of the samples, or give the loss apart, as in `diag_ggn(f, loss)`."
    )


def widened(problem: BoundProblem) -> BoundProblem:
    """The problem with all that is in half precision in single precision."""
    leaves, args, kwargs = tree.map_tensors(wide, (problem.leaves, problem.args, problem.kwargs))
    return replace(problem, leaves=leaves, args=args, kwargs=kwargs)


def told_apart(problem: BoundProblem) -> BoundProblem:
    """The problem with parameters near its own in place of those that have the same numbers at two places."""
    return replace(problem, leaves=[_told_apart(p.detach()) if _alike(p) else p.detach() for p in problem.leaves])


def _alike(x: torch.Tensor) -> bool:
    sides = [d for d, size in enumerate(x.shape) if size > 1]
    return not fake(x) and any(not anywhere(x.select(d, 0) != x.select(d, 1)) for d in sides)


def _told_apart(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x
    size = x.abs().nan_to_num(0, 0, 0).amax()
    step = 0.01 if torch.finfo(x.dtype).eps < 1e-5 else 0.5  # half precision is compared to few digits
    numbers = step * torch.arange(1.0, x.numel() + 1, device=x.device).cos().reshape(x.shape).to(x.dtype)
    return x + numbers * torch.where(x == 0, torch.where(size > 0, size, 1), x)
