"""Kinds of indices."""

from __future__ import annotations

from typing import Any

import torch


def advanced(index: Any) -> bool:
    """Whether an index is more than ints, slices, None and an ellipsis, so that the result is not a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(p is None or p is Ellipsis or isinstance(p, slice) or _is_int(p) for p in parts)


def _is_int(part: Any) -> bool:
    return not isinstance(part, (bool, torch.Tensor)) and hasattr(part, "__index__") and not hasattr(part, "__len__")
