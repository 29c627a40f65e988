"""The sum of the squared shares."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.reductions.squares import SumOfSquares
from invfunc.statistic import Statistic


def sum_grad_squared(
    f: Callable,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The sum over samples of the squared per-sample gradients of a loss function, entry by entry.

        batch_grad(f)(params, *batch).square().sum(0)

    It is not divided by N; a mean loss puts 1/N^2 into every square (see `batch_grad` about this scale).

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` with tensors shaped like the parameters, in the unit of
        (loss / parameter)^2.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.sum_grad_squared(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([68.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and a contraction; the per-sample gradients of a linear layer are never formed, those of other
    layers for a few samples at a time.

    Source: BackPACK's SumGradSquared (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("sum_grad_squared", f, SumOfSquares(), **options)
