"""Lists and dicts that a function was given: it gets copies of them, with other tensors, and may fill these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_LISTS = (list, deque)


class Containers:
    """The containers among some arguments that a function is given copies of.

    Args:
        arguments: as the caller has them; their structure is that of the copies.
    """

    def __init__(self, arguments: tuple = ()) -> None:
        self._arguments = arguments if _holds(arguments) else ()

    def follow(self, copies: tuple) -> AbstractContextManager:
        """A context after which what was changed in the first copies is changed in the caller's containers too."""
        return self._following(list(_nodes(self._arguments, copies))) if self._arguments else nullcontext()

    @contextmanager
    def _following(self, nodes: list[_Node]) -> Iterator[None]:
        yield
        known = {id(b): a for a, b, _, _ in nodes}
        known |= {id(then[key]): of_a[key] for _, _, of_a, then in nodes for key in then.keys() & of_a.keys()}
        for a, b, _, then in nodes:
            if not isinstance(b, tuple) and not _same(then, now := _content(b) or {}):
                _fill(a, {key: known.get(id(value), value) for key, value in now.items()})
        self._arguments = ()


_Node = tuple[Any, Any, dict[Any, Any], dict[Any, Any]]
"""A container or a tuple, its copy, and what is in both."""


def _holds(value: Any) -> bool:
    """Whether there is a container in it that can be changed."""
    if isinstance(value, torch.Tensor):
        return False
    return any(map(_holds, value)) if isinstance(value, tuple) else _content(value) is not None


def _nodes(a: Any, b: Any) -> Iterator[_Node]:
    """What is the same container in a tree and in its copy."""
    if a is b or isinstance(a, torch.Tensor):
        return
    of_a, of_b = (dict(enumerate(v)) if isinstance(v, tuple) else _content(v) for v in (a, b))
    if of_a is not None and of_b is not None:
        yield a, b, of_a, of_b
        for key in of_a.keys() & of_b.keys():
            yield from _nodes(of_a[key], of_b[key])


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
