"""The laws for an operation of the user's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.operation import Operation
from invfunc.testing.laws.book import chosen
from invfunc.testing.laws.check import judged
from invfunc.testing.laws.compare import fixed
from invfunc.testing.laws.law import FUNCTION, OPERATION
from invfunc.testing.laws.operations import OperationProblem, half_squares
from invfunc.testing.laws.problem import Problem, problem, seeded
from invfunc.testing.laws.run import tried
from invfunc.testing.laws.table import Table

OWED = (
    "per-sample gradients sum to the gradient",
    "fast equals generic",
    "blocks do not matter",
    "chunks do not matter",
)
OWED += ("the order of the samples does not matter", "samples= picks", "vmap over parameters is the loop")
"""What is said of a model that is this operation alone."""


def check_operation(
    op: Operation,
    *args: Any,
    samples: tuple[int, ...] = (0,),
    rtol: float | None = None,
    seconds: float = 10,
    seed: int = 0,
) -> Table:
    """Assert that an operation keeps the samples apart, and that its rules give autograd's per-sample gradients.

        for n in range(N):
            op(x[n : n + 1], w) == op(x, w)[n : n + 1]
            rule's gradient of w for sample n == grad(lambda w: (op(x, w)[n] * cotangent[n]).sum())(w)

    Then the laws of `check` are tried on each argument with a rule: chunks, blocks, order, the generic path, vmap.

    Args:
        op: what `operation` made.
        args: arguments for it, best in float64; those with a rule are its parameters.
        samples: the positions of the arguments that have the samples, along axis 0.
        rtol: the largest difference, relative to the largest entry of a gradient; some roundings of the precision
            unless given.
        seconds: how long laws are tried.
        seed: where torch's global generators start.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: that names the operation and the argument whose rule is wrong, with the smallest case.
        ArgumentTypeError, ArgumentError: `op` is no operation, or `samples` are not positions of tensors with samples.

    Example:
        >>> import torch, invfunc
        >>> from invfunc.testing import check_operation
        >>> scaled = invfunc.operation(lambda x, weight: x * weight)
        >>> rule = scaled.share_of("weight")(lambda cotangent, x, weight: ("vni,ni->i", cotangent, x))
        >>> len(check_operation(scaled, torch.randn(3, 2).double(), torch.randn(2).double()).failed)
        0
    """
    if not isinstance(op, Operation):
        kind = type(op).__name__
        raise ArgumentTypeError(f"check_operation(op, ...): op is of type {kind}, but has to be made by `operation`.")
    n = _length(op, args, samples)

    def again(law: str, few: list[int]) -> str:
        given = f"*(x[{few}] if i in {samples} else x for i, x in enumerate(args))"
        return f"check_operation(op, {given}, samples={samples}, seed={seed})"

    given = OperationProblem(op, args, samples, seed, n, rtol, tuple(range(n)))
    _check_output(given)
    outcomes = tried(chosen("check_operation", OPERATION, None), given, seconds / 2)
    judged(Table(repr(given), tuple(outcomes)), given, again, seconds)
    for argument in op.rules:
        model = _as_model(given, argument)
        laws = chosen("check_operation", FUNCTION, OWED)
        found = tried(laws, model, seconds / 2 / len(op.rules))
        title = f"{op!r}, as a model of {argument!r}, N = {n}"
        judged(Table(title, tuple(found)), model, again, seconds)
        outcomes += [replace(o, law=replace(o.law, name=f"{o.law.name}, {argument!r}")) for o in found]
    return Table(repr(given), tuple(outcomes))


def _length(op: Operation, args: tuple, samples: tuple[int, ...]) -> int:
    """How many samples the arguments have."""
    told = f"check_operation({op!r}, ..., samples={samples})"
    if not samples or not all(isinstance(i, int) and 0 <= i < len(args) for i in samples):
        raise ArgumentError(f"{told}: these are no positions of the {len(args)} arguments that were given.")
    lengths = {len(x) if isinstance(x, torch.Tensor) and x.ndim else 0 for x in (args[i] for i in samples)}
    if len(lengths) > 1 or 0 in lengths:
        raise ArgumentError(f"{told}: the arguments there have to be tensors with as many samples along axis 0.")
    return lengths.pop()


def _check_output(given: OperationProblem) -> None:
    told, n = f"check_operation({given.op!r}, ...)", given.n
    with seeded(given.seed), torch.no_grad():
        out = given.op(*tree.map_tensors(torch.clone, given.args))
    if not isinstance(out, torch.Tensor):
        raise ArgumentTypeError(f"{told}: it returns a {type(out).__name__}, but has to return one tensor [N, ...].")
    if not out.ndim or len(out) != n:
        raise ArgumentError(f"{told}: it returns shape {list(out.shape)} for {n} samples, but has to return [N, ...].")


def _as_model(given: OperationProblem, argument: str | int) -> Problem:
    f, p, rest, dims = given.model(argument)
    target = fixed(given.op(*given.args).shape, p, 0.1)
    batch, dims = (*rest, target), (*dims, 0)
    try:
        return replace(problem("check_operation", f, p, batch, half_squares, dims, None, given.seed), rtol=given.rtol)
    except InvFuncError as error:
        raise type(error)(f"{given.op!r} as a model of {argument!r}: {error}") from None
