"""Both sides of every threshold, so that small examples take the ways of large ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from invfunc import thresholds

FAR = 2**60
SINGLE_AND_DOUBLE = (torch.float32, torch.float64)
SIDES: dict[str, tuple[Any, Any]] = {
    "ORDERS": (0, FAR),
    "FORMED": (0, FAR),
    "CANCELS": ((torch.float32,), SINGLE_AND_DOUBLE),
    "DOUBLE": (0, FAR),
    "GHOST_CANCELS": (0, 4),
    "GHOST_ON": ((), ("cpu",)),
    "GHOST_PRODUCTS": (FAR, 0),
    "AT_ONCE": (0, FAR),
    "HALVED": (0, FAR),
    "ADDED_ON": (("cpu",), ()),
    "ADDED_POSITIONS": (0, FAR),
    "ADDED_NUMBERS": (0, FAR),
    "ADDED_ROWS": (0, FAR),
    "HUGE_PAGES": (0, FAR),
    "HUGE_ON": (("cpu",), ()),
    "MIRRORED": (1, FAR),
    "APART": (0, FAR),
    "HOOKED": (0, FAR),
    "GROUPED": (1, FAR),
    "APART_ON": (("cpu",), ()),
    "CACHE": ({"cpu": 16}, {"cpu": 2**24}),
    "ELSEWHERE": (64, 2**24),
    "SHARES": (1, 64),
    "KEPT_SHARES": (0, FAR),
    "DISPLACED_DTYPES": (SINGLE_AND_DOUBLE, ()),
    "DISPLACED_ON": (("cpu",), ()),
    "TOTAL_DTYPES": ((), (torch.float32, torch.float64)),
    "TOTAL_ON": (("cpu",), ()),
    "TOTAL_POSITIONS": (0, 2**40),
    "ALONE": (0, FAR),
    "UNFOLD": (FAR, 0),
    "ASSEMBLE": (0, FAR),
    "CALL": (0, FAR),
    "SLICES": (0, FAR),
    "EXACT": (1, FAR),
    "FEW": (0, FAR),
    "PAYS": (math.inf, 0.0),
    "LOOK": (0.0, 1.0),
    "LOOK_ENTRY": (0.0, 1.0),
    "LOOKS": (0, 1),
    "LOOK_ON": ({}, {"cpu": 2}),
    "LOGITS": (0, FAR),
    "CLASS": (0.0, 2.0**60),
    "COLUMN": (0.0, 1.0),
    "SHARED": (0.0, 2.0**60),
    "FACTORED_COST": (0.0, 2.0**60),
    "NARROWER": (math.inf, 0.0),
    "NARROWEST": (3, 0),
    "TOGETHER": (1, FAR),
    "FACTORED": (FAR, 0),
    "MOVED": (0, FAR),
    "CHECKED": (0, FAR),
    "TRIED_PASSES": (1, FAR),
    "FOLDED": (0, FAR),
    "COMPARED_NUMBERS": (0, FAR),
    "DIRECTIONS": (1, FAR),
    "OPERATIONS": (0, FAR),
    "WIDENED": (1, FAR),
    "PLANS": (1, FAR),
    "SHAPES": (FAR, FAR),
    "MISSES": (1, FAR),
}
"""Of each threshold a value on its one side, where small things are treated as large ones, and one on the other."""
LOWEST, HIGHEST = ({name: sides[i] for name, sides in SIDES.items()} for i in (0, 1))
GATES_OF_PATCHES = ["UNFOLD", "ASSEMBLE", "CALL", "SLICES", "EXACT", "DISPLACED_DTYPES", "DISPLACED_ON"]
"""Thresholds that choose how products of patches are computed: from the patches, or from displacements."""


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


@st.composite
def sides(draw, *names: str) -> dict[str, Any]:
    """All thresholds, or some, on one side but for a few: a way is reached where those before it are not taken."""
    base, few = draw(st.integers(0, 1)), draw(st.sets(st.sampled_from(names or list(SIDES)), max_size=3))
    return {name: SIDES[name][base ^ (name in few)] for name in names or SIDES}
