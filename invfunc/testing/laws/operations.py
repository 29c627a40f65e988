"""The laws for an operation of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.operation import Operation, gives
from invfunc.statistics.curvature import diag_ggn
from invfunc.statistics.first_order import batch_grad
from invfunc.testing.laws.compare import (
    cast,
    fixed,
    generators,
    seeded,
    state,
    written,
)
from invfunc.testing.laws.pairs import floats, live
from invfunc.testing.laws.problem import LawProblem, problem
from invfunc.testing.laws.run import (
    FUNCTION,
    OPERATION,
    Claim,
    Inapplicable,
    Subject,
    Table,
    chosen,
    coarsest,
    judged,
    law,
    tried,
)
from invfunc.testing.oracles import dense_diag_ggn, loop_batch_grad

COLUMNS = 2
"""For how many columns a rule is asked itself."""


@dataclass(frozen=True, repr=False, kw_only=True)
class OperationProblem(Subject):
    """`op(*args)`, with the samples along axis 0 of the arguments at some positions."""

    op: Operation
    args: tuple
    at: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{self.op!r}, N = {self.n}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest one of the arguments."""
        return coarsest(self.args)

    def part(self, samples: Sequence[int]) -> OperationProblem:
        """The same of some samples."""
        return self.of_samples(
            samples, args=tuple(x[list(samples)] if i in self.at else x for i, x in enumerate(self.args))
        )

    def double(self) -> OperationProblem:
        """The same in float64."""
        return replace(self, args=cast(self.args, torch.float64))

    def model(self, argument: str | int, op: Callable | None = None) -> tuple[Callable, Any, tuple, tuple]:
        """The operation as a model function of one argument: f, its params, inputs, and their in_dims."""
        place, op = self.op.position(argument), op or self.op

        def f(p: Any, *rest: Any) -> torch.Tensor:
            return op(*rest[:place], p, *rest[place:])

        rest = tuple(x for i, x in enumerate(self.args) if i != place)
        dims = tuple(0 if i in self.at else None for i in range(len(self.args)) if i != place)
        return f, self.args[place], rest, dims


