"""Matrices after a look at their values: products, blocks, eigenvalues, inverses, or an error that names the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.nn import functional as F

from invfunc._torch.functorch import dual_level, innermost, levels
from invfunc._torch.values import check, doubled
from invfunc.errors import ArgumentError, ArgumentTypeError


def spectrum(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of `[..., k, k]`: `h @ vectors == vectors * values`."""
    jvps = 0 if torch.compiler.is_compiling() else [kind for kind, _ in levels()].count("jvp")
    if jvps == 1:  # torch has no jvp of a jvp of a custom Function
        return _Spectrum.apply(h)  # pyright: ignore[reportReturnType]
    values, vectors = torch.linalg.eigh(h)
    return values, vectors


class _Spectrum(torch.autograd.Function):
    """By perturbation of first order; undefined at equal eigenvalues, as eigenvectors are there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = torch.linalg.eigh(h)
        return values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # values alone have a derivative at equal eigenvalues, too
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (of_values, of_vectors), (values, vectors) = cotangents, ctx.saved_tensors
        inner = torch.diag_embed(torch.zeros_like(values) if of_values is None else of_values)
        if of_vectors is not None:
            inner = inner + _over_gaps(values, vectors.mT @ of_vectors)
        found = vectors @ inner @ vectors.mT
        return (found + found.mT) / 2

    @staticmethod
    def jvp(ctx: Any, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, vectors = ctx.saved_tensors
        inner = vectors.mT @ ((change + change.mT) / 2) @ vectors
        return inner.diagonal(dim1=-2, dim2=-1), vectors @ _over_gaps(values, inner)


def _over_gaps(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each entry of x over the difference of the eigenvalues of its column and of its row, 0 on the diagonal."""
    own = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    return torch.where(own, 0, x / torch.where(own, 1, gaps))


