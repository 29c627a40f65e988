"""Curvature matrices with structure: the Kronecker product of one parameter, and a low rank over all."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from numbers import Real
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import kind, table
from invfunc._torch.values import checked_at_the_end, doubled
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.linear_algebra import matrices


@dataclass(frozen=True)
class Joint:
    """The layout of a weight and its bias in one matrix `[out, in + 1]`: the bias comes last, in each block of the
    weight.
    """

    bias: str
    """Name of the bias."""
    shape: torch.Size
    """Of the weight."""
    out: tuple[int, ...]
    """The dims of the weight that the rows are over."""
    read: tuple[int, ...]
    """The dims of the weight that the columns are over."""
    blocks: tuple[int, ...]
    """Into how many parts each dim of the weight is divided."""

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`[*lead, out, in + 1]` of a weight and a bias with as many axes more in front."""
        w = matrices.gathered(weight, self.shape, self.blocks)
        lead = w.ndim - len(self.shape)
        order = [*range(lead), *(lead + d for d in (*self.out, *self.read))]
        sizes = matrices.part(self.shape, self.blocks)
        rows, columns = (torch.Size(sizes[d] for d in dims).numel() for dims in (self.out, self.read))
        w = w.permute(order).reshape(*w.shape[:lead], rows, columns)
        b = bias.reshape(*w.shape[1:lead], len(w), rows).movedim(lead - 1, 0)
        x = torch.cat([w, b.unsqueeze(-1)], -1)
        return matrices.scattered(x, *self._of(x.shape[-2:]))

    def parts(self, x: torch.Tensor, bias: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and the bias, of this shape, that such a matrix is of."""
        sizes, count = matrices.part(self.shape, self.blocks), torch.Size(self.blocks).numel()
        x = matrices.gathered(x, *self._of((x.shape[-2] // count, x.shape[-1])))
        lead, order = x.ndim - 2, (*self.out, *self.read)
        w = x[..., :-1].reshape([*x.shape[:lead], *(sizes[d] for d in order)])
        w = w.permute([*range(lead), *(lead + order.index(d) for d in range(len(order)))])
        return matrices.scattered(w, self.shape, self.blocks), x[..., -1].movedim(0, -2).reshape(bias)

    def _of(self, block: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
        """The shape of the matrix of such blocks, and into how many parts its dims are divided."""
        count = torch.Size(self.blocks).numel()
        return [count * block[0], block[1]], (count, 1)


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of factors. Any other one is equal to it: trees of different parameters and batches have one
    structure.

    `A` is the mean of `inputs` products, and all else a sum over n samples.
    """

    name: str = ""
    """Of the parameter, which errors tell."""
    n: int | None = None
    """Number of samples; None where they are not sums and means over samples alone."""
    inputs: float = 0.0
    """Number of products `a a^T` of which the factor of the inputs is the mean."""
    read: int | None = None
    """Number of that factor."""
    degree: int | None = 1
    """The power of the loss's scale that the other one has; None where its scale is not that of n samples."""
    reached: bool = True
    """True if the parameter influences the result; else all is zero, and the groups are not known."""
    joint: Joint | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """The code by which a graph of torch.compile makes it, and its arguments."""
        return repr(self), {"Origin": Origin, "Joint": Joint, "torch": torch}


def derived(origin: Origin) -> Origin:
    """The origin of an inverse, of a root, or of an average."""
    if torch.compiler.is_compiling():
        from invfunc._torch.eager import eagerly  # the compiler does not look into what a graph holds as a constant

        return eagerly(_derived, (origin,), {})
    return _derived((origin,), {})


def _derived(args: tuple[Origin], options: dict[str, Any]) -> Origin:
    return replace(args[0], n=None)


Damping = matrices.Damping


@tree.register("factors", "values")
@dataclass(frozen=True, eq=False, repr=False)
class Kronecker:
    """A symmetric positive semi-definite matrix over the P entries of one parameter, as a Kronecker product.

        K = reduce(torch.kron, factors)          # [P, P]
        K = K @ values.flatten().diag() @ K.T    # with values: factors are orthogonal eigenvectors

    Rows and columns are in the order of `parameter.flatten()`. For the weight `[out, in]` of an `nn.Linear` the
    K-factors are (B, A) in this order, with `A = 1/N sum_n a a^T` over its inputs a, and `B = sum_n s s^T` over the
    columns s of a square root of the loss Hessian, pulled back to its outputs. B contains the scale of the loss, such
    as the 1/N of a mean. The factors of W `[in, out]` in `x @ W` are (A, B).

    Args:
        factors: symmetric matrices `[k, k]`; a vector `[k]` is the diagonal of one. With `values`, the eigenvectors.
        groups: the dims of the parameter that each factor is over, in order; k is the product of their sizes.
        shape: of the parameter.
        values: the eigenvalues `[k1, k2, ...]`, one for each product of eigenvectors.
        blocks: the number of blocks of each dim, for a block-diagonal matrix: it is zero between blocks, and each has a
            Kronecker product of its own. All factors and values then have a leading axis, which counts the blocks in
            the order of the dims. The weight `[out, in, ...]` of a convolution in g groups has `blocks=(g, 1, ...)`,
            and factors `[g, out / g, out / g]` and `[g, in, in]`.
        origin: set by the transform that computed it: its name, for errors, and the numbers of samples.

    Raises:
        ArgumentError: shapes that do not fit, damping that is negative or not finite, a factor that is not symmetric,
            positive semi-definite and finite, a matrix to be inverted that is singular, a split that does not exist.
        ArgumentTypeError: factors that are not floating-point tensors, or damping that is not a number.

    Example:
        >>> import torch, invfunc
        >>> B, A = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0])
        >>> K = invfunc.kronecker.Kronecker((B, A), groups=((0,), (1,)), shape=torch.Size([2, 2]))
        >>> K
        Kronecker([2, 2] over (0,), [2] over (1,), shape=(2, 2))
        >>> K @ torch.ones(2, 2)
        tensor([[3., 9.],
                [3., 9.]])
        >>> K.solve(torch.ones(2, 2), damping=1.0)
        tensor([[0.2500, 0.1000],
                [0.2500, 0.1000]])

    Composes with: pytrees and so torch.func, as a node that contains the factors and values. What a vmap returns has
        its axis; use it inside another one. There is no derivative in the factors through eigenvectors at equal
        eigenvalues (it is NaN, and of any size near them): in `eigen`, `sqrt`, and `inverse` and `solve` with damping
        and no split. That of `logdet` exists once, that of `sqrt` not at an eigenvalue 0; all others always.

    Cost: `P * (k1 + k2 + ...)` multiplications for a product, a decomposition of each factor (`k^3`) in float64 for the
        rest. Results have the dtype of the factors, or float32 for half precision; only products with a v of half
        precision are cast back. `solve` and `logdet` of factors are rounded once, at the end. The results of `eigen`,
        `sqrt` and `inverse` are right to eps of their largest eigenvalue: solutions with them have rounding errors of
        `eps |v| / damping`, along the largest eigenvectors. Negative eigenvalues of factors up to `32 sqrt(k) eps` of
        the largest are rounding, and count as 0.

    Source: Martens and Grosse (ICML 2015), section 6.3 for the split; George et al. (NeurIPS 2018) for the values.
    """

    factors: tuple[torch.Tensor, ...]
    groups: tuple[tuple[int, ...], ...]
    shape: torch.Size
    values: torch.Tensor | None = None
    blocks: tuple[int, ...] | None = None
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        fits = isinstance(self.factors, tuple | list)
        values = () if self.values is None else (self.values,)
        leaves = [*self.factors, *values] if fits else tree.leaves(self)
        if not fits or not all([isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves]):
            if any(isinstance(x, torch.fx.Proxy) for x in leaves):
                return  # torch.compile at work
            given = ", ".join(str(getattr(x, "dtype", type(x).__name__)) for x in leaves)
            raise ArgumentTypeError(f"Kronecker: wanted is a tuple of floating-point tensors; these came: {given}.")
        own = vars(self)  # as they are frozen
        own["factors"], own["groups"] = tuple(self.factors), tuple(map(tuple, self.groups))
        own["shape"], own["blocks"] = torch.Size(self.shape), self.blocks and tuple(self.blocks)
        self._check()

    def __repr__(self) -> str:
        parts = [f"{[*getattr(x, 'shape', ())]} over {g}" for x, g in zip(self.factors, self.groups, strict=False)]
        more = ", values" * (self.values is not None) + f", blocks={self.blocks}" * (self.blocks is not None)
        return f"Kronecker({', '.join(parts)}, shape={tuple(self.shape)}{more}{kind(self.factors)})"

    def _repr_html_(self) -> str:
        parts = zip(self.groups, self.factors, strict=True)
        rows = [(f"dims {[*g]}", [*x.shape], float(doubled(x).norm())) for g, x in parts]
        rows += [("values", [*x.shape], float(doubled(x).norm())) for x in (self.values,) if x is not None]
        blocks = "" if self.blocks is None else f"in blocks of the dims {[*self.blocks]}"
        return table(f"Kronecker, of a parameter {[*self.shape]}", ["of", "shape", "norm"], rows, blocks)

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        """The product with each v of `[*lead, *shape]`."""
        if not isinstance(v, torch.Tensor):
            return NotImplemented
        self._check()
        lead = v.shape[: max(v.ndim - len(self.shape), 0)]
        if v.shape != (*lead, *self.shape):
            wanted = ", ".join(map(str, ("*lead", *self.shape)))
            raise ArgumentError(f"{self} @ v: v has shape {list(v.shape)}, but has to have shape [{wanted}].")
        if self.blocks is not None:
            x = torch.vmap(Kronecker.__matmul__)(self._each(), matrices.gathered(v, self.shape, self.blocks))
            return matrices.scattered(x, self.shape, self.blocks)
        order = [*range(len(lead)), *(len(lead) + d for group in self.groups for d in group)]
        dtype = dtype_of(self, v)
        x = v.permute(order).reshape(*lead, *self._sizes).to(matrices.wide(dtype))
        if self.values is not None:
            x = self.values.to(x.dtype) * matrices.product(self.factors, x, transposed=True)
        x = matrices.product(self.factors, x).reshape([v.shape[d] for d in order])
        return x.permute(sorted(range(v.ndim), key=order.__getitem__)).to(dtype)

    def is_diagonal(self, i: int) -> bool:
        """Tells whether a factor is stored as its diagonal."""
        return self.factors[i].ndim == (1 if self.blocks is None else 2)

    def dense(self) -> torch.Tensor:
        """The matrix `[P, P]`."""
        size, like = math.prod(self.shape), self.factors[0]
        units = torch.eye(size, dtype=matrices.wide(like.dtype), device=like.device)
        return (self @ units.reshape(size, *self.shape)).reshape(size, size).mT

    def trace(self) -> torch.Tensor:
        """The sum of the diagonal, or of the eigenvalues."""
        self._check()
        if self.blocks is not None:
            each = self._each()
            return torch.vmap(Kronecker.trace)(each).sum()
        parts = [_diagonal(f) for f in self.factors] if self.values is None else [self.values]
        return reduce(torch.mul, [x.sum(dtype=matrices.wide(x.dtype)) for x in parts])

    @checked_at_the_end()
    def eigen(self) -> Kronecker:
        """The matrix in the form with eigenvalues."""
        return rounded(self, self._decomposed())

    def sqrt(self) -> Kronecker:
        """The symmetric positive semi-definite matrix whose square it is, in the form with values."""
        return self.power(0.5)

    @checked_at_the_end()
    def power(self, exponent: float, damping: Damping = 0.0) -> Kronecker:
        """The power of `K + damping I`, in the form with values, as `power(-0.25)` for Shampoo."""
        values, vectors = self._spectrum()
        shifted = values + matrices.damped(damping)
        if exponent < 0:
            shifted = matrices.positive(shifted, self._called("the matrix"))
        return rounded(self, self._made(vectors, shifted**exponent))

    @checked_at_the_end()
    def logdet(self, damping: Damping = 0.0) -> torch.Tensor:
        """The logarithm of the determinant of `K + damping I`."""
        shifted = self._spectrum(regular=matrices.is_none(damping))[0] + matrices.damped(damping)
        total = matrices.positive(shifted, self._called("the matrix")).log().sum()
        return total.to(matrices.wide(dtype_of(self)))

    @checked_at_the_end()
    def inverse(self, damping: Damping = 0.0, split: str | None = None) -> Kronecker:
        """The inverse of `K + damping I`; with a damping above 0, in the form with values.

        With `split="pi"`, the inverse of a nearby product of two damped factors, which is a product of factors again:
        `(A + pi sqrt(damping) I) kron (B + sqrt(damping) / pi I)`, `pi = sqrt((tr A / dim A) / (tr B / dim B))`, or 1
        where a trace is 0.
        """
        return rounded(self, self._inverse(damping, split))

    def _inverse(self, damping: Damping, split: str | None) -> Kronecker:
        """The inverse in float64."""
        undamped = matrices.is_none(matrices.damped(damping))
        if split not in (None, "pi"):
            raise ArgumentError(f"{self}: split is {split!r}, but a split is None or 'pi'.")
        if split == "pi" and (self.values is not None or len(self.factors) != 2):
            raise ArgumentError(f"{self}: split='pi' is of two factors without values. Pass split=None.")
        if self.values is not None or not (split or undamped):
            values, vectors = self._spectrum()
            return self._made(vectors, matrices.positive(values + damping, self._called("the matrix")).reciprocal())
        self._check()
        if self.blocks is not None:
            parts = torch.vmap(lambda part: part._inverse(damping, split))(self._each())
            return self._made(parts.factors)
        shifts = [0.0] * len(self.factors) if undamped else _split(self.factors, damping)
        parts = zip(self.factors, shifts, strict=True)
        return self._made(
            tuple(matrices.inverse(f, shift, self._called(f"factors[{i}]")) for i, (f, shift) in enumerate(parts))
        )

    @checked_at_the_end()
    def solve(self, v: torch.Tensor, damping: Damping = 0.0, split: str | None = None) -> torch.Tensor:
        """The product of `inverse(damping, split)` with each v of `[*lead, *shape]`, in float64 up to the result."""
        return (self._inverse(damping, split) @ v).to(dtype_of(self, v))

    def _spectrum(self, regular: bool = False) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The eigenvalues and the eigenvectors in float64."""
        self._check()
        if self.values is not None:
            noise = matrices.noise(self.values)
            return matrices.not_negative(self.values, self._called("values"), noise), self.factors
        if self.blocks is not None:
            parts = torch.vmap(lambda part: part._decomposed(regular))(self._each())
            assert parts.values is not None
            return parts.values, parts.factors
        return _of_spectra(matrices.eigen(self.factors, self._names, regular))

    def _decomposed(self, regular: bool = False) -> Kronecker:
        """The matrix in the form with eigenvalues, in float64."""
        values, vectors = self._spectrum(regular)
        return self._made(vectors, values)

    def _made(self, factors: tuple[torch.Tensor, ...], values: torch.Tensor | None = None) -> Kronecker:
        """A matrix that is a function of this one."""
        return replace(self, factors=factors, values=values, origin=derived(self.origin))

    @property
    def _names(self) -> list[str]:
        """The names of its factors in errors."""
        return [self._called(f"factors[{i}]") for i in range(len(self.factors))]

    def _called(self, part: str) -> str:
        """The name of one of its tensors in errors."""
        return f"{part} of {self.origin.name}" if self.origin.name else part

    def _each(self) -> Kronecker:
        """One block, with an axis more that counts them: what a vmap takes."""
        assert self.blocks is not None
        each = copy(self)  # unchecked, as its leaves have that axis
        each.__dict__.update(shape=matrices.part(self.shape, self.blocks), blocks=None)
        return each

    @property
    def _sizes(self) -> list[int]:
        shape = self.shape if self.blocks is None else matrices.part(self.shape, self.blocks)
        sizes = list[int]()
        for group in self.groups:
            sizes.append(math.prod(map(shape.__getitem__, group)))
        return sizes

    def _check(self) -> None:
        """Before every use, as there is an axis more in what a vmap returned."""
        shape, dims, wanted = tuple(self.shape), [*chain(*self.groups)], [*range(len(self.shape))]
        ordered = dims == wanted or (
            sorted(dims) == wanted and all([[*group] == sorted(group) for group in self.groups])
        )
        if not ordered or not len(self.factors) == len(self.groups) > 0:
            raise ArgumentError(
                f"Kronecker: {len(self.factors)} factors with groups {self.groups} came; wanted is a group for each, "
                f"and each of the {len(shape)} dims of shape {shape} in one group, in order."
            )
        if self.blocks is not None and not matrices.divide(self.blocks, shape):
            raise ArgumentError(f"Kronecker: blocks {self.blocks} came; wanted is a divisor of each dim of {shape}.")
        sizes, each = self._sizes, () if self.blocks is None else (math.prod(self.blocks),)
        for i, (x, k) in enumerate(zip(self.factors, sizes, strict=True)):
            if x.shape != (*each, k, k) and x.shape != (*each, k):
                self._misfit(f"factors[{i}]", x, (*each, k, k), (*each, k))
        if self.values is not None and self.values.shape != (*each, *sizes):
            self._misfit("values", self.values, (*each, *sizes))

    def _misfit(self, name: str, x: torch.Tensor, *shapes: tuple[int, ...]) -> None:
        raise ArgumentError(
            f"Kronecker: {name} has shape {list(x.shape)}, but for groups {self.groups} of shape {tuple(self.shape)} "
            f"it has to be {' or '.join([str([*s]) for s in shapes])}. Use what a vmap returned inside a vmap."
        )


def dtype_of(matrix: Kronecker, *vectors: torch.Tensor) -> torch.dtype:
    """The dtype of a product with vectors."""
    return reduce(torch.promote_types, [x.dtype for x in (*tree.tensors(matrix), *vectors)])


def rounded(matrix: Kronecker, result: Kronecker) -> Kronecker:
    """A result in the dtype of the matrix that it was computed from; that of half precision in float32."""
    dtype = matrices.wide(dtype_of(matrix))
    return tree.map_leaves(lambda x: x.to(dtype), result)


def decomposed(each: Sequence[Kronecker], regular: bool = False) -> list[Kronecker]:
    """Each in the form with eigenvalues, in float64, from one decomposition for all factors that have one shape."""
    plain = [K for K in each if K.values is None and K.blocks is None]
    for K in plain:
        K._check()
    factors, names = [f for K in plain for f in K.factors], [name for K in plain for name in K._names]
    spectra, found = iter(matrices.eigen(factors, names, regular)), dict[int, Kronecker]()
    for i, K in enumerate(each):
        if K.values is None and K.blocks is None:
            values, vectors = _of_spectra([next(spectra) for _ in K.factors])
            found[i] = K._made(vectors, values)
    return [found[i] if i in found else K._decomposed(regular) for i, K in enumerate(each)]


def _of_spectra(spectra: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The eigenvalues of a product from those of its factors, and the eigenvectors of each."""
    values, vectors = zip(*spectra, strict=True)
    return reduce(lambda a, b: a[..., None] * b, values), vectors


def _split(factors: tuple[torch.Tensor, ...], damping: Damping) -> list[torch.Tensor]:
    """The numbers to add to the diagonals of two factors: parts of the damping in the ratio of their mean
    eigenvalues.
    """
    a, b = (_diagonal(f).mean(dtype=matrices.wide(f.dtype)) for f in factors)
    ratio = torch.where((a > 0) & (b > 0), a, 1) / torch.where((a > 0) & (b > 0), b, 1)
    return [(damping * ratio).sqrt(), (damping / ratio).sqrt()]


def _diagonal(factor: torch.Tensor) -> torch.Tensor:
    return factor if factor.ndim == 1 else factor.diagonal()


class Whole(ABC):
    """A matrix over all parameters, which `solve` and `logdet` take in place of factors."""

    @abstractmethod
    def solve(self, v: tree.Tree, damping: Damping = 0.0) -> tree.Tree:
        """The inverse of the matrix plus damping, times a tree of vectors."""

    @abstractmethod
    def logdet(self, damping: Damping = 0.0) -> torch.Tensor:
        """The logarithm of the determinant of the matrix plus damping."""


@tree.register("vectors", "weights", "scale")
@dataclass(frozen=True, eq=False, repr=False)
class LowRank:
    """A symmetric matrix over the P entries of all parameters: k vectors, plus a multiple of the identity.

        U = torch.cat([u.flatten(1) for u in vectors.values()], 1)      # [k, P]
        U.T @ weights.diag() @ U + scale * torch.eye(P)                 # with weights [k, k]: U.T @ weights @ U

    `Eigenpairs.inverse(damping)` returns one: the covariance of a Laplace approximation, for `predictive_covariance`.

    Args:
        vectors: a tree like the parameters, of tensors `[k, *p]`.
        weights: `[k]`, a symmetric matrix `[k, k]`, or None for ones. They may be negative, as long as the whole has no
            negative eigenvalue.
        scale: a number, or a 0-d tensor.

    Raises:
        ArgumentError: shapes that do not fit, also of a vector in `M @ v`.
        ArgumentTypeError: something else than tensors among the vectors, or a scale that is no number.

    Example:
        >>> import torch, invfunc
        >>> M = invfunc.kronecker.LowRank({"w": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([2.0])}, scale=1.0)
        >>> M
        LowRank(rank 1 of 3, scale=1.0)
        >>> M @ {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor(0.0)}
        {'w': tensor([2., 1.]), 'b': tensor(2.)}

    Composes with: pytrees and so torch.func, as a node that contains the vectors, the weights and the scale.

    Cost: `2 k P` multiplications for a product, in the widest dtype of vectors, weights and v.

    Source: Woodbury (1950); Dangel, Tatzel and Hennig, "ViViT", TMLR 2022.
    """

    vectors: tree.Tree
    weights: torch.Tensor | None = None
    scale: float | torch.Tensor = 0.0

    def __post_init__(self) -> None:
        for path, u in tree.named_leaves(self.vectors):
            if not isinstance(u, torch.Tensor):
                raise ArgumentTypeError(
                    f"LowRank(vectors): vectors{path} is of type {type(u).__name__}, but has to be a tensor [k, *p]."
                )
            if u.ndim < 1 or len(u) != self.rank:
                raise ArgumentError(
                    f"LowRank(vectors): vectors{path} has shape {list(u.shape)}, but has to have {self.rank} vectors "
                    "along axis 0, as the first tensor has."
                )
        k = self.rank
        if self.weights is not None and list(self.weights.shape) not in ([k], [k, k]):
            raise ArgumentError(
                f"LowRank(vectors, weights): weights has shape {list(self.weights.shape)}, but has to have [{k}], a "
                f"number for each vector, or [{k}, {k}]."
            )
        if not isinstance(self.scale, Real) and not (isinstance(self.scale, torch.Tensor) and not self.scale.ndim):
            kind = type(self.scale).__name__
            raise ArgumentTypeError(f"LowRank(scale=...): scale is of type {kind}, but has to be a number or 0-d.")

    def __repr__(self) -> str:
        scale = self.scale.item() if isinstance(self.scale, torch.Tensor) else self.scale
        found = tree.tensors(self.vectors)
        size = sum(u.shape[1:].numel() for u in found)
        return f"LowRank(rank {self.rank} of {size}, scale={scale}{kind(found)})"

    @property
    def rank(self) -> int:
        """The number of vectors."""
        found = tree.tensors(self.vectors)
        return found[0].shape[0] if found and found[0].ndim else 0

    def __matmul__(self, v: Any) -> Any:
        """The product with a tree of vectors `[*lead, *p]`."""
        found, structure = tree.flatten(v)
        paths = [path for path, _ in tree.named_leaves(v)]
        leaves = self.leaves(paths, "v")
        lead = found[0].shape[: max(0, found[0].ndim + 1 - leaves[0].ndim)] if found else ()
        for path, u, x in zip(paths, leaves, found, strict=True):
            if x.shape != (wanted := (*lead, *u.shape[1:])):
                raise ArgumentError(f"{self!r} @ v: v{path} has shape {list(x.shape)}, but has to have {[*wanted]}.")
        kinds = [t.dtype for t in (*leaves, *found, *tree.tensors(self.weights))]
        wide = reduce(torch.promote_types, kinds, torch.float32)
        pairs = [(u.to(wide), x.to(wide)) for u, x in zip(leaves, found, strict=True)]
        flat = [(u.reshape(len(u), -1 if len(u) else u.shape[1:].numel()), x) for u, x in pairs]
        along = reduce(torch.add, [x.reshape(*lead, u.shape[1]) @ u.T for u, x in flat])
        images = [torch.tensordot(weighted(along, self.weights), u, 1) + self.scale * x for u, x in pairs]
        return tree.unflatten([y.to(x) for x, y in zip(found, images, strict=True)], structure)

    def leaves(self, paths: list[str], name: str) -> list[torch.Tensor]:
        """The vectors of the parameters at these key paths, which have to be all."""
        given = dict(tree.named_leaves(self.vectors))
        if sorted(given) != sorted(paths):
            path = next(iter({*given} ^ {*paths}))
            has, lacks = ("vectors", name) if path in given else (name, "vectors")
            raise ArgumentError(f"{self!r}: {has} has an entry {has}{path}, but {lacks} has none.")
        return [given[path] for path in paths]


def weighted(along: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Products with the vectors, `[*lead, k]`, times the weights."""
    if weights is None:
        return along
    weights = weights.to(along)
    return along @ weights if weights.ndim == 2 else along * weights
