"""The share of each sample in the gradient, compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import projecting
from invfunc.statistic import Statistic


def sketched_grad(
    f: Callable,
    *,
    rows: int,
    columns: int,
    generator: torch.Generator,
    projection: Literal["signs", "sparse", "mask"] = "signs",
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The per-sample gradients of a loss function, compressed by random matrices.

        G = batch_grad(f)(params, *batch)                       # of each parameter [N, *p], taken as [N, O, I]
        torch.einsum("noi,or,ic->nrc", G, P, Q).flatten(1)      # P: [O, rows], Q: [I, columns], random

    O is the first dim of a parameter, and I all others. A vector has one matrix, `[O, rows * columns]`. The average of
    `P P^T` and of `Q Q^T` is the identity, so that the inner product of two sketches is on average that of the
    per-sample gradients:

        |sketch(g) . sketch(h) - g . h| is of the size  (2 / rows + 2 / columns + 4 / (rows columns))^(1/2) |g| |h|

    at most (the standard deviation), for each parameter, and independently. A side that is no longer than its sketch is
    kept unchanged, padded with zeros, and adds no error. With stored sketches, the inner products of new samples with a
    whole data set are one matrix product: which samples influence the loss of a test sample, and which are similar.

    Args:
        f, samples, argnums, in_dims, has_aux: as in `batch_grad`. f is pure in torch.func's sense (see the
            conventions).
        rows, columns: the lengths of the two sides of a sketch.
        projection: the kind of matrices: random `"signs"` (LoGra); `"sparse"` ones with one sign in each row, of which
            the deviation above is the same; or a `"mask"`, which picks some rows and columns of the gradient (GraSS):
            right on average, too, but far off where few entries are large.
        generator: draws the matrices once, when the statistic is made: all of its calls use the same ones. Another
            statistic uses the same ones, too, if its generator has the same seed, and its rows, columns, and shapes and
            order of parameters are the same. They do not depend on the device or the dtype.

    Returns:
        A function `(params, *batch) -> sketches` with tensors `[N, rows * columns]`, in the unit of loss / parameter.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; rows or columns below 1, another projection, no generator.

    Example:
        Sides that are short enough are kept:

        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square().sum(1)
        >>> args = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.zeros(2, 2)
        >>> g = torch.Generator().manual_seed(0)
        >>> invfunc.sketched_grad(f, rows=2, columns=2, generator=g)(*args)
        tensor([[2., 0., 0., 0.],
                [2., 4., 4., 8.]])

        Otherwise their products are near those of the per-sample gradients:

        >>> w, x, y = torch.eye(100), torch.eye(100)[:2] + 1, torch.zeros(2, 100)
        >>> sketches = invfunc.sketched_grad(f, rows=20, columns=20, generator=g)(w, x, y)
        >>> exact = invfunc.gram(f)(w, x, y)
        >>> bool(((sketches @ sketches.T - exact).abs() < 0.5 * exact).all())
        True

    Composes with: `chunked` over samples and params, `streamed` (with `out=` a data set's sketches go to a file),
    `distributed`, `together`, `certified`; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: a backward pass without the gradients of the weights, the result, and products of each operation's input, and
    of the gradient at its output, with the matrices. `[N, O, I]` is formed only for operations without a rule, for some
    samples at a time. On one CPU core 0.7 to 1.1 gradients, with 16 rows and columns.

    Source: Choe et al., "What is your data worth to GPT?" (LoGra), arXiv 2405.13954, for linear layers; Hu et al.,
    "GraSS", arXiv 2505.18976; Park et al., "TRAK", ICML 2023; Johnson and Lindenstrauss (1984).
    """
    reduction = projecting("sketched_grad", rows, columns, projection, generator)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("sketched_grad", f, reduction, **options)
