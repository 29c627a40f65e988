"""Estimates of what a matrix is, from its products with random vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc._extras import extra
from invfunc._torch.precision import double_on
from invfunc._torch.values import wide
from invfunc.callables import check_choice, describe
from invfunc.errors import ArgumentError
from invfunc.evaluation.processes import parts
from invfunc.loss.drawn import by
from invfunc.loss.square_root import safe_root
from invfunc.products.product import Space, along, check_probes, check_product, names_of, space_of
from invfunc.reductions.estimate import Estimate
from invfunc.spectra import Basis, applied, inner
from invfunc.transform import Transform

DISTRIBUTIONS = ("rademacher", "gaussian")
LEAVE_ONE_OUT = {"trace": "xtrace", "diagonal": "xdiag"}


@dataclass(frozen=True, repr=False)
class Estimator(Transform):
    """A function `(params, *batch) -> Estimate`."""

    of: Literal["trace", "diagonal"]
    product: Callable
    probes: int
    generator: torch.Generator
    distribution: str
    progress: bool
    method: str
    outermost = True

    def __post_init__(self) -> None:
        shown, methods = repr(self)[:-1], ("hutchinson", LEAVE_ONE_OUT[self.of])
        check_product(f"estimate_{self.of}", self.product)
        check_probes(shown, self.probes, self.generator)
        check_choice(f"{shown}, ", "distribution", self.distribution, DISTRIBUTIONS)
        check_choice(f"{shown}, ", "method", self.method, methods)
        if self.method != methods[0] and self.probes % 2:
            raise ArgumentError(
                f"{shown}, probes={self.probes}, method={self.method!r}): probes has to be even, as half of the "
                "products are with random vectors, and the others with what these gave."
            )

    def __repr__(self) -> str:
        return f"estimate_{self.of}({describe(self.product)})"

    def names(self, count: int) -> Sequence[str]:
        return names_of(self.product, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Estimate, Any]:
        space, mean, spread, count = space_of(args, names), [], [], 0
        values = self._values if self.method == "hutchinson" else self._left_out
        for found in values(args, kwargs, space):
            count += 1
            off = [x - m for x, m in zip(found, mean, strict=True)] if mean else found
            mean = [m + d / count for m, d in zip(mean, off, strict=True)] if mean else found
            more = [d * (x - m) for x, m, d in zip(found, mean, off, strict=True)]
            spread = [s + d for s, d in zip(spread, more, strict=True)] if spread else more
        errors = [safe_root(s / (count * (count - 1))) if count > 1 else s * torch.nan for s in spread]
        dtypes = [kind.dtype for kind in space.kinds]
        if self.of == "trace":
            dtype = reduce(torch.promote_types, dtypes)
            return Estimate(mean[0].to(dtype), errors[0].to(dtype)), None
        mean, errors = ([x.to(dtype) for x, dtype in zip(xs, dtypes, strict=True)] for xs in (mean, errors))
        params = tree.tensors(args[:1])
        return Estimate(space.tree(parts(mean, params)), space.tree(parts(errors, params))), None

    def _values(self, args: tuple, kwargs: dict[str, Any], space: Space) -> Iterator[list[torch.Tensor]]:
        """Hutchinson's `v (A v)` of each random vector, or the sum of its entries."""
        at = along(self.product, args, kwargs, space)
        for _ in self._rounds(range(self.probes)):
            v = self._drawn(space)
            found = [wide(x) * wide(y) for x, y in zip(v, at(v), strict=True)]
            yield [reduce(torch.add, [x.sum() for x in found])] if self.of == "trace" else found

    def _left_out(self, args: tuple, kwargs: dict[str, Any], space: Space) -> Iterator[list[torch.Tensor]]:
        """An estimate for each random vector, which is of the part of the matrix outside of what the others span.

        With `A V = Q R`, and of `Q` the vector `Q s` that is orthogonal to the products with all others, the projection
        on these is `Q (I - s s^T) Q^T`. What is inside of it is known exactly, from `Z = A Q`.
        """
        at, n = applied(self.product, args, kwargs, space), self.probes // 2
        rounds = iter(self._rounds(range(self.probes)))
        basis, drawn, r, square = Basis(space.kinds, n), [], torch.zeros(n, n, dtype=torch.float64), []
        for i, _ in zip(range(n), rounds, strict=False):
            drawn.append(v := self._drawn(space))
            product = at(v)
            square.append(inner(v, product))
            found, length = basis.add(product)
            r[: len(found), i] = found
            r[len(found), i] += length
        k = basis.count
        s = F.normalize(torch.linalg.inv(r), dim=1) if k == n else torch.zeros(n, k, dtype=torch.float64)
        images = [at(basis.row(i)) for i, _ in zip(range(k), rounds, strict=False)]
        r, h = r[:k], torch.stack([basis.along(z) for z in images], 1) if k else r[:0, :0]
        if self.of == "trace":
            for s_i, r_i, v, vav in zip(s, r.T, drawn, square, strict=True):
                w = basis.along(v)
                x = w - s_i * (s_i @ w)
                value = h.trace() - s_i @ h @ s_i + vav - 2 * x @ r_i + x @ h @ x
                yield [value.to(space.kinds[0].device, double_on(space.kinds[0].device))]
            return
        z = [torch.stack(x) if x else q[:0] for q, x in zip(basis.rows, zip(*images, strict=True), strict=True)]
        inside = [(q[:k] * x).sum(0) for q, x in zip(basis.rows, z, strict=True)]
        for s_i, r_i, v in zip(s, r.T, drawn, strict=True):
            out, image = basis.joined(s_i), [torch.tensordot(s_i.to(x), x, 1) for x in z]
            own = float(s_i @ r_i)
            yield [y + q * (own * w - x) for y, q, w, x in zip(inside, out, v, image, strict=True)]

    def _rounds(self, steps: range) -> Iterable[int]:
        return extra("tqdm", "progress").tqdm(steps, repr(self)) if self.progress else steps

    def _drawn(self, space: Space) -> list[torch.Tensor]:
        """A random vector whose entries are independent, with mean 0 and variance 1."""
        draw = partial(by, self.generator)
        if self.distribution == "gaussian":
            return [draw(torch.randn, kind.shape, kind.dtype, kind.device) for kind in space.kinds]
        signs = partial(torch.randint, 0, 2)
        return [2 * draw(signs, *kind._replace(dtype=torch.int64)).to(kind.dtype) - 1 for kind in space.kinds]


