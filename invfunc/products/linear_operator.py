"""A curvature matrix as an operator of scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc._extras import extra
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.products.along import along, check_product, names_of, space_of
from invfunc.products.product import Space
from invfunc.transform import Transform


def linear_operator(product: Callable) -> Operator:
    """A symmetric matrix, given by its products, as a `scipy.sparse.linalg.LinearOperator`.

        A @ x == flat(product(params, tree(x), *batch))      # flat: the leaves one behind the other; tree: its inverse

    What scipy has for matrices works with it: eigenvalues (`eigsh`, `lobpcg`), equations (`cg`, `minres`).

    Args:
        product: a function `(params, v, *batch) -> tree like params`, linear in v and symmetric, as `hvp`, `ggnvp` and
            `fvp` make them; their aux is dropped.

    Returns:
        A function `(params, *batch) -> LinearOperator` of shape `(P, P)` for P numbers in the leaves of params, of
        their dtype. It takes and gives arrays of numpy, wherever the parameters are.

    Raises:
        ArgumentError, ArgumentTypeError: the parameters have different dtypes, or one that numpy has not, or the result
            of the product is not a tree like them.
        MissingExtraError: scipy is missing: `pip install 'invfunc[scipy]'`.

    Example:
        >>> import torch, invfunc
        >>> from scipy.sparse.linalg import cg, eigsh
        >>> f = lambda w, x: (x @ w).cosh().log().sum()
        >>> w, x = torch.zeros(3).double(), torch.diag(torch.tensor([1.0, 2.0, 3.0]).double())
        >>> A = invfunc.linear_operator(invfunc.hvp(f))(w, x)
        >>> A.shape, eigsh(A, 1)[0].round(6).tolist()
        ((3, 3), [9.0])
        >>> cg(A, [1.0, 2.0, 18.0])[0].round(6).tolist()
        [1.0, 0.5, 2.0]

    Composes with: `hvp`, `ggnvp`, `fvp`, these `streamed`, for the matrix of a data set, and products of one's own.
    Arrays of numpy have no derivatives.

    Cost: of a product that has `.linearize`, one linearisation, which is kept as long as the operator is, and its
    products; several columns, one after the other.

    Source: `scipy.sparse.linalg.LinearOperator`; curvlinops (Dangel et al.).
    """
    check_product("linear_operator", product)
    if getattr(product, "lead", 0):
        raise ArgumentError(f"linear_operator({product!r}): a product of blocks takes several vectors at once.")
    return Operator(product)


@dataclass(frozen=True, repr=False)
class Operator(Transform):
    """A function `(params, *batch) -> LinearOperator`."""

    product: Callable

    def __repr__(self) -> str:
        return f"linear_operator({describe(self.product)})"

    def names(self, count: int) -> Sequence[str]:
        return names_of(self.product, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Any, Any]:
        scipy, space = extra("scipy.sparse.linalg", "scipy"), space_of(args, names)
        dtype = _dtype_of_all(space)
        with torch.no_grad() if hasattr(self.product, "linearize") else torch.enable_grad():
            at = along(self.product, args, kwargs, space)
        return _operator(scipy.LinearOperator, at, space, dtype), None


def _dtype_of_all(space: Space) -> Any:
    """The dtype that numpy has for all parameters."""
    name, kinds = space.name, space.kinds
    for path, kind in zip(space.paths, kinds, strict=True):
        if kind.dtype != kinds[0].dtype:
            raise ArgumentError(
                f"{name}{path} has dtype {kind.dtype}, but {name}{space.paths[0]} has {kinds[0].dtype}; an operator "
                "has one dtype for all."
            )
    try:
        return torch.zeros(0, dtype=kinds[0].dtype).numpy().dtype
    except TypeError:
        raise ArgumentTypeError(f"{name} has dtype {kinds[0].dtype}, which numpy has not.") from None


def _operator(base: Any, at: Callable, space: Space, dtype: Any) -> Any:
    kinds = space.kinds
    sizes = [kind.shape.numel() for kind in kinds]

    class Curvature(base):
        """The products of a symmetric matrix."""

        def _matvec(self, x: Any) -> Any:
            if x.dtype.kind == "c":
                return self._matvec(x.real) + 1j * self._matvec(x.imag)
            parts = torch.tensor(x.reshape(-1), dtype=kinds[0].dtype).split(sizes)
            v = [part.reshape(kind.shape).to(kind.device) for part, kind in zip(parts, kinds, strict=True)]
            return torch.cat([y.detach().cpu().reshape(-1) for y in at(v)]).numpy()

        def _adjoint(self) -> Any:
            return self

        def _transpose(self) -> Any:
            return self

    return Curvature(dtype, (sum(sizes), sum(sizes)))
