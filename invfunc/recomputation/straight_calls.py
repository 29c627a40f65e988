"""The results of blocks in calls that need not be watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invfunc import tree
from invfunc._torch.functorch import transforming
from invfunc.recomputation.straight import fits_around
from invfunc.recomputation.straight_found import Finder, Found
from invfunc.recomputation.straight_hooks import Series
from invfunc.recomputation.straight_nodes import NodeSeries

Step = tuple[Any, tuple, dict[str, Any]]
"""A `Checkpointed`, and its further arguments."""


def unwatched(steps: Sequence[Step], x: Any) -> tuple[Any, int]:
    """The state after as many of some steps as need not be watched, and how many they are."""
    node = transforming()
    if not fits_around(node):
        return x, 0
    series, finder = (NodeSeries if node else Series)(x), Finder(node)
    try:
        for block, args, kwargs in steps:
            found = finder.find(block, series.flat, tree.flatten((args, kwargs)))
            if found is None or not _goes_on(series, found, args, kwargs):
                break
    finally:  # also of a series that is interrupted, which has taken x over
        done = series.ends()
    return done


def _goes_on(series: Series | NodeSeries, found: Found, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether one more was evaluated. An error is that of a watched call, which tells of it."""
    try:
        return series.goes_on(found, args, kwargs)
    except Exception:
        return False
