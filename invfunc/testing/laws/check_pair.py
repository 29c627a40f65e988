"""The laws for an invertible function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.pair import Invertible, as_pair
from invfunc.testing.laws.book import chosen
from invfunc.testing.laws.check import call, judged
from invfunc.testing.laws.law import PAIR
from invfunc.testing.laws.pairs import PairProblem, floats
from invfunc.testing.laws.problem import picked
from invfunc.testing.laws.run import tried
from invfunc.testing.laws.table import Table


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
        raise ArgumentError("laws.check_pair(pair, x): x has no numbers in it, of which all laws hold.")
    if any(not bool(t.isfinite().all()) for t in floats(x)):
        raise ArgumentError("laws.check_pair(pair, x): x has numbers that are not finite, which are equal to nothing.")
    sizes = {t.shape[0] if t.ndim else 0 for t in tree.tensors(x)}
    n = sizes.pop() if len(sizes) == 1 else 0
    given = PairProblem(found, x, args, seed, n, samples=tuple(range(n)))
    if samples is not None:
        if not n:
            raise ArgumentError("laws.check_pair(..., samples=): the tensors of x have not one size along axis 0.")
        given = given.part(picked("laws.check_pair", samples, n))
    outcomes = tried(chosen("laws.check_pair", PAIR, only), given, seconds)
    again = call("laws.check_pair", "pair, x, *args", {}, seed)
    return judged(Table(repr(given), tuple(outcomes)), given, again, seconds)
