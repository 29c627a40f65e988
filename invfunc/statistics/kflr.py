"""Kronecker-factored curvature, from all columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import by_method, check_factors, most_of
from invfunc.reductions.kronecker_factors import KroneckerFactors
from invfunc.reductions.quantity import GGN
from invfunc.statistic import Statistic


def kflr(
    f: Callable,
    loss: Callable | None = None,
    *,
    method: Literal["auto", "dense"] = "auto",
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
    """Kronecker factors of each parameter's block of the GGN, from a whole square root of the loss Hessian.

        kfac(f, loss, fisher="exact")

    Of one sample the product of the factors is the block itself, as it is of a deep linear network.

    Args:
        method: as in `diag_ggn`. With "expand" only, where each position counts on its own, columns (see `kfac`) whose
            receptive fields are disjoint share a pullback, and a last layer whose entries are the outputs has its
            factors in closed form: `diag(p) - p p^T` of a cross entropy.
        f, loss, weight_sharing, joint, unsupported, max_factor_dim, samples, argnums, in_dims, out_dims, has_aux: as in
            `kfac`. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        As `kfac`.

    Raises:
        ArgumentError, SplitError, ConvexityError, SampleAxisError: as in `kfac`.

    Example:
        >>> import torch, invfunc
        >>> f, loss = lambda w, x: x @ w, lambda z, y: (z - y).square().sum() / 2
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1)
        >>> invfunc.kflr(f, loss)(torch.ones(2, 1), x, y).dense()
        tensor([[1., 2.],
                [2., 4.]])

    Composes with: as `kfac`.

    Cost: that of `diag_ggn`, with products of matrices in place of squares, and those of each layer's inputs.

    Source: Botev, Ritter and Barber (ICML 2017); BackPACK's KFLR.
    """
    check_factors("kflr", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    most = most_of("kflr", max_factor_dim)
    return Statistic(
        "kflr",
        f,
        KroneckerFactors(weight_sharing, joint, unsupported, most, 1 if samples is None else None),
        kind=GGN,
        loss=loss,
        options=by_method("kflr", f, method),
        **options,
    )
