"""The laws for a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from invfunc.arguments.problem import InDims
from invfunc.errors import ArgumentError
from invfunc.testing.laws.book import chosen
from invfunc.testing.laws.law import FUNCTION
from invfunc.testing.laws.problem import Problem, problem
from invfunc.testing.laws.run import Outcome, smallest, tried
from invfunc.testing.laws.table import Table, cause


def check(
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
    """Assert the laws of this library for a function of yours: that its statistics are right, in all ways to them.

        for law in LAWS.values():
            assert all(claim.found() == claim.expected() for claim in law.claims(f, params, *batch))

    A law is tried on all statistics that take f, against plain loops and double backward passes of autograd that know
    nothing of this library, or against the same statistic on another way. What this library refuses is no failure: it
    is told, with its error. Give few samples (3 to 8) and small sizes, in float64, where rounding hides least. In a
    lower precision as much is tolerated as the loop itself differs from the same loop in float64, some times over.
    "Samples do not mix" is of f and of `loss`: a contrastive loss, or a batch norm that trains, fails it. An f that
    gives NaN is an error.

    Args:
        f: a loss function `f(params, *batch)` that returns a scalar or `[N]`, or a model function `f(params, *inputs)`.
        params: any pytree of floating-point tensors.
        batch: tensors, or trees of them, with the samples along axis 0; with `loss` the last one is its target.
        loss: `loss(outputs, target)` of a model function, a scalar or `[N]`.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        seconds: how long laws are tried, the cheap and telling ones first. What is left is listed as not tried, and
            is no failure; what was begun is finished, which may take minutes (the Hessian of attention, without fast
            rules). A smallest case is looked for as long again.
        only: the name of a law, or several.
        samples: these of the batch only.
        seed: where torch's global generators start; they are put back behind.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: a law does not hold. It tells the smallest case: the fewest samples, the entry with both
            numbers, and what to type to see it again.
        ArgumentError, ArgumentTypeError: arguments that no law can use, names of no law, or an f that all laws refuse.

    Example:
        >>> import torch
        >>> from invfunc.testing import laws
        >>> def f(w, x, y):
        ...     return (x @ w - y).square()
        >>> w, x, y = torch.ones(2).double(), torch.eye(3, 2).double(), torch.zeros(3).double()
        >>> table = laws.check(f, w, x, y, only=["fast equals generic", "chunks do not matter"])
        >>> [outcome.state for outcome in table.outcomes]
        ['holds', 'holds']

    Cost: some hundred statistics: a few seconds for a small model, half a minute for a small transformer.
    """
    given = problem("laws.check", f, params, batch, loss, in_dims, samples, seed)
    laws = chosen("laws.check", FUNCTION, only)
    outcomes = tried(laws, given, seconds)
    again = call("laws.check", "f, params, *batch", options(given, in_dims), seed)
    return judged(Table(repr(given), tuple(outcomes)), given, again, seconds)


Again = Callable[[str, list[int]], str]
"""What to type to see a law fail for some samples."""


def judged(table: Table, subject: Any, again: Again, seconds: float) -> Table:
    """The table itself, or the error that it calls for."""
    if table.failed:
        raise AssertionError(told(table.failed[0], table, subject, again, seconds))
    asked = [outcome for outcome in table.outcomes if not outcome.law.of_f]
    if table.refused and not any(outcome.tried for outcome in asked):
        raise ArgumentError(f"every law refuses this function: {cause(next(iter(table.refused.values())))}\n\n{table}")
    return table


def told(outcome: Outcome, table: Table, subject: Any, again: Again, seconds: float) -> str:
    """The message for a law that does not hold."""
    failure = outcome.failures[0]
    part, failure = smallest(outcome.law, subject, failure, seconds)
    samples = list(part.samples)
    few = f"\n    samples: {samples}, of {subject.n}" if subject.n else ""
    return (
        f"a law does not hold: {outcome.law.name}\n    {outcome.law.statement}\n    {failure}{few}\n"
        f"    to see it again: {again(outcome.law.name, samples)}\n\n{table}"
    )


def call(name: str, called: str, options: dict[str, Any], seed: int) -> Again:
    """That of a call, with the options that are not what they are by themselves."""
    shown = "".join(f", {key}={value}" for key, value in options.items())

    def again(law: str, samples: list[int]) -> str:
        few = f", samples={samples}" if samples else ""
        return f"{name}({called}{shown}, only={law!r}{few}, seed={seed})"

    return again


def options(given: Problem, in_dims: InDims) -> dict[str, Any]:
    """How a loss and in_dims were given."""
    loss = {} if given.loss is None else {"loss": "loss"}
    return loss | ({} if in_dims == 0 else {"in_dims": in_dims})
