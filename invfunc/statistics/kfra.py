"""Kronecker-factored curvature, from a recursion that averages over the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import check_factors, most_of
from invfunc.reductions.kronecker_factors import ChainFactors
from invfunc.reductions.quantity import CHAIN
from invfunc.statistic import Statistic


def kfra(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = None,
    *,
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
    """Kronecker factors of each parameter's block of the GGN, with B from a recursion through a chain of layers (KFRA).

        G = sum(hessian(loss)(z[n]) for n in range(N))         # at the outputs
        for layer in reversed(layers):                         # with Jacobians J[n]; B of a linear layer is this G
            G = sum(J[n].T @ G @ J[n] for n in range(N)) / N

    Args:
        f, loss, weight_sharing, joint, unsupported, max_factor_dim, samples, argnums, in_dims, out_dims, has_aux: as in
            `kfac`. f is a chain: each operation reads one tensor, which comes from the one before, and each parameter
            is read once. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        As `kfac`.

    Raises:
        ArgumentError: f is not a chain; otherwise as in `kfac`.
        SplitError, ConvexityError, SampleAxisError: as in `kfac`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: torch.tanh(x @ w[0]) @ w[1]
        >>> params, x, y = [torch.zeros(2, 1), torch.ones(1, 1)], torch.eye(2), torch.zeros(2, 1)
        >>> A, B = invfunc.kronecker.kfra(f, torch.nn.functional.mse_loss)(params, x, y)[0].factors
        >>> B
        tensor([[2.]])

    Composes with: `torch.func.grad` around it, and `vmap` where the result is used inside.

    Cost: one forward pass, and at each layer with d inputs and outputs of a sample a matrix `[d, d]` and pullbacks
    (vector-Jacobian products) of 2d vectors through it; element-wise operations are cheap. It is for layers of moderate
    width.

    Source: Botev, Ritter and Barber, "Practical Gauss-Newton optimisation for deep learning", ICML 2017.
    """
    check_factors("kfra", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    factors = ChainFactors(weight_sharing, joint, unsupported, most_of("kfra", max_factor_dim))
    return Statistic("kfra", f, factors, kind=CHAIN, loss=loss, **options)
