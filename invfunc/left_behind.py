"""What forward has left on the copy of a module, or of the copy in what the module shares with it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from invfunc import thresholds
from invfunc.errors import ArgumentError
from invfunc.module_copy import PLAIN, STANDARD, EntangledError, ModuleCopy, Reach, Rewiring, references

_REGISTERED = ("_parameters", "_buffers", "_modules")


def left(copy: ModuleCopy) -> list[tuple[Any, str, str | None, Any]]:
    """What forward, but no hook, has left on the copies: `(original, name, part of a module or None, value)`."""
    found: list[tuple[Any, str, str | None, Any]] = []
    for original, copied, began, own in copy.made:
        now, before = copied.__dict__, original.__dict__
        if len(now) != len(began) or not all(map(operator.is_, now.values(), began.values())):
            changed = [(n, v) for n, v in now.items() if began.get(n, began) is not v and n not in own]
            found += [(original, name, None, value) for name, value in changed]
        for kind in _REGISTERED if isinstance(copied, nn.Module) else ():
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
        for name, value in () if _ours(original) else vars(original).items():
            if name in STANDARD or not _leads(value, back):
                continue
            try:
                _mended(vars(original), name, value, _home(back))
            except EntangledError as error:
                raise ArgumentError(
                    f"{called}: forward has put a part of the module, or a method of one, into {error}, where it would "
                    "stay in calls with other parameters. Put it there before the first call, as in __init__."
                ) from None


def _leads(x: Any, back: Mapping[int, Any]) -> bool:
    """Whether something of the caller's leads to a copy; what leads on from a module is asked of that."""
    waiting, seen = [x], set[int]()
    while waiting and len(seen) <= thresholds.SEARCHED:
        one = waiting.pop()
        if id(one) in back:
            return True
        if type(one) in PLAIN or id(one) in seen or isinstance(one, (nn.Module, torch.Tensor)) or _ours(one):
            continue
        seen.add(id(one))
        waiting.extend(references(one))
    return False


def _ours(x: Any) -> bool:
    """Whether it is of this library, as blocks are, which have no use for the parts that they are copied with."""
    return type(x).__module__.partition(".")[0] == __package__


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
