"""The share of each sample in the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import describe
from invfunc.errors import ArgumentTypeError
from invfunc.reductions.gradients import EachSample, SumOf
from invfunc.statistic import Statistic


def batch_grad(
    f: Callable,
    *,
    sum_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The per-sample gradients of a loss function: what each sample adds to its gradient.

        G = torch.stack([grad(lambda p: f(p, *batch)[n])(params) for n in range(N)])     # an [N]-valued f

    For a scalar f, `G[n]` is sample n's part of its gradient: `G.sum(0) == grad(f)`. A mean loss therefore puts 1/N
    into every per-sample gradient; return the `[N]` losses of the samples where their scale matters.

    With `sum_of=torch.sign`, `torch.abs`, a power or any other function, the result is the sum of that function of each
    gradient. Only a few gradients are in memory at a time:

        torch.stack([sum_of(g) for g in G]).sum(0)

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. A term of a scalar f in the parameters
            alone counts as 1/N for each sample. f is pure in torch.func's sense (see the conventions).
        sum_of: a function of one sample's gradient in one parameter, `[*p]`, which returns as many numbers. They are
            summed in the dtype of the gradient (also booleans and integers).
        samples: the indices of some samples, in any order, also repeated; None for all. The result is for these samples
            alone, with the scale that they have in the whole batch; a result that counts samples counts these.
        argnums: the position of the parameters among the arguments; for a tuple of positions, the result is a tuple.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        has_aux: f returns `(loss, aux)`, and the transform `(result, aux)`.

    Returns:
        A function `(params, *batch) -> G` with a tensor `[N, *p]` for each parameter `p`, in the unit of loss /
        parameter, or with `sum_of` a tensor `[*p]`. For a batch without samples (N = 0), and `[N]` losses or their sum,
        it is `[0, *p]`, and sums of first-order statistics are zeros; a mean of no losses is an error.

    Raises:
        ArgumentError: f returns neither a scalar nor `[N]`, no parameter reaches it (f calls a module in place of a
            function of params), the batch arguments disagree about N, or `samples` has an index that does not exist;
            `sum_of` returns another number of entries, or reads a tensor that requires a gradient.
        SampleAxisError: f mixes samples.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.batch_grad(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[2.],
                [8.]])
        >>> invfunc.batch_grad(f, sum_of=torch.sign)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([2.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient, and the result itself; with `sum_of`, the gradients of some samples in one parameter.
    With few `samples` the backward pass is still that of the batch.

    Source: BackPACK's BatchGrad (Dangel, Kunstner and Hennig, ICLR 2020); sums of functions of them: Roulet and
    Agarwala, 2025 (arXiv 2510.00236).
    """
    if sum_of is not None and not callable(sum_of):
        raise ArgumentTypeError(f"batch_grad({describe(f)}, sum_of={sum_of!r}): sum_of has to be a function.")
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    if sum_of is not None:
        return Statistic("batch_grad", f, SumOf(sum_of), spelled=f", sum_of={describe(sum_of)}", **options)
    return Statistic("batch_grad", f, EachSample(), **options)
