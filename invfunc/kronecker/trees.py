"""Of the matrices of all parameters, each over its own block: products with inverses, and determinants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import log
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.values import checked_at_the_end
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker.matrix import Damping, Kronecker, Whole, decomposed, dtype_of, rounded
from invfunc.kronecker.origin import Joint, Origin
from invfunc.linear_algebra.symmetric import is_none, require, wide
from invfunc.tree import Tree


@checked_at_the_end()
def solve(factors: Tree, v: Tree, damping: Damping = 0.0, split: str | None = None) -> Tree:
    """The product of the inverse of the block-diagonal matrix, plus damping, with a tree of vectors.

        {name: K.solve(v[name], damping, split) for name, K in factors.items()}

    A weight and a bias that have one matrix (`joint=True`) are solved together.

    Args:
        factors: what `kfac`, `ekfac` or `kfra` returned, or a part of that tree: a `Kronecker` for each
            parameter, a tensor `p` in place of a diagonal one, as `diag_ggn` gives it, or None. Pass
            `kronecker.eigen(factors)` to solve several times with one decomposition each. Or what `eigenpairs`
            returned: the inverse of the whole matrix, not of its blocks.
        v: a tensor `[*lead, *p]` for each parameter p, such as a gradient, or what `batch_grad` returns.
        damping, split: as in `Kronecker.inverse`; a single factor, as of a bias, gets all of the damping.

    Returns:
        A tree like v. It has None for parameters without a block (`unsupported="skip"`).

    Raises:
        ArgumentError: v has other parameters or shapes than factors; a bias is missing for its weight; as
            `Kronecker.solve`.
        ArgumentTypeError: factors has something else than `Kronecker`, tensors and None.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(2, 1))
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.zeros(2, 1)
        >>> factors = invfunc.kfac(f, torch.nn.functional.mse_loss, fisher="exact", joint=True)(params, x, y)
        >>> gradient = {"weight": torch.tensor([[8.0, 10.0]]), "bias": torch.tensor([8.0])}
        >>> step = invfunc.kronecker.solve(factors, gradient, damping=2.0)
        >>> step["weight"].round(decimals=3), step["bias"].round(decimals=3)
        (tensor([[1., 1.]]), tensor([1.]))

    Composes with: torch.func, as `Kronecker.solve`.

    Cost: that of `Kronecker.solve` for each: with damping and no split, one eigendecomposition of each factor.

    Source: Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015.
    """
    call = "kronecker.solve(factors, v)"
    if isinstance(factors, Whole):
        if split is not None:
            raise ArgumentError(f"{call}: split={split!r} is of two factors, but factors is {factors!r}.")
        return factors.solve(v, damping)
    own, (_, structure), given = kroneckers(call, factors), tree.flatten(v), dict(tree.named_leaves(v))
    same_places(call, "factors", own, "v", given)
    whole = {path: K for path, K in own.items() if K is None or _split_of(K, split) is None}
    spectra = {} if is_none(damping) else _decomposed(whole)
    found: dict[str, Any] = dict.fromkeys(given)
    for path, matrix in own.items():
        if matrix is None:
            continue
        inverted = spectra.get(path, matrix)
        joint = matrix.origin.joint
        shape = matrix.shape if joint is None else joint.shape
        lead = _lead(call, path, given[path], shape)
        if joint is None:
            x = inverted.solve(given[path], damping, _split_of(matrix, split))
            found[path] = x.to(dtype_of(matrix, given[path]))
        else:
            bias = _bias(call, path, matrix.origin.name, joint, own)
            _fits(call, bias, given[bias], torch.Size((*lead, matrix.shape[0])), len(lead))
            both = joint.matrix(given[path], given[bias])
            x = inverted.solve(both, damping, _split_of(matrix, split)).to(dtype_of(matrix, both))
            found[path], found[bias] = joint.parts(x, given[bias].shape)
    return tree.unflatten(list(found.values()), structure)


@checked_at_the_end()
def logdet(factors: Tree, damping: Damping = 0.0) -> torch.Tensor:
    """The logarithm of the determinant of the block-diagonal matrix, plus damping.

        sum(K.logdet(damping) for K in factors.values())

    Args:
        factors: as in `solve`. Parameters with None are left out; with `joint=True` a bias is in the matrix of its
            weight.
        damping: as in `Kronecker.logdet`.

    Returns:
        A 0-d tensor.

    Raises:
        ArgumentError, ArgumentTypeError: as in `solve`.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(2, 1, bias=False))
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> factors = invfunc.kfac(f, torch.nn.functional.mse_loss, fisher="exact")(params, x, y)   # diag(1, 4)
        >>> invfunc.kronecker.logdet(factors, damping=1.0)
        tensor(2.3026)

    Composes with: torch.func, as `Kronecker.logdet`.

    Cost: one eigendecomposition of each factor; none of what `kronecker.eigen` returned.

    Source: Ritter, Botev and Barber, "A scalable Laplace approximation for neural networks", ICLR 2018.
    """
    if isinstance(factors, Whole):
        return factors.logdet(damping)
    own = kroneckers("kronecker.logdet(factors)", factors)
    found = _decomposed(own, regular=is_none(damping))
    each = [found[path].logdet(damping).to(wide(dtype_of(K))) for path, K in own.items() if K is not None]
    return reduce(lambda a, b: a + b.to(a.device), each)


@checked_at_the_end()
def log_evidence(
    factors: Tree, params: Tree, loss: torch.Tensor, prior_precision: Damping, *, scale: float = 1.0
) -> torch.Tensor:
    """The logarithm of the marginal likelihood of a Laplace approximation, which chooses its prior.

        size, squares = sum(p.numel() for p in params.values()), sum(p.square().sum() for p in params.values())
        volume = size * log(prior_precision / scale) - logdet(factors, prior_precision / scale)
        volume / 2 - prior_precision / 2 * squares - scale * loss

    The prior of the parameters is the Gaussian of mean 0 and this precision, the posterior that of mean params and
    precision `scale * factors + prior_precision * I`.

    Args:
        factors: as in `solve`, of the loss at params. A parameter with None (`unsupported="skip"`) keeps the variance
            of the prior.
        params: the parameters, a tree of tensors.
        loss: the negative log-likelihood of all data: the sum of the losses of the samples.
        prior_precision: a number or a 0-d tensor above 0.
        scale: N where the loss, and that of factors, is the mean of N samples.

    Returns:
        A 0-d tensor.

    Raises:
        ArgumentError: a precision that is not above 0; as `logdet`.
        ArgumentTypeError: as `logdet`.

    Example:
        >>> import math, torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x, y = torch.tensor([[0.5]]), torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])
        >>> loss = lambda z, y: (z - y).square().sum() / 2 + math.log(2 * math.pi)    # noise of variance 1
        >>> ggn = invfunc.diag_ggn(lambda w, x, y: loss(invfunc.outputs(f(w, x)), y))(w, x, y)
        >>> [invfunc.kronecker.log_evidence(ggn, w, loss(f(w, x), y), prior) for prior in (1.0, 4.0)]
        [tensor(-2.9838), tensor(-2.8683)]

    Composes with: torch.func, as `logdet` does in damping: there is one derivative in prior_precision.

    Cost: that of `logdet`; of `kronecker.eigen(factors)` hardly anything for each prior.

    Source: MacKay (1992); Immer et al., "Scalable marginal likelihood estimation for model selection in deep learning",
    ICML 2021.
    """
    require(prior_precision > 0, "log_evidence: prior_precision has to be above 0.", "kronecker.")
    leaves, shift = tree.tensors(params), prior_precision / scale
    own = [] if isinstance(factors, Whole) else kroneckers("kronecker.log_evidence(factors)", factors).values()
    size = sum(K.shape.numel() for K in own if K is not None) or sum(p.numel() for p in leaves)
    volume = size * (shift.log() if isinstance(shift, torch.Tensor) else log(shift)) - logdet(factors, shift)
    squares = reduce(torch.add, [p.square().sum() for p in leaves])
    return (volume - prior_precision * squares) / 2 - scale * loss


@checked_at_the_end()
def eigen(factors: Tree) -> Tree:
    """Each matrix in the form with eigenvalues, so that later solves decompose nothing again.

        {name: K.eigen() for name, K in factors.items()}

    Eigenvectors have the dtype of the factors: in float32, `solve` with them has rounding errors of 1e-7 of `|v| /
    damping`, and with the factors themselves of 1e-7 of the result.

    Args:
        factors: as in `solve`.

    Returns:
        A tree like factors.

    Raises:
        ArgumentError, ArgumentTypeError: as in `solve`.

    Example:
        >>> import torch, invfunc
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> K = invfunc.kronecker.Kronecker((A,), groups=((0,),), shape=A.shape[:1])
        >>> found = invfunc.kronecker.eigen({"w": K})
        >>> found["w"].values.round(decimals=3)
        tensor([1., 3.])
        >>> [invfunc.kronecker.logdet(found, damping).exp().round(decimals=3) for damping in (0.0, 1.0)]
        [tensor(3.), tensor(8.)]

    Composes with: torch.func, as `Kronecker.eigen`.

    Cost: one eigendecomposition of each factor, batched over factors of one shape; a GPU is waited for once.

    Source: Martens and Grosse (ICML 2015).
    """
    own = kroneckers("kronecker.eigen(factors)", factors)
    found = _decomposed(own)
    return rebuilt(factors, [None if K is None else rounded(K, found[path]) for path, K in own.items()])


def _split_of(matrix: Kronecker, split: str | None) -> str | None:
    """The shares of damping of the factors of a matrix: one takes all of it."""
    return None if len(matrix.factors) == 1 else split


def _decomposed(matrices: dict[str, Kronecker | None], regular: bool = False) -> dict[str, Kronecker]:
    """Each that is there in the form with eigenvalues, in float64."""
    there = {path: matrix for path, matrix in matrices.items() if matrix is not None}
    return dict(zip(there, decomposed(list(there.values()), regular), strict=True))


def kroneckers(call: str, factors: Tree, name: str = "factors") -> dict[str, Kronecker | None]:
    """The matrix of each parameter by its key path, or None."""
    found = dict(tree.named_parts(factors, Kronecker)[0])
    for path, matrix in found.items():
        if isinstance(matrix, torch.Tensor):
            dims = (tuple(range(matrix.ndim)),)
            found[path] = Kronecker((matrix.flatten(),), dims, matrix.shape, origin=Origin(f"{name}{path}"))
        elif not isinstance(matrix, Kronecker | None):
            raise ArgumentTypeError(
                f"{call}: {name}{path} is of type {type(matrix).__name__}, but has to be a Kronecker or None, as kfac, "
                "ekfac and kfra return them, or a tensor, its diagonal."
            )
    if all(matrix is None for matrix in found.values()):
        raise ArgumentError(f"{call}: {name} has no Kronecker; pass what kfac, ekfac or kfra returned.")
    return found


def same_places(call: str, name: str, some: dict[str, Any], other: str, others: dict[str, Any]) -> None:
    """Tells whether two trees have leaves at the same places."""
    for path in [*some, *others]:
        if path not in some or path not in others:
            has, lacks = (name, other) if path in some else (other, name)
            raise ArgumentError(
                f"{call}: {has} has an entry {has}{path}, but {lacks} has none; pass trees of the same parameters."
            )


def rebuilt(factors: Tree, matrices: Sequence[Kronecker | None]) -> Tree:
    """The tree with other matrices."""
    return tree.unflatten(matrices, tree.named_parts(factors, Kronecker)[1])


def _lead(call: str, path: str, v: Any, shape: Sequence[int]) -> torch.Size:
    """The axes in front of a vector for a parameter of this shape."""
    if not isinstance(v, torch.Tensor):
        raise ArgumentTypeError(
            f"{call}: v{path} is of type {type(v).__name__}, but has to be a tensor, as factors are."
        )
    count = v.ndim - len(shape)
    if count < 0 or v.shape[count:] != torch.Size(shape):
        wanted = ", ".join(map(str, ("*lead", *shape)))
        raise ArgumentError(f"{call}: v{path} has shape {list(v.shape)}, but has to have shape [{wanted}].")
    return v.shape[:count]


def _fits(call: str, path: str, bias: Any, shape: torch.Size, lead: int) -> None:
    """Tells whether a bias has as many axes in front as its weight, and the entries of one; these may be `[1, out]`."""
    _lead(call, path, bias, ())
    if bias.shape[:lead] != shape[:lead] or bias.numel() != shape.numel():
        raise ArgumentError(
            f"{call}: v{path} has shape {list(bias.shape)}, but beside its weight has to have shape {list(shape)}."
        )


def _bias(call: str, path: str, name: str, joint: Joint, matrices: dict[str, Any]) -> str:
    """The key path of the bias whose weight is at this one: as far from it as in the tree that was returned."""
    found = joint.bias.removeprefix(name.removesuffix(path))
    if not name.endswith(path) or found not in matrices or matrices[found] is not None:
        raise ArgumentError(
            f"{call}: factors{path} has one matrix for {name} and {joint.bias}, but factors has no entry for "
            f"{joint.bias}. Pass the whole tree that kfac(joint=True) returned, or a part that has both."
        )
    return found
