"""Both sides of every threshold, so that small examples take the ways of large ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from invfunc import thresholds

WIDE = (torch.float32, torch.float64)


@contextmanager
def thresholds_at(**values: Any) -> Iterator[None]:
    """Some thresholds at other values; what was decided by the old ones, or by these, is forgotten."""
    try:
        with mock.patch.multiple(thresholds, **values):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "invfunc"]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
