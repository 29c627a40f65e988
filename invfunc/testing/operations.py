"""The law of one's own operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from invfunc.errors import ArgumentTypeError
from invfunc.operation import Operation
from invfunc.plan import Options
from invfunc.statistics.batch_grad import batch_grad
from invfunc.testing.oracles import assert_trees_close


def check_operation(op: Operation, *args: Any, samples: tuple[int, ...] = (0,), rtol: float | None = None) -> None:
    """Assert that an operation keeps the samples apart, and that its rules give the shares that autograd gives.

        for n in range(N):
            op(x[n : n + 1], w) == op(x, w)[n : n + 1]
            rule's share of w for sample n == grad(lambda w: (op(x, w)[n] * cotangent[n]).sum())(w)

    Args:
        op: what `operation` made.
        args: arguments for it, best in float64; those with a rule are its parameters.
        samples: the positions of the arguments that have the samples, along axis 0.
        rtol: the largest difference, relative to the largest entry of a share; the square root of the precision of
            the output unless given.

    Raises:
        AssertionError: that names the operation and the argument whose rule is wrong.

    Example:
        >>> import torch, invfunc
        >>> from invfunc.testing import check_operation
        >>> scaled = invfunc.operation(lambda x, weight: x * weight)
        >>> rule = scaled.share_of("weight")(lambda cotangent, x, weight: ("vni,ni->i", cotangent, x))
        >>> check_operation(scaled, torch.randn(3, 2), torch.randn(2))
    """
    if not isinstance(op, Operation):
        kind = type(op).__name__
        raise ArgumentTypeError(f"check_operation(op, ...): op is of type {kind}, but has to be made by `operation`.")
    out = op(*args)
    n = len(out)
    tolerance = torch.finfo(out.dtype).eps ** 0.5 if rtol is None else rtol
    alone = [op(*(x[i : i + 1] if at in samples else x for at, x in enumerate(args))) for i in range(n)]
    _close(torch.cat(alone), out, tolerance, f"{op!r} does not keep the samples apart")
    cotangent = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=torch.Generator(out.device))
    for argument in op.rules:
        at = op.position(argument)

        def losses(p: torch.Tensor, *batch: Any, at: int = at) -> torch.Tensor:
            given, weights = [*batch[:at], p, *batch[at:-1]], batch[-1]
            return (op(*given) * weights).reshape(n, -1).sum(1)

        rest = [x for i, x in enumerate(args) if i != at]
        dims = tuple(0 if i in samples else None for i in range(len(args)) if i != at)
        fast = batch_grad(losses, in_dims=(*dims, 0))
        p = args[at].detach().clone().requires_grad_()
        entries = losses(p, *rest, cotangent)
        expected = torch.stack([torch.autograd.grad(entries[i], p, retain_graph=True)[0] for i in range(n)])
        wrong = f"the rule of {op!r} for {argument!r} gives other shares than"
        _close(fast(args[at], *rest, cotangent), expected, tolerance, f"{wrong} autograd")
        try:
            generic = replace(fast, options=Options(fast=False))(args[at], *rest, cotangent)
        except ValueError:  # what torch.vmap cannot batch has no generic path
            continue
        _close(
            generic,
            expected,
            tolerance,
            f"the generic path of {op!r} for {argument!r} gives other shares than autograd",
        )


def _close(found: torch.Tensor, expected: torch.Tensor, rtol: float, wrong: str) -> None:
    try:
        assert_trees_close(found.detach(), expected.detach(), rtol)
    except AssertionError as error:
        raise AssertionError(f"{wrong}: {error}") from None
