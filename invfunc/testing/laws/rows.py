"""The public statistics, a row for each: laws that hold for all of them go over these rows.

A new statistic has all laws as soon as it has its row. Beside them stand the paths that a caller does not choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import invfunc
from invfunc import thresholds, tree
from invfunc.plan import AxisName, Options
from invfunc.testing.oracles import (
    dense_diag_ggn,
    loop_batch_grad,
    loop_batch_jacobian,
    loop_batch_l2_grad,
    loop_clipped_grad,
    loop_grad_and_variance,
    loop_gram,
    loop_noise_scale,
    loop_predictive_covariance,
    loop_sketched_grad,
    loop_sum_grad_squared,
    loop_variance,
    noise_of,
    projected,
)

LOSS, MODEL, BOTH = "of a loss", "of a model", "of a model and its loss"
"""The functions that a statistic is made of: `(f)` of a loss function, `(f)` of a model function, `(f, loss)`."""
LEAVES, TREES, WHOLE, FACTORS = "leaves", "trees", "whole", "factors"
"""The results: a tensor for each parameter, a tuple of results, one tensor for all parameters, K-factors."""


@dataclass(frozen=True)
class Row:
    """A statistic, made as `make(*functions, **options)`, and what the laws have to know of it."""

    make: Callable
    forms: tuple[str, ...]
    gives: str = LEAVES
    loop: Callable | None = None
    """Its oracle `loop(*functions, samples=...)`, of the first form and of the last; K-factors have one of modules, in
    their own laws."""
    of_shares: Callable | None = None
    """The statistic, if it is first-order, as a function of per-sample gradients `[N, *p]` or of a tree of them."""
    of_each: Callable | None = None
    """The statistic, if it is of a GGN, as a function of the diagonals of each sample, a tree of `[N, *p]`."""
    hessian: bool = False
    """True if it is of the Hessian of the whole function."""
    axes: tuple[AxisName, ...] = ("samples", "params")
    """The axes that `chunked` divides."""
    drawn: bool = False
    """True if its columns are drawn, for which the loss has to have a sampler."""
    fewest: int = 1
    """The fewest samples that it may be of."""
    picks: Callable | None = None
    """`picks(result, index)`: the result for samples in another order, or for some of them; None if it is a sum."""

    @property
    def form(self) -> str:
        """The form that says most: of a model and its loss, where it takes them."""
        return self.forms[-1]

    def of(self, f: Callable, loss: Callable, form: str | None = None, **options: Any) -> Callable:
        """`t(params, *inputs, target)` of a model function with its loss, in one of the forms."""
        form = form or self.form
        if form == MODEL:
            return lambda params, *batch: self.make(f, **options)(params, *batch[:-1])
        if form == BOTH:
            return self.make(f, loss, **options)
        return self.make(lambda params, *batch: loss(f(params, *batch[:-1]), batch[-1]), **options)


def _of_leaves(of: Callable) -> Callable:
    return partial(tree.map_tensors, of)


def _norms(shares: torch.Tensor) -> torch.Tensor:
    return shares.flatten(1).square().sum(1) if shares.ndim > 1 else shares.square()


def _grams(shares: torch.Tensor) -> torch.Tensor:
    rows = shares.reshape(len(shares), -1)
    return rows @ rows.T


def _cube(share: torch.Tensor) -> torch.Tensor:
    return (share / 2) ** 3  # of 32, still a number of float16


def _cubes(shares: Any) -> Any:
    return tree.map_tensors(lambda g: _cube(g).sum(0), shares)


def _sum(shares: Any) -> Any:
    return tree.map_tensors(lambda g: g.sum(0), shares)


def _variance(shares: Any) -> Any:
    return tree.map_tensors(lambda g: g.var(0, correction=0), shares)


def clipping(max_norm: float, **options: Any) -> Row:
    """The row of `clipped_grad` for a norm, with groups and a weight."""
    given = {"max_norm": max_norm, **options}
    make, loop, of_shares = (partial(of, **given) for of in (invfunc.clipped_grad, loop_clipped_grad, _clipped))
    return Row(make, (LOSS,), TREES, loop, of_shares, axes=("samples",), picks=_norms_of)


def _clipped(
    shares: Any, max_norm: float, groups: Callable | None = None, weight: Callable | None = None
) -> tuple[Any, Any]:
    weight = weight or (lambda norm, most: (most / norm).clamp(max=1))
    leaves, form = tree.separate(shares)
    names = ["" if groups is None else groups(path) for path, g in tree.named_leaves(shares) if g is not None]
    norms, clipped = {}, dict[int, torch.Tensor]()
    for name in names:
        own = {i: g for i, g in enumerate(leaves) if names[i] == name}
        squares = _added(map(_norms, own.values()))
        none = squares == 0  # where the slope of a norm is zero; that of NaN is NaN
        norms[name] = squares.masked_fill(none, 1).sqrt().masked_fill(none, 0)
        clipped |= {i: torch.tensordot(weight(norms[name], max_norm), g, 1) for i, g in own.items()}
    return form.join([clipped[i] for i in range(len(leaves))]), norms[""] if groups is None else norms


def automatic(norm: Any, max_norm: Any) -> Any:
    """A weight of norms that leaves none as it is."""
    return max_norm / (norm + 0.1)


def noise(groups: Callable | None = None) -> Row:
    """The row of `noise_scale` for groups of parameters."""
    made, loop = partial(invfunc.noise_scale, groups=groups), partial(loop_noise_scale, groups=groups)
    return Row(made, (LOSS,), TREES, loop, lambda shares: (_sum(shares), noise_of(shares, groups)), fewest=2)


def sketching(rows: int, columns: int, projection: str = "signs") -> Row:
    """The row of `sketched_grad` for matrices of a size, which are those of a seed."""

    def make(*functions: Any, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        sizes = {"rows": rows, "columns": columns, "projection": projection}
        return invfunc.sketched_grad(*functions, **sizes, generator=generator, **options)

    def sides(i: int, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = make(torch.sum).reduction.sides(i, p)
        return found.first, found.rest

    loop, of_shares = partial(loop_sketched_grad, sides=sides), partial(projected, sides=sides)
    return Row(make, (LOSS,), LEAVES, loop, of_shares, picks=_picked)


def _drawn(make: Callable, **drawing: Any) -> Callable:
    """With numbers from the same seed for each statistic."""
    return lambda *functions, **options: make(
        *functions, generator=torch.Generator().manual_seed(0), **drawing, **options
    )


def _total(diagonals: Any) -> torch.Tensor:
    return _added(d.sum() for d in tree.tensors(diagonals))


def _added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def _picked(result: Any, index: torch.Tensor, axis: int = 0) -> Any:
    return tree.map_tensors(lambda x: x.index_select(axis, index), result)


def _both_ways(result: Any, index: torch.Tensor) -> Any:
    """`[N, *out, N, *out]`"""
    return tree.map_tensors(lambda x: x.index_select(0, index).index_select(x.ndim // 2, index), result)


def _norms_of(result: Any, index: torch.Tensor) -> Any:
    return result[0], _picked(result[1], index)


def _first(name: str, loop: Callable, of_shares: Callable, gives: str = LEAVES, picks: Callable | None = None) -> Row:
    return Row(getattr(invfunc, name), (LOSS,), gives, loop, of_shares, picks=picks)


COLUMNS = ("outputs", "samples", "params")
GGN = partial(Row, forms=(LOSS, BOTH), axes=COLUMNS)
FACTORED = partial(GGN, gives=FACTORS)
GRAM = partial(Row, forms=(LOSS, MODEL), axes=("params",), picks=_both_ways)
ROWS = {
    "batch_grad": _first("batch_grad", loop_batch_grad, lambda shares: shares, picks=_picked),
    "batch_grad summed": Row(
        partial(invfunc.batch_grad, sum_of=_cube),
        (LOSS,),
        loop=lambda f, **options: lambda *args: _cubes(loop_batch_grad(f, **options)(*args)),
        of_shares=_cubes,
    ),
    "batch_l2_grad": _first("batch_l2_grad", loop_batch_l2_grad, _of_leaves(_norms), picks=_picked),
    "sum_grad_squared": _first("sum_grad_squared", loop_sum_grad_squared, _of_leaves(lambda g: g.square().sum(0))),
    "variance": _first("variance", loop_variance, _variance),
    "grad_and_variance": _first(
        "grad_and_variance", loop_grad_and_variance, lambda shares: (_sum(shares), _variance(shares)), TREES
    ),
    "clipped_grad": clipping(1.0),
    "clipped_grad to little": clipping(0.01),
    "clipped_grad of each": clipping(0.5, groups=str, weight=automatic),
    "noise_scale": noise(),
    "noise_scale of each": noise(str),
    "sketched_grad": sketching(3, 2),
    "sketched_grad sparse": sketching(6, 8, "sparse"),
    "sketched_grad of a mask": sketching(2, 3, "mask"),
    "gram": GRAM(
        invfunc.gram,
        gives=WHOLE,
        loop=loop_gram,
        of_shares=lambda shares: _added(map(_grams, tree.tensors(shares))),
    ),
    "gram per parameter": GRAM(
        partial(invfunc.gram, per_parameter=True),
        loop=partial(loop_gram, per_parameter=True),
        of_shares=_of_leaves(_grams),
    ),
    "batch_jacobian": Row(invfunc.batch_jacobian, (MODEL,), loop=loop_batch_jacobian, axes=COLUMNS, picks=_picked),
    "predictive_covariance": Row(
        partial(invfunc.predictive_covariance, covariance=0.5),
        (MODEL,),
        WHOLE,
        partial(loop_predictive_covariance, covariance=0.5),
        picks=_picked,
    ),
    "diag_ggn": GGN(invfunc.diag_ggn, loop=dense_diag_ggn, of_each=_sum),
    "diag_ggn dense": GGN(partial(invfunc.diag_ggn, method="dense"), of_each=_sum),
    "diag_ggn drawn": GGN(_drawn(invfunc.diag_ggn, mc_samples=2), drawn=True),
    "diag_ggn peeled": GGN(_drawn(invfunc.diag_ggn, mc_samples=2, peel="auto"), drawn=True),
    "diag_ggn with error": GGN(
        _drawn(invfunc.diag_ggn, mc_samples=3, peel=1, with_error=True),
        gives=TREES,
        axes=("samples", "params"),
        drawn=True,
    ),
    "diag_ggn of each": GGN(
        partial(invfunc.diag_ggn, per_sample=True), of_each=lambda diagonals: diagonals, picks=_picked
    ),
    "diag_ggn of each drawn": GGN(_drawn(partial(invfunc.diag_ggn, per_sample=True), mc_samples=2), drawn=True),
    "sqrt_ggn": GGN(invfunc.sqrt_ggn, picks=partial(_picked, axis=1)),
    "sqrt_ggn drawn": GGN(_drawn(invfunc.sqrt_ggn, mc_samples=2), drawn=True),
    "ggn_trace": GGN(invfunc.ggn_trace, gives=WHOLE, of_each=_total),
    "ggn_trace per parameter": GGN(
        partial(invfunc.ggn_trace, per_parameter=True), of_each=_of_leaves(lambda d: d.sum())
    ),
    "ggn_trace with error": GGN(
        _drawn(invfunc.ggn_trace, mc_samples=2, with_error=True), gives=TREES, axes=("samples", "params"), drawn=True
    ),
    "diag_hessian": GGN(invfunc.diag_hessian, hessian=True),
    "diag_hessian of each": GGN(partial(invfunc.diag_hessian, per_sample=True), hessian=True, picks=_picked),
    "kfac": FACTORED(_drawn(invfunc.kfac), drawn=True),
    "kfac empirical": FACTORED(partial(invfunc.kfac, fisher="empirical"), axes=("samples", "params")),
    "kfac exact": FACTORED(partial(invfunc.kfac, fisher="exact")),
    "kfoc": FACTORED(_drawn(invfunc.kronecker.kfoc), drawn=True),
    "kfoc of one sweep": FACTORED(partial(invfunc.kronecker.kfoc, fisher="exact", sweeps=1)),
    "kfra": FACTORED(invfunc.kronecker.kfra, axes=()),
    "ekfac": FACTORED(_drawn(invfunc.ekfac), drawn=True),
    "ekfac exact": FACTORED(partial(invfunc.ekfac, fisher="exact")),
}
"""By the public name, and what makes it another one of that name."""
PRODUCTS: dict[str, Callable] = {
    "hvp": invfunc.hvp,
    "ggnvp": invfunc.ggnvp,
    "ggnvp empirical": partial(invfunc.ggnvp, fisher="empirical"),
    "hvp of blocks": partial(invfunc.hvp, blocks=True),
    "ggnvp of blocks": partial(invfunc.ggnvp, blocks=True),
    "hvp of positive blocks": partial(invfunc.hvp, blocks=True, modify="abs"),
}
"""Products with a matrix, likewise; blocks take several vectors."""
CASES = {f"{name}, {form}": (row, form) for name, row in ROWS.items() for form in row.forms}
"""All rows in all their forms."""


def rows(*gives: str, form: str | None = None) -> dict[str, Row]:
    """The rows of statistics that give one of these, and take a form."""
    return {
        name: row
        for name, row in ROWS.items()
        if (not gives or row.gives in gives) and (form is None or form in row.forms)
    }


FIRST_ORDER = {name: row for name, row in ROWS.items() if row.of_shares is not None}
OF_DIAGONALS = {name: row for name, row in ROWS.items() if row.of_each is not None}
HESSIANS = {name: row for name, row in ROWS.items() if row.hessian}


TINY_CACHE = 64
"""Numbers that an intermediate tensor may have, so that a block has one sample, and one column."""


def generic(statistic: Any) -> Any:
    """The same statistic by the path that every operation can take."""
    return replace(statistic, options=Options(fast=False))


def in_blocks(statistic: Callable) -> Callable:
    """The same statistic with blocks of samples and columns that fit a tiny cache."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, devices = thresholds.CACHE, {x.device.type for x in tree.tensors((args, kwargs))}
        thresholds.CACHE = before | dict.fromkeys(devices, TINY_CACHE)
        try:
            return statistic(*args, **kwargs)
        finally:
            thresholds.CACHE = before

    return call
