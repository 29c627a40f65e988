"""Laws by their names, and trying them: one after the other, in a time budget, down to the smallest case that fails."""

from __future__ import annotations

import math
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc.errors import ArgumentError, InverseError, InvFuncError, InvFuncWarning
from invfunc.testing.laws.compare import Difference, difference, plain, seeded, tolerance


class Claim(NamedTuple):
    """A claim that two trees are equal up to rounding; what is no tensor in them has to be the same."""

    of: str
    """The subject, such as a statistic."""
    found: Callable[[], Any]
    expected: Callable[[], Any]
    """Evaluated first: where torch cannot do it, the law does not apply."""
    terms: int = 1
    """About how many numbers are added up for an entry, for the tolerance."""


@dataclass(frozen=True)
class Law:
    """A law by its name; `claims(subject)` lists what is to be compared, `when(subject)` says why it does not apply."""

    name: str
    statement: str
    subjects: tuple[str, ...]
    claims: Callable[[Any], Iterable[Claim]]
    when: Callable[[Any], str]
    of_f: bool = False
    """True for a law of f alone, with nothing of this library in it."""

    def __repr__(self) -> str:
        return f"Law({self.name!r})"


class Inapplicable(Exception):
    """Raised where a claim does not apply, with the reason."""


FUNCTION, PAIR, TRANSFORM, OPERATION = "a function", "a pair", "a transform", "an operation"


LAWS: dict[str, Law] = {}
"""All laws, by their names."""


def law(
    name: str, *subjects: str, when: Callable[[Any], str] = lambda subject: "", of_f: bool = False
) -> Callable[[Callable[[Any], Iterable[Claim]]], Law]:
    """Make a function `subject -> claims` a law of a function or of other subjects, whose statement is its docstring.

    Those of one subject are tried in the order in which they are made: the cheap and telling first.
    """

    def made(claims: Callable[[Any], Iterable[Claim]]) -> Law:
        LAWS[name] = Law(name, (claims.__doc__ or "").strip(), subjects or (FUNCTION,), claims, when, of_f)
        return LAWS[name]

    return made


@dataclass(frozen=True, repr=False, kw_only=True)
class Subject:
    """Something that laws are tried on, with samples."""

    seed: int
    n: int
    """The number of samples; 0 if that is not known."""
    samples: tuple[int, ...] = ()
    """The places of these in the caller's batch."""
    rtol: float | None = None
    """The relative error that is tolerated; rounding unless given."""
    floor = 0.0
    """A size that is small beside its results, so that rounding is all there is in it."""

    def of_samples(self, samples: Sequence[int], **changed: Any) -> Any:
        """The same with what has changed for some of the samples."""
        return replace(self, n=len(samples), samples=tuple(self.samples[n] for n in samples), **changed)


def coarsest(given: Any) -> torch.dtype:
    """The dtype of fewest digits in a tree."""
    floats = [x.dtype for x in tree.tensors(given) if x.is_floating_point()]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


SEARCHED, LEAST_SECONDS = 200, 5.0
"""The number of parts of a batch that are tried for a smallest case, and the least time."""
ROUNDINGS = 8
"""The factor between the rounding of a result and that of its loop: its terms come in another order."""


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
    """The outcome of one law."""

    law: Law
    tried: list[str] = field(default_factory=list)
    error: float = 0.0
    seconds: float = 0.0
    why_not: str = ""
    """The reason why it does not apply."""
    refused: dict[str, str] = field(default_factory=dict)
    """The errors of this library, by what they are said of."""
    inapplicable: dict[str, str] = field(default_factory=dict)
    """The reason why it does not apply to some: torch cannot do it alone, or it is not said of them."""
    left: int = 0
    """Claims for which there was no time."""
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Adds the outcome on another subject."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InvFuncWarning)  # about statistics that nobody asked for
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
    allowed = subject.rtol or tolerance(subject.dtype, claim.terms)
    largest = difference(found, expected, subject.floor)
    if largest.error > allowed and not subject.rtol:
        allowed = max(allowed, ROUNDINGS * _rounding(law, claim, subject, expected))
    return largest if largest.error <= allowed else Failure(claim.of, largest, allowed)


def _rounding(law: Law, claim: Claim, subject: Any, expected: Any) -> float:
    """The distance of what is expected from that in float64: a function may make much of the rounding of few terms."""
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
    """The fewest samples, up to three, for which the same claim of a law fails, and how; else all."""
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

    for size in range(1, min(4, subject.n)):
        for samples in islice(combinations(range(subject.n), size), SEARCHED):
            if time.perf_counter() > deadline:
                break
            if (found := fails(samples)) is not None:
                return found
    return subject, failure


