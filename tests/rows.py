"""Rows of the public statistics with their options, of products, and of the ways that a caller does not choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

import invfunc
from invfunc import thresholds, tree
from invfunc.core import run
from invfunc.testing import loop_batch_jacobian
from invfunc.testing.laws.rows import (
    BOTH,
    FACTORS,
    GGN,
    LEAVES,
    LOSS,
    MODEL,
    TREES,
    WHOLE,
    Row,
    clipping,
    first_order,
    noise,
    sketching,
)
from invfunc.testing.laws.rows import ROWS as EACH

__all__ = ["LOSS", "WHOLE"]


def loop_predictive_covariance(
    f: Callable, covariance: float | list[torch.Tensor], *, out_dims: int = 0, samples: Any = None
) -> Callable:
    """The oracle of `predictive_covariance`: `J S J^T` of each sample, with the whole J. The covariance is a number, or
    a matrix `[P, P]` for each parameter."""

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        leaves, _ = tree.separate(params)
        each = tree.tensors(loop_batch_jacobian(f, out_dims=out_dims, samples=samples)(params, *inputs, **kwargs))
        found = []
        for k, (j, p) in enumerate(zip(each, leaves, strict=True)):
            shape = j.shape[: j.ndim - p.ndim]
            rows = j.reshape(shape[0], shape[1:].numel(), p.numel())
            s = covariance * torch.eye(p.numel()).to(p) if isinstance(covariance, (int, float)) else covariance[k].to(p)
            found.append((rows @ s @ rows.mT).reshape(*shape, *shape[1:]))
        return sum(found)

    return oracle


def drawing(make: Callable, gives: str = LEAVES, **options: Any) -> Row:
    """A row of drawn columns, with numbers from the same seed for each statistic."""

    def made(*functions: Any, **more: Any) -> Any:
        return make(*functions, generator=torch.Generator().manual_seed(0), **options, **more)

    return GGN(made, gives=gives, drawn=True)


def cube(share: torch.Tensor) -> torch.Tensor:
    """A function of a per-sample gradient, still a number of float16 where that is 32."""
    return (share / 2) ** 3


def automatic(norm: Any, max_norm: Any) -> Any:
    """A weight of norms that leaves none as it is."""
    return max_norm / (norm + 0.1)


DIAGONALS, TRACES = partial(invfunc.diag_ggn, per_sample=True), partial(invfunc.ggn_trace, per_parameter=True)
ROWS = EACH | {
    "batch_grad summed": first_order(
        partial(invfunc.batch_grad, sum_of=cube), partial(tree.map_tensors, lambda g: cube(g).sum(0))
    ),
    "clipped_grad to little": clipping(0.01),
    "clipped_grad of each": clipping(0.5, groups=str, weight=automatic),
    "noise_scale of each": noise(str),
    "sketched_grad sparse": sketching(6, 8, "sparse"),
    "sketched_grad of a mask": sketching(2, 3, "mask"),
    "predictive_covariance": replace(
        EACH["predictive_covariance"], loop=partial(loop_predictive_covariance, covariance=0.5)
    ),
    "diag_ggn dense": replace(EACH["diag_ggn"], make=partial(invfunc.diag_ggn, method="dense"), loop=None),
    "diag_ggn drawn": drawing(invfunc.diag_ggn, mc_samples=2),
    "diag_ggn peeled": drawing(invfunc.diag_ggn, mc_samples=2, peel="auto"),
    "diag_ggn with error": drawing(invfunc.diag_ggn, TREES, mc_samples=3, peel=1, with_error=True),
    "diag_ggn of each drawn": drawing(DIAGONALS, mc_samples=2),
    "sqrt_ggn drawn": drawing(invfunc.sqrt_ggn, mc_samples=2),
    "ggn_trace per parameter": GGN(TRACES, of_each=partial(tree.map_tensors, torch.sum)),
    "ggn_trace with error": drawing(invfunc.ggn_trace, TREES, mc_samples=2, with_error=True),
    "diag_hessian of each": GGN(partial(invfunc.diag_hessian, per_sample=True)),
    "kfac": drawing(invfunc.kfac, FACTORS),
    "kfac exact": GGN(partial(invfunc.kfac, fisher="exact"), gives=FACTORS),
    "kfoc": drawing(invfunc.kronecker.kfoc, FACTORS),
    "ekfac": drawing(invfunc.ekfac, FACTORS),
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


def made_of(row: Row, f: Callable, loss: Callable, form: str | None = None, **options: Any) -> Callable:
    """`t(params, *inputs, target)` of a model function with its loss, in one of the forms of a row."""
    form = form or row.form
    if form == MODEL:
        return lambda params, *batch: row.make(f, **options)(params, *batch[:-1])
    if form == BOTH:
        return row.make(f, loss, **options)
    return row.make(lambda params, *batch: loss(f(params, *batch[:-1]), batch[-1]), **options)


def rows(*gives: str, form: str | None = None) -> dict[str, Row]:
    """The rows of statistics that give one of these, and take a form."""
    return {
        name: row
        for name, row in ROWS.items()
        if (not gives or row.gives in gives) and (form is None or form in row.forms)
    }


FIRST_ORDER = {name: row for name, row in ROWS.items() if row.of_shares is not None}
OF_DIAGONALS = {name: row for name, row in ROWS.items() if row.of_each is not None}
HESSIANS = {name: row for name, row in ROWS.items() if name.startswith("diag_hessian")}
BY_SAMPLE = "batch_", "clipped_grad", "sketched_grad", "gram", "predictive_covariance", "sqrt_ggn"


def picks(name: str) -> Callable[[Any, torch.Tensor], Any] | None:
    """A function that gives the result for samples in another order, or for some of them; None of a sum over them."""
    axis = 1 if name == "sqrt_ggn" else 0

    def picked(result: Any, index: torch.Tensor) -> Any:
        if name.startswith("clipped_grad"):
            return result[0], tree.map_tensors(lambda x: x.index_select(0, index), result[1])
        found = tree.map_tensors(lambda x: x.index_select(axis, index), result)
        both = name.startswith("gram")  # [N, *out, N, *out]
        return tree.map_tensors(lambda x: x.index_select(x.ndim // 2, index), found) if both else found

    of_each = name.startswith((*BY_SAMPLE, "diag_ggn of each", "diag_hessian of each"))
    return picked if of_each and not name.endswith(("drawn", "summed")) else None


TINY_CACHE = 64
"""Numbers that an intermediate tensor may have, so that a block has one sample, and one column."""


def generic(statistic: Any) -> Any:
    """The same statistic by the path that every operation can take, without rules of how it reads parameters."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(run, "FACTORS", {}):
            return statistic(*args, **kwargs)

    return call


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
