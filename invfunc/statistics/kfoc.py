"""The Kronecker product nearest to each parameter's block of the curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import check_count
from invfunc.column_options import fisher_columns, most_of
from invfunc.reductions.sides import BothSides, OneSide
from invfunc.statistic import Statistic


def kfoc(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = None,
    *,
    sweeps: int = 3,
    fisher: Literal["mc", "exact", "empirical"] = "mc",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable[..., Any] | None = None,
    peel: int | str | None = None,
    max_factor_dim: int | None = 16_384,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The Kronecker product nearest to each parameter's own block of the Fisher matrix or of the GGN (KFOC, Shampoo).

        A = torch.eye(inputs)                                       # G: of column v (see `kfac`) and sample n
        B = torch.einsum("vnoi,ij,vnpj->op", G, A, G) / A.square().sum()
        A = torch.einsum("vnoi,op,vnpj->ij", G, B, G) / B.square().sum()
        B = torch.einsum("vnoi,ij,vnpj->op", G, A, G) / A.square().sum()          # and so on, one for each sweep
        torch.kron(B, A)                                            # about the block of the weight [out, in]

    Each line is the best factor for the other one, in the Frobenius norm, so the error falls with each sweep to that of
    the best product. With one sweep it is Shampoo's: `kron(sum G G^T, sum G^T G)` over the trace of either. Unlike
    `kfac`, it assumes nothing about the use of a parameter: any matrix has factors, also one that is tied, masked, or
    computed from others, and correlations of the positions of a sequence count.

    Args:
        f, loss, fisher, mc_samples, generator, sample, peel, samples, argnums, in_dims, out_dims, has_aux: as in
            `kfac`; the same columns in all sweeps. f and loss are pure in torch.func's sense (see the conventions).
        sweeps: the number of factors that are computed, one after the other.
        max_factor_dim: as in `kfac`; the factor of the other side is the best one for a diagonal.

    Returns:
        A function `(params, *inputs, target) -> tree`, without `loss` `(params, *batch) -> tree`, with a `Kronecker`
        for each parameter: a factor for the first dim, and one for all others together, of the same trace. For a
        vector, as a bias, it is the block itself.

    Raises:
        ArgumentError: `sweeps` is below 1, or as in `kfac`.
        SplitError, ConvexityError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w.mT
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> invfunc.kronecker.kfoc(f, torch.nn.functional.mse_loss, fisher="exact")(torch.ones(1, 2), x, y).dense()
        tensor([[1., 0.],
                [0., 4.]])

    Composes with: `chunked` over outputs, samples and params; `streamed`, which goes through the loader once for each
    sweep; `together`; `torch.func.grad` around it. `invfunc.kronecker` takes its result; `kronecker.merge` does not, as
    the nearest product of two batches does not follow from those of each.

    Cost: a pullback of the columns for each sweep, and of each per-sample gradient the product with itself, from its
    factors where that is cheaper; of an embedding `[V, D]` they are formed.

    Source: Schnaus et al., "Kronecker-factored optimal curvature", 2021, for the best product; Gupta, Koren and Singer,
    "Shampoo", ICML 2018; Morwani et al., "A new perspective on Shampoo's preconditioner", 2024, for what both are.
    """
    check_count("kfoc(", "sweeps", sweeps)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    columns = fisher_columns("kfoc", fisher, mc_samples, generator, sample, peel)
    most = most_of("kfoc", max_factor_dim)
    sides = BothSides(most) if sweeps == 1 else OneSide(most, sweeps - 1)
    return Statistic("kfoc", f, sides, loss=loss, **columns, **options)
