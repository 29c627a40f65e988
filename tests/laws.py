"""The laws of the statistics, for one case: every path gives what the plain loop gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from invfunc import batch_grad, diag_ggn, sum_grad_squared, tree, variance
from invfunc.jacobian.engine import Options
from invfunc.testing import (
    assert_trees_close,
    dense_diag_ggn,
    loop_batch_grad,
    loop_sum_grad_squared,
    loop_variance,
)
from tests.strategies import Case, Numbers

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}
FLOOR = 1e-2
"""What cancels in a leaf that is zero by structure, as the shift of all logits is."""


def generic(statistic: Any) -> Any:
    """The same statistic by the path that every operation can take."""
    return replace(statistic, options=Options(fast=False))


def in_blocks(statistic: Any) -> Callable:
    """The same statistic with blocks of samples and columns that fit a tiny cache."""

    def call(*args: Any) -> Any:
        with mock.patch("invfunc.jacobian.engine.budget", lambda device: 64):
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


def expectations(case: Case, scalar: bool = True) -> Iterator[tuple[Any, tuple, Any]]:
    """Statistics of a model function with their arguments and what the loop gives."""
    f, options = case.f, {"in_dims": (*case.in_dims, 0)}
    z = f(case.params, *case.inputs)
    target, label = Numbers(1)(*z.shape).to(z.device), Numbers(2).below(z[0].numel(), len(z)).to(z.device)
    losses, args = composed(f, squares), (case.params, *case.inputs, target)
    shares = loop_batch_grad(losses)(*args)
    yield batch_grad(losses, **options), args, shares
    yield sum_grad_squared(losses, **options), args, loop_sum_grad_squared(losses)(*args)
    yield variance(losses, **options), args, loop_variance(losses)(*args)
    if scalar:

        def mean(*args: Any) -> torch.Tensor:
            return losses(*args).mean()

        yield batch_grad(mean, **options), args, tree.map_tensors(lambda g: g / len(z), shares)
    for loss, t in (F.mse_loss, target), (cross_entropy, label):
        args = (case.params, *case.inputs, t)
        expected = dense_diag_ggn(f, loss)(*args)
        yield diag_ggn(f, loss, **options), args, expected
        if scalar:
            yield diag_ggn(composed(f, loss), **options), args, expected


def assert_every_path_equals_the_loop(
    case: Case, device: torch.device, dtype: torch.dtype, scalar: bool = True
) -> None:
    """Fast path == fast path in small blocks == generic path == the plain loop; the fast path also in float32.

    With `scalar=False` no scalar loss is tried: what mixes nothing but has no rule is for `[N]`-valued losses only.
    """
    params, inputs = moved((case.params, case.inputs), torch.float64, device)
    for statistic, args, expected in expectations(replace(case, params=params, inputs=inputs), scalar):
        for path, kind in (
            (statistic, dtype),
            (in_blocks(statistic), dtype),
            (generic(statistic), dtype),
            (statistic, torch.float32),
        ):
            assert_trees_close(path(*moved(args, kind, device)), expected, RTOL[kind], FLOOR)
