"""Looks at a state: some of its entries and their sum, to be compared with what the inverse gives back."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from typing import Any

import torch

from invfunc._torch.functorch import after_backward, backward_pass, batch_first, dispatched, innermost
from invfunc._torch.values import HALF, differentiable, double_on
from invfunc.errors import InexactWarning, InverseError
from invfunc.transform import told

ENTRIES = 64
"""Number of entries of a tensor that are compared."""
EVERY = 8
"""Of blocks one after the other the first one is looked at, and each eighth: a wrong x reaches the first one anyway."""
FEW = 0.05
"""The error above which a gradient is not worth having."""
HELPS = (
    "Keep some of the states (anchor_every=, keep=True), compute in float64, or take a coupling with exact=True. "
    '(check="error" raises at once, check="off" does not look.)'
)


class TensorLook:
    """Entries and the sum of a tensor."""

    __slots__ = ("entries", "total")

    def __init__(self, x: torch.Tensor) -> None:
        x = batch_first(x)
        flat = x.reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).view(-1)
        wide = flat.dtype if flat.dtype.itemsize >= 4 else torch.float32
        self.entries = flat[:: (flat.numel() // ENTRIES) | 1].to(wide, copy=True)
        self.total = flat.sum(dtype=wide)

    def near(self, now: TensorLook, count: int, most: float) -> bool:
        """Tells whether all is off by at most this, relative to the largest entry; for the CPU, in few operations."""
        size = torch.linalg.vector_norm(self.entries, torch.inf).item() * most
        off = torch.dist(now.entries, self.entries, torch.inf).item()
        return off <= size and abs(now.total.item() - self.total.item()) <= size * count**0.5

    def error(self, now: TensorLook, count: int, y: torch.Tensor) -> torch.Tensor:
        """The largest difference, of entries and of the sum of many roundings, and the size that it is relative to.

        Zeros, with which a sum begins (of log-determinants, say), are measured by what the block makes of them: y.
        """
        finite, there = self.total.isfinite(), self.entries.isfinite()
        lost = torch.where(finite, torch.inf, 0)  # where x had nan or inf, the inverse may spread them
        off = (now.entries - self.entries).abs()
        off = torch.where(there, torch.where(off.isfinite(), off, lost), 0).amax()
        off_sum = ((now.total - self.total).abs() / count**0.5).nan_to_num(torch.inf)
        off = torch.maximum(off, torch.where(finite, off_sum, 0))
        size = torch.where(there, self.entries.abs(), 0).amax()
        if y.is_floating_point() and y.numel():
            size = torch.where(size == 0, batch_first(y).abs().amax(), size)
        return torch.stack((off, size))


def looked_at(xs: Sequence[torch.Tensor], without: Container[int] = ()) -> list[TensorLook | None] | None:
    """Looks at tensors with numbers that are not whole, but for those at some places."""
    if dispatched() or any(x.is_meta or x.layout is not torch.strided for x in xs):
        return None
    return [TensorLook(x) if i not in without and differentiable(x) and x.numel() else None for i, x in enumerate(xs)]


def compare(
    block: Any,
    looks: Sequence[TensorLook | None],
    xs: Sequence[torch.Tensor],
    names: Sequence[str],
    ys: list[torch.Tensor],
) -> None:
    """Warn or raise where a state did not come back; off the CPU when the backward pass has ended.

    Args:
        block: the block whose inverse gave them.
        looks: looks at the state as it was.
        xs: the state that came back.
        names: the names of its tensors.
        ys: the state from which it came.
    """
    if dispatched():
        return
    others = ys if len(ys) == len(xs) > 1 else [torch.empty(0)] * len(xs)
    every = zip(looks, xs, names, others, strict=True)
    pairs = [(a, TensorLook(x), x, name, y) for a, x, name, y in every if a is not None]
    if not pairs:
        return
    precision = max([precision_of(x) for _, _, x, *_ in pairs])
    most, at_once = tolerated(block.check, precision), all([now.total.is_cpu for _, now, *_ in pairs])
    if at_once and all([look.near(now, x.numel(), most) for look, now, x, *_ in pairs]):
        return
    errors = [look.error(now, x.numel(), y) for look, now, x, _, y in pairs]
    faint = min(1.0, 16 * precision**0.5)

    def judge() -> None:
        found = [e.tolist() for e in errors]
        whole = max(size for _, size in found) * faint  # beside which smaller numbers may be rounding
        relative = [off / (max(size, whole) or 1.0) for off, size in found]
        worst = max(range(len(found)), key=relative.__getitem__)
        tell(block, relative[worst], precision, pairs[worst][3], pairs[worst][2].dtype)

    if at_once or backward_pass() < 0:
        judge()
    else:
        after_backward(judge)


def tolerated(check: Any, precision: float) -> float:
    """The relative error up to which nothing is told."""
    return precision**0.5 if isinstance(check, (str, bool)) else float(check)


def tell(block: Any, error: float, precision: float, name: str, dtype: torch.dtype) -> None:
    """Warn of an error that is more than rounding, or raise."""
    check, most = block.check, tolerated(block.check, precision)
    if error <= most:
        return
    text = f"the inverse gives {name} back with an error of {error:.1e}, where up to {most:.1e} is rounding. "
    if dtype in HALF:
        text += (
            f"The state is in {dtype}, whose rounding errors are large: keep it in float32, as by `stem(x).float()` "
            "before the first block; what is added to it may be in half precision. "
        )
    if error > FEW:
        text += (
            "Most likely f_inv is no inverse of f: `check_inverse` compares them. If it is one, rounding errors have "
            "grown from block to block (`drift` tells how fast), or f reads something that has changed since, or y was "
            "written by `.data`. "
        )
    else:
        text += "Rounding errors drift, and grow from block to block (`drift` tells how fast). "
    where = f"{block!r}, in the backward pass"
    if check == "warn" and error <= max(4 * most, FEW):
        if not block.known.warned:
            block.known.warned = True
            warnings.warn(f"{where}: {text}{HELPS}", InexactWarning, stacklevel=2)
        return
    raise told(InverseError(text + HELPS), where)


def precision_of(x: torch.Tensor) -> float:
    """The precision of a tensor, whose square root is taken for rounding; 0 of whole numbers."""
    return torch.finfo(x.dtype).eps if differentiable(x) else 0.0


def relative_error(came: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of what was wanted; over all entries of any vmap."""
    wide = double_on(wanted.device).to_complex() if wanted.is_complex() else double_on(wanted.device)
    came, wanted = came.to(wide), wanted.to(wide)
    error, size = innermost((came - wanted).abs()), innermost(wanted.abs())
    return error.max().item() / (size.max().item() or 1.0) if size.numel() else 0.0
