"""Kronecker-factored curvature with corrected eigenvalues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import check_factors, fisher_columns, most_of
from invfunc.reductions.eigenbasis import InEigenbasis
from invfunc.reductions.kronecker_factors import KroneckerFactors
from invfunc.statistic import Statistic


def ekfac(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["mc", "exact", "empirical"] = "mc",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    weight_sharing: Literal["expand", "reduce", "backpack"] = "expand",
    joint: bool = False,
    unsupported: Literal["error", "diagonal", "skip"] = "error",
    max_factor_dim: int | None = 16_384,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """Each parameter's block of the Fisher matrix or of the GGN in the eigenbasis of its K-factors (EKFAC).

        Q_B, Q_A = (torch.linalg.eigh(factor).eigenvectors for factor in kfac(f, loss)(...)["weight"].factors)
        values = torch.einsum("vnoi,ok,ij->vnkj", G, Q_B, Q_A).square().sum((0, 1))       # G: rows of `sqrt_ggn`

    The eigenvalues are those of the block's diagonal in that basis, so that it has the trace of the block, and is at
    least as near to it (in the Frobenius norm) as the product of the factors. If a factor has equal eigenvalues (as the
    one of a transposed convolution whose stride is its kernel has), its eigenvectors are not unique. The result may
    then depend on rounding, for example on the chunks of samples: two such results differ by more, and each is right.

    Args:
        f, loss, fisher, mc_samples, generator, sample, peel, weight_sharing, joint, unsupported, max_factor_dim,
            samples, argnums, in_dims, out_dims, has_aux: as in `kfac`; the same columns give the basis and the
            eigenvalues, and the basis of a side that is kept as a diagonal is the identity. f and loss are pure in
            torch.func's sense (see the conventions).

    Returns:
        As `kfac`, but each `Kronecker` has `values`, and eigenvectors as its factors.

    Raises:
        ArgumentError, SplitError, ConvexityError, SampleAxisError: as in `kfac`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> invfunc.ekfac(f, torch.nn.functional.mse_loss, fisher="exact")(torch.ones(2, 1), x, y).dense()
        tensor([[1., 0.],
                [0., 4.]])

    Composes with: `chunked` over outputs, samples and params; `streamed`, which goes through the loader twice;
    `torch.func.vmap` where the result is used inside. Eigenvectors have no derivative at equal eigenvalues.

    Cost: that of `kfac`, a second pullback, and eigendecompositions of the factors.

    Source: George et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018.
    """
    check_factors("ekfac", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    columns = fisher_columns("ekfac", fisher, mc_samples, generator, sample, peel)
    factors = KroneckerFactors(weight_sharing, joint, unsupported, most_of("ekfac", max_factor_dim))
    return Statistic("ekfac", f, InEigenbasis(factors), loss=loss, **columns, **options)
