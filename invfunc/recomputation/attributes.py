"""Plain Python state of a function: attributes of the modules that it holds.

Where the function is evaluated again it finds numbers, texts and flags as they were, and the lengths of its lists;
after that they are what they were before, as are all attributes that it replaced.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from invfunc import thresholds
from invfunc.functional.module_copy import REGISTERED, STANDARD
from invfunc.pairs.value import Value, held_by

_FILLED = set(REGISTERED) - {"_buffers"}
"""Where a module may put what it makes in its first call."""
_PLAIN = (int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, deque, dict, set)
_LOOKS = 4
"""How many calls look at all that the function holds, to find out what it changes."""


class Entry(NamedTuple):
    """A name with its value; of a container its entries, or else their number, and which that is registered is None."""

    name: str
    value: Any = None
    content: Any = None
    identity: int | None = None
    """Of a value that is not kept itself, so that it is not kept alive."""
    length: int | None = None


Site = dict[str, Any]
"""The attributes of a module."""
State = list[tuple[Site, list[Entry]]]


class Attributes:
    """What the functions of a block hold and change."""

    def __init__(self) -> None:
        self._calls = 0
        self._sites: list[Site] = []
        self._changing: dict[int, Site] = {}
        self._last: State = []

    def __reduce__(self) -> tuple:  # a copy is of the functions that the copied block has
        return Attributes, ()

    def begins(self, of: Any) -> None:
        """A call of functions begins, or of a pair of them."""
        if self._calls < _LOOKS:
            self._calls += 1
            self._sites = list(_sites(of))
        elif self._sites:
            self._sites = list(self._changing.values())

    def ended(self, before: State) -> None:
        """The call has ended: what it has changed is looked at in all others."""
        if self._calls <= _LOOKS:
            for (site, then), (other, now) in zip(before, self.state(), strict=False):
                if site is other and then != now:  # another thread may have begun a call of a copy
                    self._changing[id(site)] = site

    def state(self) -> State:
        """What is held now."""
        found = [(site, [_entry(name, value) for name, value in _items(site)]) for site in self._sites]
        if not _is_one(found, self._last):
            self._last = found
        return self._last  # of which a call keeps several, and each block its own

    def set(self, state: State) -> None:
        """Plain values and lengths become what they were."""
        for site, entries in state:
            now = dict(_items(site))
            for name, value, content, identity, length in entries:
                current = now.pop(name, _MISSING)
                if length is not None and id(current) == identity:
                    _resize(current, length)
                    if content is not None:
                        current.update(content)
                elif identity is None:
                    if current is not value:
                        site[name] = value
                    if content is not None:
                        _fill(value, content)
            for name, value in now.items():  # that is new since
                if _is_plain(value):
                    del site[name]

    def everything(self) -> list[tuple[Site, str, Any, Any]]:
        """All values, as long as the function is evaluated again."""
        found = [(site, name, value, _copy(value)) for site in self._sites for name, value in _items(site)]
        if found:
            _again.whole = [*_whole(), {id(value): content for *_, value, content in found if type(value) is list}]
        return found

    def restore(self, everything: list[tuple[Site, str, Any, Any]]) -> None:
        """All that was there is there again."""
        if everything:
            _again.whole = _whole()[:-1]
        for site, name, value, content in everything:
            if site.get(name, _MISSING) is not value:
                site[name] = value
            if content is not None:
                _fill(value, content)


def same(a: State, b: State) -> bool:
    """Whether two states are of the same modules, and equal."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(site is other and then == now for (site, then), (other, now) in pairs)


def _is_one(a: State, b: State) -> bool:
    """Whether two states hold the very same values, so that one stands for both: equal ones may differ (1 and True)."""
    return len(a) == len(b) and all(
        site is other and len(then) == len(now) and all(map(_is_entry, then, now))
        for (site, then), (other, now) in zip(a, b, strict=True)
    )


def _is_entry(a: Entry, b: Entry) -> bool:
    same_place = a.value is b.value and (a.name, a.identity, a.length) == (b.name, b.identity, b.length)
    return same_place and not a.content and not b.content


_MISSING = object()


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        type(value) is tuple and len(value) <= thresholds.COPIED and all(map(_is_plain, value))
    )


def _entry(name: str, value: Any) -> Entry:
    if _is_plain(value):
        return Entry(name, value)
    if type(value) not in _CONTAINERS:
        return Entry(name, identity=id(value))
    entries = value.values() if isinstance(value, dict) else value
    if len(value) <= thresholds.COPIED and all(map(_is_plain, entries)):
        return Entry(name, value, _copy(value))
    content = {key: None for key, entry in value.items() if entry is None} if name in _FILLED else None
    return Entry(name, None, content or None, id(value), len(value))


def _items(site: Site) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(site.items()) if name in _FILLED or name not in STANDARD]


def _copy(value: Any) -> Any:
    return None if type(value) not in _CONTAINERS else dict(value) if type(value) is dict else list(value)


def _fill(container: Any, content: Any) -> None:
    if type(container) is dict:
        same = len(container) == len(content) and all(container.get(k, _MISSING) is v for k, v in content.items())
    else:
        same = len(container) == len(content) and all(map(is_, container, content))
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


_again = threading.local()
"""The lists that evaluations within one another have found, outermost first."""


def _whole() -> list[dict[int, list]]:
    return getattr(_again, "whole", [])


def _resize(container: Any, length: int) -> None:
    """Take off what was added at the end since, or put it back where an evaluation around us has taken it off."""
    while len(container) > length and not isinstance(container, set):
        container.popitem() if isinstance(container, dict) else container.pop()
    whole = next((found[id(container)] for found in _whole() if id(container) in found), [])
    if len(container) < length and isinstance(container, list):
        container += whole[len(container) : length]


def _sites(of: Any) -> Iterator[Site]:
    """The attributes of the modules that functions lead to."""
    waiting, seen = [of], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield vars(value)
            waiting += [*value._modules.values(), *(v for name, v in _items(vars(value)) if name not in _FILLED)]
        elif isinstance(value, Value):
            waiting += vars(value).values()
        elif not isinstance(value, _CONTAINERS) or len(value) <= thresholds.ENTERED:
            waiting += held_by(value)
