"""Memory for large results in huge pages, where the system hands them out on request (Linux).

The first touch of fresh memory costs more than what is written to it: 75 MiB in pages of 4 KiB take 32 ms, in huge
ones 5 ms. torch does the same for all tensors if the environment says THP_MEM_ALLOC_ENABLE=1.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from invfunc import thresholds
from invfunc._torch.values import fake


@cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def room(shape: list[int], like: torch.Tensor) -> torch.Tensor | None:
    """An empty tensor for a large result on the CPU; None where there is nothing to gain."""
    size = math.prod(shape) * like.element_size()
    if size < thresholds.HUGE_PAGES or like.device.type not in thresholds.HUGE_ON:
        return None
    if (advise := _madvise()) is None:
        return None
    if fake(like):  # what is laid out in another way may be copied at another place
        return like.new_empty(shape)
    empty = torch.empty(shape, dtype=like.dtype)
    start = -(-empty.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = max(0, empty.data_ptr() + size - start)
    advise(start, length // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return empty
