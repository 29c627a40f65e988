"""Lists and dicts that a function was given: it gets copies of them, with other tensors, and may fill these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

_LISTS = (list, deque)


class Containers:
    """The containers in a tree that a function is given copies of.

    Args:
        tree: as the caller has it; its structure is that of its copies.
    """

    def __init__(self, tree: Any = None) -> None:
        self._tree = tree

    @contextmanager
    def follow(self, copy: Any) -> Iterator[None]:
        """A context after which what was changed in the first copy is changed in the caller's containers too."""
        pairs = list(_pairs(self._tree, copy))
        before = [(a, b, then) for a, b in pairs if a is not b and (then := _content(b)) is not None]
        yield
        known = {id(b): a for a, b in pairs}
        for a, b, then in before:
            if not _same(then, now := _content(b) or {}):
                _fill(a, {key: known.get(id(value), value) for key, value in now.items()})
        self._tree = None


def _pairs(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """What is the same thing in a tree and in its copy."""
    yield a, b
    if a is not b:
        of_a, of_b = (_content(value) or dict(enumerate(value if isinstance(value, tuple) else ())) for value in (a, b))
        for key in of_a.keys() & of_b.keys():
            yield from _pairs(of_a[key], of_b[key])


def _content(value: Any) -> dict[Any, Any] | None:
    """The entries of a container by place, key or name; None of what cannot be changed."""
    if isinstance(value, _LISTS):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(a[key] is b[key] for key in a)


def _fill(container: Any, content: dict[Any, Any]) -> None:
    if isinstance(container, _LISTS):
        container.clear()
        container.extend(content.values())
    elif isinstance(container, MutableMapping):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if key not in container or container[key] is not value:
                container[key] = value
    else:
        for name, value in content.items():
            if getattr(container, name, None) is not value:
                setattr(container, name, value)
