"""The inner products of the shares."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.recording.problem import Indices, InDims
from invfunc.reductions.quantity import GRADIENT_OR_JACOBIAN
from invfunc.reductions.squares import InnerProducts
from invfunc.statistic import Statistic


def gram(
    f: Callable,
    *,
    per_parameter: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The inner products of the samples' shares of the gradient; of a model function the neural tangent kernel (NTK).

        G = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *batch).values()], 1)         # [N, P]
        G @ G.T

        J = torch.cat([j.flatten(2) for j in batch_jacobian(f)(params, *inputs).values()], 2)    # [N, C, P]
        torch.einsum("ncp,mdp->ncmd", J, J)

    A mean loss puts 1/N^2 into every product of a loss function; a model function has no such scale.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`, or a model function
            `f(params, *inputs)`, which returns one tensor `[N, *out]` of two dimensions or more.
        per_parameter: a matrix for each parameter instead of their sum.
        out_dims: the sample axis of the outputs of a model function.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> [N, N]`, in the unit of (loss / parameter)^2; for a model function
        `(params, *inputs) -> [N, *out, N, *out]`. With `per_parameter` a tree like the parameters of these.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.gram(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[ 4., 16.],
                [16., 64.]])

    Composes with: `chunked` over params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one forward pass and a pullback of all outputs of a sample at once. The shares of a layer are formed where
    that is cheaper than the products of what it reads and of its cotangents, slice by slice.

    Source: Jacot, Gabriel and Hongler, "Neural tangent kernel", NeurIPS 2018; Dangel, Tatzel and Hennig, "ViViT",
    TMLR 2022.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples, "out_dims": out_dims}
    return Statistic("gram", f, InnerProducts(per_parameter), kind=GRADIENT_OR_JACOBIAN, **options)
