"""Symmetric matrices after a look at their values: eigenvalues and inverses, or an error that names the matrix."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch.nn import functional as F

from invfunc._torch.functorch import innermost
from invfunc._torch.values import anywhere
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.linear_algebra import blocks
from invfunc.linear_algebra.spectrum import spectrum

Damping = float | torch.Tensor
"""What is added to the diagonal, a number or a 0-d tensor."""


def eigen(factor: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors."""
    f = _symmetric(factor, name)
    values, vectors = _spectrum(f) if f.ndim == 2 else (f, torch.ones_like(f))
    return not_negative(values, name, noise(factor), 8 * torch.finfo(f.dtype).eps * (f.ndim == 2)), vectors


def _spectrum(f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eigenvalues and eigenvectors, in float64 if float32 fails, as LAPACK may where rows are zero (dead units)."""
    try:
        values, vectors = spectrum(f)
        if not anywhere(~(values.sum(-1) + vectors.sum((-1, -2))).isfinite()):  # a sum is, if all of it is
            return values, vectors
    except RuntimeError:  # that of torch.linalg is one
        pass
    values, vectors = spectrum(f.double())
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
    shown = innermost(damping).tolist() if isinstance(damping, torch.Tensor) else damping
    fine = (damping >= 0) & (damping < math.inf)
    require(fine, f"damping is {shown}, but has to be finite, and 0 or more.", called)
    return damping


def require(holds: torch.Tensor | bool, otherwise: str, called: str = "Kronecker: ") -> None:
    """Looks at values, also at those below the wrappers of torch.func."""
    if anywhere(~holds) if isinstance(holds, torch.Tensor) else not holds:
        raise ArgumentError(f"{called}{otherwise}")


def noise(x: torch.Tensor) -> float:
    """What rounding may have done to the entries of a matrix, as a part of the largest."""
    return 32 * x.shape[-1] ** 0.5 * torch.finfo(x.dtype).eps


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
