"""Laws of invertible functions: what their inverses and their checkpoints have to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.func import grad, jacrev, vmap

import invfunc
from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.pair import Invertible, as_pair
from invfunc.pairs.value import reached
from invfunc.testing.laws.compare import (
    alive,
    cast,
    fixed,
    generators,
    state,
    written,
)
from invfunc.testing.laws.problem import picked
from invfunc.testing.laws.run import (
    PAIR,
    Claim,
    Inapplicable,
    Subject,
    Table,
    call,
    chosen,
    coarsest,
    judged,
    law,
    tried,
)

ROUND_TRIP = 100
"""The number of roundings of a round trip, and of what is computed from it."""


@dataclass(frozen=True, repr=False, kw_only=True)
class PairProblem(Subject):
    """`pair(x, *args)`."""

    pair: Invertible
    x: Any
    args: tuple

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.pair!r}, {f'N = {self.n}, ' if self.n else ''}{dtype}"

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest one of the state."""
        return coarsest((self.x, self.args))

    @cached_property
    def floor(self) -> float:
        """A size that is small beside the state, so that rounding is all there is in it."""
        sizes = [t.detach().abs().nan_to_num().max().item() for t in floats(self.x) if t.numel()]
        return 1e-6 * max(sizes, default=0.0)

    def part(self, samples: Sequence[int]) -> PairProblem:
        """The same of some samples of x."""
        return self.of_samples(samples, x=tree.map_tensors(lambda t: t[list(samples)], self.x))

    def double(self) -> PairProblem:
        """The same in float64."""
        return replace(self, x=cast(self.x, torch.float64), args=cast(self.args, torch.float64))

    @cached_property
    def block(self) -> Callable:
        """The pair under a checkpoint."""
        return invfunc.invertible_checkpoint(self.pair)

    def forth(self, x: Any) -> tuple[Any, tuple]:
        """y, and what is hidden beside it; with the same random numbers each time."""
        torch.manual_seed(self.seed)
        return self.pair.apart(self.pair.forward(*self.pair.shared, x, *self.args))

    def back(self, y: Any, hidden: tuple) -> Any:
        """`f_inv(y)`, with those of f."""
        torch.manual_seed(self.seed)
        return self.pair.inverse(*self.pair.shared, y, *hidden, *self.args)


def floats(given: Any) -> list[torch.Tensor]:
    """The tensors of a tree that can have a gradient."""
    return [t for t in tree.tensors(given) if t.is_floating_point()]


def live(given: Any) -> Any:
    """Copies that require grad."""
    return tree.map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), given)


def passing(x: Any) -> Any:
    """A copy that nobody else holds, so that a checkpoint has to compute it from y."""
    return tree.map_tensors(lambda t: t * 1 if t.is_floating_point() else t, x)


def loss(y: Any, at: float = 0.0) -> torch.Tensor:
    """A nonlinear function of a state."""
    parts = [(t.square() * fixed(t.shape, t, at)).sum() + (t * fixed(t.shape, t, at + 0.3)).sum() for t in floats(y)]
    return torch.stack(parts).sum()


def gradients(h: Callable, problem: PairProblem, twice: bool = False) -> list[torch.Tensor]:
    """Gradients of the loss in x and the arguments, or of a loss of them, by torch.autograd."""
    given = live((problem.x, problem.args))
    wanted = floats(given)
    with torch.enable_grad():
        value = loss(h(passing(given[0]), *given[1]))
        found = torch.autograd.grad(value, wanted, create_graph=twice, materialize_grads=True)
        if twice:
            connected = [g for g in found if g.requires_grad]
            found = torch.autograd.grad(loss(connected), wanted, materialize_grads=True) if connected else found
    return list(found)


def no_floats(problem: PairProblem) -> str:
    """The reason why there are no gradients, if there are none."""
    return "" if floats((problem.x, problem.args)) else "nothing in x has a gradient"


def _other(t: torch.Tensor) -> torch.Tensor:
    """Another state near a state, none of whose numbers is zero."""
    return torch.where(t == 0, 0.01 * fixed(t.shape, t).abs(), 0.9 * t) if t.is_floating_point() else t


@law("the inverse restores", PAIR)
def restores(problem: PairProblem) -> Iterator[Claim]:
    """f_inv(f(x, *args), *args) == x, and f(f_inv(y, *args), *args) == y, also with another x in between"""

    @cache
    def trip() -> tuple[Any, Any, Any]:
        with torch.no_grad():
            y, hidden = problem.forth(problem.x)
            x = problem.back(y, hidden)
            return y, x, problem.forth(x)[0]

    yield Claim("f_inv(f(x))", lambda: trip()[1], lambda: problem.x, ROUND_TRIP)
    yield Claim("f(f_inv(y))", lambda: trip()[2], lambda: trip()[0], ROUND_TRIP)
    other = tree.map_tensors(_other, problem.x)

    def in_between() -> Any:
        with torch.no_grad():
            first, second = problem.forth(problem.x), problem.forth(other)
            return problem.back(*first), problem.back(*second)

    yield Claim("f_inv of one y and of another", in_between, lambda: (problem.x, other), ROUND_TRIP)


