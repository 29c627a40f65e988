"""Products as linear operators, Jacobians with their transposes, and estimates from random products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc._extras import extra
from invfunc._torch.values import double_on, wide
from invfunc.callables import check_choice, check_functions, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.processes import parts
from invfunc.loss.drawn import by
from invfunc.loss.square_root import safe_root
from invfunc.products.curvature import of_jacobian
from invfunc.products.given import ProductArguments
from invfunc.products.product import Linearised, Space, along, check_probes, check_product, names_of, space_of
from invfunc.reductions.estimates import Estimate
from invfunc.spectra import Basis, applied, inner
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
    loss, drawing, in_dims, out_dims = None, None, 0, 0
    several, owned = True, False  # the outputs are made so, the maps are no tensors
    of_one_batch = (
        "its outputs are those of one batch. Call it for each, or take a product that adds up, as ggnvp(f, loss)"
    )

    def __repr__(self) -> str:
        return f"linearize({describe(self.f)})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[tuple, Any]:
        given = ProductArguments(self, args, kwargs, names)
        with given.scope:
            there, values, structure = of_jacobian(given)
            outputs, aux = given.scope.result((values, given.aux))
        shown, memory = f"{self!r}({', '.join(names)})", (args, kwargs)
        params = Space(names, given.structure, there.back.into)
        images = Space(["outputs"], structure, there.there.into)
        jvp = Linearised(f"{shown}[1]", there, params, images, memory=memory)
        vjp = Linearised(f"{shown}[2]", there.transposed, images, params, "c", memory=memory)
        return (own_memory(images.tree(outputs), memory), jvp, vjp), aux


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
