"""The functions that the core does not follow, so that it is not asked again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import count
from typing import TypeVar

from invfunc._torch.weak import WeakIdMap

_REFUSED = WeakIdMap[set[Hashable]]()
_TIMES = count()
T = TypeVar("T")


def refused(f: Callable, what: Hashable) -> bool:
    """Whether the core has refused a function for a statistic, or what else is asked of it."""
    return what in (_REFUSED.get(f) or ())


def refuse(f: Callable, what: Hashable) -> None:
    """Note that it did."""
    next(_TIMES)
    with suppress(TypeError):  # a function of a kind that has no weak references
        _REFUSED.set(f, {*(_REFUSED.get(f) or ()), what})


def straight(run: Callable[[], T]) -> T:
    """What a run finds in which the core refuses nothing: one in which it does has done things twice."""
    before = repr(_TIMES)
    found = run()
    return found if repr(_TIMES) == before else run()


def asked_again(f: Callable) -> None:
    """Forget what is noted of a function."""
    _REFUSED.set(f, None)
