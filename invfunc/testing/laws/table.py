"""What `check` returns and prints: a line for each law."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from invfunc.testing.laws.run import Outcome

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
        """What this library refused in any law, with its error."""
        return {of: error for outcome in self.outcomes for of, error in outcome.refused.items()}

    @property
    def summary(self) -> str:
        """How many laws hold, and how many are left."""
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
            lines += _wrapped("refused: ", f"{_few(ofs, REFUSED)}: {error}")
        return "\n".join(lines)

    __repr__ = __str__


def _told(outcome: Outcome) -> str:
    parts = [_few(outcome.tried)] if outcome.tried else []
    parts += [outcome.why_not] if outcome.why_not else []
    parts += [f"refused: {_few(outcome.refused)}"] if outcome.refused else []
    parts += [f"not of {_few(ofs)}: {why}" for why, ofs in _by_error(outcome.inapplicable).items()]
    parts += [f"not tried, for want of time: {outcome.left} more"] if outcome.left else []
    return "; ".join(parts)


def _few(names: Iterable[str], shown: int = SHOWN) -> str:
    """The first of the names, and how many more there are."""
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - shown} more" if len(different) > shown else ""
    return ", ".join(different[:shown]) + more


def _by_error(told: dict[str, str]) -> dict[str, list[str]]:
    """Those of one error together, without the call that it names, shortened to what a line or two can hold."""
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
