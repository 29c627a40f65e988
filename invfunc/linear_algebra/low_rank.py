"""A matrix over all parameters at once: one of low rank, and a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import kind
from invfunc.errors import ArgumentError, ArgumentTypeError


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
