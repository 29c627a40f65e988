"""The laws of the statistics, for one case: every path gives what the plain loop gives.

Private: of the thousands of cases of operations each has its loops once, and is tried on paths and in precisions by
turns. The public laws try all statistics of one function of a user, with the same rows and oracles.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from invfunc import batch_grad, batch_jacobian, batch_l2_grad, diag_ggn, gram, predictive_covariance, tree
from invfunc.kronecker import Kronecker
from invfunc.testing import assert_trees_close, loop_batch_grad, loop_batch_jacobian
from invfunc.testing.models import moved
from tests.networks import Loss, Network, samples_loss
from tests.rows import BOTH, FIRST_ORDER, MODEL, Row, clipping, generic, in_blocks, rows
from tests.strategies import Case, Numbers

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}
FLOOR = 1e-2
"""Absolute tolerance for a leaf that is zero by structure, as the shift of all logits is."""


OF_LOSSES = FIRST_ORDER
OF_MODELS = {name.replace("gram", "NTK"): row for name, row in rows(form=MODEL).items()}
STATISTICS = OF_LOSSES | OF_MODELS | {name: row for name, row in rows(form=BOTH).items() if row.loop is not None}
"""Statistics that have a loop."""


def arranged(called: str, net: Network, loss: Loss) -> tuple[Row, tuple, tuple]:
    """A statistic by its name, the functions that it takes, and the arguments of what it makes of them."""
    row, args = STATISTICS[called], (net.params, net.x, loss.target(Numbers(1), net.n))
    if called in OF_MODELS:
        return row, (net.f,), args[:2]
    return row, (net.f, loss) if row.form == BOTH else (samples_loss(net, loss),), args


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
    """Expectations of a case: the first statistics on every path; those with a last contraction of their own on the
    fast path and on another one, which is not the same for each case."""
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
    norms = sum(g.reshape(n, -1).square().sum(1) for g in tree.leaves(shares)).sqrt()
    bound = 0.9 * norms.mean().item() or 1.0  # some norms are above, some below
    for name, row in FIRST_ORDER.items():
        if name not in _OTHERWISE and row.fewest <= n:
            paths = EVERY if name in _ON_EVERY_PATH else ("fast", next(others))
            floor = FLOOR if row.fewest == 1 else max(FLOOR, norms.square().sum().item())  # squares cancel
            yield Expectation(row.make(f, **options), args, row.of_shares(shares), paths, floor)
    yield Expectation(batch_grad(f, samples=chosen, **options), args, picked, (next(others),))
    made, floor = clipping(bound), max(bound, FLOOR)  # shares of one size may cancel
    yield Expectation(made.make(f, **options), args, made.of_shares(shares), ("fast", next(others)), floor)
    yield Expectation(made.make(f, samples=chosen, **options), args, made.of_shares(picked), (next(others),), floor)
    if scalar:

        def mean(*args: Any) -> torch.Tensor:
            return f(*args).mean()

        norms = FIRST_ORDER["batch_l2_grad"].of_shares(tree.map_tensors(lambda g: g / n, picked))
        yield Expectation(
            batch_grad(mean, **options), args, tree.map_tensors(lambda g: g / n, shares), ("fast", "blocks")
        )
        yield Expectation(batch_l2_grad(mean, samples=chosen, **options), args, norms, (next(others),))


_ON_EVERY_PATH = {"batch_grad", "sum_grad_squared", "variance"}
_OTHERWISE = {"clipped_grad", "clipped_grad to little", "gram per parameter"}
"""With a norm of the case; of the model."""


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
    yield from _between_batches(case, kernels, z)
    for i, of in enumerate((_variances, _matrices)):
        given = tree.map_tensors(of, case.params)
        matrices = [x.dense() if i else x.flatten().diag() for _, x in tree.named_parts(given, Kronecker)[0]]
        expected = sum(_between(j, x) for j, x in zip(tree.tensors(rows), matrices, strict=True))
        paths = ("fast", next(others)) if i else (next(others),)
        yield Expectation(predictive_covariance(f, given, **options), args, expected, paths)
    outputs = list(range(1, z.ndim))
    squares = tree.map_tensors(lambda j: j.square().sum(outputs) if outputs else j.square(), jacobian)
    curvature = diag_ggn(f, _half_squares, in_dims=(*case.in_dims, 0), per_sample=True)
    yield Expectation(curvature, (*args, Numbers(1)(*z.shape).to(z)), squares, ("fast",))


def _variances(p: torch.Tensor) -> torch.Tensor:
    return Numbers(4)(*p.shape).to(p).square()


def _matrices(p: torch.Tensor) -> Kronecker:
    """Of the first dim, and of all others."""
    groups = [(0,), tuple(range(1, p.ndim))] if p.ndim > 1 else [tuple(range(p.ndim))]
    factors = []
    for i, dims in enumerate(groups):
        half = Numbers(5 + i)(size := torch.Size(p.shape[d] for d in dims).numel(), size).to(p)
        factors.append(half @ half.T)
    return Kronecker(tuple(factors), tuple(groups), p.shape)


def _between(jacobian: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`J S J^T` of each sample, of `[N, *out, P]`."""
    rows = jacobian.reshape(len(jacobian), -1, jacobian.shape[-1])
    return (rows @ matrix @ rows.mT).reshape(*jacobian.shape[:-1], *jacobian.shape[1:-1])


