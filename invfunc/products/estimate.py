"""Estimates of what a matrix is, from its products with random vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._extras import extra
from invfunc._torch.values import wide
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.rounds import parts
from invfunc.loss.drawn import by
from invfunc.loss.square_root import safe_root
from invfunc.products.maps import Kind
from invfunc.products.product import along, check_product, names_of, space_of
from invfunc.reductions.estimate import Estimate
from invfunc.transform import Transform

DISTRIBUTIONS = ("rademacher", "gaussian")


@dataclass(frozen=True, repr=False)
class Estimator(Transform):
    """A function `(params, *batch) -> Estimate`."""

    of: Literal["trace", "diagonal"]
    product: Callable
    probes: int
    generator: torch.Generator
    distribution: str
    progress: bool

    def __post_init__(self) -> None:
        name, shown = f"estimate_{self.of}", repr(self)[:-1]
        check_product(name, self.product)
        if getattr(self.product, "lead", 0):
            raise ArgumentError(f"{shown}): a product of blocks takes several vectors at once; give that of the whole.")
        if not isinstance(self.probes, int) or isinstance(self.probes, bool):
            kind = type(self.probes).__name__
            raise ArgumentTypeError(
                f"{shown}, probes={self.probes!r}): probes is of type {kind}, but has to be an int."
            )
        if self.probes < 1:
            raise ArgumentError(f"{shown}, probes={self.probes}): probes has to be at least 1.")
        if not isinstance(self.generator, torch.Generator):
            kind = type(self.generator).__name__
            raise ArgumentTypeError(
                f"{shown}, generator=...): generator is of type {kind}, but the vectors are drawn from an explicit "
                "torch.Generator: pass generator=torch.Generator().manual_seed(0)."
            )
        if self.distribution not in DISTRIBUTIONS:
            raise ArgumentError(
                f"{shown}, distribution={self.distribution!r}): it is one of {', '.join(map(repr, DISTRIBUTIONS))}."
            )

    def __repr__(self) -> str:
        return f"estimate_{self.of}({describe(self.product)})"

    def names(self, count: int) -> Sequence[str]:
        return names_of(self.product, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Estimate, Any]:
        return self._estimated(args, kwargs, names), None

    def _estimated(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> Estimate:
        space, count, steps = space_of(args, names), self.probes, range(self.probes)
        rounds = extra("tqdm", "progress").tqdm(steps, repr(self)) if self.progress else steps
        at, mean, spread = along(self.product, args, kwargs, space), [], []
        for i in rounds:
            v = [self._drawn(kind) for kind in space.kinds]
            found = [wide(x) * wide(y) for x, y in zip(v, at(v), strict=True)]
            if self.of == "trace":
                first, *others = [x.sum() for x in found]
                found = [sum(others, first)]
            off = [x - m for x, m in zip(found, mean, strict=True)] if mean else found
            mean = [m + d / (i + 1) for m, d in zip(mean, off, strict=True)] if mean else found
            more = [d * (x - m) for x, m, d in zip(found, mean, off, strict=True)]
            spread = [s + d for s, d in zip(spread, more, strict=True)] if spread else more
        errors = [safe_root(s / (count * (count - 1))) if count > 1 else s * torch.nan for s in spread]
        dtypes = [kind.dtype for kind in space.kinds]
        if self.of == "trace":
            dtype = reduce(torch.promote_types, dtypes)
            return Estimate(mean[0].to(dtype), errors[0].to(dtype))
        mean, errors = ([x.to(dtype) for x, dtype in zip(xs, dtypes, strict=True)] for xs in (mean, errors))
        params = tree.tensors(args[:1])
        return Estimate(space.tree(parts(mean, params)), space.tree(parts(errors, params)))

    def _drawn(self, kind: Kind) -> torch.Tensor:
        """A random vector whose entries are independent, with mean 0 and variance 1."""
        if self.distribution == "gaussian":
            return by(self.generator, torch.randn, kind.shape, kind.dtype, kind.device)
        return (
            by(self.generator, partial(torch.randint, 0, 2), kind.shape, torch.int64, kind.device).to(kind.dtype) * 2
            - 1
        )


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
