"""Symmetric matrices after a look at their values: eigenvalues and inverses, or an error that names the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from invfunc._torch.functorch import innermost
from invfunc._torch.precision import doubled
from invfunc._torch.values import any_of, check
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.linear_algebra import blocks
from invfunc.linear_algebra.spectrum import spectrum

Damping = float | torch.Tensor
"""What is added to the diagonal, a number or a 0-d tensor."""


def eigen(factors: Sequence[torch.Tensor], names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eigenvalues and eigenvectors of each, from one decomposition for all that have one shape."""
    checked = [_symmetric(factor, name) for factor, name in zip(factors, names, strict=True)]
    # in a stack, eigenvectors that stay where they are would have a tangent
    apart = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    alike: dict[tuple, list[int]] = {}
    for i, f in enumerate(checked):
        alike.setdefault((f.shape, f.dtype, f.device, i if apart else None), []).append(i)
    found = {i: (f, torch.ones_like(f)) for i, f in enumerate(checked) if f.ndim == 1}
    numbers = [each for each in alike.values() if each[0] not in found]
    stacks = [torch.stack([checked[i] for i in each]) if len(each) > 1 else checked[each[0]] for each in numbers]
    for each, (values, vectors) in zip(numbers, _spectra(stacks), strict=True):
        pairs = zip(values.unbind(), vectors.unbind(), strict=True) if len(each) > 1 else [(values, vectors)]
        found.update(zip(each, pairs, strict=True))

    def of(i: int, values: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zero = 8 * torch.finfo(values.dtype).eps * (values.shape != vectors.shape)
        return not_negative(values, names[i], noise(factors[i]), zero), vectors

    return [of(i, *found[i]) for i in range(len(checked))]


def _spectra(stacks: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of several stacks, in float64 where float32 fails, as in LAPACK it may if rows are zero (dead units)."""
    found = [_attempted(f) for f in stacks]
    sums = [values.sum(-1) + vectors.sum((-1, -2)) for values, vectors in found]  # each is finite if all of it is
    lost = any_of([~x.isfinite() for x in sums])
    return [_in_double(f) if bad else both for f, bad, both in zip(stacks, lost, found, strict=True)]


def _attempted(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        return spectrum(f)
    except RuntimeError:  # that of torch.linalg is one
        return _in_double(f)


def _in_double(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = spectrum(doubled(f))
    return values.to(f.dtype), vectors.to(f.dtype)


def inverse(factor: torch.Tensor, shift: float | torch.Tensor, name: str) -> torch.Tensor:
    """Without eigenvectors, so that it has a derivative at equal eigenvalues."""
    f = _symmetric(factor, name)
    if f.ndim == 1:
        return positive(f + shift, name).reciprocal()
    eye = torch.eye(len(f), dtype=f.dtype, device=f.device)
    f = f + shift * eye
    root, failed = torch.linalg.cholesky_ex(f)
    positive(1 - failed, name)
    half = torch.linalg.solve_triangular(root, eye, upper=False)
    inverse = blocks.product((half.mT,), half.mT)  # torch.cholesky_inverse has a wrong derivative in forward mode
    inflation = f.diagonal() * inverse.diagonal()  # from 1 for a diagonal to 1 / eps, where no digit is right
    positive(1 / (64 * torch.finfo(f.dtype).eps) - inflation, name)
    return inverse


def positive(x: torch.Tensor, name: str = "the matrix") -> torch.Tensor:
    require(x > 0, f"{name} is not positive definite, or nearly singular. Pass damping, or more of it.")
    return x


def not_negative(values: torch.Tensor, name: str, noise: float, zero: float = 0.0) -> torch.Tensor:
    """Eigenvalues with 0 for those that are rounding: negative, or below this part of the largest.

    Their derivative is that of what they are without rounding.
    """
    values = values.to(wide(values.dtype))
    largest = F.pad(values.flatten(), (0, 1)).amax()  # there may be none
    require((values >= -noise * largest) & values.isfinite(), f"{name} is not positive semi-definite and finite.")
    return values + (torch.where(values > zero * largest, values, 0) - values).detach()


def _symmetric(factor: torch.Tensor, name: str) -> torch.Tensor:
    """A factor in the precision to compute in, after a look at its values."""
    f = factor.to(wide(factor.dtype))
    other = f.mT if f.ndim == 2 else f
    largest = f.abs().amax() if f.numel() else f.new_zeros(())  # which NaN or inf in any place is, too
    near = (f - other).abs() <= noise(factor) * largest
    require(near & largest.isfinite(), f"{name} is not symmetric and finite. Without NaN, pass (A + A.T) / 2.")
    return f


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
    """Whether nothing is added."""
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
    """What rounding may have done to the entries of a matrix, as a part of the largest."""
    return 32 * x.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
