"""Kronecker factors of a whole tree of parameters: solved, decomposed, merged over batches and averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import log
from numbers import Real
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.values import checked_at_the_end
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker.matrix import Damping, Joint, Kronecker, Origin, Whole, decomposed, derived, dtype_of, rounded
from invfunc.linear_algebra import matrices
from invfunc.linear_algebra.matrices import is_none, require, wide
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


def merge(*factors: Tree, reduction: str) -> Tree:
    """The factors of one batch of all samples, from the factors of several batches.

        A = sum(inputs[k] * A[k] for k in range(K)) / sum(inputs)     # inputs: how many a each A[k] is the mean of
        B = sum(B[k] for k in range(K))                               # of a loss that is a sum
        B = sum(n[k] * B[k] for k in range(K)) / sum(n)               # of a mean: c = 1 / n[k] becomes 1 / sum(n)

    The factors store their n and inputs (`K.origin`), which add up, so results may be merged again. With
    `fisher="empirical"` B has the square of the scale, so that weights are `(n[k] / sum(n))^2`.

    Args:
        factors: trees that `kfac` returned with the same options, of as many batches as there are.
        reduction: that of the loss over the samples of a batch: "sum" (also of `[N]` losses), or "mean". A mean with
            weights (`ignore_index`, class weights, padding) is neither: return `[N]` losses, or take the sum.

    Returns:
        A tree like the first.

    Raises:
        ArgumentError: trees of different parameters or factors; factors that are not sums over samples: those of
            `ekfac` (whose eigenvalues belong to the basis of one batch), of `kfra` (which averages over its batch at
            each layer), of a weight in two roles, averages and inverses; with "mean", those of `samples=`; those of
            fisher="empirical" beside others.
        ArgumentTypeError: as in `kronecker.solve`.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(2, 1, bias=False))
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 1.0]]), torch.zeros(3, 1)
        >>> factors = invfunc.kfac(f, torch.nn.functional.mse_loss, fisher="exact")
        >>> two, one = factors(params, x[:2], y[:2]), factors(params, x[2:], y[2:])
        >>> whole = invfunc.kronecker.merge(two, one, reduction="mean")
        >>> torch.allclose(whole["weight"].dense(), factors(params, x, y)["weight"].dense())
        True

    Composes with: `torch.func.grad` around it, and `vmap` where factors are used inside. With `fisher="mc"` the draws
    of all batches count together.

    Cost: one addition of the factors a batch; nothing is decomposed.

    Source: Martens and Grosse (ICML 2015), section 5, whose A and B are means over the data.
    """
    call = "kronecker.merge(*factors)"
    if reduction not in ("sum", "mean"):
        raise ArgumentError(f"{call}: reduction is {reduction!r}, but that of a loss is 'sum' or 'mean'.")
    return _joined(call, factors, lambda path, parts: _merged(call, path, parts, reduction))


def _merged(call: str, path: str, parts: list[Kronecker], reduction: str) -> Kronecker:
    first, counts = parts[0].origin, [part.origin.n for part in parts]
    known = [n for n in counts if n is not None]
    if len(known) < len(parts):
        raise ArgumentError(
            f"{call}: factors{path} is not a sum over samples. Merge what kfac returns, and take inverses afterwards. "
            "(A weight in two roles, as a tied embedding, has no such sum.)"
        )
    n, inputs = sum(known), [part.origin.inputs for part in parts]
    degrees = {part.origin.degree for part in parts}
    if len(degrees - {None}) > 1:
        raise ArgumentError(
            f"{call}: factors{path} are of the per-sample gradients in one tree (fisher='empirical'), and of the GGN "
            "in another. Pass factors that were made with the same options."
        )
    degree = None if None in degrees else first.degree
    if reduction == "sum":
        weights = [1.0] * len(parts)
    elif degree is not None:
        weights = [(k / (n or 1)) ** degree for k in known]
    else:
        raise ArgumentError(
            f"{call}: factors{path} has samples=, but the mean loss is over the whole batch. Return [N] losses, and "
            "pass reduction='sum'."
        )
    means = [k / (sum(inputs) or 1) for k in inputs]
    origin = replace(first, n=n, inputs=sum(inputs), degree=degree)
    return _combined(parts, lambda i: means if i == first.read else weights, origin)


def ema(old: Tree, new: Tree, decay: float | torch.Tensor) -> Tree:
    """The exponential moving average of factors: `decay * old + (1 - decay) * new`, factor by factor.

        factors = kfac(f, loss)(params, *first)
        for batch in rest:
            factors = kronecker.ema(factors, kfac(f, loss)(params, *batch), decay=0.95)

    It is `E[B] kron E[A]`, as K-FAC takes it, and not `E[B kron A]`: the average of the products is another matrix.

    Args:
        old, new: trees that `kfac` or `kfra` returned with the same options, or `ema`.
        decay: a number or a 0-d tensor from 0 to 1.

    Returns:
        A tree like old.

    Raises:
        ArgumentError: a decay outside of that; trees of different parameters or factors; those of `ekfac`, whose
            eigenvectors have no average.
        ArgumentTypeError: as in `kronecker.solve`; a decay that is not a number.

    Example:
        >>> import torch, invfunc
        >>> old, new = (invfunc.kronecker.Kronecker((torch.tensor([a]),), ((0,),), torch.Size([1])) for a in (1.0, 3.0))
        >>> invfunc.kronecker.ema({"w": old}, {"w": new}, decay=0.75)["w"].factors
        (tensor([1.5000]),)

    Composes with: torch.func.

    Cost: one addition of the factors.

    Source: Martens and Grosse (ICML 2015), section 5.
    """
    call = "kronecker.ema(old, new, decay)"
    if not isinstance(decay, Real) and not (isinstance(decay, torch.Tensor) and decay.ndim == 0):
        raise ArgumentTypeError(
            f"{call}: decay is of type {type(decay).__name__}, but has to be a number or 0-d tensor."
        )
    matrices.require((decay >= 0) & (decay <= 1), "decay is not from 0 to 1, as that of an average has to be.")
    weights = [decay, 1 - decay]
    return _joined(call, (old, new), lambda _, parts: _combined(parts, lambda i: weights, derived(parts[0].origin)))


def _joined(call: str, trees: Sequence[Tree], join: Callable[[str, list[Kronecker]], Kronecker]) -> Tree:
    """One tree of several, of which each matrix is joined of those in its place."""
    if not trees:
        raise ArgumentError(f"{call}: no factors came; pass at least one tree.")
    each = [kroneckers(call, one, f"factors[{k}]") for k, one in enumerate(trees)]
    for k, other in enumerate(each[1:], 1):
        same_places(call, "factors[0]", each[0], f"factors[{k}]", other)
    found = [_alike(call, path, [one[path] for one in each]) for path in each[0]]
    joined = [None if parts is None else join(path, parts) for path, parts in zip(each[0], found, strict=True)]
    return rebuilt(trees[0], joined)


def _alike(call: str, path: str, parts: list[Kronecker | None]) -> list[Kronecker] | None:
    """The matrices of one parameter, with the same factors: where a batch does not reach it, these are zero."""
    reached = [part for part in parts if part is None or part.origin.reached]
    like, there = (reached or parts)[0], [part for part in parts if part is not None]
    if like is None and all(part is None for part in reached):
        return None
    if like is None or None in reached or len({_form(part) for part in reached if part is not None}) > 1:
        shown = ", ".join(map(str, parts))
        raise ArgumentError(f"{call}: factors{path} are not of one form: {shown}. Pass those of the same options.")
    if any(part.values is not None for part in there):
        raise ArgumentError(
            f"{call}: factors{path} has eigenvalues, which belong to a basis of its own. Join the factors of kfac, "
            "and take kronecker.eigen of the result."
        )
    return [part if part.origin.reached else _zero(part, like) for part in there]


def _form(part: Kronecker) -> tuple:
    return part.groups, part.shape, part.blocks, tuple(f.shape for f in part.factors), part.values is None


def _zero(part: Kronecker, like: Kronecker) -> Kronecker:
    """The factors of a batch that does not reach a parameter, in the form of one that does."""
    origin = replace(like.origin, n=part.origin.n, inputs=part.origin.inputs)
    return replace(like, factors=tuple(map(torch.zeros_like, like.factors)), origin=origin)


def _combined(parts: list[Kronecker], weights: Callable[[int], list], origin: Origin) -> Kronecker:
    """The sum of each factor over the parts, with weights."""
    factors = []
    for i, each in enumerate(zip(*(part.factors for part in parts), strict=True)):
        terms = [w * f.to(matrices.wide(f.dtype)) for w, f in zip(weights(i), each, strict=True)]
        factors.append(reduce(torch.add, terms).to(each[0].dtype))
    return replace(parts[0], factors=tuple(factors), origin=origin)
