"""A memory meter: how far the memory in use rises while a function runs."""

import gc
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from invfunc.budget import given_back, libc, resident
from invfunc.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")

_SAMPLING_SECONDS = 1e-3
_RETURN_FROM_BYTES = 1 << 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def peak_memory(fn: Callable[[], T], *, device: str | torch.device = "cpu") -> tuple[T, int]:
    """Run ``fn()`` and measure the peak of the memory in use over what was in use before.

    It stands for ``base = used(); result = fn(); return result, peak() - base``. On the CPU (Linux only)
    "used" is the resident size of the process, on CUDA the bytes of the caching allocator's live tensors.

    The resident size holds all that the process touches, not tensors alone. So call ``fn`` once before, or
    the pages of the libraries that its first call loads count too, and call :func:`return_freed_memory` when
    the program starts, or memory that ``fn`` freed and malloc kept counts as well.

    Args:
        fn: A function without arguments.
        device: Whose memory to measure, ``"cpu"`` or a CUDA device.

    Returns:
        The result of ``fn`` and the peak in bytes; tensors of the result that are new are part of it.

    Raises:
        ArgumentTypeError: ``fn`` is not callable.
        ArgumentError: There is no meter for ``device``, or none for the CPU on this system (macOS, Windows).

    Example:
        >>> ones, peak = peak_memory(lambda: torch.ones(1 << 24))
        >>> 60 < peak / 2**20 < 70
        True

    Cost:
        One call of ``fn``. The peak is the kernel's "high water mark" of the process, which this resets;
        where it cannot be reset a thread samples the size each millisecond and may miss a short peak.
    """
    if not callable(fn):
        raise ArgumentTypeError(
            f"peak_memory({fn!r}): expected a function without arguments. Write peak_memory(lambda: f(x))."
        )
    stop = _start(torch.device(device))
    try:
        result = fn()
    finally:
        peak = stop()
    return result, peak


def return_freed_memory() -> bool:
    """Have malloc give every freed tensor of 64 KiB or more back to the system at once.

    By itself glibc keeps freed memory for reuse, so that the resident size tells little of what is alive. The
    switch holds for the whole process and cannot be undone; allocations become a little slower. Call it first
    thing in a program that measures memory: holes that the heap already has stay in use. It does what the
    environment variables ``MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536`` do from the start.

    Returns:
        True, or False where the C library is not glibc and keeps its own ways.
    """
    mallopt = libc("mallopt")
    if mallopt is None:
        return False
    # Both are said: to set one alone also stops glibc from adapting the other, at whatever it is by then.
    return all([mallopt(option, _RETURN_FROM_BYTES) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)])


def _start(device: torch.device) -> Callable[[], int]:
    """Begin to measure and return the function that ends it and tells the peak."""
    gc.collect()
    if device.type == "cuda":
        return _start_cuda(device)
    if device.type != "cpu":
        raise ArgumentError(f"peak_memory(..., device={str(device)!r}): there are meters for 'cpu' and 'cuda' only.")
    if not sys.platform.startswith("linux"):
        raise ArgumentError(
            f"peak_memory(..., device='cpu'): reads /proc, which {sys.platform} does not have. "
            "Measure on Linux, or on a GPU with device='cuda'."
        )
    given_back()
    try:
        return _start_high_water()
    except OSError:
        return _start_sampling()


def _start_cuda(device: torch.device) -> Callable[[], int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device)

    def stop() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base

    return stop


def _start_high_water() -> Callable[[], int]:
    """Let the kernel keep the peak: writing 5 to clear_refs sets it back to the size of now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    base = _status("VmRSS")
    return lambda: max(_status("VmHWM") - base, 0)


def _start_sampling() -> Callable[[], int]:
    base = peak = resident()
    stopped = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stopped.wait(_SAMPLING_SECONDS):
            peak = max(peak, resident())

    thread = threading.Thread(target=sample, name="peak_memory", daemon=True)
    thread.start()

    def stop() -> int:
        stopped.set()
        thread.join()
        return max(peak, resident()) - base

    return stop


def _status(key: str) -> int:
    """One size of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        line = next((line for line in file if line.startswith(key + ":")), None)
    if line is None:
        raise OSError(f"/proc/self/status has no {key}")
    return int(line.split()[1]) * 1024