WIDTH, SHOWN, REFUSED = 120, 2, 6
"""Of a line, how many statistics are named in that of a law, and in that of an error."""


@dataclass(frozen=True, repr=False)
class Table:
    """The outcomes of the laws; `print` it, or look into `outcomes`."""

    title: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> list[Outcome]:
        """The laws that do not hold."""
        return [outcome for outcome in self.outcomes if outcome.failures]

    @property
    def refused(self) -> dict[str, str]:
        """The refusals of this library in any law, with their errors."""
        return {of: error for outcome in self.outcomes for of, error in outcome.refused.items()}

    @property
    def summary(self) -> str:
        """A line that says how many laws hold, and how many are left."""
        states = Counter(outcome.state for outcome in self.outcomes)
        parts = [f"{count} {'hold' if state == 'holds' else state}" for state, count in states.items()]
        checked, refused = (sum(len(of(o)) for o in self.outcomes) for of in (lambda o: o.tried, lambda o: o.refused))
        told = f"{len(self.outcomes)} laws: {', '.join(parts)}; {checked} claims checked, {refused} refused"
        return f"{told}: NEARLY ALL IS REFUSED" if refused > 4 * checked else told

    def __str__(self) -> str:
        names = max((len(outcome.law.name) for outcome in self.outcomes), default=0)
        lines = [self.title, f"{'law':<{names}}  {'':<14}  {'error':>7}  {'seconds':>7}  tried on"]
        for outcome in self.outcomes:
            error = f"{outcome.error:.0e}" if outcome.tried and not outcome.failures else ""
            head = f"{outcome.law.name:<{names}}  {outcome.state:<14}  {error:>7}  {outcome.seconds:>7.2f}  "
            lines += _wrapped(head, _told(outcome))
        lines += [self.summary]
        for error, ofs in _by_error(self.refused).items():
            lines += _wrapped("refused: ", f"{_shortened(ofs, REFUSED)}: {error}")
        return "\n".join(lines)

    __repr__ = __str__


def _told(outcome: Outcome) -> str:
    parts = [_shortened(outcome.tried)] if outcome.tried else []
    parts += [outcome.why_not] if outcome.why_not else []
    parts += [f"refused: {_shortened(outcome.refused)}"] if outcome.refused else []
    parts += [f"not of {_shortened(ofs)}: {why}" for why, ofs in _by_error(outcome.inapplicable).items()]
    parts += [f"not tried, for want of time: {outcome.left} more"] if outcome.left else []
    return "; ".join(parts)


def _shortened(names: Iterable[str], shown: int = SHOWN) -> str:
    """The first of the names, and how many more there are."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - shown} more" if len(different) > shown else ""
    return ", ".join(different[:shown]) + more


def _by_error(told: dict[str, str]) -> dict[str, list[str]]:
    """Statistics by their errors, without the call that it names, shortened to what a line or two can hold."""
    found: dict[str, list[str]] = {}
    for of, error in told.items():
        found.setdefault(textwrap.shorten(cause(error), 3 * WIDTH), []).append(of)
    return found


def cause(error: str) -> str:
    """An error of this library without the call that it begins with."""
    return error.partition("): ")[2] or error


def _wrapped(head: str, text: str) -> list[str]:
    indent = " " * min(len(head), WIDTH // 2)
    options = {"width": WIDTH, "subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    return [head.rstrip()] if not text else textwrap.wrap(head + text, drop_whitespace=True, **options)


def chosen(call: str, subject: str, only: Iterable[str] | str | None) -> list[Law]:
    """The laws of a subject, or those of these names."""
    own = {name: law for name, law in LAWS.items() if subject in law.subjects}
    if only is None:
        return list(own.values())
    names = [only] if isinstance(only, str) else list(only)
    known, unknown = ", ".join(map(repr, own)), [name for name in names if name not in own]
    if unknown:
        raise ArgumentError(f"{call}(..., only={names}): there is no law {unknown[0]!r}; the names are {known}.")
    if not names:
        raise ArgumentError(f"{call}(..., only=[]): leave `only` out for all laws, or name some: {known}.")
    return [law for name, law in own.items() if name in names]


Again = Callable[[str, list[int]], str]
"""The call by which a law is seen to fail for some samples."""


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
    """The text of a call, with the options that are not what they are by themselves."""
    shown = "".join(f", {key}={value}" for key, value in options.items())

    def again(law: str, samples: list[int]) -> str:
        few = f", samples={samples}" if samples else ""
        return f"{name}({called}{shown}, only={law!r}{few}, seed={seed})"

    return again