def half_squares(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss `[N]` of any outputs."""
    return (z - y).square().reshape(len(z), -1).sum(1) / 2


@law("an operation keeps the samples apart", OPERATION)
def apart(problem: OperationProblem) -> Iterator[Claim]:
    """op(x[n : n + 1], w) == op(x, w)[n : n + 1]"""

    def alone() -> torch.Tensor:
        return torch.cat([problem.op(*problem.part([n]).args) for n in range(problem.n)]).detach()

    yield Claim(f"{problem.op!r}", lambda: problem.op(*problem.args).detach(), alone)


@law("an operation and its rules draw and write nothing", OPERATION)
def effects(problem: OperationProblem) -> Iterator[Claim]:
    """op(x, w) and rule(cotangent, x, w) leave all arguments, and torch's generators, as they were"""

    def after(call: Callable) -> list[torch.Tensor]:
        call()
        return generators()

    cotangent = fixed((1, *problem.op(*problem.args).shape), tree.tensors(problem.args)[0])
    calls: dict[str, tuple[Callable, tuple]] = {f"{problem.op!r}": (problem.op, problem.args)}
    for argument, rule in problem.op.rules.items():
        calls[f"the rule for {argument!r}"] = rule, (cotangent, *problem.args)
    for called, (call, args) in calls.items():
        yield Claim(called, lambda call=call, args=args: written(lambda: call(*args), args), lambda a=args: state(a))
        yield Claim(f"{called}: generators", lambda call=call, args=args: after(lambda: call(*args)), generators)


@law("a rule gives the gradients of autograd", OPERATION)
def rules(problem: OperationProblem) -> Iterator[Claim]:
    """its share of w for sample n is grad(lambda w: (op(x, w)[n] * cotangent[n]).sum())(w), also of many columns"""
    for argument in problem.op.rules:
        f, p, rest, dims = problem.model(argument)
        target = fixed((problem.n, *f(p, *rest).shape[1:]), p)

        def losses(p: Any, *batch: Any, f: Callable = f) -> torch.Tensor:
            return half_squares(f(p, *batch[:-1]), batch[-1])

        args, dims = (p, *rest, target), (*dims, 0)
        shares, wanted = batch_grad(losses, in_dims=dims), loop_batch_grad(losses)
        columns, dense = diag_ggn(f, half_squares, in_dims=dims), dense_diag_ggn(f, half_squares)
        called = f"the rule of {problem.op!r} for {argument!r}"
        yield Claim(called, lambda t=shares, a=args: t(*a), lambda t=wanted, a=args: t(*a), problem.n)
        yield Claim(f"{called}, columns", lambda t=columns, a=args: t(*a), lambda t=dense, a=args: t(*a), problem.n)


def _by_rule(problem: OperationProblem, argument: str | int, cotangent: torch.Tensor, args: tuple) -> torch.Tensor:
    """The shares `[V, N, *p]` of a rule, asked for one column of one sample at a time."""
    rule, at = problem.op.rules[argument], replace(problem, args=args)

    def share(v: int, n: int) -> torch.Tensor:
        equation, *operands = rule(cotangent[v : v + 1, n : n + 1], *at.part([n]).args)
        return torch.einsum(equation, *operands)

    return torch.stack([torch.stack([share(v, n) for n in range(problem.n)]) for v in range(len(cotangent))])


def _by_autograd(problem: OperationProblem, argument: str | int, cotangent: torch.Tensor, args: tuple) -> torch.Tensor:
    """The same by torch.autograd, which can differentiate it again."""
    out, p = problem.op(*args), args[problem.op.position(argument)]

    def share(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of.sum(), p, create_graph=True, materialize_grads=True)[0]

    return torch.stack([torch.stack([share(of) for of in out * column]) for column in cotangent])


def _has_shares(problem: OperationProblem, argument: str | int) -> None:
    """Raises where a rule gives no shares, which is told where it is used."""
    cotangent, args = _cotangents(problem)[:1, :1], problem.part([0]).args
    answer = problem.op.rules[argument](cotangent, *args)
    equation, *operands = answer if isinstance(answer, (tuple, list)) else (answer,)
    if not gives(equation, operands, problem.args[problem.op.position(argument)].shape, cotangent.shape[:2]):
        raise Inapplicable("it returns no einsum that gives the gradient")


def _cotangents(problem: OperationProblem) -> torch.Tensor:
    """The cotangents of some columns."""
    out = problem.op(*problem.args)
    return fixed((COLUMNS, *out.shape), out, 0.6)


@law("a rule is linear in the cotangent", OPERATION)
def linear(problem: OperationProblem) -> Iterator[Claim]:
    """rule(c * cotangent, x, w) == c * rule(cotangent, x, w), also for a large and a small c of either sign"""
    for argument in problem.op.rules:
        for c in (-1e3, 1e-3):

            def found(argument: str | int = argument, c: float = c) -> Any:
                return _by_rule(problem, argument, c * _cotangents(problem), problem.args)

            def expected(argument: str | int = argument, c: float = c) -> Any:
                _has_shares(problem, argument)
                return c * _by_rule(problem, argument, _cotangents(problem), problem.args)

            yield Claim(f"the rule for {argument!r}, times {c:g}", found, expected, problem.n)


@law("a rule can be differentiated", OPERATION)
def differentiated(problem: OperationProblem) -> Iterator[Claim]:
    """grad of its share in the cotangent and all arguments is that of autograd, so that statistics have gradients"""
    for argument in problem.op.rules:

        def slopes(shares: Callable, argument: str | int = argument) -> Any:
            given = live((_cotangents(problem), problem.args))
            with torch.enable_grad():
                found = shares(problem, argument, *given)
                value = (found * fixed(found.shape, found)).sum()
            if not value.requires_grad:
                return tree.map_tensors(torch.zeros_like, floats(given))
            return list(torch.autograd.grad(value, floats(given), materialize_grads=True))

        def expected(argument: str | int = argument, slopes: Callable = slopes) -> Any:
            _has_shares(problem, argument)
            return slopes(_by_autograd)

        yield Claim(f"the rule for {argument!r}", lambda s=slopes: s(_by_rule), expected, problem.n)


OWED = "vmap over parameters is the loop"
"""The law of a model that is this operation alone."""


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

    Then a law of `check` is tried on each argument with a rule: vmap over it is the loop.

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

    given = OperationProblem(op=op, args=args, at=samples, seed=seed, n=n, rtol=rtol, samples=tuple(range(n)))
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
    """The number of samples that the arguments have."""
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


def _as_model(given: OperationProblem, argument: str | int) -> LawProblem:
    f, p, rest, dims = given.model(argument)
    target = fixed(given.op(*given.args).shape, p, 0.1)
    batch, dims = (*rest, target), (*dims, 0)
    try:
        return replace(problem("check_operation", f, p, batch, half_squares, dims, None, given.seed), rtol=given.rtol)
    except InvFuncError as error:
        raise type(error)(f"{given.op!r} as a model of {argument!r}: {error}") from None
