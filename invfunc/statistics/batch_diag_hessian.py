"""The diagonal of the Hessian, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import by_method
from invfunc.reductions.quantity import HESSIAN
from invfunc.reductions.squares import SquaresOfEach
from invfunc.statistic import Statistic


def batch_diag_hessian(
    f: Callable,
    loss: Callable | None = None,
    *,
    method: Literal["auto", "dense"] = "auto",
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The exact diagonal of each sample's part of the Hessian of a loss in the parameters.

        [torch.func.hessian(lambda p: f(p, *batch)[n])(params).diagonal() for n in range(N)]

    It sums over samples to `diag_hessian`, and has its scale: a mean loss puts 1/N into every sample's part.

    Args:
        f, loss, method, samples, argnums, in_dims, out_dims, has_aux: as in `diag_hessian`. f and loss are pure in
            torch.func's sense (see the conventions).

    Returns:
        A function `(params, *batch) -> tree`, with loss `(params, *inputs, target) -> tree`, with tensors `[N, *p]`, in
        the unit of loss / parameter^2.

    Raises:
        SampleAxisError: samples are mixed; or a parameter is read again by what depends on it, in a scalar loss whose
            outputs are not found: return the `[N]` losses.
        ArgumentError, RandomnessError: as in `diag_hessian`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x @ w).sin()
        >>> invfunc.batch_diag_hessian(f)(torch.full((1,), torch.pi / 2), torch.tensor([[1.0], [3.0]]))
        tensor([[-1.],
                [ 9.]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `diag_hessian`, and the result itself.

    Source: BackPACK's BatchDiagHessian (Dangel, Kunstner and Hennig, ICLR 2020) for chains of modules.
    """
    how = by_method("batch_diag_hessian", f, method)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("batch_diag_hessian", f, SquaresOfEach(), kind=HESSIAN, loss=loss, options=how, **options)
