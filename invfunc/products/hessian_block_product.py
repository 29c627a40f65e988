"""Products with the diagonal blocks of the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from invfunc.products.curvature import of_hessian
from invfunc.products.product import Product


def hessian_block_product(f: Callable, loss: Callable | None = None, *, has_aux: bool = False) -> Product:
    """Products of the Hessian's diagonal blocks, one for each parameter, with K vectors each.

        for name in params:
            H = hessian(lambda p: f({**params, name: p}, *batch).sum())(params[name])
            H V[name][k]                                     # for k in range(K), over all dimensions of the parameter

    Args:
        f, loss, has_aux: as in `hvp`. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, V, *batch) -> tree`, with loss `(params, V, *inputs, target) -> tree`: the tensors of V and
        of the result are `[K, *p]`. Its `.linearize(params, *batch)` gives a function `V -> tree` that has run f once.

    Raises:
        ArgumentError, ArgumentTypeError: V is not a tree like the parameters, or f returns something else than a loss.

    Example:
        >>> import torch, invfunc
        >>> f = lambda p, x: (x * p["a"] * p["b"]).exp().sum()
        >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
        >>> V = {"a": torch.tensor([1.0, 10.0]), "b": torch.tensor([1.0, 0.0])}
        >>> invfunc.hessian_block_product(f)(params, V, torch.zeros(3) + 0.5)["a"]
        tensor([ 8.1548, 81.5485])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation.

    Cost: two gradients, and for each parameter K backward passes through the part of the network behind it, batched.

    Source: BackPACK's HMP (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    return Product("hessian_block_product", f, partial(of_hessian, blocks=True), loss, has_aux=has_aux, lead=1)
