"""A square root of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import drawing
from invfunc.reductions.quantity import GGN
from invfunc.reductions.squares import SquareRoot
from invfunc.statistic import Statistic


def sqrt_ggn(
    f: Callable,
    loss: Callable | None = None,
    *,
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """A square root of the generalised Gauss-Newton matrix (GGN): `sum_vn S[v, n] S[v, n]^T` is the GGN.

        J = jacrev(f)(params, *inputs)                        # [N, C, P]
        H = hessian(lambda z: loss(z, target))(f(params, *inputs))
        R = ...                                               # [V, N, C], with R[:, n].T @ R[:, n] == H[n, :, n]
        torch.einsum("vnc,ncp->vnp", R, J)

    There are many square roots: only the products `S S^T` have a meaning. For a cross entropy over C classes V is
    `C - 1`, for other losses the number of outputs of a sample.

    Args:
        f, loss, mc_samples, generator, sample, peel, samples, argnums, in_dims, out_dims, has_aux: as in `diag_ggn`. f
            and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, *inputs, target) -> S`, without `loss` `(params, *batch) -> S`, with tensors `[V, N, *p]`,
        in the unit of sqrt(loss) / parameter.

    Raises:
        SplitError, ConvexityError, ArgumentError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.zeros(2, 1)
        >>> S = invfunc.sqrt_ggn(f, torch.nn.functional.mse_loss)(torch.ones(2, 1), x, y).flatten(2)
        >>> torch.einsum("vnp,vnq->pq", S, S)
        tensor([[5., 1.],
                [1., 1.]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it. The root of a
    loss without known structure comes from an eigendecomposition, which has no derivative at equal eigenvalues.

    Cost: that of `diag_ggn`, and the result itself.

    Source: BackPACK's SqrtGGNExact; Dangel, Tatzel and Hennig, "ViViT", TMLR 2022.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    drawn = drawing("sqrt_ggn", mc_samples, generator, sample, peel)
    return Statistic("sqrt_ggn", f, SquareRoot(), kind=GGN, loss=loss, drawing=drawn, **options)
