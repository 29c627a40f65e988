"""Products as linear operators: of scipy, and Jacobians with their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from invfunc._extras import extra
from invfunc.callables import check_choice, check_functions, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.products.curvature import of_jacobian
from invfunc.products.given import ProductArguments
from invfunc.products.product import Linearised, Space, along, check_product, names_of, space_of
from invfunc.transform import ArgumentNames, Transform, own_memory


def linear_operator(product: Callable, kind: Literal["scipy", "torch"] = "scipy") -> Operator:
    """A symmetric matrix from its products, as a `scipy.sparse.linalg.LinearOperator` or as curvlinops' of tensors.

        A @ x == flat(product(params, tree(x), *batch))      # flat: all tensors one after the other; tree: its inverse

    SciPy's functions take the first: eigenvalues (`eigsh`, `lobpcg`), equations (`cg`, `minres`). Curvlinops'
    estimators and solvers take the second: traces (`hutchpp_trace`, `xtrace`), diagonals (`xdiag`), spectral densities
    (`lanczos_approximate_spectrum`), inverses (`CGInverseLinearOperator`, Neumann's, LSMR).

    Args:
        product: a function `(params, v, *batch) -> tree like params`, linear in v and symmetric, as `hvp` and `ggnvp`
            make them; their aux is dropped.
        kind: "scipy", or "torch" for a `PyTorchLinearOperator` of curvlinops.

    Returns:
        A function `(params, *batch) -> operator` of shape `(P, P)` for P numbers in params, of their dtype. That of
        scipy takes and gives arrays of numpy, wherever the parameters are. That of torch takes and gives
        tensors on their device: `[P]`, `[P, K]`, or a list of `[*p]`, `[*p, K]` for the parameters; it can be added to
        others, scaled and multiplied with them.

    Raises:
        ArgumentError, ArgumentTypeError: the parameters have different dtypes or, for torch, are on several devices, or
            scipy's dtype is one that numpy has not; an unknown kind; the result of the product is not a tree like them.
        MissingExtraError: scipy is missing: `pip install 'invfunc[scipy]'`; or curvlinops is: `pip install
            curvlinops-for-pytorch` (no extra installs it, as it needs torchvision).

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

        With curvlinops, the trace of the GGN of a data set from 30 vectors, by Hutch++, in two ways through the loader:

            A = invfunc.linear_operator(invfunc.streamed(invfunc.ggnvp(f, loss)), kind="torch")(params, loader)
            trace = curvlinops.hutchpp_trace(A, 30)

    Composes with: `hvp`, `ggnvp`, these `streamed` and `distributed`, for the matrix of a data set, and products
    of one's own. What an operator gives has no derivatives.

    Cost: for a product with `.linearize`, one linearisation, which lives as long as the operator, and its products.
    SciPy's takes several vectors one after the other. Torch's takes them all at once, with the memory of as many
    pullbacks, and reads a loader once.

    Source: `scipy.sparse.linalg.LinearOperator`; curvlinops (Dangel et al.).
    """
    check_product("linear_operator", product)
    check_choice(f"linear_operator({describe(product)}, ", "kind", kind, KINDS)
    return Operator(product, kind)


@dataclass(frozen=True, repr=False)
class Operator(Transform):
    """A function `(params, *batch) -> operator`."""

    product: Callable
    kind: str = "scipy"

    def __repr__(self) -> str:
        kind = "" if self.kind == "scipy" else f", kind={self.kind!r}"
        return f"linear_operator({describe(self.product)}{kind})"

    def names(self, count: int) -> Sequence[str]:
        return names_of(self.product, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Any, Any]:
        made, space = KINDS[self.kind](), space_of(args, names)
        _check_alike(space, "dtype")
        with torch.no_grad() if hasattr(self.product, "linearize") else torch.enable_grad():
            operator = made(space, lambda several: along(self.product, args, kwargs, space, several))
        operator.shown = f"{self!r}({', '.join(names)})"
        return operator, None


At = Callable[[bool], Callable[[list[torch.Tensor]], list[torch.Tensor]]]
"""Makes the map from the leaves of a vector, or of several, to those of its product."""


def _told(operator: Any) -> str:
    """The `repr` of an operator: the function, its shape, its dtype and, of torch's, its device."""
    where = f", {operator.device}" if hasattr(operator, "device") else ""
    return f"<{operator.shown}: {'x'.join(map(str, operator.shape))}, {operator.dtype}{where}>"


def _check_alike(space: Space, what: str) -> None:
    """Check that an attribute is that of all parameters."""
    first, *_ = found = [getattr(kind, what) for kind in space.kinds]
    for path, x in zip(space.paths, found, strict=True):
        if x != first:
            has = {"dtype": "has dtype", "device": "is on"}[what]
            raise ArgumentError(
                f"{space.name}{path} {has} {x}, but {space.name}{space.paths[0]} {has} {first}; an operator has one "
                f"{what} for all."
            )


def _of_scipy() -> Callable[[Space, At], Any]:
    base = extra("scipy.sparse.linalg", "scipy").LinearOperator

    class SciPyCurvature(base):
        """The products of a symmetric matrix."""

        __repr__ = _told

        def __init__(self, space: Space, at: At) -> None:
            self.kinds, size = space.kinds, sum(kind.shape.numel() for kind in space.kinds)
            try:
                dtype = torch.zeros(0, dtype=self.kinds[0].dtype).numpy().dtype
            except TypeError:
                raise ArgumentTypeError(f"{space.name} has dtype {self.kinds[0].dtype}, which numpy has not.") from None
            self.at = at(False)
            super().__init__(dtype, (size, size))

        def _matvec(self, x: Any) -> Any:
            if x.dtype.kind == "c":
                return self._matvec(x.real) + 1j * self._matvec(x.imag)
            kinds = self.kinds
            parts = torch.tensor(x.reshape(-1), dtype=kinds[0].dtype).split([kind.shape.numel() for kind in kinds])
            v = [part.reshape(kind.shape).to(kind.device) for part, kind in zip(parts, kinds, strict=True)]
            return torch.cat([y.detach().cpu().reshape(-1) for y in self.at(v)]).numpy()

        def _adjoint(self) -> Any:
            return self

        _transpose = _adjoint

    return SciPyCurvature


def _of_torch() -> Callable[[Space, At], Any]:
    base = _curvlinops()

    class TorchCurvature(base):
        """The products of a symmetric matrix."""

        SELF_ADJOINT, __repr__ = True, _told

        def __init__(self, space: Space, at: At) -> None:
            _check_alike(space, "device")
            shapes, self.kind = [tuple(kind.shape) for kind in space.kinds], space.kinds[0]
            self.space, self.at = space, at(True)
            super().__init__(shapes, shapes)

        @property
        def dtype(self) -> torch.dtype:
            return self.kind.dtype

        @property
        def device(self) -> torch.device:
            return self.kind.device

        def _matmat(self, X: list[torch.Tensor]) -> list[torch.Tensor]:
            v = self.space.leaves(self.space.tree([x.detach().movedim(-1, 0) for x in X]), "x", 1)
            return [y.detach().movedim(0, -1) for y in self.at(v)]

        def _adjoint(self) -> Any:
            return self

    return TorchCurvature


def _curvlinops() -> Any:
    """The base class of curvlinops' operators, which it does not export: its own derive from it."""
    hessian = extra("curvlinops", package="curvlinops-for-pytorch").HessianLinearOperator
    return next(kind for kind in hessian.__mro__ if kind.__name__ == "PyTorchLinearOperator")


KINDS = {"scipy": _of_scipy, "torch": _of_torch}
"""The classes of operators, made of a base when it is asked for."""


def linearize(f: Callable, *, has_aux: bool = False) -> Linearization:
    """A function with products of its Jacobian J and of `J^T`, both from one forward pass.

        outputs, jvp = torch.func.linearize(lambda p: f(p, *inputs), params)
        outputs, vjp = torch.func.vjp(lambda p: f(p, *inputs), params)

    Args:
        f: any function `f(params, *inputs)` that returns a floating-point tensor or a pytree of them. f is pure in
            torch.func's sense (see the conventions).
        has_aux: f returns `(outputs, aux)`; aux comes last.

    Returns:
        A function `(params, *inputs) -> (outputs, jvp, vjp)`: `jvp(v)`, of a tree like the parameters, is a tree like
        the outputs, and `vjp(c)`, of a tree like the outputs, one like the parameters.

    Raises:
        ArgumentError, ArgumentTypeError: f returns something else than floating-point tensors, or v or c is not a tree
            like the parameters or the outputs.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).sin()
        >>> outputs, jvp, vjp = invfunc.linearize(f)(torch.zeros(2), torch.tensor([1.0, 3.0]))
        >>> outputs, jvp(torch.ones(2)), vjp(torch.tensor([0.0, 1.0]))
        (tensor([0., 0.]), tensor([1., 3.]), tensor([0., 3.]))

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around `jvp` and `vjp`.

    Cost: one gradient to record, half of one for each product, and the memory of two gradients, which is kept.

    Source: JAX's `linearize`; J v from the derivative of `u -> J^T u` is Townsend's trick of 2017.
    """
    check_functions("linearize", f)
    return Linearization(f, has_aux)


@dataclass(frozen=True, repr=False)
class Linearization(Transform):
    """A function `(params, *inputs) -> (outputs, jvp, vjp)`."""

    f: Callable
    has_aux: bool = False
    several, owned = True, False  # the outputs are made so, the maps are no tensors
    of_one_batch = (
        "its outputs are those of one batch. Call it for each, or take a product that adds up, as ggnvp(f, loss)"
    )

    def __repr__(self) -> str:
        return f"linearize({describe(self.f)})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[tuple, Any]:
        given = ProductArguments(self.f, None, args, kwargs, names, has_aux=self.has_aux)
        with given.scope:
            there, values, structure = of_jacobian(given)
            outputs, aux = given.scope.result((values, given.aux))
        shown, memory = f"{self!r}({', '.join(names)})", (args, kwargs)
        params = Space(names, given.structure, there.back.into)
        images = Space(["outputs"], structure, there.there.into)
        jvp = Linearised(f"{shown}[1]", there, params, images, memory=memory)
        vjp = Linearised(f"{shown}[2]", there.transposed, images, params, "c", memory=memory)
        return (own_memory(images.tree(outputs), memory), jvp, vjp), aux
