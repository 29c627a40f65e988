"""The factors of several batches as one: of all their samples, or as a running average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from numbers import Real

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Origin, derived
from invfunc.kronecker.trees import kroneckers, rebuilt, same_places
from invfunc.linear_algebra import symmetric
from invfunc.tree import Tree


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
    symmetric.require((decay >= 0) & (decay <= 1), "decay is not from 0 to 1, as that of an average has to be.")
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
        terms = [w * f.to(symmetric.wide(f.dtype)) for w, f in zip(weights(i), each, strict=True)]
        factors.append(reduce(torch.add, terms).to(each[0].dtype))
    return replace(parts[0], factors=tuple(factors), origin=origin)
