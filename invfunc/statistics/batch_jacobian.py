"""The Jacobian of each sample's outputs."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.reductions.quantity import JACOBIAN
from invfunc.reductions.squares import JacobianRows
from invfunc.statistic import Statistic


def batch_jacobian(
    f: Callable,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The Jacobian in the parameters of the outputs of each sample.

        torch.stack([jacrev(lambda p: f(p, *inputs)[n])(params) for n in range(N)])

    It is `torch.func.jacrev(f)(params, *inputs)` where a sample's outputs depend on that sample only, but takes as many
    backward passes as one sample has outputs, not as all have together.

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs `[N, *out]` or a pytree of them. f is pure in
            torch.func's sense (see the conventions).
        out_dims: the sample axis of the outputs.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *inputs) -> J`, a tree like the parameters with tensors `[N, *out, *p]`, in the unit of
        output / parameter. For a pytree of outputs, a tree like these of such trees.

    Raises:
        ArgumentError: f returns a scalar, or outputs without the sample axis; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: torch.stack([x @ w, (x @ w).square()], 1)
        >>> invfunc.batch_jacobian(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]))
        tensor([[[1.],
                 [2.]],
        <BLANKLINE>
                [[2.],
                 [8.]]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one forward pass, a pullback (vector-Jacobian product) for each output of a sample, batched, and the result
    itself.

    Source: BackPACK's SqrtGGN without the loss; Dangel, Tatzel and Hennig, "ViViT", TMLR 2022.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples, "out_dims": out_dims}
    return Statistic("batch_jacobian", f, JacobianRows(), kind=JACOBIAN, **options)
