"""Several statistics of one function, from one forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.plan import Options
from invfunc.statistic import Statistic
from invfunc.transform import check_no_budget

_SHARED = ("f", "loss", "argnums", "in_dims", "out_dims", "has_aux", "samples", "others")


def together(*statistics: Statistic) -> Statistic:
    """Compute several statistics of the same function at once.

        tuple(t(params, *batch) for t in statistics)

    Statistics of one kind (first-order, GGN, Hessian, Jacobians) share the forward pass. Statistics that pull back the
    same vectors (the gradient, the square root of the GGN, the same drawn columns) share the backward pass. f draws the
    same random numbers for all.

    Args:
        statistics: statistics of the same `f` (the same object), the same `loss` if it is passed apart, and the same
            options. First-order statistics need a loss function; with them, `diag_ggn(f)` takes the same one and finds
            its outputs. Chunk the result of `together`, not these.

    Returns:
        A function `(params, *batch) -> tuple` of the results in their order, aux last.

    Raises:
        ArgumentError: no statistics, different functions or options, `gram` or `batch_jacobian` beside others.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: torch.nn.functional.mse_loss(x @ w, y, reduction="none").sum(1)
        >>> both = invfunc.together(invfunc.diag_ggn(f), invfunc.variance(f))
        >>> both(torch.zeros(1, 1), torch.tensor([[1.0], [2.0]]), torch.ones(2, 1))
        (tensor([[10.0000]]), tensor([[1.]]))

    Composes with: `chunked` over the axes that all of them have, `reduced`; `torch.func.grad`, `vmap` around it.

    Cost: one forward pass for each kind of statistics, and each kind of vectors is pulled back once.

    Source: BackPACK computes all extensions in one backward pass.
    """
    if not statistics:
        raise ArgumentError("together(): give at least one statistic.")
    for t in statistics:
        check_no_budget("together", t)
        if not isinstance(t, Statistic):
            raise ArgumentTypeError(f"together(...): an argument is of type {type(t).__name__}, not a statistic.")
        if t.members or replace(t.options, dense=False) != Options() or t.shown is not None:
            raise ArgumentError(
                f"together({t!r}): it is a composition; apply `chunked` and `reduced` to together(...)."
            )
    first = statistics[0]
    for t in statistics[1:]:
        for name in _SHARED:
            if not _same(getattr(t, name), getattr(first, name)):
                raise ArgumentError(
                    f"together({first!r}, {t!r}): they have different {name}. Give all the same object; of a loss "
                    "function f, `diag_ggn(f)` finds the outputs itself."
                )
    kinds = {t.kind.of_model == "no" for t in statistics}
    if len(kinds) > 1:
        raise ArgumentError(
            f"together({', '.join(map(repr, statistics))}): `gram` and `batch_jacobian` do not come together with the "
            "statistics of a loss."
        )
    shown = f"together({', '.join(map(repr, statistics))})"
    options = Options(dense=any(t.options.dense for t in statistics))
    return replace(first, name="together", drawing=None, members=statistics, shown=shown, options=options)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # tensors of several entries
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
