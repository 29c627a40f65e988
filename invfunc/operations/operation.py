"""One entry for each operation of torch, with all that is known of it.

The files of families beside this one fill the entries in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Rule = Callable[..., Any]


@dataclass(frozen=True)
class OperationFacts:
    """Facts about an operation."""

    composed: Rule | None = None
    """The operations that it is composed of, where samples are followed in those: takes its arguments."""
    twice: Rule | None = None
    """A form whose second derivative is right, where torch's is missing or wrong: takes torch's function and its
    arguments. It is not used where only first derivatives are taken."""
    only_nn: bool = False
    """Whether these take the arguments of the function of torch.nn.functional, and not of another one of that name."""
    predictive: Literal["signs", "normal", "bernoulli"] = "signs"
    """What targets are drawn from if its second derivative is diagonal, and the variance of the slopes there: a normal
    distribution, 0 and 1 with its first argument as logits, or random signs, which serve all."""
    cornered: bool = False
    """Whether its second derivative is the outcome of a comparison, so that torch's is 0 at NaN."""
    asks: Literal["no", "form", "memory"] = "no"
    """Whether it only asks something about a tensor, other than its values: about its form, or its memory."""
    reads: Literal["all", "first", "none"] = "all"
    """Of which tensors among its arguments it reads the values, and not only the shape."""
    writes_if: tuple[str, Sequence[str]] | None = None
    """The name of an argument that says whether it writes to others, though its schema does not say so; and theirs."""
    keeps: bool = False
    """Whether its form in place writes no values."""
    differentiates: bool = False
    """Whether it takes derivatives of its first argument."""


OPERATIONS: dict[str, OperationFacts] = {}
_PLAIN = OperationFacts()


def define(names: str | Iterable[str], **facts: Any) -> None:
    """Add facts to the entries of operations, by the names of torch's functions or of aten's operations."""
    for name in names.split() if isinstance(names, str) else names:
        entry = OPERATIONS.get(name, _PLAIN)
        known = [fact for fact in facts if getattr(entry, fact) != getattr(_PLAIN, fact)]
        if known:
            raise ValueError(f"`{name}`: {known[0]} is stated twice.")
        OPERATIONS[name] = replace(entry, **facts)


def known(name: str) -> OperationFacts:
    """The facts about an operation, by its name."""
    return OPERATIONS.get(name, _PLAIN)


def not_torchs(form: Rule) -> Rule:
    """The entries of `twice` for a form that does not call torch's function."""
    return lambda func, *args, **kwargs: form(*args, **kwargs)
