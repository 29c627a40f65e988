"""The gradient, and the variance of the shares that it is the sum of."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import valued
from invfunc.reductions.gradients import SumAndCentredSquares
from invfunc.statistic import Statistic


def grad_and_variance(
    f: Callable,
    *,
    correction: float = 0,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
    value: bool = False,
) -> Statistic:
    """The gradient of a loss function and the variance of its per-sample gradients, from one backward pass.

        G = batch_grad(f)(params, *batch)
        G.sum(0), G.var(0, correction=correction)

    The gradient is that of f; for `[N]`-valued f of the sum of its entries. The variance is that of `variance`: a mean
    loss puts 1/N^2 into it, so that `N * variance` estimates the variance of its gradient over batches of size N.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        correction: the divisor of the variance is N - correction.
        samples: as in `batch_grad`; both results are those of these samples.
        argnums, in_dims, has_aux: as in `batch_grad`.
        value: also return the value of f, after the variance, as in `clipped_grad`.

    Returns:
        A function `(params, *batch) -> (grad, variance)`, two trees like the parameters, in the units of
        loss / parameter and its square; with has_aux `(grad, variance, aux)`, with value
        `(grad, variance, value)`.

    Raises:
        ArgumentError: N - correction is not above 0; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.grad_and_variance(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        (tensor([10.]), tensor([9.]))

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `variance`.

    Source: Balles and Hennig, "Dissecting Adam", ICML 2018 (what the variance of the gradient is used for).
    """
    f, has_aux = valued(f, value, has_aux)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("grad_and_variance", f, SumAndCentredSquares(correction), **options)
