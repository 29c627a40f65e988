"""Budgets of memory: sizes as they are given and told, what is free, and the most that a call takes.

Peaks are told by the allocator on CUDA; elsewhere the tensors are counted that are alive at once.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.reductions import Reduction

_UNITS = {"": 1} | {p + i: b ** (k + 1) for k, p in enumerate("kmgt") for i, b in (("", 1000), ("i", 1024))}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b", re.IGNORECASE)
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def size_of(given: Any) -> int | float:
    """A number of bytes, or a fraction of what is free when it is needed."""
    if isinstance(given, str):
        found = _TEXT.fullmatch(given.strip())
        if found is None or not (size := int(float(found[1]) * _UNITS[(found[2] or "").lower()])):
            raise ArgumentError(f"memory={given!r} is not a size. Write '512MiB', '2 GB', or a number of bytes.")
        return size
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ArgumentTypeError(
            f"memory={given!r}: memory is of type {type(given).__name__}, but has to be a number of bytes, a text as "
            "'512MiB', or a fraction of what is free."
        )
    if not (given >= 1 if isinstance(given, int) else 0 < given <= 1):
        raise ArgumentError(
            f"memory={given!r}: an int is a number of bytes, at least 1, and a float a fraction of what is free, "
            "above 0.0 and at most 1.0."
        )
    return given


def in_bytes(size: int | float, device: torch.device) -> int:
    """Number of bytes; of a fraction, of those that are free on a device now."""
    if isinstance(size, int):
        return size
    there = free() if device.type == "cpu" else free_on(device)
    if math.isinf(there):
        raise ArgumentError(
            f"memory={size!r} is a fraction of the free memory of {str(device)!r}, which torch does not report. Give "
            "it in bytes, or as '512MiB'."
        )
    return int(size * there)


def free() -> int:
    """Number of bytes that this process can have without taking them from others (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration):
        raise ArgumentError(
            "memory is a fraction of the free memory, which only Linux reports. Give it in bytes, or as '512MiB'."
        ) from None
    try:  # a container may have less than the machine
        return min(found, max(0, int(_LIMIT.read_text()) - int(_USED.read_text())))
    except (OSError, ValueError):
        return found


def free_on(device: torch.device) -> float:
    """The bytes that are free on a device; infinite where nobody tells."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "cpu":
        with suppress(ArgumentError):
            return free()
    return math.inf


def resident() -> int:
    """The bytes of memory that this process has; 0 where the system does not tell (other than Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def given_back() -> None:
    """Have malloc give back what was freed, where it can."""
    if (trim := libc("malloc_trim")) is not None:
        trim(0)


def libc(name: str) -> Callable[..., Any] | None:
    """A function of the C library, or None where it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def told(size: int) -> str:
    """Bytes as people read them, rounded up, so that what is told can be given."""
    return f"{-(-size * 100 // 2**20) / 100:.2f}MiB"


SMALL = 2**28
"""Bytes of matrices up to which nobody asks what is free."""


def bytes_of(shapes: list[list[int]], leaf: torch.Tensor) -> int:
    """The bytes of matrices of a parameter, of half precision in float32."""
    return sum(map(math.prod, shapes)) * max(4, leaf.element_size())


def fits(reduction: Reduction, leaves: list[torch.Tensor]) -> bool:
    """Tells whether the matrices that a reduction keeps take no more than what is free, at most."""
    most = sum([bytes_of(reduction.bound(leaf.shape), leaf) for leaf in leaves])
    return most <= SMALL or most <= free_on(leaves[0].device)


# Peaks

_COPIES = ("conv", "slow_conv", "mkldnn", "linalg")
"""Beginnings of the names of operations whose kernels work on copies of what they read and write."""


class Alive(TorchDispatchMode):
    """A count of the bytes of tensors that were made meanwhile, and of the most of them that were alive at once.

    It only `counts`, and `watches` where other modes are switched off: calls run under it as they do without it.
    """

    counts = watches = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree.tensors((args, kwargs or {}))
        self._see(given, new=False)
        result = func(*args, **(kwargs or {}))
        made = tree.tensors((result,))
        self._see(made, new=True)
        copies = func.overloadpacket.__name__.lstrip("_").startswith(_COPIES)
        self.most = max(self.most, self.now + copies * sum(x.nbytes for x in (*given, *made)))
        return result

    def _see(self, tensors: Iterable[torch.Tensor], new: bool) -> None:
        for x in tensors:
            memory = storage(x)
            key = id(memory)  # one object as long as there is the memory
            if key not in self._known:
                size = memory.nbytes() if new else 0
                self.now += size
                self._known[key] = weakref.ref(memory, lambda _, key=key, size=size: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def peak_of(call: Callable[[], Any], device: torch.device) -> int:
    """The bytes that a call takes over what is in use before it, its result included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with Alive() as alive:
        result = call()
        del result
    return alive.most


def settings() -> tuple:
    """State of torch on which a call depends: gradient modes, autocast, kernels."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return *modes, *autocast, torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
