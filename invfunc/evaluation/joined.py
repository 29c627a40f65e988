"""Tells whether batches may be joined: f has to give samples beside others what it gives them in their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost
from invfunc._torch.values import anywhere, near, same_values
from invfunc.arguments.problem import BoundProblem
from invfunc.errors import ArgumentError, SampleAxisError


class Drew(Exception):
    """f draws random numbers: those of the whole batch are another sequence."""


class SomeAlone(Protocol):
    """Results of f for some samples alone, perhaps elsewhere: at parameters `moved`."""

    def __call__(self, part: slice, *, elsewhere: bool = False) -> Any: ...


def check_batches(problem: BoundProblem, joined: torch.Tensor, alone: Callable[[slice], torch.Tensor] | None) -> None:
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


def check_fewer(
    whole: Sequence[torch.Tensor],
    dim: int,
    n: int,
    given: Sequence[torch.Tensor],
    alone: SomeAlone,
    traced: bool = True,
) -> bool:
    """Check that some of n samples have the same losses or outputs `alone` as in the `whole` batch, along an axis;
    whether this has told anything of f, which was `given` some tensors.

    These are a few around the largest loss, or more where f does not take so few: losses that are zero or only rounding
    would not show a factor that depends on the number of samples. Half of them without the largest is looked at, too:
    what is divided by that, as a number or detached, shows only there. Where f is `traced`, it may not run on so few.
    """
    whole = [z for z in whole if z.numel()]
    if n < 2 or not whole or not all(z.ndim for z in whole):
        return True
    sizes = [_sizes(z, dim) for z in whole]
    largest = next((x for x in sizes if anywhere(x > 0)), None)
    if largest is None:
        return False
    place, half = int(innermost(largest).argmax()) % n, n // 2
    fewer = Fewer(whole, dim, n, given, [x.amax() for x in sizes], alone)
    for few in sorted({min(2, half), half, n - 1}):
        part, found = slice(first := min(place, n - few), first + few), None
        with suppress(Exception):  # f may draw at random, or not run on so few
            found = fewer.of(part)
        if found and all(z.ndim for z in found):
            fewer.check(found, part)
            break
    part = slice(0, half) if place >= half else slice(n - half, n)
    try:
        found = fewer.of(part)
    except Exception as error:
        if traced:  # which may not know how to follow f in so few, or f draws
            return True
        error.add_note(f"This is of {half} samples alone, which f has to give what it gives them in the batch.")
        raise
    fewer.check(found, part)
    return True


@dataclass
class Fewer:
    """Results of f for samples in a batch, beside those for some of them alone."""

    whole: list[torch.Tensor]
    dim: int
    n: int
    given: Sequence[torch.Tensor]
    sizes: list[torch.Tensor]
    """The largest of each."""
    alone: SomeAlone

    def of(self, part: slice, *, elsewhere: bool = False) -> list[torch.Tensor]:
        """Results of f for some samples alone."""
        return [z for z in tree.tensors((self.alone(part, elsewhere=elsewhere),)) if z.numel()]

    def check(self, found: list[torch.Tensor], part: slice) -> None:
        """Compare what f gives some alone, unless f gives something else each time."""
        whole = slice(0, self.n)
        if not self._same(found, part) and self._same(self.of(whole), whole) and not self._rounding(part):
            raise SampleAxisError(
                "f gives a sample something else beside fewer ones, so that batches cannot be joined: it mixes the "
                "samples, as batch normalisation in train mode does, or has a factor that depends on how many there "
                "are. Take `model.eval()`, or losses without that factor, as with reduction='none'."
            )

    def _rounding(self, part: slice) -> bool:
        """Tells whether they differ where losses are only rounding, as of what is learnt by heart: elsewhere they do
        not, in either half, as one of these has the largest."""
        half = self.n // 2
        with suppress(Exception):
            whole = self.of(slice(0, self.n), elsewhere=True)
            there = replace(self, whole=whole, sizes=(sizes := [_sizes(z, self.dim).amax() for z in whole]))
            told = not any(anywhere(~z.isfinite()) or anywhere(x == 0) for z, x in zip(whole, sizes, strict=True))
            parts = (part, slice(0, half), slice(self.n - half, self.n))
            return told and all(there._same(self.of(p, elsewhere=True), p) for p in parts)
        return False

    def _same(self, found: list[torch.Tensor], part: slice) -> bool:
        """Tells whether they are that of the whole, up to what rounding makes of the largest there."""
        if len(found) != len(self.whole):
            return False
        for one, z, size in zip(found, self.whole, self.sizes, strict=True):
            dim, low = _axis(z, self.dim), _lowest(z, self.given)
            if z.shape[dim] != self.n:
                return False
            joined, by = z.narrow(dim, part.start, part.stop - part.start), size.where(size > 0, 1)
            if one.shape != joined.shape:
                return False
            if not near((one / by).to(low), (joined / by).to(low), 1):  # which is in the range of any dtype
                return False
        return True


def moved(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters of other sizes and the same signs, always the same ones."""
    source = torch.Generator().manual_seed(0)
    return [x.detach() * (torch.rand(x.shape, generator=source) + 0.5).to(x) for x in params]


def _sizes(z: torch.Tensor, dim: int) -> torch.Tensor:
    """Size of each sample's result."""
    own = z.detach().abs().nan_to_num(0, 0, 0).movedim(_axis(z, dim), 0)
    return own.reshape(len(own), -1).amax(1)


def _axis(z: torch.Tensor, dim: int) -> int:
    """The axis of the samples; losses have that axis alone."""
    return dim % z.ndim if z.ndim > 1 else 0


def _lowest(z: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype with the fewest digits in which f may have computed z, whatever that is given in."""
    kind, found = z.device.type, [z.dtype, *(x.dtype for x in given)]
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        found.append(torch.get_autocast_dtype(kind))
    low = [dtype for dtype in found if dtype.is_floating_point and not z.is_complex()]
    return max(low, key=lambda dtype: torch.finfo(dtype).eps, default=z.dtype)
