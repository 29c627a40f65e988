"""Products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.products.curvature import of_hessian
from invfunc.products.product import Product


def hvp(f: Callable, loss: Callable | None = None, *, has_aux: bool = False) -> Product:
    """The product of the Hessian of a loss with a vector, a tree like the parameters.

        jvp(grad(lambda p: f(p, *batch).sum()), (params,), (v,))[1]

    Nothing has to be known of the samples: f may mix them, as batch normalisation in train mode does, or draw random
    numbers, which a linearisation draws once for all vectors.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]` losses, whose sum then counts; with
            `loss` a model function `f(params, *inputs)`. f and loss are pure in torch.func's sense (see the
            conventions).
        loss: `loss(outputs, target)`, any twice differentiable one.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *batch) -> tree`, with loss `(params, v, *inputs, target) -> tree`, of tensors like the
        parameters and v. Its `.linearize(params, *batch)` gives a function `v -> tree` that has run f once.

    Raises:
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than a loss,
            or one that no parameter reaches.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x @ w).exp().sum()
        >>> w, x = torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> invfunc.hvp(f)(w, torch.tensor([1.0, 0.0]), x)
        tensor([2., 1.])
        >>> product = invfunc.hvp(f).linearize(w, x)
        >>> torch.stack([product(e) for e in torch.eye(2)])
        tensor([[2., 1.],
                [1., 1.]])

    Composes with: `linear_operator`, `estimate_trace`, `estimate_diagonal`, `streamed`; `torch.func.grad`, `vmap`,
    `jvp` around it and around its linearisation.

    Cost: two and a half to four gradients, and the memory of two. A linearisation keeps that memory, and each product
    takes about half of the time. Attention runs without fused kernels, which have no second derivative.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994; BackPACK's hessianfree.
    """
    return Product("hvp", f, of_hessian, loss, has_aux=has_aux)
