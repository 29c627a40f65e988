"""Weights that parametrizations give, which torch keeps within `torch.nn.utils.parametrize.cached()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.nn.utils import parametrize

Weights = dict[Any, Any]


class _Own(Weights):
    """The weights that a function computes itself, beside those that were there before it."""

    def __init__(self, before: Weights) -> None:
        super().__init__(before)
        self.before = before


def weights() -> Weights | None:
    """Those that are kept now, but for what the function computes that is being evaluated; None where none are."""
    if not parametrize._cache_enabled:
        return None
    kept: Any = parametrize._cache
    return kept.before if isinstance(kept, _Own) else dict(kept)


def parametrized_anew() -> AbstractContextManager:
    """A context in which weights that were kept before are not read."""
    return _with(True, {}) if parametrize._cache_enabled else nullcontext()


def keeping(before: Weights | None) -> AbstractContextManager:
    """A context in which these weights are kept, and what a function computes is kept no longer than it lasts."""
    if before is None and not parametrize._cache_enabled:
        return _AS_IT_IS
    return _with(before is not None, _Own(before or {}))


def keeping_own() -> AbstractContextManager:
    """A context in which what a function computes is kept no longer than it lasts."""
    return keeping(weights()) if parametrize._cache_enabled else _AS_IT_IS


_AS_IT_IS = nullcontext()


@contextmanager
def _with(enabled: bool, kept: Weights) -> Iterator[None]:
    state: Any = parametrize
    then = state._cache_enabled, state._cache
    state._cache_enabled, state._cache = int(enabled), kept
    try:
        yield
    finally:
        state._cache_enabled, state._cache = then
