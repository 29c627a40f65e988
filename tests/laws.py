"""The laws of the statistics, for one case: every path gives what the plain loop gives."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from invfunc import (
    batch_diag_ggn,
    batch_grad,
    batch_jacobian,
    batch_l2_grad,
    clipped_grad,
    diag_ggn,
    grad_and_variance,
    gram,
    sum_grad_squared,
    tree,
    variance,
)
from invfunc.plan import Options
from invfunc.testing import (
    assert_trees_close,
    dense_diag_ggn,
    loop_batch_grad,
    loop_batch_jacobian,
    loop_batch_l2_grad,
    loop_clipped_grad,
    loop_grad_and_variance,
    loop_gram,
    loop_sum_grad_squared,
    loop_variance,
)
from tests.networks import Loss, Network, samples_loss
from tests.strategies import Case, Numbers

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}
FLOOR = 1e-2
"""What cancels in a leaf that is zero by structure, as the shift of all logits is."""


@dataclass(frozen=True)
class Kind:
    """A statistic as `make(f, **options)`, its oracle as `loop(f, samples=...)`, and the axes of its chunks."""

    make: Callable
    loop: Callable
    axes: tuple[str, ...] = ("samples", "params")


def _clipped(f: Callable, **options: Any) -> Any:
    return clipped_grad(f, 1.0, **options)


OF_LOSSES = {
    "batch_grad": Kind(batch_grad, loop_batch_grad),
    "batch_l2_grad": Kind(batch_l2_grad, loop_batch_l2_grad),
    "sum_grad_squared": Kind(sum_grad_squared, loop_sum_grad_squared),
    "variance": Kind(variance, loop_variance),
    "grad_and_variance": Kind(grad_and_variance, loop_grad_and_variance),
    "clipped_grad": Kind(_clipped, partial(loop_clipped_grad, max_norm=1.0)),
    "gram": Kind(gram, loop_gram, ("params",)),
    "gram per parameter": Kind(partial(gram, per_parameter=True), partial(loop_gram, per_parameter=True), ("params",)),
}
OF_MODELS = {
    "NTK": OF_LOSSES["gram"],
    "NTK per parameter": OF_LOSSES["gram per parameter"],
    "batch_jacobian": Kind(batch_jacobian, loop_batch_jacobian, ("outputs", "samples", "params")),
}
STATISTICS = OF_LOSSES | OF_MODELS | {"diag_ggn": Kind(diag_ggn, dense_diag_ggn, ("outputs", "samples", "params"))}


def arranged(called: str, net: Network, loss: Loss) -> tuple[Kind, tuple, tuple]:
    """A statistic by its name, the functions that it takes, and the arguments of what it makes of them."""
    args = (net.params, net.x, loss.target(Numbers(1), net.n))
    if called in OF_MODELS:
        return STATISTICS[called], (net.f,), args[:2]
    return STATISTICS[called], (net.f, loss) if called == "diag_ggn" else (samples_loss(net, loss),), args


def generic(statistic: Any) -> Any:
    """The same statistic by the path that every operation can take."""
    return replace(statistic, options=Options(fast=False))


def in_blocks(statistic: Any) -> Callable:
    """The same statistic with blocks of samples and columns that fit a tiny cache."""

    def call(*args: Any) -> Any:
        with mock.patch("invfunc.evaluation.engine.budget", lambda device: 64):
            return statistic(*args)

    return call


def moved(tensors: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Numbers in another precision and place; integers stay integers."""
    return tree.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tensors)


