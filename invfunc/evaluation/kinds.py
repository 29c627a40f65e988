"""The way a result for all samples is made up of those for some of them alone, if it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Literal

import torch

from invfunc import tree
from invfunc._torch.generators import uniform
from invfunc._torch.values import HALF, anywhere, fake, near, same_values, size_of, wide
from invfunc._torch.weak import WeakIdMap
from invfunc.arguments.problem import BoundProblem
from invfunc.errors import ArgumentError, RandomnessError, SampleAxisError

Kind = Literal["each", "mean", "sum"]
"""One by one, as their mean or their sum."""
Some = Callable[[BoundProblem, list[int]], tuple[list[torch.Tensor], bool]]
"""What f gives for the samples at some places, `[k, ...]`, and whether it drew random numbers."""
_KNOWN: WeakIdMap[dict[Hashable, Kind]] = WeakIdMap()
_KEPT, FEW = 64, 8
"""Of how many calls it is known, and how many samples are looked at."""
_GIVE = "Pass what belongs to a sample, such as a mask or indices, as a batch argument."


class Drew(Exception):
    """f draws random numbers: those of the whole batch are another sequence."""


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
    by the place of a sample: such ones are `told_apart`, and computed in single precision if f runs in half. Where
    results differ, they may be nothing but rounding, as losses of what is learnt by heart: it is looked again where
    all parameters are others.
    """
    n, k = problem.n, min(problem.n, max(2, min(size, FEW)))
    places = [n * i // k for i in range(k)]
    halves = places, places[::2], places[1::2]

    def looked(leaves: list[torch.Tensor], elsewhere: bool) -> Kind:
        at, found = replace(problem, leaves=leaves), list[tuple[list, bool]]()
        device = at.leaves[0].device.type
        casts = torch.is_autocast_enabled(device)
        half = casts or any(x.dtype in HALF for x in at.tensors)
        if half:
            with suppress(Exception), torch.autocast(device, enabled=False) if casts else nullcontext():
                found = [some(widened(at), each) for each in halves]
        if not found:
            found = [some(at, each) for each in halves]
            found = [([z.bfloat16() for z in values], drew) for values, drew in found] if half else found
        drew = any(drew for _, drew in found)
        if elsewhere and any(anywhere(~z.isfinite()) or not anywhere(z != 0) for z in found[0][0] if z.numel()):
            raise SampleAxisError("f has no numbers there")
        values = zip(*(values for values, _ in found), strict=True)
        kinds: list[Kind] = [_joined(*z, k=k, drew=drew) for z in values]
        return kinds[0] if kinds else "each"

    apart = [_told_apart(p.detach()) if _alike(p) else p for p in problem.leaves]
    try:
        return looked(apart, elsewhere=False)
    except SampleAxisError:
        with suppress(Exception):
            return looked(moved(apart), elsewhere=True)
        raise


def _joined(whole: torch.Tensor, even: torch.Tensor, odd: torch.Tensor, *, k: int, drew: bool) -> Kind:
    """The way a result for k samples is made up of those for the even and for the odd ones alone."""
    if whole.ndim:
        size = size_of(whole)  # beside the largest, others are only rounding
        pairs = (even, whole[::2]), (odd, whole[1::2])
        if not drew and not all(x.shape == y.shape and near(x, y, size) for x, y in pairs):
            raise SampleAxisError(
                "f gives a sample another result in a smaller batch, so that parts of a batch, or batches, cannot be "
                "joined: it mixes the samples, as batch norm in train mode does (take `model.eval()`), uses the length "
                "of the batch, or reads something by the place of a sample (as `p[: len(x)]` does). Chunk over outputs "
                f"or params. {_GIVE}"
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


def check_batches(problem: BoundProblem, joined: torch.Tensor, alone: Callable[[slice], torch.Tensor]) -> None:
    """Check that samples have the same losses or outputs in the joined batch as where f sees a batch alone."""
    if not joined.ndim:
        raise ArgumentError(
            "f returned one number for both batches together, which does not tell their scales apart. Return the [N] "
            "losses of the samples, as with reduction='none', and scale the products."
        )
    edge, dim = problem.n - problem.others, problem.out_dims if joined.ndim > 1 else 0
    for start, stop in ((0, edge), (edge, problem.n)):
        if not same_values(alone(slice(start, stop)), joined.narrow(dim, start, stop - start)):
            raise ArgumentError(
                "f gives samples other results where both batches are joined, so it depends on the number of samples "
                f"or on their positions. {_GIVE}"
            )


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


def moved(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters of other sizes and the same signs, always the same ones."""
    by = [(1 + uniform(x.numel(), seed) / 2).reshape(x.shape) for seed, x in enumerate(params, 1)]
    return [x.detach() * factor.to(x) for x, factor in zip(params, by, strict=True)]


def _alike(x: torch.Tensor) -> bool:
    """Tells whether a parameter has the same numbers at two places."""
    sides = [d for d, size in enumerate(x.shape) if size > 1]
    return not fake(x) and any(not anywhere(x.select(d, 0) != x.select(d, 1)) for d in sides)


def _told_apart(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x
    size = x.abs().nan_to_num(0, 0, 0).amax()
    step = 0.01 if torch.finfo(x.dtype).eps < 1e-5 else 0.5  # half precision is compared to few digits
    numbers = step * torch.arange(1.0, x.numel() + 1, device=x.device).cos().reshape(x.shape).to(x.dtype)
    return x + numbers * torch.where(x == 0, torch.where(size > 0, size, 1), x)
