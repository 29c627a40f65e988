"""The layer that does nothing."""

from __future__ import annotations

from typing import Any

from invfunc.layers.common import keeps_volume
from invfunc.pairs.pair import Invertible


def identity() -> Invertible:
    """The identity: `y = x`, the neutral element of a chain.

    Args: none.

    Returns:
        An `Invertible` `x -> y` for any pytree x. Its log-determinant is zeros `[N]`, N as of the first tensor in x.

    Raises:
        ArgumentError, ArgumentTypeError: log_det of an x without a tensor or without a leading axis.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.identity()(torch.ones(2))
        tensor([1., 1.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: none; y is x itself, without a copy.

    Source: invtorch's Identity.
    """
    return Invertible(_same, _same, log_det=keeps_volume("identity()"), name="identity()")


def _same(x: Any) -> Any:
    return x
