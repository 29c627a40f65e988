"""The laws for a statistic of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from invfunc.callables import check_callable, describe
from invfunc.recording.problem import InDims
from invfunc.testing.laws.book import chosen
from invfunc.testing.laws.check import call, judged, options
from invfunc.testing.laws.law import TRANSFORM
from invfunc.testing.laws.problem import problem
from invfunc.testing.laws.run import tried
from invfunc.testing.laws.table import Table
from invfunc.testing.laws.transforms import TransformProblem


def check_transform(
    t: Callable,
    oracle: Callable,
    f: Callable,
    params: Any,
    *batch: Any,
    loss: Callable | None = None,
    in_dims: InDims = 0,
    seconds: float = 30,
    only: Iterable[str] | str | None = None,
    samples: Iterable[int] | None = None,
    seed: int = 0,
) -> Table:
    """Assert the laws of a statistic of your own, against its plain loop.

        t(f)(params, *batch) == oracle(f)(params, *batch)        # with loss=: t(f, loss) and oracle(f, loss)

    also under `grad` and `vmap`, and in chunks, in blocks and on the generic path where this library made it.

    Args:
        t: makes the statistic of a function, `t(f)` or `t(f, loss)`, as `functools.partial(invfunc.diag_ggn)` does.
        oracle: makes its plain loop. If its result can be differentiated at all, then it has to be right there.
        f, params, batch, loss, in_dims, seconds, only, samples, seed: as in `check`.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: a law does not hold. It tells the smallest case, as that of `check` does.
        ArgumentError, ArgumentTypeError: t or oracle is no function, a name is that of no law, t refuses every f.

    Example:
        >>> import torch, invfunc
        >>> from invfunc import testing
        >>> def halves(f):
        ...     return lambda *args: invfunc.batch_l2_grad(f)(*args) / 2
        >>> def loop(f):
        ...     return lambda *args: testing.loop_batch_l2_grad(f)(*args) / 2
        >>> f, w, x = lambda w, x: (x @ w).square(), torch.ones(2).double(), torch.eye(3, 2).double()
        >>> len(testing.laws.check_transform(halves, loop, f, w, x).failed)
        0
    """
    check_callable("laws.check_transform", t)
    check_callable("laws.check_transform", oracle)
    given = problem("laws.check_transform", f, params, batch, loss, in_dims, samples, seed)
    subject = TransformProblem(t, oracle, (given,), seed, (describe(f),), given.samples)
    outcomes = tried(chosen("laws.check_transform", TRANSFORM, only), subject, seconds)
    again = call("laws.check_transform", f"t, oracle, {describe(f)}, params, *batch", options(given, in_dims), seed)
    return judged(Table(f"{describe(t)} of {given!r}", tuple(outcomes)), subject, again, seconds)