def calls(problem: PairProblem) -> dict[str, Callable]:
    """Ways to call a function of x and the arguments, alone and in torch.func."""
    tensors, form = tree.separate((problem.x, problem.args))
    places = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    given = [tensors[i] for i in places]

    def of(h: Callable) -> Callable:
        def value(found: list[torch.Tensor]) -> Any:
            every = list(tensors)
            for i, t in zip(places, found, strict=True):
                every[i] = t
            x, args = form.join(every)
            return h(passing(x), *args)

        return value

    def slopes(h: Callable) -> Callable:
        return grad(lambda found: loss(of(h)(found)))

    points = [torch.stack([t, 0.9 * t]) for t in given]
    return {
        "first order": lambda h: gradients(h, problem),
        "second order": lambda h: gradients(h, problem, twice=True),
        "grad": lambda h: slopes(h)(given),
        "grad of grad": lambda h: grad(lambda found: loss(slopes(h)(found)))(given),
        "vmap": lambda h: vmap(of(h), randomness="same")(points),
        "vmap of grad": lambda h: vmap(slopes(h), randomness="same")(points),
        "jacrev": lambda h: jacrev(lambda found: torch.stack([loss(of(h)(found)), loss(of(h)(found), 0.7)]))(given),
    }


@law("a checkpoint has the plain value", PAIR)
def values(problem: PairProblem) -> Iterator[Claim]:
    """invertible_checkpoint(pair)(x, *args) == pair(x, *args)"""

    def of(h: Callable) -> Callable:
        return lambda: h(problem.x, *problem.args)

    yield Claim("value", of(problem.block), of(problem.pair))


@law("a checkpoint has the plain gradients", PAIR, when=no_floats)
def derivatives(problem: PairProblem) -> Iterator[Claim]:
    """t(g)(x, *args) == t(f)(x, *args) for t in autograd.grad, that of it, grad, grad of grad, vmap, vmap of grad,
    jacrev"""
    for called, way in calls(problem).items():
        yield Claim(called, lambda way=way: way(problem.block), lambda way=way: way(problem.pair), ROUND_TRIP)


def _no_log_det(problem: PairProblem) -> str:
    if problem.pair.composition is not None:
        return "it is a composition: check its blocks"
    return "the pair has no log_det" if problem.pair.log_det is None else "" if problem.n else "x has no sample axis"


@law("the log-determinant is that of the Jacobian", PAIR, when=_no_log_det)
def volume(problem: PairProblem) -> Iterator[Claim]:
    """log_det(x, *args)[n] == slogdet(jacobian of y[n] in x[n]).logabsdet"""
    pair = problem.pair

    def found() -> Any:
        with torch.no_grad():
            return pair.log_det(*pair.shared, problem.x, *problem.args) if pair.log_det else None

    def dense() -> torch.Tensor:
        tensors, form = tree.separate(problem.x)

        def rows(*given: torch.Tensor) -> torch.Tensor:
            y = problem.forth(form.join(given))[0]
            return torch.cat([t.reshape(problem.n, -1) for t in tree.tensors(y)], 1)

        whole = torch.autograd.functional.jacobian(rows, tuple(tensors))
        if any(j[n, :, m].any() for j in whole for n in range(problem.n) for m in range(problem.n) if m != n):
            raise Inapplicable("y of a sample depends on the others, so that there is no determinant of each")
        own = [torch.stack([j[n, :, n].reshape(j.shape[1], -1) for n in range(problem.n)]) for j in whole]
        return torch.linalg.slogdet(torch.cat(own, 2)).logabsdet

    yield Claim("log_det", found, dense, ROUND_TRIP)


@law("a pair writes no argument", PAIR)
def arguments(problem: PairProblem) -> Iterator[Claim]:
    """f, f_inv and the checkpoint, with its backward pass, leave x, y and args as they were"""
    given = (problem.x, problem.args)

    @cache
    def image() -> tuple[Any, tuple]:
        with torch.no_grad():
            return problem.forth(problem.x)

    yield Claim("f", lambda: written(image, given), lambda: state(given))
    yield Claim("f_inv", lambda: written(lambda: problem.back(*image()), image()), lambda: state(image()))
    if not no_floats(problem):
        leaves = live(given)

        def backward() -> None:
            with torch.enable_grad():
                y = problem.block(passing(leaves[0]), *leaves[1])
                torch.autograd.grad(loss(y), floats(leaves), allow_unused=True)

        yield Claim("the checkpoint", lambda: written(backward, leaves), lambda: state(leaves))


