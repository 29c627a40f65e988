"""The laws for a statistic of the user's."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

from invfunc.arguments.problem import InDims
from invfunc.callables import check_callable, describe
from invfunc.errors import MissingExtraError
from invfunc.testing import models
from invfunc.testing.laws.book import chosen
from invfunc.testing.laws.check import call, judged, options
from invfunc.testing.laws.law import TRANSFORM, Law
from invfunc.testing.laws.problem import problem
from invfunc.testing.laws.run import LEAST_SECONDS, Outcome, tried
from invfunc.testing.laws.table import Table
from invfunc.testing.laws.transforms import TransformProblem

CALL = "laws.check_transform"
EXAMPLES = 20
"""How many functions are drawn."""


def check_transform(
    t: Callable,
    oracle: Callable,
    f: Callable | None = None,
    params: Any = None,
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
        f, params, batch, loss, in_dims, seconds, only, samples, seed: as in `check`. Without f, functions are drawn
            from `invfunc.testing.strategies`, and made smaller where a law fails; where hypothesis is missing, one of
            each family of `invfunc.testing.models` is taken. They are `[N]` losses, or a model and its loss if oracle
            takes two functions.

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
    check_callable(CALL, t)
    check_callable(CALL, oracle)
    laws = chosen(CALL, TRANSFORM, only)
    if f is None:
        return _of_drawn(t, oracle, laws, seconds, seed)
    one = problem(CALL, f, params, batch, loss, in_dims, samples, seed)
    subject = TransformProblem(t, oracle, one, describe(f))
    outcomes = tried(laws, subject, seconds)
    again = call(CALL, f"t, oracle, {describe(f)}, params, *batch", options(one, in_dims), seed)
    return judged(Table(f"{describe(t)} of {one!r}", tuple(outcomes)), subject, again, seconds)


def _of_drawn(t: Callable, oracle: Callable, laws: list[Law], seconds: float, seed: int) -> Table:
    """The laws on functions that are drawn, or on one of each family."""
    deadline, seen, two = time.perf_counter() + seconds, [Outcome(law) for law in laws], _takes_two(oracle)
    form = "p.model.f, p.model.params, *p.batch, loss=p.loss" if two else "p.f, p.model.params, *p.batch"

    def tried_on(given: models.Problem) -> None:
        f, loss = (given.model.f, given.loss) if two else (given.f, None)
        one = problem(CALL, f, given.model.params, given.batch, loss, given.in_dims, None, seed)
        subject = TransformProblem(t, oracle, one, given.model.family)
        found = tried(laws, subject, max(LEAST_SECONDS, deadline - time.perf_counter()))
        for whole, outcome in zip(seen, found, strict=True):
            whole.add(outcome)
        judged(Table(f"p = {given!r}", tuple(found)), subject, call(CALL, f"t, oracle, {form}", {}, seed), seconds)

    loss = models.Loss("mse_loss", "mean" if two else "none")
    try:
        how = _drawn(tried_on, loss, deadline, seed)
    except MissingExtraError:
        how = f"one function of each of {len(models.FAMILIES)} families (hypothesis is missing)"
        for name in models.FAMILIES:
            tried_on(models.Problem(models.Model(name), loss))
    return Table(f"{describe(t)} of {how}", tuple(seen))


def _drawn(tried_on: Callable[[models.Problem], None], loss: models.Loss, deadline: float, seed: int) -> str:
    """Examples of hypothesis, which makes one that fails smaller."""
    strategies: Any = importlib.import_module("invfunc.testing.strategies")
    hypothesis, count, failed = importlib.import_module("hypothesis"), 0, False
    phases = hypothesis.Phase.generate, hypothesis.Phase.shrink

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        print_blob=False,
        phases=phases,
        report_multiple_bugs=False,  # one after the other
    )
    @hypothesis.given(strategies.models())
    def test(model: models.Model) -> None:
        nonlocal count, failed
        if failed or time.perf_counter() < deadline:  # one that fails fails again, whatever the time
            count += 1
            try:
                tried_on(models.Problem(model, loss))
            except AssertionError:
                failed = True
                raise

    test()
    return f"{count} functions that hypothesis drew"


def _takes_two(oracle: Callable) -> bool:
    """Whether it is made of a model and its loss."""
    found = inspect.signature(oracle).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found) > 1
