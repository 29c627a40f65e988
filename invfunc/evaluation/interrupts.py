"""Ctrl-C in one of several processes: it comes where that computes by itself, and not while all exchange something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Interrupts:
    """What is called at Ctrl-C within a call of several processes."""

    def __init__(self, before: Callable[[Any, Any], Any]) -> None:
        """`before` is what was called without it, as Python's own, which raises KeyboardInterrupt."""
        self.before, self.alone = before, False
        self.came: tuple[Any, Any] | None = None

    def __call__(self, *given: Any) -> None:
        self.came = given
        if self.alone:
            self.deliver()

    def deliver(self) -> None:
        if self.came is not None:
            given, self.came = self.came, None
            self.before(*given)

    @contextmanager
    def turned(self, alone: bool) -> Iterator[None]:
        was, self.alone = self.alone, alone
        try:
            if alone:
                self.deliver()
            yield
        finally:
            self.alone = was
        if was:
            self.deliver()


_known: list[_Interrupts] = []
"""That of the call that the main thread is in, which is the one that sees signals."""


@contextmanager
def held() -> Iterator[None]:
    """Have Ctrl-C wait, within a call of several processes, until this one is `alone`, or the call has ended."""
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or _known or not callable(before):
        yield
        return
    own = _Interrupts(before)
    _known.append(own)
    signal.signal(signal.SIGINT, own)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _known.remove(own)
        own.deliver()


def alone() -> Any:
    """What a process does by itself, and then tells the others of: Ctrl-C ends it."""
    return _turned(True)


def together() -> Any:
    """What all do at once, within what one does by itself: Ctrl-C comes behind it."""
    return _turned(False)


@contextmanager
def _turned(alone: bool) -> Iterator[None]:
    if not _known or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _known[0].turned(alone):
        yield
