"""The Hessian with the second derivatives of the model's own operations made positive, as a linear map."""

from __future__ import annotations

import torch

from invfunc.errors import ArgumentError
from invfunc.loss.hessian import gradient
from invfunc.loss.square_root import Elementwise
from invfunc.passes.run import WHOLE, Run
from invfunc.passes.second_order import kind_of, second_order_columns
from invfunc.products.curvature import sandwich
from invfunc.products.fallback import followed
from invfunc.products.given import Given
from invfunc.products.maps import Linear, Pull, Vectors
from invfunc.recording import Trace


def of_positive_hessian(given: Given, modify: str) -> Linear:
    """`J^T H J v` of the outputs and of the inputs of all nonlinear calls, in each parameter alone."""
    split, scope = followed(given), given.scope
    roots, n = [r.value for r in split.roots], split.n
    for step in split.steps:
        if kind_of(step) != "elementwise":
            raise ArgumentError(
                f"`{step.call.name}` is nonlinear and not element-wise, so its second derivative has no "
                "sign to be changed. `ggn_block_product` does without it."
            )
    outputs = {r.ordinal: (z, r.axis) for r, z in zip(split.roots, split.values, strict=True)}
    run = Run(Trace(scope, n), given.params, WHOLE, dict(outputs))
    with given.mode.back(split.result.device):
        split.hessian()
        made = second_order_columns(scope, run, split.steps, gradient(scope, split.result, split.roots, n))
        slopes = Pull(scope, graph=True)([split.result], roots, [torch.ones_like(split.result)])
    weights = []
    for local in made:
        assert isinstance(local.inner, Elementwise)
        x, axis = run.outputs[local.inner.root]
        h = axis.restore(local.inner.diagonal, n)
        weights.append((x, h.abs() if modify == "abs" else h.clamp(min=0)))
    split.values = [*split.values, *(x for x, _ in weights)]

    def middle(t: Vectors, pull: Pull) -> Vectors:
        along = t[len(roots) :]
        inner = [None if x is None else x * h for x, (_, h) in zip(along, weights, strict=True)]
        return [*pull(slopes, roots, t[: len(roots)]), *inner]

    return sandwich(given, split, middle, blocks=True)
