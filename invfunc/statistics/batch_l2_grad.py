"""The squared norm of the share of each sample."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.reductions.gradients import SquaredNorms
from invfunc.statistic import Statistic


def batch_l2_grad(
    f: Callable,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The squared Euclidean norm of each per-sample gradient, for each parameter.

        G = batch_grad(f)(params, *batch)
        {name: g.flatten(1).square().sum(1) for name, g in G.items()}

    A mean loss puts 1/N^2 into every squared norm; return the `[N]` losses of the samples where the scale matters.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` like the parameters, of tensors `[N]`, in the unit of
        (loss / parameter)^2. The sum of these tensors is the squared norm over all parameters.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.batch_l2_grad(f)(torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.zeros(2))
        tensor([ 8., 64.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and a contraction. For a layer with P positions, I inputs and O outputs, that is the cheaper of
    two ways: products of all pairs of positions, P^2 (I + O), in float64, because they cancel; or the per-sample
    gradient itself, P I O.

    Source: Goodfellow, "Efficient per-example gradient computations", 2015; Li et al., ICLR 2022 ("ghost norm");
    BackPACK's BatchL2Grad.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("batch_l2_grad", f, SquaredNorms(), **options)
