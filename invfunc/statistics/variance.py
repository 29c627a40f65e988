"""The variance of the shares."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.reductions.gradients import CentredSquares
from invfunc.statistic import Statistic


def variance(
    f: Callable,
    *,
    correction: float = 0,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The variance of the per-sample gradients of a loss function, entry by entry.

        batch_grad(f)(params, *batch).var(0, correction=correction)

    It is never negative, and exact in float32 even if the mean is 1e3 times the deviation. A mean loss puts 1/N into
    every per-sample gradient and 1/N^2 into the variance: for the variance of "the" gradient of a sample, let f return
    the `[N]` losses of the samples.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        correction: the divisor is N - correction; 0 for the variance of the batch, 1 for the unbiased estimate.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` with tensors shaped like the parameters, in the unit of
        (loss / parameter)^2.

    Raises:
        ArgumentError: N - correction is not above 0; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.variance(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([9.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and two contractions, in float64 where float32 would not be exact.

    Source: BackPACK's Variance (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("variance", f, CentredSquares(correction), **options)
