"""Products with the diagonal blocks of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from invfunc.arguments.problem import InDims
from invfunc.products.curvature import of_ggn
from invfunc.products.product import Product


def ggn_block_product(
    f: Callable, loss: Callable | None = None, *, in_dims: InDims = 0, out_dims: int = 0, has_aux: bool = False
) -> Product:
    """Products of the diagonal blocks of the generalised Gauss-Newton matrix (GGN), one for each parameter.

        for name in params:
            J = jacrev(lambda p: f({**params, name: p}, *inputs))(params[name])
            J^T H J V[name][k]                               # for k in range(K), over all dimensions of the parameter

    Args:
        f, loss, in_dims, out_dims, has_aux: as in `ggnvp`. f and loss are pure in torch.func's sense (see the
            conventions).

    Returns:
        A function `(params, V, *inputs, target) -> tree`, without `loss` `(params, V, *batch) -> tree`: the tensors of
        V and of the result are `[K, *p]`. Its `.linearize(params, *batch)` gives a function `V -> tree` that has run f
        once.

    Raises:
        SplitError, ConvexityError, SampleAxisError, ArgumentError, ArgumentTypeError: as in `ggnvp`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda p, x: x @ p["w"] + p["b"]
        >>> params, V = {"w": torch.zeros(2, 1), "b": torch.zeros(1)}, {"w": torch.ones(1, 2, 1), "b": torch.ones(1, 1)}
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggn_block_product(f, torch.nn.functional.mse_loss)(params, V, x, y)["w"]
        tensor([[[3.],
                 [2.]]])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation.

    Cost: two gradients, and for each parameter K Jacobian products and K pullbacks through the part of the network
    behind it, batched.

    Source: BackPACK's GGNMP (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    record = partial(of_ggn, blocks=True)
    return Product("ggn_block_product", f, record, loss, in_dims, out_dims, has_aux, lead=1)
