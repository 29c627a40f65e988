"""Whether f treats a sample alike at every place of the batch, as it has to where it runs on a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from invfunc import tree
from invfunc.errors import InvFuncError, RandomnessError, SampleAxisError
from invfunc.passes.alone import FOREIGN
from invfunc.recording.checks import check_same, same_values
from invfunc.recording.problem import Problem

_GIVE = "What f has for each sample, such as a mask, goes among its batch arguments, not into constants or keywords."
Values = list[torch.Tensor]
"""What f gives for some samples, `[k, ...]`."""


def not_in_parts(why: str) -> SampleAxisError:
    """The error for a function that cannot take some of the samples, with what it said of it."""
    told = why.strip().split("\n")[0]
    return SampleAxisError(
        f"f does not run on a part of the batch ({told}), so it cannot be chunked over samples. {_GIVE}"
    )


def other_in_part() -> SampleAxisError:
    return SampleAxisError(
        "the outputs of f on a part of the batch are not those of the whole batch (has it a constant for each sample, "
        f"or does it use the length of the batch?), so it cannot be chunked over samples. {_GIVE}"
    )


def other_losses_in_part() -> SampleAxisError:
    return SampleAxisError(
        "the losses of f on a part of the batch are not those of the whole batch (does it divide by its length?), so "
        "it cannot be chunked over samples; mark its outputs with `outputs(z)`."
    )


def other_again(what: str) -> RandomnessError:
    return RandomnessError(
        f"f gives {what} when it runs again: it draws numbers outside of torch, or changes a state that it reads (a "
        "counter, a moving average). Pass these as arguments."
    )


@contextmanager
def runs_on_part(partial: bool) -> Iterator[None]:
    """A context in which errors that f raises on a part of the batch are told to come from that."""
    try:
        yield
    except FOREIGN as error:
        if isinstance(error, InvFuncError) or not partial:
            raise
        raise not_in_parts(str(error)) from error


def check_part(
    part: slice,
    total: int,
    found: Values,
    again: Callable[[list[int]], Values],
    beside: Sequence[tuple[int, Values]] = (),
) -> None:
    """Check that the outputs `found` of a part do not depend on how many samples, or which, are beside each; nor those
    of the samples at some other places."""
    start, stop = part.start, part.stop
    several = _places(start, stop, total)
    several[0] += [place for place, _ in beside]
    known = {place: [z[place - start] for z in found] for place in range(start, stop)} | dict(beside)
    for places in several:
        came = again(places)
        for i, place in enumerate(places):
            for z, x in zip(known.get(place, ()), came, strict=place in known):
                check_same(z, x[i], _other_at_place)


def _other_at_place() -> SampleAxisError:
    return SampleAxisError(
        "the outputs of a sample depend on how many are beside it, or on its place (does f use the length of the "
        f"batch?), so f cannot be chunked over samples. {_GIVE}"
    )


def _places(start: int, stop: int, total: int) -> list[list[int]]:
    """Samples of a part beside others than there, on either side and in another mirror image, and never as many."""
    n, other = stop - start, stop % total
    few = {1: [[other, start], [start, other]], 2: [[stop - 1], [start]], 3: [[stop - 1, start + 1]]}
    return few.get(n, [[stop - 1, start, start + n // 2]])


def check_again(found: Values, whole: Values, again: Callable[[], Values]) -> None:
    """Check that the first samples alone have the same outputs once more, if these are others than in the batch."""

    def same(others: Values) -> bool:
        return all(
            a[0].shape == b[0].shape and same_values(a, b[: len(a)]) for a, b in zip(found, others, strict=False)
        )

    if not same(whole) and not same(again()):
        raise other_again("other outputs")


def check_parameters(problem: Problem, most: int, outputs: Callable[[Problem, list[int]], Values]) -> None:
    """Check that f does not read parameters by the place of a sample, in parts of at most so many (or two) samples.

    Where the entries for two places are the same numbers, as they are at first, outputs do not show it: they are
    computed with parameters that are `told_apart`, and in single precision if f runs in it.
    """
    last = problem.n - 1
    first, second = ([last, 0], [problem.n // 2, 0, last]) if most > 2 else ([last], [0, last])
    kind = problem.leaves[0].device.type
    casts = torch.is_autocast_enabled(kind)
    for wide in (True, False) if casts or any(x.dtype in _HALF for x in problem.tensors()) else (False,):
        near = told_apart(widened(problem) if wide else problem)
        try:
            with torch.autocast(kind, enabled=False) if wide and casts else nullcontext():
                found = [outputs(near, places) for places in (first, second)]
        except Exception:  # it is not defined there, or does not run on so few
            continue
        for a, b in zip(*found, strict=False):
            check_same(a[0], b[-1], _by_place)
        return


def _by_place() -> SampleAxisError:
    return SampleAxisError(
        "f reads a parameter by the place of a sample in the batch (as `p[: len(x)]` does), or uses the length of the "
        "batch, so it cannot be chunked over samples. Pick the entries by indices that are a batch argument, as in "
        "`p[index]`."
    )


_HALF = (torch.float16, torch.bfloat16)
"""Which show few digits."""


def widened(problem: Problem) -> Problem:
    """The problem with all that is in half precision in single precision."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype in _HALF else x

    leaves, args, kwargs = tree.map_tensors(wide, (problem.leaves, problem.args, problem.kwargs))
    return replace(problem, leaves=leaves, args=args, kwargs=kwargs)


def told_apart(problem: Problem) -> Problem:
    """The problem with parameters near its own, of which no two entries are the same."""
    return replace(problem, leaves=[_told_apart(p.detach()) for p in problem.leaves])


def _told_apart(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x
    size = x.abs().nan_to_num(0, 0, 0).amax()
    step = 0.01 if torch.finfo(x.dtype).eps < 1e-5 else 0.5  # half precision is compared to few digits
    numbers = step * torch.arange(1.0, x.numel() + 1, device=x.device).cos().reshape(x.shape).to(x.dtype)
    return x + numbers * torch.where(x == 0, torch.where(size > 0, size, 1), x)
