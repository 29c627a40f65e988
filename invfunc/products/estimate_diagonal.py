"""An estimate of a diagonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.products.estimate import Estimator


def estimate_diagonal(
    product: Callable,
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = "rademacher",
    progress: bool = False,
) -> Estimator:
    """An unbiased estimate of the diagonal of a matrix, from its products with random vectors.

        v = [randn_like(params) for i in range(probes)]      # "gaussian"; signs for "rademacher"
        values = stack([v[i] * product(params, v[i], *batch) for i in range(probes)])
        values.mean(0), values.std(0) / sqrt(probes)

    Args:
        product, probes, generator, distribution, progress: as in `estimate_trace`.

    Returns:
        A function `(params, *batch) -> Estimate(value, standard_error)`, a named tuple of two trees like the
        parameters. The standard error of one probe is NaN.

    Raises:
        ArgumentError, ArgumentTypeError, MissingExtraError: as in `estimate_trace`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).exp().sum()
        >>> generator = torch.Generator().manual_seed(0)
        >>> estimate = invfunc.estimate_diagonal(invfunc.hvp(f), probes=1, generator=generator)
        >>> estimate(torch.zeros(2), torch.tensor([1.0, 3.0])).value
        tensor([1., 9.])

    Composes with: `hvp`, `ggnvp`, these `streamed`, and products of one's own; `torch.func.grad`, `vmap`,
    `jvp` around it.

    Cost: that of `estimate_trace`, and the memory of a few trees like the parameters.

    Source: Bekas, Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", 2007.
    """
    return Estimator("diagonal", product, probes, generator, distribution, progress)
