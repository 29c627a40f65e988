"""The evaluations of the functions that both directions of a pair share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._parametrized import keeping_own
from invfunc.recomputation.like import Like
from invfunc.recomputation.replay import Replay
from invfunc.recomputation.sight import Sight

Evaluate = Callable[[int, Callable, tuple, dict[str, Any]], Any]
"""An evaluation of a shared function: which one in the order of forward, the function and its arguments."""


@dataclass
class Moment:
    """An evaluation of a shared function: which one, what the tensors are like that it got, and what was around it."""

    fn: Callable
    like: list[Like]
    before: Replay
    after: Replay
    grad: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients were enabled, which a function may ask."""

    def again(self, evaluate: Callable[[], Any]) -> Any:
        """An evaluation by the inverse, with what was around the first one; it has a graph only where one is wanted."""
        graph = torch.is_grad_enabled()
        with self.before.again(), torch.set_grad_enabled(self.grad):
            result = evaluate()
        return result if graph else tree.map_tensors(torch.Tensor.detach, result)


class Evaluations:
    """The evaluations of shared functions in one direction, counted."""

    def __init__(self, evaluate: Evaluate | None) -> None:
        self._evaluate = evaluate
        self.count = 0

    def of(self, shared: tuple[Callable, ...]) -> tuple[Callable, ...]:
        """The functions as forward or inverse gets them."""
        return shared if self._evaluate is None else tuple(partial(self._call, fn) for fn in shared)

    def _call(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        assert self._evaluate is not None
        self.count += 1
        return self._evaluate(self.count - 1, fn, args, kwargs)


def evaluated(sight: Sight, evaluate: Evaluate | None, index: int, fn: Callable, args: tuple, kwargs: Any) -> Any:
    """A shared function, of which what it closes over is an argument too."""
    if sight.lifts:
        fn, args = partial(sight.lifted, fn), (sight.lifts, *args)
    with keeping_own():
        return fn(*args, **kwargs) if evaluate is None else evaluate(index, fn, args, kwargs)
