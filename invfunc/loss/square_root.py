"""Square roots of the Hessian of a loss in the outputs, as columns that are made when they are asked for.

Each kind says how many columns it has and makes those of a range for some samples: `left[v, n, *one]` for each root,
with `sum_v weight[v, n] left[v, n] right[v, n]^T` (right = left unless given) the Hessian of sample n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from invfunc._torch.values import doubled
from invfunc.linear_algebra.matrices import spectrum

OutputCotangents = dict[int, torch.Tensor]
"""Cotangents `[V, n, *one]` at the outputs, by the numbers of the roots that take part."""


@dataclass
class ColumnBlock:
    """Some columns for some samples."""

    left: OutputCotangents
    right: OutputCotangents | None = None
    weight: torch.Tensor | None = None


class Columns(Protocol):
    """The columns of one part of the outputs."""

    @property
    def count(self) -> int: ...

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock: ...


@dataclass
class FormedColumns:
    """Columns `[V, n, *one]` at each root: the one of the gradient, drawn ones, or eigenvectors."""

    values: OutputCotangents
    exact: torch.Tensor | None = None
    """Number of the first columns of each sample that are not drawn, if some are."""

    def __post_init__(self) -> None:
        self.count = len(next(iter(self.values.values()))) if self.values else 1

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        return ColumnBlock({i: columns[start:stop, part] for i, columns in self.values.items()})


@dataclass
class Units:
    """A unit column for each entry of the joined outputs: their pullbacks are the rows of the Jacobian."""

    values: dict[int, torch.Tensor]
    """The outputs, `[n, *one]`."""

    @property
    def count(self) -> int:
        return sum(z[0].numel() for z in self.values.values())

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        left, offset = {}, 0
        for i, z in self.values.items():
            at = offset + torch.arange(z[0].numel(), device=z.device)
            unit = (torch.arange(start, stop, device=z.device)[:, None] == at).to(z.dtype)[:, None]
            n = len(z[part])
            left[i] = unit.expand(-1, n, -1).reshape(stop - start, n, *z.shape[1:])
            offset += z[0].numel()
        return ColumnBlock(left)


@dataclass
class Elementwise:
    """A diagonal Hessian `h[n, *one]`: unit columns, with their squares weighted by h."""

    root: int
    diagonal: torch.Tensor
    predictive: str = "signs"
    """Distribution of a target: "normal", "bernoulli" of the logits; else the columns get random signs."""
    logits: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.diagonal[0].numel()

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        h = self.diagonal[part]
        at = torch.arange(self.count, device=h.device)
        unit = (at[start:stop, None] == at).to(h.dtype)[:, None].expand(-1, h.shape[0], -1)
        weight = h.reshape(h.shape[0], -1)[:, start:stop].T
        return ColumnBlock({self.root: unit.reshape(stop - start, *h.shape)}, weight=weight)


@dataclass
class Softmax:
    """`k (diag p - p p^T)` at each position: with q = sqrt(p), C - 1 columns of `diag(q) (I - q q^T)^(1/2)`."""

    root: int
    logits: torch.Tensor
    """`[n, C, positions]`"""
    weight: torch.Tensor
    """k as `[n, positions]`"""
    layout: Callable[[torch.Tensor], torch.Tensor]
    """From `[V, n, C, positions]` to the root's `[V, n, *one]`."""

    @property
    def count(self) -> int:
        return (self.logits.shape[1] - 1) * self.logits.shape[2]

    @staticmethod
    def columns(q: torch.Tensor, unit: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The columns `diag(q) u_v` for q `[n, C, ...]`, given the unit vectors e_v and the entries q_v.

        All but the last column of a Householder reflection that sends the last unit vector to q are a basis of what is
        orthogonal to q: `u_v = e_v - q_v (q + e_C) / (1 + q_C)`.
        """
        last = torch.zeros_like(q[:1])
        last[:, -1] = 1
        return q * (unit - own * (q + last) / (1 + q[:, -1:]))

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        logits = self.logits[part]
        n, classes, positions = logits.shape
        if positions == 1:
            q = (logits[:, :, 0].log_softmax(1) / 2).exp()  # [n, C]
            unit = torch.eye(classes, dtype=q.dtype, device=q.device)
            rest = q * (q + unit[-1]) / (1 + q[:, -1:])
            dense = torch.addcmul(q * unit[start:stop, None], q[:, start:stop].T[..., None], rest, value=-1)
            weight = self.weight[part].T.expand(stop - start, n)
            return ColumnBlock({self.root: self.layout(dense.unsqueeze(3))}, weight=weight)
        rank = classes - 1
        v = torch.arange(start, stop, device=logits.device)
        at, column = v // rank, v % rank
        q = (logits[:, :, at].log_softmax(1) / 2).exp()  # [n, C, V]
        unit = (torch.arange(classes, device=v.device)[:, None] == column).to(q.dtype)
        root = self.columns(q, unit, torch.gather(q, 1, column.expand(n, 1, -1)))
        place = (at[:, None] == torch.arange(positions, device=v.device)).to(q.dtype)
        dense = torch.einsum("ncv,vp->vncp", root, place)
        return ColumnBlock({self.root: self.layout(dense)}, weight=self.weight[part][:, at].T)


@dataclass
class Affine:
    """Columns at an affine function of the roots, brought to each of them."""

    inner: Columns
    root: int
    """The number of the root in whose place the function is in the inner columns."""
    roots: Sequence[int]
    pull: Callable[[torch.Tensor, slice], OutputCotangents]

    @property
    def count(self) -> int:
        return self.inner.count

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        whole = self.inner.block(start, stop, slice(None))
        weight = None if whole.weight is None else whole.weight[:, part]
        return ColumnBlock(self.pull(whole.left[self.root], part), weight=weight)


@dataclass
class General:
    """Any Hessian `[n, M, M]` over the joined outputs: unit columns e_k on the left, H e_k on the right."""

    shapes: dict[int, torch.Size]
    hessian: torch.Tensor

    @property
    def count(self) -> int:
        return self.hessian.shape[-1]

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        h = self.hessian[part]
        right = h[:, :, start:stop].movedim(2, 0)
        left = torch.eye(self.count, dtype=h.dtype, device=h.device)[start:stop, None].expand_as(right)
        return ColumnBlock(self.split(left), self.split(right))

    def split(self, flat: torch.Tensor) -> OutputCotangents:
        pieces = flat.split([math.prod(s) for s in self.shapes.values()], dim=2)
        return {i: c.reshape(*c.shape[:2], *s) for (i, s), c in zip(self.shapes.items(), pieces, strict=True)}


def safe_root(x: torch.Tensor) -> torch.Tensor:
    """The square root, which has no derivative at 0: there it is 0. That of NaN is NaN."""
    none = x <= 0
    return torch.where(none, 0, torch.where(none, 1, x).sqrt())


@dataclass
class Weighted:
    """Columns multiplied by the square roots of their weights."""

    inner: Columns

    @property
    def count(self) -> int:
        return self.inner.count

    def block(self, start: int, stop: int, part: slice) -> ColumnBlock:
        block = self.inner.block(start, stop, part)
        if block.weight is None:
            return block
        root = safe_root(block.weight)
        return ColumnBlock({i: c * root.reshape(*root.shape, *[1] * (c.ndim - 2)) for i, c in block.left.items()})


def rooted(columns: Columns) -> Columns:
    """Columns S with `S S^T` the Hessian: those of a known loss with their weights, else its eigenvectors."""
    if not isinstance(columns, General):
        return Weighted(columns)
    root = MatrixRoot.apply(doubled(columns.hessian)).to(columns.hessian.dtype)
    return FormedColumns(columns.split(root.movedim(2, 0)))


class MatrixRoot(torch.autograd.Function):
    """The square root `S = U sqrt(L)` of `H = U L U^T`, `[n, M, M]`.

    Eigenvectors of equal eigenvalues have no derivatives. But with `T = S (S^T S)^+` and the projection `P = S T^T`
    any change of H within the matrices of its rank is `dS S^T + S dS^T` of `dS = (1 - P / 2) dH T`, which is taken as
    the derivative: so those of what is made of `S S^T` are right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(h: torch.Tensor) -> torch.Tensor:
        values, vectors = _eigh(h)
        least = values[:, -1:].clamp(min=0) * torch.finfo(h.dtype).eps * h.shape[-1]
        return vectors * torch.where(values <= least, 0 * values, values).sqrt().unsqueeze(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:
        (s,), (slope,) = ctx.saved_tensors, slopes
        t = _inverse(s)
        found = (slope - t @ (s.mT @ slope) / 2) @ t.mT
        return (found + found.mT) / 2

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        (s,), (tangent,) = ctx.saved_tensors, tangents
        t = _inverse(s)
        return tangent @ t - s @ (t.mT @ tangent @ t) / 2


def _inverse(s: torch.Tensor) -> torch.Tensor:
    """`S (S^T S)^+` of a root whose columns are orthogonal, perhaps zero."""
    none = (s.detach() == 0).all(1).to(s.dtype).diag_embed()
    return torch.linalg.solve(s.mT @ s + none, s.mT).mT


def _eigh(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of `[n, M, M]`: NaN for a matrix with NaN or inf in it, at which LAPACK gives up."""
    wrong = ~h.detach().isfinite().all(2).all(1)[:, None]
    values, vectors = spectrum(h.masked_fill(wrong[:, None], 0))
    return values.masked_fill(wrong, torch.nan), vectors


def joined_block(
    made: list[Columns], start: int, stop: int, part: slice, n: int, everywhere: bool = False
) -> ColumnBlock:
    """The columns of a range over all kinds together; a kind that has no part in a column has zeros there.

    `everywhere` asks for zeros also at outputs at which only columns of other ranges are.
    """
    found: list[ColumnBlock] = []
    offset = 0
    for kind in made:
        a, b = max(start - offset, 0), min(stop - offset, kind.count)
        if a < b:
            found.append(kind.block(a, b, part))
        elif everywhere and kind.count:
            found.append(_none(kind.block(0, 1, part)))
        offset += kind.count
    if len(found) == 1:
        return found[0]
    left = _joined([b.left for b in found])
    right = _joined([b.right or b.left for b in found]) if any(b.right for b in found) else None
    weights = None
    if any(b.weight is not None for b in found):
        weights = torch.cat([_weight(b, n) for b in found])
    return ColumnBlock(left, right, weights)


def _none(block: ColumnBlock) -> ColumnBlock:
    """None of the columns of a block."""
    right = None if block.right is None else {i: c[:0] for i, c in block.right.items()}
    weight = None if block.weight is None else block.weight[:0]
    return ColumnBlock({i: c[:0] for i, c in block.left.items()}, right, weight)


def _weight(block: ColumnBlock, n: int) -> torch.Tensor:
    if block.weight is not None:
        return block.weight
    column = next(iter(block.left.values()))
    return column.new_ones(column.shape[0], n)


def _joined(cotangents: list[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    counts = [next(iter(c.values())).shape[0] for c in cotangents]
    joined = {}
    for i in dict.fromkeys(i for c in cotangents for i in c):
        like = next(c[i] for c in cotangents if i in c)
        parts = [
            c[i] if i in c else like.new_zeros(v, *like.shape[1:]) for c, v in zip(cotangents, counts, strict=True)
        ]
        joined[i] = torch.cat(parts)
    return joined
