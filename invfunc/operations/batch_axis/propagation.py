"""How each torch function moves the sample axis: from the axes of what it read to that of what it returned.

A rule (`batch_axis` of an entry) takes a `Call` and returns an `Axis`, `BATCH_SUM` (summed over the samples) or None
(no sample in it): one for all tensors that came out, or a list with one for each. It raises `Mixed` where samples meet
or the axis cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.equations import Equation, equation
from invfunc.operations.naming import argument
from invfunc.operations.operation import known, linear


class Mixed(Exception):
    """Samples are mixed by an operation, or it moves the sample axis where nothing can follow; says how."""


class Unknown(Mixed):
    """Nothing is known about the operation; it may well keep the samples apart."""


class BatchSum:
    """What stands in place of an axis for a tensor that is a sum over the samples, as a scalar loss is."""

    def __repr__(self) -> str:
        return "BATCH_SUM"


BATCH_SUM = BatchSum()
Place = Axis | BatchSum | None


@dataclass
class Call:
    """One call of a torch function: what it read, what it returned, and where the samples are in what it read."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    places: dict[int, Axis | BatchSum]
    n: int
    active: bool
    """Whether the sample tensors depend on the parameters."""
    read: list[torch.Tensor]
    by_rows: bool = False
    """Whether data that change places are followed to their samples, and not only their order is known."""

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by its name."""
        return argument(self.func, self.args, self.kwargs, name, default)

    def place(self, x: Any) -> Place:
        return self.places.get(id(x))

    @cached_property
    def equation(self) -> Equation | None:
        """It as an einsum, None where it cannot be written as one."""
        return equation(self.name, self.args, self.kwargs)

    @cached_property
    def samples(self) -> list[tuple[torch.Tensor, Axis | BatchSum]]:
        return [(x, self.places[id(x)]) for x in self.read if id(x) in self.places]

    @property
    def first(self) -> torch.Tensor:
        if self.args:
            return self.args[0]
        return next(self.kwargs[k] for k in ("input", "tensors", "self", *self.kwargs) if k in self.kwargs)


def propagate(call: Call) -> Place | list[Place]:
    """Where the samples are in the result of a call."""
    places = [place for _, place in call.samples]
    if not places:  # of what nothing of a sample was written into
        return None
    alone = [place for place in places if isinstance(place, Axis) and place.dim is None]
    if alone and all(place == alone[0] for place in places):  # nothing to mix: everything is of the one sample
        if call.n == 1 or known(call.name).places != "writes":
            return alone[0]
    if BATCH_SUM in places or (alone and known(call.name).places == "no"):
        return _of_sums(call, places)
    of_mask = call.name == "where" and not isinstance(call.out, torch.Tensor)
    found = getattr(call.func, "follow", None) or known("nonzero" if of_mask else call.name).batch_axis
    if found is None:
        raise Unknown("it has no rule that follows the sample axis")
    return _checked(call, found(call))


def _checked(call: Call, found: Place | list[Place]) -> Place | list[Place]:
    """What a rule has found, once checked: each result has room for n samples along its axis, or is left empty."""
    produced = tree.tensors(call.out)
    places = list(found) if isinstance(found, list) else [found] * len(produced)
    for i, (x, place) in enumerate(zip(produced, places, strict=True)):
        if isinstance(place, Axis) and not place.fits(x, call.n):
            if x.numel() or i == 0:
                raise Mixed(f"{tuple(x.shape)} is not the shape of {call.n} samples along {place}")
            places[i] = None
    return places if None in places and found is not None else found


def _of_sums(call: Call, places: list[Axis | BatchSum]) -> Place:
    """The place of what a call gives that reads a sum over the samples, or one sample as a sum of its own."""
    if all(isinstance(place, BatchSum) or place.dim is None for place in places):
        return total(call)
    if BATCH_SUM in places:
        raise Mixed("it combines a sum over the samples with tensors that keep them apart")
    raise Unknown("it combines one sample with tensors that seem to keep them apart")


def total(call: Call) -> Place:
    """The place of what is computed from sums over the samples: linear operations keep them a sum."""
    sums = list({id(x): x for x, _ in call.samples}.values())
    if not linear(call.func, call.args, call.kwargs, call.read, sums):
        how = known(call.name).linear
        if how == "each":
            raise Mixed("it multiplies two sums over the samples")
        where = " in this argument (as in a divisor)" if isinstance(how, int) else ""
        raise Mixed(f"it is not linear in a sum over the samples{where}")
    return BATCH_SUM


# What several rules of families do


def leading(call: Call, trailing: int) -> Place:
    """The last `trailing` dimensions are computed on, those before them only go along."""
    x, axis = call.samples[0]
    others = [a for key, a in (*enumerate(call.args), *call.kwargs.items()) if key not in (0, "input")]
    if any(isinstance(a, torch.Tensor) and call.place(a) is not None for a in others):
        raise Unknown("other arguments than its input depend on the samples")
    assert isinstance(axis, Axis) and axis.dim is not None
    if axis.dim >= x.ndim - trailing:
        raise Mixed("it computes across the sample axis")
    return axis
