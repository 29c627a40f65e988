"""The trace of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import by_method, drawing
from invfunc.reductions.estimate import EstimatedTrace
from invfunc.reductions.quantity import GGN
from invfunc.reductions.squares import MatrixTrace
from invfunc.statistic import Statistic


def ggn_trace(
    f: Callable,
    loss: Callable | None = None,
    *,
    per_parameter: bool = False,
    method: Literal["auto", "dense"] = "auto",
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    with_error: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The trace of the generalised Gauss-Newton matrix (GGN) of a loss in the parameters, exact or drawn.

        sum(d.sum() for d in tree_leaves(diag_ggn(f, loss)(params, *inputs, target)))

    Args:
        per_parameter: the trace of each parameter's block instead of their sum.
        f, loss, method, mc_samples, generator, sample, peel, with_error, samples, argnums, in_dims, out_dims,
            has_aux: as in `diag_ggn`. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, *inputs, target) -> trace`, without `loss` `(params, *batch) -> trace`, a tensor without
        dimensions in the unit of loss / parameter^2; with `per_parameter` a tree like the parameters of these. With
        `with_error` an `Estimate(trace, standard_error)` of two of these.

    Raises:
        SplitError, ConvexityError, ArgumentError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggn_trace(f, torch.nn.functional.mse_loss)(torch.ones(2, 1), x, y)
        tensor(6.)

    Composes with: `chunked` over samples, params and, without with_error, outputs; `torch.func.grad`, `vmap`, `jvp`
    around it.

    Cost: that of `diag_ggn`, without its result. `estimate_trace(ggnvp(f, loss), ...)` is an estimate for networks with
    many outputs.

    Source: BackPACK's tutorial on extension hooks sums the diagonal so.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    how = by_method("ggn_trace", f, method)
    drawn = drawing("ggn_trace", mc_samples, generator, sample, peel, with_error)
    trace = EstimatedTrace(per_parameter) if with_error else MatrixTrace(per_parameter)
    return Statistic("ggn_trace", f, trace, kind=GGN, loss=loss, drawing=drawn, options=how, **options)
