"""Errors that are numbers of a device, which is waited for once, when the backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from invfunc._torch.functorch import after_backward, backward_pass
from invfunc.recomputation.rounding import Error, numbers_of

_Judge = Callable[[float, float], None]
_waiting: dict[int, list[tuple[torch.Tensor, Error, _Judge]]] = {}


def later(error: torch.Tensor, before: Error, judge: _Judge) -> None:
    """Look at numbers of a device when the backward pass has ended; at once where none is running."""
    running = backward_pass()
    if running < 0:
        return judge(float(error), float(before))
    waiting = _waiting.setdefault(running, [])
    waiting.append((error, before, judge))
    if len(waiting) == 1:
        while len(_waiting) > _PASSES:  # those of passes that failed
            del _waiting[next(iter(_waiting))]
        after_backward(lambda: _look(_waiting.pop(running, [])))


_PASSES = 100


def _look(waiting: Sequence[tuple[torch.Tensor, Error, _Judge]]) -> None:
    numbers = iter(numbers_of([e for error, before, _ in waiting for e in (error, before)]))
    for (_, _, judge), error, before in zip(waiting, numbers, numbers, strict=False):
        judge(error, before)
