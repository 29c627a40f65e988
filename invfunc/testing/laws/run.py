"""Laws are tried one after the other, within a time budget; of one that fails the smallest case is looked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc.errors import ArgumentError, InverseError, InvFuncError
from invfunc.testing.laws.compare import FLOOR, Difference, difference, plain, tolerance
from invfunc.testing.laws.law import Claim, Inapplicable, Law
from invfunc.testing.laws.problem import seeded

SEARCHED, LEAST_SECONDS = 200, 5.0
"""How many parts of a batch are tried for a smallest case, and at least how long."""
ROUNDINGS = 8
"""How many times the rounding of what is expected what is found may have: its terms come in another order."""


@dataclass(frozen=True)
class Failure:
    """A claim that does not hold: by how much, or what was raised in place of a result."""

    of: str
    difference: Difference | None
    allowed: float = 0.0
    error: Exception | None = None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.of}: raises {type(self.error).__name__}: {self.error}"
        error, where, found, expected = self.difference
        at = f" at {where}" if where else ""
        if expected == "":  # what is wrong is told in words
            return f"{self.of}{at}: {found}"
        told = f"{self.of}{at}: {_shown(found)} came, {_shown(expected)} is right"
        if math.isinf(error):
            return told
        return f"{told} (apart by {error:.1e} of the largest entry, where {self.allowed:.0e} may be rounding)"


def _shown(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)[:200]


@dataclass
class Outcome:
    """What came of one law."""

    law: Law
    tried: list[str] = field(default_factory=list)
    error: float = 0.0
    seconds: float = 0.0
    why_not: str = ""
    """Why it does not apply."""
    refused: dict[str, str] = field(default_factory=dict)
    """The errors of this library, by what they are said of."""
    inapplicable: dict[str, str] = field(default_factory=dict)
    """Why it does not apply to some: torch cannot do it even without this library, or it is not said of them."""
    left: int = 0
    """Claims for which there was no time."""
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """What came of it on another subject."""
        self.tried += other.tried
        self.refused |= other.refused
        self.inapplicable |= other.inapplicable
        self.failures += other.failures
        self.error, self.why_not = max(self.error, other.error), self.why_not or other.why_not
        self.seconds, self.left = self.seconds + other.seconds, self.left + other.left

    @property
    def state(self) -> str:
        """In one word."""
        if self.failures:
            return "FAILED"
        if self.tried:
            return "holds"
        if self.refused:
            return "refused"
        return "not tried" if self.left else "does not apply"


def tried(laws: Iterable[Law], subject: Any, seconds: float) -> list[Outcome]:
    """The outcomes of all laws. Those for which no time is left are listed with what is left of them."""
    if not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ArgumentError(f"seconds={seconds!r}: it has to be a number of seconds.")
    deadline = time.perf_counter() + seconds
    return [_tried(law, subject, deadline) for law in laws]


def _tried(law: Law, subject: Any, deadline: float) -> Outcome:
    outcome, start = Outcome(law), time.perf_counter()
    if start < deadline:
        with seeded(subject.seed):
            outcome.why_not = law.when(subject)
    if not outcome.why_not:
        try:
            for claim in law.claims(subject):
                if time.perf_counter() >= deadline:
                    outcome.left += 1
                else:
                    _weigh(claim, subject, outcome)
        except Inapplicable as why:
            outcome.why_not = str(why)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _weigh(claim: Claim, subject: Any, outcome: Outcome) -> None:
    try:
        found = weighed(outcome.law, claim, subject)
    except InvFuncError as error:
        outcome.refused[claim.of] = str(error)
    except Inapplicable as error:
        outcome.inapplicable[claim.of] = str(error)
    else:
        outcome.tried.append(claim.of)
        if isinstance(found, Failure):
            outcome.failures.append(found)
        else:
            outcome.error = max(outcome.error, found.error)


def weighed(law: Law, claim: Claim, subject: Any) -> Failure | Difference:
    """The largest difference of a claim of a law, as a failure if rounding does not explain it."""
    try:
        with seeded(subject.seed), sdpa_kernel(SDPBackend.MATH):  # torch differentiates no other attention twice
            expected = claim.expected()
    except InverseError as error:
        return Failure(claim.of, None, error=error)
    except InvFuncError:
        raise
    except (RuntimeError, ValueError) as error:  # as torch has them
        raise Inapplicable(f"torch: {error}") from error
    try:
        with seeded(subject.seed):
            found = claim.found()
    except InverseError as error:  # it says of an inverse that it is none, and refuses nothing
        return Failure(claim.of, None, error=error)
    except InvFuncError:
        raise
    except Exception as error:
        return Failure(claim.of, None, error=error)
    allowed = subject.rtol or tolerance(claim.dtype or subject.dtype, claim.terms)
    largest = difference(found, expected, subject.floor)
    if largest.error > allowed and claim.nearby is not None:
        largest = difference(found, expected, max(subject.floor, FLOOR * _size(claim, subject)))
    if largest.error > allowed and not subject.rtol:
        allowed = max(allowed, ROUNDINGS * _rounding(law, claim, subject, expected))
    return largest if largest.error <= allowed else Failure(claim.of, largest, allowed)


def _size(claim: Claim, subject: Any) -> float:
    """The largest number of what is expected nearby; 0 where it is not defined there."""
    try:
        with seeded(subject.seed), sdpa_kernel(SDPBackend.MATH):
            found = tree.tensors(plain(claim.nearby())) if claim.nearby is not None else []
    except Exception:  # of the user's f, which may not be defined there
        return 0.0
    return max((x.detach().abs().nan_to_num(0, 0, 0).max().item() for x in found if x.numel()), default=0.0)


def _rounding(law: Law, claim: Claim, subject: Any, expected: Any) -> float:
    """How far what is expected is from the same in float64: a function may make much of the rounding of few terms."""
    if subject.dtype == torch.float64 or not all(map(_is_floating, tree.leaves(plain(expected)))):
        return 0.0
    try:
        double = subject.double()
        with seeded(double.seed):
            exact = next(again for again in law.claims(double) if again.of == claim.of).expected()
    except Exception:  # of a function that is of one precision only
        return 0.0
    error = difference(exact, expected, subject.floor).error
    if ROUNDINGS * error >= 1:
        raise Inapplicable(f"rounding alone changes what is expected by {error:.0e} of it; give float64")
    return error


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def smallest(law: Law, subject: Any, failure: Failure, seconds: float) -> tuple[Any, Failure]:
    """The fewest samples for which the same claim of a law fails, and how."""
    deadline = time.perf_counter() + max(seconds, LEAST_SECONDS)

    def fails(samples: Sequence[int]) -> tuple[Any, Failure] | None:
        try:
            part = subject.part(samples)
            with seeded(part.seed):
                claims = [] if law.when(part) else [c for c in law.claims(part) if c.of == failure.of]
            found = weighed(law, claims[0], part) if claims else None
        except Exception:  # a part that f or the law does not take
            return None
        return (part, found) if isinstance(found, Failure) and type(found.error) is type(failure.error) else None

    found = next(filter(None, map(fails, _until(deadline, _few(subject.n)))), None)
    return found or _reduced(fails, list(range(subject.n)), deadline) or (subject, failure)


def _few(n: int) -> Iterator[tuple[int, ...]]:
    """Single samples, pairs and triples."""
    sizes = [islice(combinations(range(n), size), SEARCHED) for size in (1, 2, 3) if size < n]
    return chain.from_iterable(sizes)


def _until(deadline: float, found: Iterable[Any]) -> Iterator[Any]:
    for one in found:
        if time.perf_counter() > deadline:
            return
        yield one


def _reduced(fails: Callable, samples: list[int], deadline: float) -> Any:
    """Leave out parts, halves first, as long as the rest still fails."""
    best, size = None, len(samples) // 2
    while size:
        for start in _until(deadline, range(0, len(samples), size)):
            rest = samples[:start] + samples[start + size :]
            if rest and (found := fails(rest)):
                best, samples = found, rest
                break
        else:
            size //= 2
    return best
