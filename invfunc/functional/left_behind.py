"""What forward has left on the copy of a module, or of the copy in what the module shares with it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from invfunc.errors import ArgumentError
from invfunc.functional.module_copy import (
    REGISTERED,
    STANDARD,
    EntangledError,
    ModuleCopy,
    Reach,
    Rewiring,
    leads,
    references,
)
from invfunc.functional.remade import LeavesNothing


def left(copy: ModuleCopy) -> list[tuple[Any, str, str | None, Any]]:
    """What forward, but no hook, has left on the copies: `(original, name, part of a module or None, value)`."""
    found: list[tuple[Any, str, str | None, Any]] = []
    for original, copied, began, own in copy.made:
        now, before = copied.__dict__, original.__dict__
        if len(now) != len(began) or not all(map(operator.is_, now.values(), began.values())):
            changed = [(n, v) for n, v in now.items() if began.get(n, began) is not v and n not in own]
            found += [(original, name, None, value) for name, value in changed]
        for kind in REGISTERED if isinstance(copied, nn.Module) else ():
            if len(now[kind]) > len(before[kind]):
                found += [(original, n, kind, now[kind][n]) for n in now[kind].keys() - before[kind].keys()]
    if not found:
        return found
    home = _home(_originals(copy))
    return [(original, name, kind, home.of(value)) for original, name, kind, value in found]


def put_back(copy: ModuleCopy, called: str) -> None:
    """Put the modules themselves in the place of copies that forward has put into what is shared, as a list of layers
    that the first call fills."""
    back = _originals(copy)
    for original in back.values():
        for name, value in () if isinstance(original, LeavesNothing) else vars(original).items():
            if name in STANDARD or not leads(value, back, _onward):
                continue
            try:
                _mended(vars(original), name, value, _home(back))
            except EntangledError as error:
                raise ArgumentError(
                    f"{called}: forward has put a part of the module, or a method of one, into {error}, where it would "
                    "stay in calls with other parameters. Put it there before the first call, as in __init__."
                ) from None


def _onward(x: Any) -> Iterable[Any]:
    """What something of the caller's leads to; what a module leads to is asked of that."""
    return () if isinstance(x, (nn.Module, LeavesNothing)) else references(x)


def _mended(attributes: dict[str, Any], name: str, value: Any, home: Rewiring) -> None:
    """Bring an attribute home; a container stays the same object."""
    mended = home.of(value)
    if isinstance(value, (list, deque, dict, set)):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(mended)
    else:
        attributes[name] = mended


def _originals(copy: ModuleCopy) -> dict[int, Any]:
    """The originals, by the ids of what was copied of them."""
    return {id(copied): original for original, copied, *_ in copy.made}


def _home(back: Mapping[int, Any]) -> Rewiring:
    return Rewiring(back, back, Reach())