def squares(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The `[N]` squared errors of the samples."""
    return (z - target).square().reshape(z.shape[0], -1).sum(1)


def cross_entropy(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, with all outputs of a sample as its classes."""
    return F.cross_entropy(z.reshape(z.shape[0], -1), target)


def composed(f: Callable, loss: Callable) -> Callable:
    """The loss function of a model function."""
    return lambda params, *batch: loss(f(params, *batch[:-1]), batch[-1])


EVERY = ("fast", "blocks", "generic", "float32")


class Expectation(NamedTuple):
    """A statistic with its arguments, what the loop gives, and the paths on which to compare the two."""

    statistic: Any
    args: tuple
    expected: Any
    paths: tuple[str, ...]
    floor: float = FLOOR


def expectations(case: Case, scalar: bool = True) -> Iterator[Expectation]:
    """What is said of a case: the first statistics on every path, those with a last contraction of their own on the
    fast one and another one, which is not the same for each case."""
    turn = zlib.crc32(repr(case).encode()) % 3
    others = cycle(EVERY[1 + turn :] + EVERY[1 : 1 + turn])
    z = case.f(case.params, *case.inputs)
    target, label = Numbers(1)(*z.shape).to(z.device), Numbers(2).below(z[0].numel(), len(z)).to(z.device)
    chosen = [2 % len(z), 0, 0, -1]
    yield from _of_losses(case, target, chosen, others, scalar)
    jacobian = loop_batch_jacobian(case.f)(case.params, *case.inputs)
    yield from _of_the_model(case, z, jacobian, chosen, others)
    yield from _of_curvature(case, z, jacobian, {F.mse_loss: target, cross_entropy: label}, scalar)


def _of_losses(case: Case, target: torch.Tensor, chosen: list[int], others: Iterator[str], scalar: bool) -> Iterator:
    f, n, options = composed(case.f, squares), len(target), dict[str, Any](in_dims=(*case.in_dims, 0))
    args = (case.params, *case.inputs, target)
    shares = loop_batch_grad(f)(*args)
    picked = tree.map_tensors(lambda g: g[chosen], shares)
    moments = tree.map_tensors(lambda g: g.sum(0), shares), tree.map_tensors(lambda g: g.var(0, correction=0), shares)
    rows = torch.cat([g.reshape(n, -1) for g in tree.leaves(shares)], 1)
    bound = 0.9 * rows.norm(dim=1).mean().item() or 1.0  # some norms are above, some below
    yield Expectation(batch_grad(f, **options), args, shares, EVERY)
    yield Expectation(
        sum_grad_squared(f, **options), args, tree.map_tensors(lambda g: g.square().sum(0), shares), EVERY
    )
    yield Expectation(variance(f, **options), args, moments[1], EVERY)
    for t, expected in (
        (grad_and_variance(f, **options), moments),
        (batch_l2_grad(f, **options), tree.map_tensors(_squared_norms, shares)),
        (gram(f, **options), rows @ rows.T),
    ):
        yield Expectation(t, args, expected, ("fast", next(others)))
    yield Expectation(batch_grad(f, samples=chosen, **options), args, picked, (next(others),))
    clipped = clipped_grad(f, bound, **options), clipped_grad(f, bound, samples=chosen, **options)
    floor = max(bound, FLOOR)  # shares of one size may cancel
    yield Expectation(clipped[0], args, _clipped_sum(shares, rows, bound), ("fast", next(others)), floor)
    yield Expectation(clipped[1], args, _clipped_sum(picked, rows[chosen], bound), (next(others),), floor)
    if scalar:

        def mean(*args: Any) -> torch.Tensor:
            return f(*args).mean()

        norms = tree.map_tensors(lambda g: _squared_norms(g / n), picked)
        yield Expectation(
            batch_grad(mean, **options), args, tree.map_tensors(lambda g: g / n, shares), ("fast", "blocks")
        )
        yield Expectation(batch_l2_grad(mean, samples=chosen, **options), args, norms, (next(others),))


def _squared_norms(shares: torch.Tensor) -> torch.Tensor:
    return shares.reshape(len(shares), -1).square().sum(1)


def _clipped_sum(shares: Any, rows: torch.Tensor, bound: float) -> tuple[Any, torch.Tensor]:
    norms = rows.norm(dim=1)
    return tree.map_tensors(lambda g: torch.tensordot((bound / norms).clamp(max=1), g, 1), shares), norms


def _half_squares(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose Hessian in the outputs is the identity."""
    return F.mse_loss(z, target, reduction="sum") / 2


def _of_the_model(case: Case, z: torch.Tensor, jacobian: Any, chosen: list[int], others: Iterator[str]) -> Iterator:
    f, args, options = case.f, (case.params, *case.inputs), dict[str, Any](in_dims=case.in_dims)
    rows = tree.map_tensors(lambda j: j.reshape(*z.shape, -1), jacobian)
    kernels = tree.map_tensors(lambda j: torch.tensordot(j, j.movedim(-1, 0), 1), rows)
    yield Expectation(batch_jacobian(f, **options), args, jacobian, ("fast", next(others)))
    picked = tree.map_tensors(lambda j: j[chosen], jacobian)
    yield Expectation(batch_jacobian(f, samples=chosen, **options), args, picked, (next(others),))
    yield Expectation(gram(f, **options), args, sum(tree.leaves(kernels)), ("fast", next(others)))
    yield Expectation(gram(f, per_parameter=True, **options), args, kernels, (next(others),))
    outputs = list(range(1, z.ndim))
    squares = tree.map_tensors(lambda j: j.square().sum(outputs) if outputs else j.square(), jacobian)
    curvature = batch_diag_ggn(f, _half_squares, in_dims=(*case.in_dims, 0))
    yield Expectation(curvature, (*args, Numbers(1)(*z.shape).to(z)), squares, ("fast",))


def _of_curvature(case: Case, z: torch.Tensor, jacobian: Any, losses: dict, scalar: bool) -> Iterator:
    f, options = case.f, dict[str, Any](in_dims=(*case.in_dims, 0))
    for loss, target in losses.items():
        args = (case.params, *case.inputs, target)
        hessian = torch.autograd.functional.hessian(lambda z, of=(loss, target): of[0](z, of[1]), z.detach())
        expected = tree.map_tensors(lambda j, h=hessian: _diagonal(j, h), jacobian)
        blocks = ["blocks"] * (loss is F.mse_loss), ["blocks"] * (loss is cross_entropy)  # the slowest, once for each
        yield Expectation(diag_ggn(f, loss, **options), args, expected, ("fast", "generic", "float32", *blocks[0]))
        if scalar:
            yield Expectation(diag_ggn(composed(f, loss), **options), args, expected, ("fast", *blocks[1]))


def _diagonal(jacobian: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """That of `J^T H J`, of the shape of the parameter."""
    outputs = hessian.ndim // 2
    return (jacobian * torch.tensordot(hessian, jacobian, outputs)).flatten(0, outputs - 1).sum(0)


def assert_every_path_equals_the_loop(
    case: Case, device: torch.device, dtype: torch.dtype, scalar: bool = True, drawn: bool = False
) -> None:
    """Fast path == fast path in small blocks == generic path == the plain loop; the fast path also in float32.

    With `scalar=False` no scalar loss is tried: what mixes nothing but has no rule is for `[N]`-valued losses only.
    Of a case that is one of many, `drawn`, the shares are compared on every path and each other statistic on one of its
    paths, which is not the same for each case.
    """
    params, inputs = moved((case.params, case.inputs), torch.float64, device)
    turn = zlib.crc32(repr(case).encode())
    for i, told in enumerate(expectations(replace(case, params=params, inputs=inputs), scalar)):
        at = (turn + i) % len(told.paths)
        for path in told.paths[at : at + 1] if drawn and i else told.paths:
            kind = torch.float32 if path == "float32" else dtype
            t = {"blocks": in_blocks, "generic": generic}.get(path, lambda t: t)(told.statistic)
            assert_trees_close(t(*moved(told.args, kind, device)), told.expected, RTOL[kind], told.floor)
