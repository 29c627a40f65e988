"""An estimate of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.products.estimate import Estimator


def estimate_trace(
    product: Callable,
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = "rademacher",
    progress: bool = False,
) -> Estimator:
    """An unbiased estimate of the trace of a matrix, from its products with random vectors.

        v = [randn_like(params) for i in range(probes)]      # "gaussian"; signs for "rademacher"
        values = stack([(v[i] * product(params, v[i], *batch)).sum() for i in range(probes)])
        values.mean(), values.std() / sqrt(probes)

    Args:
        product: a function `(params, v, *batch) -> tree like params`, linear in v, as `hvp` and `ggnvp` make
            them; their aux is dropped.
        probes: how many vectors, at least 1.
        generator: from which they are drawn, on the device of the parameters.
        distribution: of their entries: "rademacher", signs, which is exact for a diagonal matrix and has the smaller
            variance, or "gaussian".
        progress: whether to show a bar.

    Returns:
        A function `(params, *batch) -> Estimate(value, standard_error)`, a named tuple of two tensors without
        dimensions. The standard error of one probe is NaN.

    Raises:
        ArgumentError, ArgumentTypeError: probes < 1, no generator, one on another device, or a product that is not a
            tree like the parameters.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).exp().sum()
        >>> generator = torch.Generator().manual_seed(0)
        >>> estimate = invfunc.estimate_trace(invfunc.hvp(f), probes=3, generator=generator)
        >>> estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
        Estimate(value=tensor(10.), standard_error=tensor(0.))

    Composes with: `hvp`, `ggnvp`, these `streamed`, and products of one's own; `torch.func.grad`, `vmap`,
    `jvp` around it.

    Cost: one linearisation of a product that has `.linearize`, and `probes` products.

    Source: Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990.
    """
    return Estimator("trace", product, probes, generator, distribution, progress)
