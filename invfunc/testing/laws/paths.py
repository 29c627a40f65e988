"""The ways in which a statistic is computed that a caller does not choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from invfunc import thresholds, tree
from invfunc.plan import Options

TINY_CACHE = 64
"""Numbers that an intermediate tensor may have, so that a block has one sample, and one column."""


def generic(statistic: Any) -> Any:
    """The same statistic by the path that every operation can take."""
    return replace(statistic, options=Options(fast=False))


def in_blocks(statistic: Callable) -> Callable:
    """The same statistic with blocks of samples and columns that fit a tiny cache."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, devices = thresholds.CACHE, {x.device.type for x in tree.tensors((args, kwargs))}
        thresholds.CACHE = before | dict.fromkeys(devices, TINY_CACHE)
        try:
            return statistic(*args, **kwargs)
        finally:
            thresholds.CACHE = before

    return call
