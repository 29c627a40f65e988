"""Tells whether batches may be joined: f has to give samples beside others what it gives them in their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from invfunc import tree
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
            "f returned one number for both batches together, which does not tell their scales apart. Return the [N] "
            "losses of the samples, as with reduction='none', and scale the products."
        )
    edge, dim = problem.n - problem.others, problem.out_dims if joined.ndim > 1 else 0
    for start, stop in ((0, edge), (edge, problem.n)):
        if alone is not None and not same_values(alone(slice(start, stop)), joined.narrow(dim, start, stop - start)):
            raise ArgumentError(
                "f gives samples other results where both batches are joined, so it depends on the number of samples "
                "or on their positions. Pass what belongs to a sample as a batch argument."
            )


def check_fewer(
    whole: Sequence[torch.Tensor],
    dim: int,
    n: int,
    given: Sequence[torch.Tensor],
    alone: SomeAlone,
    traced: bool = True,
) -> bool:
    """Check that either half of n samples has the same losses or outputs `alone` as in the `whole` batch, along an
    axis; whether this has told anything of f, which was `given` some tensors.

    One half has the largest result, beside which others are only rounding; what f divides by that, as a number or
    detached, shows in the other. Where f is `traced`, it may not run on so few.
    """
    fewer = Halves([z for z in whole if z.numel()], dim, n, given, alone)
    if n < 2 or not fewer.whole or not all(z.ndim for z in fewer.whole):
        return True
    if not any(anywhere(z.detach().abs().nan_to_num(0, 0, 0) > 0) for z in fewer.whole):
        return False
    try:
        halves = fewer.run()
    except Exception as error:
        if traced:  # which may not know how to follow f in so few, or f draws
            return True
        error.add_note(f"This is of {n // 2} samples alone, which f has to give what it gives them in the batch.")
        raise
    if not fewer.same(halves) and fewer.same([fewer.results(slice(0, n))]) and not fewer.rounding():
        raise SampleAxisError(
            "f gives a sample another result in a smaller batch, so that batches cannot be joined: it mixes the "
            "samples, as batch norm in train mode does (take `model.eval()`), or it has a factor that depends on how "
            "many there are (return the losses without it, as with reduction='none')."
        )
    return True


@dataclass
class Halves:
    """Results of f for n samples in a batch, beside those for its halves alone."""

    whole: list[torch.Tensor]
    dim: int
    n: int
    given: Sequence[torch.Tensor]
    alone: SomeAlone

    def results(self, part: slice, *, elsewhere: bool = False) -> list[torch.Tensor]:
        """Results of f for some samples alone."""
        return [z for z in tree.tensors((self.alone(part, elsewhere=elsewhere),)) if z.numel()]

    def run(self, *, elsewhere: bool = False) -> list[list[torch.Tensor]]:
        """Results of f for either half alone."""
        edge = self.n // 2
        return [self.results(part, elsewhere=elsewhere) for part in (slice(0, edge), slice(edge, self.n))]

    def rounding(self) -> bool:
        """Tells whether they differ where losses are only rounding, as of what is learnt by heart: elsewhere they do
        not."""
        with suppress(Exception):
            there = replace(self, whole=self.results(slice(0, self.n), elsewhere=True))
            numbers = all(not anywhere(~z.isfinite()) and anywhere(z != 0) for z in there.whole)
            return numbers and there.same(self.run(elsewhere=True))
        return False

    def same(self, parts: list[list[torch.Tensor]]) -> bool:
        """Tells whether parts are those of the whole, up to what rounding makes of the largest there."""
        if any(len(part) != len(self.whole) or not all(z.ndim for z in part) for part in parts):
            return False
        for z, *own in zip(self.whole, *parts, strict=True):
            dim, low = _axis(z, self.dim), _lowest(z, self.given)
            shapes = [(*x.shape[:dim], *x.shape[dim + 1 :]) for x in own]
            if any(shape != (*z.shape[:dim], *z.shape[dim + 1 :]) for shape in shapes):
                return False
            if (joined := torch.cat(own, dim)).shape != z.shape:
                return False
            by = z.detach().abs().nan_to_num(0, 0, 0).amax()
            by = by.where(by > 0, 1)
            if not near((joined / by).to(low), (z / by).to(low), 1):  # which is in the range of any dtype
                return False
        return True


def moved(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters of other sizes and the same signs, always the same ones."""
    source = torch.Generator().manual_seed(0)
    return [x.detach() * (torch.rand(x.shape, generator=source) + 0.5).to(x) for x in params]


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
