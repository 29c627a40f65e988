"""Questions about the numbers in tensors, where there may be none, and the precision of sums of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from invfunc import thresholds
from invfunc._torch.functorch import fake_tensors, innermost
from invfunc.errors import ArgumentError

HALF = (torch.float16, torch.bfloat16)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the precision in which sums are accumulated, and probabilities taken: at least float32."""
    return x.float() if x.dtype in HALF else x


def differentiable(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def fake(x: torch.Tensor) -> bool:
    """Tells whether a tensor has no numbers (FakeTensorMode)."""
    return isinstance(innermost(x), fake_tensors.FakeTensor)


def anywhere(x: torch.Tensor) -> bool:
    """Tells whether something holds anywhere; without numbers nothing does."""
    return not fake(x) and bool(innermost(x).any())


def room(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """An empty tensor for a result; a large one in huge pages, where the system hands them out on request (Linux): the
    first touch of fresh memory costs more than what is written to it."""
    empty, page = like.new_empty(shape), mmap.PAGESIZE
    if empty.nbytes >= thresholds.HUGE_PAGES and like.device.type in thresholds.HUGE_ON and not fake(like) and _ADVISE:
        first, end = -(-empty.data_ptr() // page) * page, empty.data_ptr() + empty.nbytes
        _ADVISE(ctypes.c_void_p(first), ctypes.c_size_t(max(0, end - first) // page * page), mmap.MADV_HUGEPAGE)
    return empty


_ADVISE = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def any_of(several: Sequence[torch.Tensor]) -> list[bool]:
    """In which of several tensors something holds anywhere; each device is waited for once."""
    found, here = [False] * len(several), dict[torch.device, list[int]]()
    for i, x in enumerate(several):
        if not fake(x):
            here.setdefault(x.device, []).append(i)
    for places in here.values():
        flags = torch.stack([innermost(_flag(innermost(several[i]))) for i in places])
        for i, flag in zip(places, innermost(flags).tolist(), strict=True):
            found[i] = flag
    return found


def _flag(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 0 and x.dtype is torch.bool else x.any()


Check = tuple[torch.Tensor, Callable[[], Exception]]
"""Flag that something is wrong, and the error that says so."""
_CHECKS: ContextVar[list[Check] | None] = ContextVar("_CHECKS", default=None)


def check(wrong: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raise the error if something is wrong anywhere: at once, or at the end (`checked_at_the_end`)."""
    checks = _CHECKS.get()
    if checks is not None:
        checks.append((innermost(innermost(wrong).any()), error))
    elif anywhere(wrong):
        raise error()


@contextmanager
def checked_at_the_end(own: bool = False) -> Iterator[None]:
    """Numbers are looked at together, so that an accelerator is waited for once. Within another such context that is
    done at the end of the outer one, unless it is to be at its own."""
    if _CHECKS.get() is not None and not own:
        yield
        return
    checks: list[Check] = []
    token = _CHECKS.set(checks)
    try:
        yield
    except Exception:
        _look(checks)  # what is wrong may be the cause
        raise
    finally:
        _CHECKS.reset(token)
    _look(checks)


@contextmanager
def checked_at_once() -> Iterator[None]:
    """Numbers are looked at where a check is."""
    token = _CHECKS.set(None)
    try:
        yield
    finally:
        _CHECKS.reset(token)


def _look(checks: list[Check]) -> None:
    if checks and any(wrong := any_of([wrong for wrong, _ in checks])):
        raise checks[wrong.index(True)][1]()


def apart(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor | int) -> torch.Tensor:
    """A mask of the entries in which tensors differ by more than the rounding of sums of numbers of this size."""
    tolerance = torch.finfo(a.dtype).eps ** 0.75  # 2e-12 in float64, 6e-6 in float32
    same = (a - b).abs() <= 8 * tolerance * size
    return ~(same | (a == b) | (a.isnan() & b.isnan()))


def near(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor | int) -> bool:
    """Tells whether tensors are the same up to rounding, where numbers of this size are added up."""
    return not anywhere(apart(a, b, size))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether values agree up to what another batch size does to their rounding."""
    return a.shape == b.shape and near(a, b, size_of(b))


def size_of(x: torch.Tensor) -> torch.Tensor | int:
    """The largest absolute value, without what is not finite."""
    return x.detach().abs().nan_to_num(0, 0, 0).amax() if x.numel() else 0


WITHOUT_FLOAT64 = {"mps"}
"""The kinds of devices that refuse tensors of float64. There no way is taken in which sums of products cancel."""


def has_float64(device: torch.device) -> bool:
    """Tells whether a device has it."""
    return device.type not in WITHOUT_FLOAT64


def double_on(device: torch.device) -> torch.dtype:
    """The dtype of the most digits that a device has."""
    return torch.float64 if has_float64(device) else torch.float32


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A tensor in that dtype."""
    return x.to(double_on(x.device))


def in_float64(x: torch.Tensor, why: str) -> torch.Tensor:
    """A tensor in float64, or the error that says why there is no other way."""
    if not has_float64(x.device):
        raise ArgumentError(f"{why} in float64, which {x.device.type} has not. Keep its tensors on the CPU.")
    return x.to(torch.promote_types(x.dtype, torch.float64))
