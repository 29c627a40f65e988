"""The evaluations of the functions that both directions of a pair share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import watched
from invfunc._torch.parametrized import keeping_own
from invfunc.errors import InvFuncError
from invfunc.recomputation.like import Like
from invfunc.recomputation.replay import Replay
from invfunc.recomputation.sight import Sight
from invfunc.transform import told

Tensors = Sequence[torch.Tensor]


class Evaluation:
    """One of a shared function, at what it is given, or at other tensors in its place.

    Args:
        sight: what looks on at the function that it is shared by.
    """

    def __init__(self, sight: Sight, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.fn, self._sight, self._given = fn, sight, (args, kwargs)
        self.own, self._form = tree.separate(self._given)
        self._lifts = len(sight.lifts)
        self.tensors: Tensors = [*sight.lifts, *self.own] if self._lifts else self.own
        """What the function is given, behind what it closes over, which is an argument too."""

    def laid(self, own: Tensors) -> None:
        """It is given these tensors in place of its own."""
        if any(t is not then for t, then in zip(own, self.own, strict=True)):
            self._given = self._form.join(own)
            self.tensors = [*self.tensors[: self._lifts], *own]

    def at(self, tensors: Tensors) -> Any:
        """The result at some tensors."""
        args, kwargs = self._given if tensors is self.tensors else self._form.join(tensors[self._lifts :])
        lifting = self._sight.lifting(tensors[: self._lifts]) if self._lifts else _AS_IT_IS
        with keeping_own(), lifting, watched():
            return self.fn(*args, **kwargs)


_AS_IT_IS = nullcontext()
Evaluate = Callable[[int, Evaluation], Any]
"""The result of an evaluation, of which it is known which one it is in the order of forward."""


@dataclass
class Moment:
    """An evaluation of a shared function: which one, what the tensors are like that it got, and what was around it."""

    fn: Callable
    places: list[int | None]
    """Which further arguments of the pair the tensors are."""
    like: list[Like | None]
    """What those are like that are none."""
    before: Replay
    after: Replay
    grad: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients were enabled, which a function may ask."""

    def given(self, evaluation: Evaluation, rest: Tensors) -> list[torch.Tensor] | None:
        """What an evaluation by the inverse is given, laid out as then; None if it is that of another function, or of
        other shapes. What is the same further argument is as it was."""
        if evaluation.fn is not self.fn or len(evaluation.own) != len(self.places):
            return None
        laid = []
        for t, place, like in zip(evaluation.own, self.places, self.like, strict=True):
            if place is None or t is not rest[place]:
                like = like or Like.of(rest[place or 0])
                if t.shape != like.shape:
                    return None
                t = like.given_to(t)
            laid.append(t)
        return laid

    def again(self, evaluate: Callable[[], Any]) -> Any:
        """An evaluation by the inverse, with what was around the first one; it has a graph only where one is wanted."""
        graph = torch.is_grad_enabled()
        with self.before.again(), _AS_IT_IS if graph is self.grad else torch.set_grad_enabled(self.grad):
            result = evaluate()
        return result if graph else tree.map_tensors(torch.Tensor.detach, result)


class Evaluations:
    """The evaluations of shared functions in one direction, counted."""

    def __init__(self, evaluate: Evaluate | None, sight: Sight) -> None:
        self._evaluate, self._sight = evaluate, sight
        self.count = 0

    def of(self, shared: tuple[Callable, ...]) -> tuple[Callable, ...]:
        """The functions as forward or inverse gets them."""
        return shared if self._evaluate is None else tuple(partial(self._call, fn) for fn in shared)

    def _call(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluate is not None
        self.count += 1
        with self._sight.aside():
            return self._evaluate(self.count - 1, Evaluation(self._sight, fn, args, kwargs))


@contextmanager
def naming(pair: Any) -> Iterator[None]:
    """A context in which errors name a block in its backward pass."""
    try:
        yield
    except InvFuncError as error:
        raise told(error, f"invertible_checkpoint({pair!r}), in the backward pass") from error.__cause__
