"""What is in memory beside the tensors of a call and the buffers of its kernels: what is added for it.

what a call never exceeds = filled(bytes counted, bytes of small tensors) + what is in reserve for it
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

SLACK = 2**18
"""What each call has for objects of Python."""
MARGIN = 1.02
"""How much more than the bytes that are counted is taken: for pages that are not full."""
HEAP, HOLES = 2**16, 2
"""Tensors of fewer bytes lie side by side: where one is gone there is a hole, which only others like it fill, and not
all of it: in many chunks 3.9 times what they take at most was measured beside them, with objects of Python, for which
there are `HOLES` of them and what is in reserve."""
MALLOC = 128
"""Larger ones have pages of their own, with so many bytes for malloc."""


def filled(counted: int, small: int) -> int:
    """The bytes that are never exceeded where so many are counted, and small tensors take so many of them at most."""
    return int(MARGIN * counted) + HOLES * small + SLACK


def in_pages(size: int) -> int:
    """The bytes of whole pages, which a tensor has with what malloc writes beside it, if it has pages of its own."""
    return size if size < HEAP else -(-(size + MALLOC) // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class Reserve:
    """What is in reserve for a call, whatever its tensors are."""

    size: int
    of_python: int = 0
    """How much of it is for what Python keeps of the search."""


FIRST = Reserve(4 * 2**20, of_python=2 * 2**20)
"""Of a call that is the first of its kind in a process: pages of the libraries' code, and what they keep (up to 1.6 MiB
were measured)."""
LATER = Reserve(2 * 2**20)
"""Of a call that has run in this process, of which the next one may be in other chunks."""
VARIES = 2**20
"""By how much that which Python keeps of a search is another in another process: it takes memory in such pieces."""
