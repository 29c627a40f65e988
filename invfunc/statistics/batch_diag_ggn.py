"""The diagonal of the generalised Gauss-Newton matrix, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import by_method, drawing
from invfunc.reductions.quantity import GGN
from invfunc.reductions.squares import SquaresOfEach
from invfunc.statistic import Statistic


def batch_diag_ggn(
    f: Callable,
    loss: Callable | None = None,
    *,
    method: Literal["auto", "dense"] = "auto",
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
    """The exact diagonal of each sample's part of the generalised Gauss-Newton matrix (GGN).

        J = jacrev(f)(params, *inputs)                        # [N, C, P]
        H = hessian(lambda z: loss(z, target))(f(params, *inputs))
        torch.einsum("ncp,ncnd,ndp->np", J, H, J)

    It sums over samples to `diag_ggn`, and has its scale: the H of a mean loss contains its 1/N.

    Args:
        f, loss, method, mc_samples, generator, sample, peel, samples, argnums, in_dims, out_dims,
            has_aux: as in `diag_ggn`. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, *inputs, target) -> tree`, without `loss` `(params, *batch) -> tree`, with tensors
        `[N, *p]`, in the unit of loss / parameter^2.

    Raises:
        SplitError, ConvexityError, ArgumentError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)
        >>> invfunc.batch_diag_ggn(f, torch.nn.functional.mse_loss)(torch.ones(1, 1), x, y)
        tensor([[[1.]],
        <BLANKLINE>
                [[4.]]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `diag_ggn`, and the result itself.

    Source: BackPACK's BatchDiagGGNExact (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    how = by_method("batch_diag_ggn", f, method)
    drawn = drawing("batch_diag_ggn", mc_samples, generator, sample, peel)
    return Statistic("batch_diag_ggn", f, SquaresOfEach(), kind=GGN, loss=loss, drawing=drawn, options=how, **options)
