"""Chunks of a call that do the same, so that a plan of the call writes one of them down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Writer(Protocol):
    """Writes down what is done."""

    def each(self, parts: Iterable[T]) -> Iterator[T]: ...


_WRITER: ContextVar[Writer | None] = ContextVar("_WRITER", default=None)


@contextmanager
def written(writer: Writer) -> Iterator[None]:
    """Have it be told of chunks that do the same."""
    token = _WRITER.set(writer)
    try:
        yield
    finally:
        _WRITER.reset(token)


def alike(chunks: Iterable[T]) -> Iterable[T]:
    """Chunks of a call, one after the other."""
    writer = _WRITER.get()
    return chunks if writer is None else writer.each(chunks)