def estimate_diagonal(
    product: Callable,
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = "rademacher",
    method: Literal["hutchinson", "xdiag"] = "hutchinson",
    progress: bool = False,
) -> Estimator:
    """An unbiased estimate of the diagonal of a matrix, from its products with random vectors.

        v = [randn_like(params) for i in range(probes)]      # "gaussian"; signs for "rademacher"
        values = stack([v[i] * product(params, v[i], *batch) for i in range(probes)])
        values.mean(0), values.std(0) / sqrt(probes)

    Args:
        product, probes, generator, distribution, progress: as in `estimate_trace`.
        method: "hutchinson", the formula above, or "xdiag", the counterpart of "xtrace" for the diagonal.

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

    Composes with: `hvp`, `ggnvp`, these `streamed`, `compiled` and `distributed` (with the same seed in each process),
    and products of one's own; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `estimate_trace`, and the memory of a few trees like the parameters; with "xdiag" of `2 probes`.

    Source: Bekas, Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", 2007; Epperly, Tropp and Webber,
    "XTrace", 2024.
    """
    return Estimator("diagonal", product, probes, generator, distribution, progress, method)


def estimate_trace(
    product: Callable,
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = "rademacher",
    method: Literal["hutchinson", "xtrace"] = "hutchinson",
    progress: bool = False,
) -> Estimator:
    """An unbiased estimate of the trace of a matrix, from its products with random vectors.

        v = [randn_like(params) for i in range(probes)]      # "gaussian"; signs for "rademacher"
        values = stack([(v[i] * product(params, v[i], *batch)).sum() for i in range(probes)])
        values.mean(), values.std() / sqrt(probes)

    Args:
        product: a function `(params, v, *batch) -> tree like params`, linear in v, as `hvp` and `ggnvp` make
            them; their aux is dropped.
        probes: the number of vectors, at least 1.
        generator: draws them, on the device of the parameters.
        distribution: of their entries. "rademacher" (signs) is exact for a diagonal matrix, and has the smaller
            variance; or "gaussian".
        method: "hutchinson", the formula above, or "xtrace": half of the products find the range of the matrix, `Q =
            orth(A V)`, where the trace is exact; each random vector estimates the rest, outside of the products with
            all others. It is far more precise if eigenvalues fall fast, and exact if `probes / 2` is above the rank.
            `probes` is even. Its standard error tends to be too small: two of it cover some 80 to 94 %.
        progress: show a bar.

    Returns:
        A function `(params, *batch) -> Estimate(value, standard_error)`, a named tuple of two tensors without
        dimensions. The standard error of one probe is NaN.

    Raises:
        ArgumentError, ArgumentTypeError: probes < 1, or odd for "xtrace"; no generator, one on another device, or a
            product that is not a tree like the parameters.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).exp().sum()
        >>> generator = torch.Generator().manual_seed(0)
        >>> estimate = invfunc.estimate_trace(invfunc.hvp(f), probes=3, generator=generator)
        >>> estimate(torch.zeros(2), torch.tensor([1.0, 3.0]))
        Estimate(value=tensor(10.), standard_error=tensor(0.))

    Composes with: `hvp`, `ggnvp`, these `streamed`, `compiled` and `distributed` (with the same seed in each process),
    and products of one's own; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one linearisation of a product that has `.linearize`, and `probes` products; with "xtrace" the memory of as
    many trees like the parameters, and no derivatives.

    Source: Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990; Epperly, Tropp and Webber,
    "XTrace: making the most of every sample in stochastic trace estimation", SIAM J. Matrix Anal. Appl. 2024.
    """
    return Estimator("trace", product, probes, generator, distribution, progress, method)