def _between_batches(case: Case, kernels: Any, z: torch.Tensor) -> Iterator:
    """The products with another batch, here the first two samples."""
    given = [(x, d) for x, d in zip(case.inputs, case.in_dims, strict=True) if d is not None]
    first = tuple(tree.map_tensors(lambda t, d=d: t.narrow(d, 0, min(2, t.shape[d])), x) for x, d in given)
    both = iter(
        [tree.map_leaves(lambda a, b, d=d: torch.cat([a, b], d), x, y) for (x, d), y in zip(given, first, strict=True)]
    )
    try:
        args = [x if d is None else next(both) for x, d in zip(case.inputs, case.in_dims, strict=True)]
        found = case.f(case.params, *args)
    except RuntimeError:
        return  # it holds something of each sample of one batch
    if not torch.allclose(found, torch.cat([z, z[:2]])):
        return  # or something that depends on their number or places
    expected = tree.map_tensors(lambda k: k.narrow(z.ndim, 0, min(2, len(k))), kernels)
    t = gram(case.f, others=first, per_parameter=True, in_dims=case.in_dims)
    yield Expectation(t, (case.params, *case.inputs), expected, ("fast",))


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
    """Diagonal of `J^T H J`, of the shape of the parameter."""
    outputs = hessian.ndim // 2
    return (jacobian * torch.tensordot(hessian, jacobian, outputs)).flatten(0, outputs - 1).sum(0)


def assert_every_path_equals_the_loop(
    case: Case, device: torch.device, dtype: torch.dtype, scalar: bool = True, drawn: bool = False
) -> None:
    """Fast path == fast path in small blocks == generic path == the plain loop; the fast path also in float32.

    With `scalar=False` no scalar loss is tried: what mixes nothing but has no rule is for `[N]`-valued losses only.
    Of a case that is one of many, `drawn`, the shares are compared on every path and half of the other statistics on
    one of their paths: which ones and on which is not the same for each case.
    """
    params, inputs = moved((case.params, case.inputs), torch.float64, device)
    turn = zlib.crc32(repr(case).encode())
    for i, told in enumerate(expectations(replace(case, params=params, inputs=inputs), scalar)):
        if drawn and i and (turn // 64 + i) % 2:
            continue
        at = (turn + i) % len(told.paths)
        for path in told.paths[at : at + 1] if drawn and i else told.paths:
            kind = torch.float32 if path == "float32" else dtype
            t = {"blocks": in_blocks, "generic": generic}.get(path, lambda t: t)(told.statistic)
            found = t(*moved(told.args, kind, device))
            for a, b in zip(tree.tensors(found), tree.tensors(told.expected), strict=True):
                cancels = kind is torch.float32 and bool((b.abs() < 1e-9).all())  # as the slope of a norm of one entry
                assert_trees_close(a, b, RTOL[kind], 0.5 if cancels else told.floor)
            assert_trees_close(found, told.expected, RTOL[kind], max(told.floor, 0.5))  # the tree is the same