def gathered(v: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """`[*lead, *shape]` as `[blocks, *lead, *part]`: dim d is divided into `blocks[d]` parts of equal length."""
    lead = v.ndim - len(shape)
    pairs = [n for size, count in zip(shape, blocks, strict=True) for n in (count, size // count)]
    x = v.reshape([*v.shape[:lead], *pairs])
    order = [*range(lead, x.ndim, 2), *range(lead), *range(lead + 1, x.ndim, 2)]
    x = x.permute(order)
    return x.reshape([math.prod(blocks), *x.shape[len(shape) :]])


def scattered(x: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """The inverse of `gathered`."""
    d = len(shape)
    lead = x.ndim - 1 - d
    x = x.reshape([*blocks, *x.shape[1:]])
    order = [*range(d, d + lead), *(n for i in range(d) for n in (i, d + lead + i))]
    x = x.permute(order)
    return x.reshape([*x.shape[:lead], *shape])


def part(shape: Sequence[int], blocks: Sequence[int]) -> torch.Size:
    """The shape of a block."""
    return torch.Size(size // count for size, count in zip(shape, blocks, strict=True))


def divide(blocks: Sequence[int], shape: Sequence[int]) -> bool:
    """Tells whether each number divides the length of its dim."""
    return len(blocks) == len(shape) and all(n > 0 and size % n == 0 for n, size in zip(blocks, shape, strict=True))


def product(factors: tuple[torch.Tensor, ...], x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Each factor applied along its axis, which are the last ones of x."""
    device = x.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        for axis, f in enumerate(factors, -len(factors)):
            f, x = f.to(x.dtype), x.movedim(axis, -1)
            x = x * f if f.ndim == 1 else x @ (f if transposed else f.mT)
            x = x.movedim(-1, axis)
    return x


Damping = float | torch.Tensor
"""Number or 0-d tensor that is added to the diagonal."""


def eigen(
    factors: Sequence[torch.Tensor], names: Sequence[str], regular: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eigenvalues and eigenvectors of each in float64, from one decomposition for all that have one shape.

    Float32 would leave no digit of eigenvalues below 1e-7 of the largest. `regular` factors have none that are rounding
    in their own dtype.
    """
    checked = [_symmetric(factor, name) for factor, name in zip(factors, names, strict=True)]
    # in a stack, eigenvectors that stay where they are would have a tangent
    apart = not torch.compiler.is_compiling() and dual_level()
    alike: dict[tuple, list[int]] = {}
    for i, f in enumerate(checked):
        alike.setdefault((f.shape, f.dtype, f.device, i if apart else None), []).append(i)
    found = {i: (f, torch.ones_like(f)) for i, f in enumerate(checked) if f.ndim == 1}
    for each in alike.values():
        if each[0] not in found:
            values, vectors = spectrum(torch.stack([checked[i] for i in each]) if len(each) > 1 else checked[each[0]])
            pairs = zip(values.unbind(), vectors.unbind(), strict=True) if len(each) > 1 else [(values, vectors)]
            found.update(zip(each, pairs, strict=True))

    def of(
        f: torch.Tensor, name: str, values: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        zero = 8 * torch.finfo(values.dtype).eps * (f.ndim == 2)
        values = not_negative(values, name, noise(f), zero)
        if regular and f.ndim == 2 and f.numel():
            positive(values - 8 * torch.finfo(wide(f.dtype)).eps * values.amax(), name)
        return values, vectors

    return [of(f, names[i], *found[i]) for i, f in enumerate(factors)]


def inverse(factor: torch.Tensor, shift: float | torch.Tensor, name: str) -> torch.Tensor:
    """The inverse in float64, without eigenvectors, so that it has a derivative at equal eigenvalues."""
    f = _symmetric(factor, name)
    if f.ndim == 1:
        return positive(f + shift, name).reciprocal()
    eye = torch.eye(len(f), dtype=f.dtype, device=f.device)
    f = f + shift * eye
    root, failed = torch.linalg.cholesky_ex(f)
    positive(1 - failed, name)
    half = torch.linalg.solve_triangular(root, eye, upper=False)
    inverse = product((half.mT,), half.mT)  # torch.cholesky_inverse has a wrong derivative in forward mode
    inflation = f.diagonal() * inverse.diagonal()  # from 1 for a diagonal to 1 / eps, where the factor has no digit
    positive(1 / (64 * torch.finfo(wide(factor.dtype)).eps) - inflation, name)
    return inverse


def positive(x: torch.Tensor, name: str = "the matrix") -> torch.Tensor:
    require(x > 0, f"{name} is not positive definite, or nearly singular. Pass damping, or more of it.")
    return x


def not_negative(values: torch.Tensor, name: str, noise: float, zero: float = 0.0) -> torch.Tensor:
    """Eigenvalues in float64, with 0 for those that are rounding: negative, or below this part of the largest.

    Their derivative is that of what they are without rounding.
    """
    values = _finite(values, name)
    largest = F.pad(values.flatten(), (0, 1)).amax()  # there may be none
    require(values >= -noise * largest, f"{name} is not positive semi-definite.")
    return values + (torch.where(values > zero * largest, values, 0) - values).detach()


def _symmetric(factor: torch.Tensor, name: str) -> torch.Tensor:
    """A factor in the precision to compute in, after a look at its values."""
    f = _finite(factor, name)
    other = f.mT if f.ndim == 2 else f
    largest = f.abs().amax() if f.numel() else f.new_zeros(())
    near = (f - other).abs() <= noise(factor) * largest
    require(near, f"{name} is not symmetric. Pass (A + A.T) / 2.")
    return f


def _finite(x: torch.Tensor, name: str) -> torch.Tensor:
    """The values in the precision to compute in, if none is NaN or inf."""
    wrong = ~x.isfinite()
    bad = innermost(wrong)

    def error() -> str:
        return (
            f"{name} is not finite: {int(bad.sum())} of {bad.numel()} entries are NaN or inf. Look for NaN or inf in "
            "the inputs, then in the parameters and the target, then for a loss that overflows."
        )

    require(~wrong, error)
    return doubled(x.to(wide(x.dtype)))


def damped(damping: Damping, called: str = "Kronecker: ") -> Damping:
    """Damping after a look at it."""
    if not isinstance(damping, Real) and not (isinstance(damping, torch.Tensor) and damping.ndim == 0):
        kind = f"a tensor of {damping.ndim} dims" if isinstance(damping, torch.Tensor) else type(damping).__name__
        raise ArgumentTypeError(f"{called}damping is {kind}, but has to be a number or a 0-d tensor.")
    fine = (damping >= 0) & (damping < math.inf)
    shown = partial(_number, damping)
    require(fine, lambda: f"damping is {shown()}, but has to be finite, and 0 or more.", called)
    return damping


def is_none(damping: Damping) -> bool:
    """Tells whether nothing is added."""
    return not isinstance(damping, torch.Tensor) and damping == 0


def _number(x: Damping) -> Any:
    return innermost(x).tolist() if isinstance(x, torch.Tensor) else x


def require(holds: torch.Tensor | bool, otherwise: str | Callable[[], str], called: str = "Kronecker: ") -> None:
    """Looks at values, also at those below the wrappers of torch.func."""

    def error() -> ArgumentError:
        return ArgumentError(f"{called}{otherwise if isinstance(otherwise, str) else otherwise()}")

    if isinstance(holds, torch.Tensor):
        check(~holds, error)
    elif not holds:
        raise error()


def noise(x: torch.Tensor) -> float:
    """The rounding error of the entries of a matrix, relative to the largest."""
    return 32 * x.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
