"""Spectra of matrices that are known by their products: Lanczos' method on trees, and densities of eigenvalues.

`spectral_density` is public; `invfunc.eigenpairs(product, top=k)` takes the largest eigenvalues one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc._extras import axes, ticking
from invfunc._torch.functorch import transforming
from invfunc._torch.values import double_on, wide
from invfunc.callables import check_count, describe
from invfunc.errors import ArgumentError
from invfunc.loss.drawn import by
from invfunc.products.given import Kind
from invfunc.products.product import Space, along, check_probes, check_product, names_of, space_of
from invfunc.reductions.estimates import Estimate
from invfunc.transform import Transform

__all__ = ["SpectralDensity", "spectral_density"]

Vector = list[torch.Tensor]
"""A vector over all parameters, by its leaves."""
Product = Callable[[Vector], Vector]
"""A symmetric matrix."""

CLOSE = 1e-8
"""The residual of an eigenvector, in eigenvalues, at which no more products are taken; rounding may leave more."""
LOOKED_FOR = 8
"""Products with what is orthogonal to the eigenvectors that are there, to see that none of the same value is missing:
from one vector Lanczos' method finds one of several equal eigenvalues."""
RESTARTS = 50
"""Most times that the room of a basis is filled."""


class Basis:
    """Orthonormal vectors over all parameters, one behind the other: `[room, *p]` for each parameter."""

    def __init__(self, kinds: Sequence[Kind], room: int) -> None:
        self.kinds, self.count = kinds, 0
        self.size = sum(kind.shape.numel() for kind in kinds)
        self.eps = max(torch.finfo(kind.dtype).eps for kind in kinds)
        room = min(room, self.size)
        self.rows = [k._replace(dtype=torch.promote_types(k.dtype, torch.float32)).zeros(room) for k in kinds]

    def row(self, i: int) -> Vector:
        """A vector in the dtypes of the parameters."""
        return [x[i].to(kind.dtype) for x, kind in zip(self.rows, self.kinds, strict=True)]

    def along(self, vector: Vector) -> torch.Tensor:
        """The products of those that are there with a vector, on the CPU in float64: `[count]`."""
        n, pairs = self.count, zip(self.rows, vector, strict=True)
        each = [x[:n].reshape(n, v.numel()) @ v.to(x).flatten() for x, v in pairs]
        return torch.stack([x.cpu().double() for x in each]).sum(0)

    def joined(self, weights: torch.Tensor) -> Vector:
        """Sums of those that are there with weights `[..., count]`, in the dtypes they are kept in."""
        return [torch.tensordot(weights.to(x), x[: weights.shape[-1]], 1) for x in self.rows]

    def split(self, vector: Vector) -> tuple[torch.Tensor, Vector]:
        """The products with a vector, `[count]`, and what is left of it, which is orthogonal to all."""
        total = torch.zeros(self.count, dtype=torch.float64)
        left = [v.to(x) for v, x in zip(vector, self.rows, strict=True)]
        for _ in range(2):  # "twice is enough"
            total += (found := self.along(left))
            left = [v - x for v, x in zip(left, self.joined(found), strict=True)]
        return total, left

    def add(self, vector: Vector) -> tuple[torch.Tensor, float]:
        """Add the direction of a vector, unless it is in the span of those that are there, or there is no room: its
        products `[count]` with those, and the length of what was left and added, or 0."""
        found, left = self.split(vector)
        length = norm(left)
        if length <= 8 * self.eps * norm(vector) or self.count == len(self.rows[0]):
            return found, 0.0
        for x, v in zip(self.rows, left, strict=True):
            x[self.count] = v / length
        self.count += 1
        return found, length

    def turn(self, weights: torch.Tensor, others: slice = slice(0)) -> None:
        """Put sums of them with weights `[k, m]` in their place, in front of some of the others."""
        for x, new in zip(self.rows, self.joined(weights), strict=True):
            behind = x[others].clone()
            x[: len(new)], x[len(new) : len(new) + len(behind)] = new, behind
        self.count = len(weights) + len(behind)


