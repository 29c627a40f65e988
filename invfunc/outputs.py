"""The marker of a model's outputs."""

from __future__ import annotations

from typing import Any

from invfunc import tree
from invfunc.core.split import mark


def outputs(z: Any) -> Any:
    """Mark the outputs of the model inside a loss function: `outputs(z) == z`.

    The generalised Gauss-Newton matrix of `loss(z(params))` is `J^T H J`, with J the Jacobian of z and H the Hessian of
    the loss in z. It depends on where one ends and the other begins. `diag_ggn(f)` finds that place automatically at
    torch's convex losses; this identity sets it by hand, for any loss that is convex in z.

    Args:
        z: a tensor `[N, ...]` or a pytree of them. Several marked outputs are joined.

    Returns:
        z. Outside a transform of this library nothing else happens.

    Example:
        >>> import torch, invfunc
        >>> def loss(w, x, y):
        ...     z = invfunc.outputs(x @ w)
        ...     return (z - y).cosh().log().mean()
        >>> invfunc.diag_ggn(loss)(torch.zeros(2), torch.ones(3, 2), torch.zeros(3))
        tensor([1.0000, 1.0000])

    Composes with: `diag_ggn(f)`, and `chunked(..., over="samples")` of a statistic of a scalar loss.

    Cost: none; a loss without known structure needs its Hessian over all outputs of a sample.

    Source: Martens, "New insights and perspectives on the natural gradient method", JMLR 2020, section 8.
    """
    return tree.map_tensors(mark, z)
