"""Products with the diagonal blocks of a Hessian that is made positive, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from invfunc.arguments.problem import InDims
from invfunc.callables import describe
from invfunc.errors import ArgumentError
from invfunc.products.positive import of_positive_hessian
from invfunc.products.product import Product


def pch_block_product(
    f: Callable,
    loss: Callable | None = None,
    *,
    modify: Literal["abs", "clip"] = "abs",
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """Products of the diagonal blocks of the positive-curvature Hessian (PCH), one for each parameter.

        J^T H J + sum(J_s^T positive(h_s) J_s for s in the nonlinear operations of the model)

    h_s is the second derivative of an element-wise operation times the gradient at its output, J_s the Jacobian of its
    input in the parameter. With h_s unchanged, this is the block of the Hessian; with `modify`, it is positive
    semi-definite, and no smaller than that of the GGN.

    Args:
        f, loss, in_dims, out_dims, has_aux: as in `ggnvp`. The nonlinear operations of f are element-wise. f and loss
            are pure in torch.func's sense (see the conventions).
        modify: what makes h positive: its absolute value ("abs"), or 0 where it is negative ("clip").

    Returns:
        A function `(params, V, *inputs, target) -> tree`, without `loss` `(params, V, *batch) -> tree`: the tensors of
        V and of the result are `[K, *p]`. Its `.linearize(params, *batch)` gives a function `V -> tree` that has run f
        once.

    Raises:
        ArgumentError: a nonlinear operation is not element-wise (it is named), or modify is unknown.
        SplitError, ConvexityError, SampleAxisError, ArgumentTypeError: as in `ggnvp`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).sin()
        >>> w, v = torch.full((1,), torch.pi / 2), torch.ones(1, 1)
        >>> x, y = torch.ones(1, 1), torch.zeros(1, 1)
        >>> invfunc.pch_block_product(f, torch.nn.functional.mse_loss)(w, v, x, y)
        tensor([[2.]])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation.

    Cost: that of `ggn_block_product`, and a second derivative of each nonlinear operation.

    Source: Chen, "Positive-curvature Hessian", arXiv 1802.06502; BackPACK's PCHMP.
    """
    if modify not in ("abs", "clip"):
        raise ArgumentError(f"pch_block_product({describe(f)}, modify={modify!r}): modify is one of 'abs', 'clip'.")
    record = partial(of_positive_hessian, modify=modify)
    return Product("pch_block_product", f, record, loss, in_dims, out_dims, has_aux, lead=1)
