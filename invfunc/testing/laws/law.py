"""What a law is: a name, a formula, and what it claims of a function, a pair, a transform or an operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Claim(NamedTuple):
    """That two trees are equal up to rounding; what is no tensor in them has to be the same."""

    of: str
    """What it is said of, such as a statistic."""
    found: Callable[[], Any]
    expected: Callable[[], Any]
    """Evaluated first: where torch cannot do it, the law does not apply."""
    terms: int = 1
    """About how many numbers are added up for an entry, for the tolerance."""
    dtype: torch.dtype | None = None
    """Whose rounding is tolerated; that of the subject unless given."""
    nearby: Callable[[], Any] | None = None
    """What is expected at other parameters, which tells its size where all cancels at these."""


@dataclass(frozen=True)
class Law:
    """A law by its name; `claims(subject)` lists what is to be compared, `when(subject)` says why it does not apply."""

    name: str
    statement: str
    subject: str
    claims: Callable[[Any], Iterable[Claim]]
    when: Callable[[Any], str]
    of_f: bool = False
    """Whether it is a law of f alone, with nothing of this library in it."""

    def __repr__(self) -> str:
        return f"Law({self.name!r})"


class Inapplicable(Exception):
    """Raised where a claim does not apply, with the reason."""


FUNCTION, PAIR, TRANSFORM, OPERATION = "a function", "a pair", "a transform", "an operation"


def always(subject: Any) -> str:
    """For a law that always applies."""
    return ""


def law(
    name: str, subject: str = FUNCTION, when: Callable[[Any], str] = always, of_f: bool = False
) -> Callable[[Callable[[Any], Iterable[Claim]]], Law]:
    """Make a function `subject -> claims` a law, whose statement is its docstring."""

    def made(claims: Callable[[Any], Iterable[Claim]]) -> Law:
        return Law(name, (claims.__doc__ or "").strip(), subject, claims, when, of_f)

    return made
