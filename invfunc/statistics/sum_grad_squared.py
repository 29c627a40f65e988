"""The sum of the squared shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import describe
from invfunc.column_options import spelled
from invfunc.errors import ArgumentError
from invfunc.reductions.squares import SquaresOfPlaces, SumOfSquares
from invfunc.statistic import Statistic


def sum_grad_squared(
    f: Callable,
    *,
    per: Literal["sample", "token"] = "sample",
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The sum over samples of the squared per-sample gradients of a loss function, entry by entry.

        batch_grad(f)(params, *batch).square().sum(0)

    It is not divided by N; a mean loss puts 1/N^2 into every square (see `batch_grad` about this scale).

    With `per="token"` the squares are those of each token's part of the gradient. For a linear layer with the input
    `a[n, t]` and the gradient `d[n, t]` at its output, that is one product:

        torch.einsum("nto,ntk->ok", d.square(), a.square())          # sum_nt (d[n, t] a[n, t]^T)^2

    Tokens are the positions of a linear layer or an einsum, the windows of a convolution, the words of an embedding,
    and the entries to which a bias is added, or that a scale multiplies. A parameter that is read twice, as tied ones
    are, has the tokens of both.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        per: "sample", or "token".
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` with tensors shaped like the parameters, in the unit of
        (loss / parameter)^2.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; per token also if the tokens of an operation that reads a
            parameter are not known, or it reads a tensor computed from the parameter.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.sum_grad_squared(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([68.])
        >>> words = lambda w, x: (x @ w).square().sum(1)  # of two tokens each
        >>> invfunc.sum_grad_squared(words, per="token")(torch.tensor([1.0]), torch.tensor([[[1.0], [2.0]]]))
        tensor([68.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and a contraction; the per-sample gradients of a linear layer are never formed, those of other
    layers for a few samples at a time. Per token, one product in place of that of the gradient.

    Source: BackPACK's SumGradSquared (Dangel, Kunstner and Hennig, ICLR 2020); per token Roulet and Agarwala, 2025
    (arXiv 2510.00236).
    """
    if per not in ("sample", "token"):
        raise ArgumentError(f"sum_grad_squared({describe(f)}, per={per!r}): per has to be 'sample' or 'token'.")
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    if per == "token":
        return Statistic("sum_grad_squared", f, SquaresOfPlaces(), spelled=spelled(per=per), **options)
    return Statistic("sum_grad_squared", f, SumOfSquares(), **options)
