"""Products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from invfunc.arguments.problem import InDims
from invfunc.callables import describe
from invfunc.column_options import spelled
from invfunc.errors import ArgumentError
from invfunc.products.curvature import of_hessian, of_positive_hessian
from invfunc.products.product import Product


def hvp(
    f: Callable,
    loss: Callable | None = None,
    *,
    blocks: bool = False,
    modify: Literal["abs", "clip"] | None = None,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """The product of the Hessian of a loss with a vector, a tree like the parameters.

        jvp(grad(lambda p: f(p, *batch).sum()), (params,), (v,))[1]

        for name in params:                                  # with blocks=True, over all dimensions of the parameter
            H = hessian(lambda p: f({**params, name: p}, *batch).sum())(params[name])
            H V[name][k]                                     # for k in range(K)

    f may mix its samples, as batch norm in train mode does. It may draw random numbers; a linearisation draws them once
    for all vectors.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]` losses, whose sum then counts; with
            `loss` a model function `f(params, *inputs)`. f and loss are pure in torch.func's sense (see the
            conventions).
        loss: `loss(outputs, target)`, any twice differentiable one.
        blocks: multiply the diagonal block of each parameter alone, with K vectors for each.
        modify: with blocks, multiply the blocks of the positive-curvature Hessian (PCH), `J^T H J + sum(J_s^T
            positive(h_s) J_s)` over the nonlinear operations s of the model. h_s is the second derivative of an
            element-wise operation times the gradient at its output, J_s the Jacobian of its input in the parameter.
            With h_s unchanged, this is the block of the Hessian. "abs" takes the absolute value of h_s, "clip" takes 0
            where it is negative: both are positive semi-definite, and no smaller than the block of the GGN. f and loss
            are as in `ggnvp`, and the nonlinear operations of f are element-wise.
        in_dims, out_dims: as in `ggnvp`. Only `modify` looks at the samples.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *batch) -> tree`, with loss `(params, v, *inputs, target) -> tree`, of tensors like the
        parameters and v; with blocks, those of V and of the result are `[K, *p]`. Its `.linearize(params, *batch)`
        gives a function `v -> tree` that has run f once.

    Raises:
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than a loss,
            or one that no parameter reaches. With `modify`: a nonlinear operation is not element-wise (it is named).
        SplitError, ConvexityError, SampleAxisError: with `modify`, as in `ggnvp`.

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

        >>> f = lambda p, x: (x * p["a"] * p["b"]).exp().sum()
        >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
        >>> V = {"a": torch.tensor([1.0, 10.0]), "b": torch.tensor([1.0, 0.0])}
        >>> invfunc.hvp(f, blocks=True)(params, V, torch.zeros(3) + 0.5)["a"]
        tensor([ 8.1548, 81.5485])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation; `streamed`; but for blocks
    `linear_operator`, `estimate_trace`, `estimate_diagonal`.

    Cost: two and a half to four gradients, and the memory of two. A linearisation keeps that memory, and each product
    takes about half of the time. Attention runs without fused kernels, which have no second derivative. With blocks,
    two gradients, and for each parameter K backward passes through the part of the network behind it, batched.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994; BackPACK's hessianfree, HMP (Dangel, Kunstner
    and Hennig, ICLR 2020) and PCHMP; Chen, "Positive-curvature Hessian", arXiv 1802.06502.
    """
    call = f"hvp({describe(f)}, modify={modify!r})"
    if modify not in (None, "abs", "clip"):
        raise ArgumentError(f"{call}: modify is one of 'abs', 'clip', or None.")
    if modify and not blocks:
        raise ArgumentError(f"{call}: it is of the blocks of single parameters; pass blocks=True, too.")
    record = partial(of_positive_hessian, modify=modify) if modify else of_hessian
    options = spelled(blocks=blocks, modify=modify)
    return Product("hvp", f, record, loss, in_dims, out_dims, has_aux, blocks, spelled=options)
