"""The ways in which the core follows functions, so that those that fail are not tried again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import count
from typing import TypeVar

from invfunc._torch.weak import WeakIdMap

_WAYS = WeakIdMap[dict[Hashable, int]]()
_TIMES = count()
T = TypeVar("T")


def known_way(f: Callable, what: Hashable) -> int:
    """The number of the way in which a function is followed, for a statistic or what else is asked of it."""
    return (_WAYS.get(f) or {}).get(what, 0)


def note_way(f: Callable, what: Hashable, way: int) -> None:
    """Note which way follows a function."""
    next(_TIMES)
    with suppress(TypeError):  # a function of a kind that has no weak references
        _WAYS.set(f, {**(_WAYS.get(f) or {}), what: way})


def straight(run: Callable[[], T]) -> T:
    """The result of a run in which no way fails: one in which a way fails has done things twice."""
    before = repr(_TIMES)
    found = run()
    return found if repr(_TIMES) == before else run()