@law("a checkpoint leaves states as f does", PAIR, when=no_floats)
def states(problem: PairProblem) -> Iterator[Claim]:
    """generators, and the tensors that f holds, are after g(x, *args) and its gradient where f and its leave them"""
    parts = [problem.pair.forward, problem.pair.inverse, *problem.pair.shared]
    held = list({id(t): t for *_, t in reached(parts) if isinstance(t, torch.Tensor)}.values())

    def after(h: Callable) -> tuple[list, list]:
        before = [t.detach().clone() for t in held]
        gradients(h, problem)
        found = [t.detach().clone() for t in held], generators()
        with torch.no_grad():
            for t, old in zip(held, before, strict=True):
                if not torch.equal(t, old):
                    t.copy_(old)
        return found

    yield Claim("held tensors and generators", lambda: after(problem.block), lambda: after(problem.pair))


@law("nothing of a checkpoint stays alive", PAIR, when=no_floats)
def life(problem: PairProblem) -> Iterator[Claim]:
    """when x, args, y and gradients are deleted, their tensors are gone"""

    def whole(given: Any) -> Any:
        leaves = tree.map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), given)
        with torch.enable_grad():
            y = problem.block(passing(leaves[0]), *leaves[1])
            return torch.autograd.grad(loss(y), floats(leaves), allow_unused=True)

    yield Claim("checkpoint", lambda: alive(whole, (problem.x, problem.args)), list)


def check_pair(
    pair: Callable | tuple[Callable, Callable],
    x: Any,
    *args: Any,
    seconds: float = 30,
    only: Iterable[str] | str | None = None,
    samples: Iterable[int] | None = None,
    seed: int = 0,
) -> Table:
    """Assert the laws of an invertible function: that its inverse restores, and that a checkpoint of it is it.

        f_inv(f(x, *args), *args) == x                  # also with another x in between
        grad(lambda x: loss(invertible_checkpoint(f, f_inv)(x, *args)))(x) == grad(lambda x: loss(f(x, *args)))(x)

    Args:
        pair: an `Invertible`, what `invertible_checkpoint` made of one, or `(f, f_inv)`.
        x: where to look, any pytree; best of few samples along axis 0, in float64.
        args: the further arguments of both functions.
        seconds, only, samples, seed: as in `check`; `samples` are along axis 0 of x.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: a law does not hold. It tells the smallest case, as that of `check` does.
        ArgumentError, ArgumentTypeError: `pair` is none, x has no tensors or is not finite, a name is that of no law.

    Example:
        >>> import torch
        >>> from invfunc.testing import laws
        >>> table = laws.check_pair((lambda x: 2 * x, lambda y: y / 2), torch.eye(2).double())
        >>> table.failed, table.refused
        ([], {})
        >>> laws.check_pair((lambda x: 2 * x, lambda y: y / 3), torch.ones(2, 1).double())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: a law does not hold: the inverse restores
            f_inv(f(x, *args), *args) == x, and f(f_inv(y, *args), *args) == y, also with another x in between
            f_inv(f(x)) at [0, 0]: 0.6666666667 came, 1 is right (apart by 3.3e-01 of the ...
            samples: [0], of 2
        ...

    Cost: some dozens of forward and backward passes.
    """
    found = (
        Invertible(*pair)
        if isinstance(pair, tuple) and len(pair) == 2
        else as_pair("laws.check_pair(pair, ...)", pair, " or (f, f_inv)")
    )
    if not tree.tensors(x):
        raise ArgumentTypeError(f"laws.check_pair(pair, x): x is of type {type(x).__name__}, and has no tensors.")
    if not any(t.numel() for t in tree.tensors(x)):
        raise ArgumentError("laws.check_pair(pair, x): the tensors of x have no numbers to compare.")
    if any(not bool(t.isfinite().all()) for t in floats(x)):
        raise ArgumentError("laws.check_pair(pair, x): x has numbers that are not finite, which are equal to nothing.")
    sizes = {t.shape[0] if t.ndim else 0 for t in tree.tensors(x)}
    n = sizes.pop() if len(sizes) == 1 else 0
    given = PairProblem(pair=found, x=x, args=args, seed=seed, n=n, samples=tuple(range(n)))
    if samples is not None:
        if not n:
            raise ArgumentError("laws.check_pair(..., samples=): the tensors of x have not one size along axis 0.")
        given = given.part(picked("laws.check_pair", samples, n))
    outcomes = tried(chosen("laws.check_pair", PAIR, only), given, seconds)
    again = call("laws.check_pair", "pair, x, *args", {}, seed)
    return judged(Table(repr(given), tuple(outcomes)), given, again, seconds)
