"""Products with the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import InDims
from invfunc.products.curvature import of_ggn
from invfunc.products.product import Product


def ggnvp(
    f: Callable, loss: Callable | None = None, *, in_dims: InDims = 0, out_dims: int = 0, has_aux: bool = False
) -> Product:
    """The product of the generalised Gauss-Newton matrix (GGN) of a loss with a vector, a tree like the parameters.

        z, Jv = jvp(lambda p: f(p, *inputs), (params,), (v,))
        HJv = jvp(grad(lambda z: loss(z, target)), (z,), (Jv,))[1]
        vjp(lambda p: f(p, *inputs), params)[1](HJv)[0]

    The matrix of which `diag_ggn` is the diagonal. Nothing has to be known of the samples: the model may mix them, as
    batch normalisation in train mode does, or draw random numbers.

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs, a tensor or a pytree of them. Without `loss`,
            a loss function `f(params, *batch)`, whose outputs are found: those that are marked by `outputs(z)`, or else
            what torch's convex losses are called with. f and loss are pure in torch.func's sense (see the conventions).
        loss: `loss(outputs, target)`, convex in the outputs. A loss without known structure whose Hessian, sample by
            sample (of all outputs, where it mixes samples), has more than 2^24 numbers is not checked for that.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        out_dims: the sample axis of the outputs of a model function.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *inputs, target) -> tree`, without `loss` `(params, v, *batch) -> tree`, of tensors like
        the parameters and v. Its `.linearize(params, *batch)` gives a function `v -> tree` that has run f once.

    Raises:
        SplitError: no outputs are found, or a path from the parameters to the result goes around them.
        ConvexityError: the loss is not convex in the outputs.
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than it
            should, or what no parameter reaches.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x, y = torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggnvp(f, torch.nn.functional.mse_loss)(w, torch.tensor([[1.0], [0.0]]), x, y)
        tensor([[2.],
                [1.]])

    Composes with: `linear_operator`, `estimate_trace`, `estimate_diagonal`, `streamed`; `torch.func.grad`, `vmap`,
    `jvp` around it and around its linearisation.

    Cost: two gradients, and little more than the memory of one. `J v` is taken in forward mode, in a run of f of its
    own that keeps no graph and draws the same random numbers. Where f has no derivative there, and inside of
    torch.func, it is three to four gradients and the memory of two. A linearisation runs f once and keeps that memory;
    each of its products takes two gradients more. Attention runs without fused kernels.

    Source: Schraudolph, "Fast curvature matrix-vector products", 2002; BackPACK's hessianfree.
    """
    return Product("ggnvp", f, of_ggn, loss, in_dims, out_dims, has_aux, forward=True)
