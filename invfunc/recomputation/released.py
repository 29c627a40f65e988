"""Slots let go of what can be given back again: when it is needed no more, and when it is not what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def release(slots: Iterable[Any]) -> None:
    """Let go of what can be given back again."""
    for slot in slots:
        slot.release()


def told_of(tell: Callable[[], None], slots: Sequence[Any]) -> None:
    """Tell of what was given back to slots; where that is an error, no other backward pass finds it there."""
    try:
        tell()
    except BaseException:
        release(slots)
        raise
