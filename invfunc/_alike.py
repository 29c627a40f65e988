"""Parts of a call that do the same: where their tensors are only counted, one of them tells what the others take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from invfunc import tree

T = TypeVar("T")


@dataclass
class Spent:
    """What was in use at most, and was left in the end, beside what was in use at first; and what was done."""

    most: int = 0
    left: int = 0
    work: float = 0.0
    added: list[tuple[Callable[[Any], None], list[Any], Any, Spent]] = field(default_factory=list)
    """What was added to what all parts bring: how, the leaves and the structure of what, and what that took."""


class Counter(Protocol):
    """Counts what a run takes."""

    live: int
    work: float
    open: dict[str, Spent | None]
    """The parts that are counted, by what is divided into them."""
    parts: dict[str, int]
    """Into how many each was divided at most."""

    def spending(self) -> AbstractContextManager[Spent]: ...
    def use(self, size: int) -> None: ...


class Writer(Protocol):
    """Writes down what is done."""

    def each(self, parts: Iterable[T]) -> Iterator[T]: ...


_COUNTER: ContextVar[Counter | None] = ContextVar("_COUNTER", default=None)
_WRITER: ContextVar[Writer | None] = ContextVar("_WRITER", default=None)


@contextmanager
def counted(counter: Counter) -> Iterator[None]:
    """Have parts that are alike be counted once."""
    token = _COUNTER.set(counter)
    try:
        yield
    finally:
        _COUNTER.reset(token)


@contextmanager
def written(writer: Writer) -> Iterator[None]:
    """Have it be told of parts that are alike."""
    token = _WRITER.set(writer)
    try:
        yield
    finally:
        _WRITER.reset(token)


def alike(axis: str, parts: Iterable[T], kind: Callable[[T], Hashable], last: bool = False) -> Iterator[T]:
    """The parts, one after the other. Those of one kind take the same, beside what is `added` up of them.

    Where that is counted, the first part is run, which finds nothing of others, and behind it one of each kind; `last`
    says that more is done in the last one, which is then run, too.
    """
    counter, writer = _COUNTER.get(), _WRITER.get()
    if counter is None:
        yield from parts if writer is None else writer.each(parts)
        return
    parts, known = list(parts), dict[Hashable, Spent]()
    counter.parts[axis] = max(counter.parts.get(axis, 0), len(parts))
    for k, part in enumerate(parts):
        same = kind(part)
        if same in known and (k + 1 < len(parts) or not last):
            _again(counter, known[same])
            continue
        outer = counter.open.get(axis)
        with counter.spending() as spent:
            counter.open[axis] = spent
            yield part
        counter.open[axis] = outer
        if k:
            known[same] = spent


def added(axis: str, add: Callable[[Any], None], state: Any) -> None:
    """Add what a part brings to what all of them bring."""
    counter = _COUNTER.get()
    spent = None if counter is None else counter.open.get(axis)
    if counter is None or spent is None:
        add(state)
        return
    with counter.spending() as own:
        add(state)
    leaves, structure = tree.flatten(state)
    spent.added.append((add, [_like(x) for x in leaves], structure, own))


def _like(x: Any) -> Any:
    """What makes a tensor as this one; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    return partial(torch.empty_strided, tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


def _again(counter: Counter, spent: Spent) -> None:
    """Count a part as one that was run: the same in use at once, and more where more was there to add to.

    What that one left beside what it added is in use from now on, as often as it is counted.
    """
    start, work, most, more, left = counter.live, counter.work, 0, 0, spent.left
    for add, leaves, structure, before in spent.added:
        state = tree.unflatten([x() if isinstance(x, partial) else x for x in leaves], structure)
        with counter.spending() as own:
            add(state)
        del state  # before the next one is made
        change = own.left - before.left
        most, more, left = max(most, own.most - before.most), more + max(0, change), left + change
    counter.use(start + spent.most + most + more)
    counter.work = work + spent.work
    counter.live = max(counter.live, start + left)