def norm(vector: Vector) -> float:
    """The length of a vector over all parameters."""
    each = [float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, double_on(x.device)))) for x in vector]
    return math.hypot(*each)


def inner(a: Vector, b: Vector) -> torch.Tensor:
    """The product of two vectors, on the CPU in float64."""
    return torch.stack([(wide(x) * wide(y)).sum().cpu().double() for x, y in zip(a, b, strict=True)]).sum()


def applied(product: Callable, args: tuple, kwargs: dict[str, Any], space: Space) -> Product:
    """The products at these arguments, without derivatives."""
    if transforming():
        raise ArgumentError("it is inside of a transform of torch.func, but branches on values. Compute it outside.")
    own = hasattr(product, "linearize")
    with torch.set_grad_enabled(not own):
        at = along(product, args, kwargs, space)

    def detached(v: Vector) -> Vector:
        with torch.set_grad_enabled(not own):
            return [x.detach() for x in at(v)]

    return detached


class Krylov:
    """Lanczos' method, `A Q = Q T + q r^T`, with Q orthonormal and q orthogonal to it, for a symmetric A.

    Each product is made orthogonal to all vectors before it. T is `Q^T A Q` as it was computed; how far it is from
    symmetric tells how much products round.
    """

    def __init__(self, at: Product, kinds: list[Kind], room: int, generator: torch.Generator) -> None:
        self.at, self.generator, self.products = at, generator, 0
        self.basis = Basis(kinds, room + 1)
        self.room, self.known = min(room, self.basis.size), 0
        """Vectors of which there may be, and of which there is, a product."""
        self.t = torch.zeros(self.room + 1, self.room + 1, dtype=torch.float64)
        self.lost = torch.zeros(self.room + 1, dtype=torch.float64)
        """Lengths of what `A Q = Q T + q r^T` leaves out."""
        self.fresh()

    @property
    def whole(self) -> bool:
        """True if Q spans all that A does: there is no q."""
        return self.known == self.basis.count

    def fresh(self) -> None:
        """Put a random vector in the place of q."""
        self.lost[: self.known] += self.t[self.known, : self.known].abs()
        self.t[self.known], self.basis.count = 0, self.known
        self.basis.add([by(self.generator, torch.randn, x.shape[1:], x.dtype, x.device) for x in self.basis.rows])

    def step(self) -> None:
        """Take the product with q, which becomes the last one of Q."""
        i = self.known
        product = self.at(self.basis.row(i))
        self.products, self.known = self.products + 1, i + 1
        found, length = self.basis.add(product)
        if not found.isfinite().all():
            raise ArgumentError("products are not finite: f or its loss gives NaN or inf.")
        self.t[: i + 1, i] = found
        self.t[i + 1, i] = length
        if not length:  # Q is an invariant space
            self.fresh()

    def ritz(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Eigenvalues of T, the largest first, with eigenvectors `[m, m]` in columns, the lengths of their residuals
        but for rounding, and with it: `A Q y - l Q y = q (r . y)`."""
        m = self.known
        t = self.t[:m, :m]
        values, vectors = (x.flip(-1) for x in torch.linalg.eigh((t + t.T) / 2))
        residuals = (self.t[m, :m] @ vectors).abs()
        rounding = ((t - t.T) / 2 @ vectors).norm(dim=0) + self.lost[:m] @ vectors.abs()
        return values, vectors, residuals, residuals + rounding

    def restart(self, keep: int) -> None:
        """Keep the first Ritz vectors alone, and q."""
        values, vectors, _, errors = self.ritz()
        m, y = self.known, vectors[:, :keep]
        r, self.lost[:keep] = self.t[m, :m] @ y, (errors - (self.t[m, :m] @ vectors).abs())[:keep]
        self.t.zero_()
        self.t[range(keep), range(keep)], self.t[keep, :keep] = values[:keep], r
        self.lost[keep:] = 0
        self.basis.turn(y.T, slice(m, self.basis.count))
        self.known = keep


def largest(at: Product, kinds: list[Kind], top: int, title: str = "") -> tuple[torch.Tensor, Vector, torch.Tensor]:
    """The largest positive eigenvalues `[k]`, their eigenvectors `[k, *p]`, and how far off each eigenvalue may be.

    By Lanczos' method, restarted with the Ritz vectors of the largest values when the room is full (Wu and Simon).
    """
    generator = torch.Generator().manual_seed(0)  # only the number of products depends on it
    krylov = Krylov(at, kinds, max(20, 4 * top), generator)
    top, since, before = min(top, krylov.basis.size), 0, torch.zeros(0)
    eps = krylov.basis.eps
    with ticking(title, 1) as ticks:
        while True:
            ticks.expect(1)
            krylov.step()
            ticks.done()
            values, vectors, residuals, errors = krylov.ritz()
            rounding, since = 16 * eps * values.abs().amax(), since + 1
            wanted = torch.maximum(max(CLOSE, 16 * eps) * values.abs(), rounding)
            close = krylov.known >= top and bool((residuals <= wanted)[:top].all())
            if krylov.whole or krylov.products >= RESTARTS * krylov.room:
                break
            if close and len(before):
                same = bool((values[:top] - before <= 2 * wanted[:top]).all())
                if since >= LOOKED_FOR and same:
                    break
                close = since >= LOOKED_FOR
            if close:
                before, since = values[:top], 0
                krylov.restart(top)
                krylov.fresh()
            elif krylov.known == krylov.room:
                krylov.restart((top + krylov.room) // 2)
    errors = errors + rounding
    count = int((values[:top] > rounding).sum())
    return values[:count], krylov.basis.joined(vectors[:, :count].T), errors[:count]


def spectral_density(
    product: Callable, *, probes: int, generator: torch.Generator, steps: int = 40, progress: bool = False
) -> DensityEstimator:
    """The density of the eigenvalues of a symmetric matrix, from its products: stochastic Lanczos quadrature.

        v = randn_like(params) / norm                        # for each of the probes
        T = V.T @ A @ V                                      # V: an orthonormal basis of v, A v, ..., A^(steps - 1) v
        nodes, y = torch.linalg.eigh(T)
        (y[0] ** 2 * function(nodes)).sum() * P              # about the trace of function(A), over the probes its mean

    Args:
        product: a function `(params, v, *batch) -> tree like params`, linear in v and symmetric, as `hvp` and `ggnvp`
            make them; their aux is dropped.
        probes: how many random vectors. What they differ by gives the error band, so 2 or more.
        generator: from which they are drawn, on any device.
        steps: how many products for each, which sets how fine the density is; P or less.
        progress: show a bar.

    Returns:
        A function `(params, *batch) -> SpectralDensity`: called with points it gives the density there, and the trace
        of any function of the matrix by `trace(function)`, each with its standard error; `plot()` draws it.

    Raises:
        ArgumentError, ArgumentTypeError: probes or steps < 1, no generator, a product that is not a tree like the
            parameters or not finite; inside of torch.func.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> from invfunc.spectra import spectral_density
        >>> f = lambda w, x: (x @ w).cosh().log().sum()
        >>> w, x = torch.zeros(4).double(), torch.diag(torch.tensor([1.0, 1.0, 2.0, 3.0]).double())
        >>> g = torch.Generator().manual_seed(0)
        >>> density = spectral_density(invfunc.hvp(f), probes=100, generator=g)(w, x)           # 1, 1, 4, 9
        >>> density
        SpectralDensity(4 eigenvalues from 1 to 9, 100 probes)
        >>> density.trace(torch.log)                       # log 36 = 3.58
        Estimate(value=...)

    Composes with: `hvp`, `ggnvp`, these `streamed`, `compiled` and `distributed` (with the same seed in each process,
    also of sharded parameters), and products of one's own. Of some parameters alone: close over the others. What it
    gives has no derivatives.

    Cost: `probes` times `steps` products, and `steps` vectors like the parameters.

    Source: Golub and Welsch (1969); Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos
    quadrature", 2017; Ghorbani, Krishnan and Xiao, "An investigation into neural net optimization via Hessian
    eigenvalue density", ICML 2019.
    """
    return DensityEstimator(product, probes, generator, steps, progress)


@dataclass(frozen=True, repr=False)
class DensityEstimator(Transform):
    """A function `(params, *batch) -> SpectralDensity`."""

    product: Callable
    probes: int
    generator: torch.Generator
    steps: int
    progress: bool
    owned = False
    outermost = True

    def __post_init__(self) -> None:
        check_product("spectral_density", self.product)
        check_probes(repr(self)[:-1], self.probes, self.generator)
        check_count(f"{repr(self)[:-1]}, ", "steps", self.steps)

    def __repr__(self) -> str:
        return f"spectral_density({describe(self.product)})"

    def names(self, count: int) -> Sequence[str]:
        return names_of(self.product, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[SpectralDensity, Any]:
        space = space_of(args, names)
        at, found = applied(self.product, args, kwargs, space), []
        with ticking(repr(self) if self.progress else "", 1) as ticks:
            for _ in range(self.probes):
                krylov = Krylov(at, space.kinds, self.steps, self.generator)
                ticks.expect(krylov.room)
                for _ in range(krylov.room):
                    krylov.step()
                    ticks.done()
                values, vectors, *_ = krylov.ritz()
                found.append((values, vectors[0].square()))
        nodes, weights = map(torch.stack, zip(*found, strict=True))
        return SpectralDensity(nodes, weights, krylov.basis.size), None


@dataclass(frozen=True, eq=False, repr=False)
class SpectralDensity:
    """The eigenvalues of a matrix as a measure, once for each random vector. `spectral_density` makes it.

    Args:
        nodes: `[probes, steps]`, where the measure is, in float64 on the CPU.
        weights: `[probes, steps]`, which sum to 1 for each random vector.
        size: how many eigenvalues there are, P.
    """

    nodes: torch.Tensor
    weights: torch.Tensor
    size: int

    def __repr__(self) -> str:
        low, high = self.nodes.amin(), self.nodes.amax()
        return f"SpectralDensity({self.size} eigenvalues from {low:.3g} to {high:.3g}, {len(self.nodes)} probes)"

    def trace(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Estimate:
        """The trace of a function of the matrix, the sum of `function(eigenvalue)` over all P.

        `torch.ones_like` gives P itself, and `lambda l: l / (l + damping)` the effective number of parameters.
        """
        return self._mean((self.weights * function(self.nodes)).sum(1) * self.size)

    def __call__(self, points: torch.Tensor, width: float | None = None) -> Estimate:
        """The density at points, which integrates to 1: each eigenvalue is smoothed to a Gaussian of this standard
        deviation, by default a hundredth of the range."""
        width = self._width if width is None else width
        off = (points.double().cpu()[:, None, None] - self.nodes) / width
        kernel = off.square().div(-2).exp() / (math.sqrt(2 * math.pi) * width)
        return self._mean((self.weights * kernel).sum(2).T)

    def plot(self, ax: Any = None, width: float | None = None) -> Any:
        """Draw the density with a band of two standard errors.

        Args:
            ax: the axes of matplotlib to draw into; by default those of a new figure.
            width: as in a call.

        Returns:
            The axes.

        Raises:
            MissingExtraError: without matplotlib: `pip install 'invfunc[notebooks]'`.
        """
        ax, margin = axes(ax), 3 * (self._width if width is None else width)
        points = torch.linspace(self.nodes.amin().item() - margin, self.nodes.amax().item() + margin, 1000).double()
        value, error = self(points, width)
        least = 1e-2 / self.size
        ax.fill_between(points, (value - 2 * error).clamp(min=least), (value + 2 * error).clamp(min=least), alpha=0.3)
        ax.semilogy(points, value.clamp(min=least))
        ax.set(xlabel="eigenvalue", ylabel="density")
        return ax

    @property
    def _width(self) -> float:
        return max(float(self.nodes.amax() - self.nodes.amin()) / 100, torch.finfo(torch.float64).tiny)

    @staticmethod
    def _mean(values: torch.Tensor) -> Estimate:
        return Estimate(values.mean(0), values.std(0) / len(values) ** 0.5)


torch.serialization.add_safe_globals([SpectralDensity])  # tensors and a number
