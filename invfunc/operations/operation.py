"""One entry for each operation of torch, with all that is known of it.

The files of families beside this one (`views`, `products`, `norms` ...) fill the entries in, each of them in one place.
What an entry leaves out is right and slow, or an error. Operations of aten that only torch itself calls have entries of
their own. What torch's own tags say stands for what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import torch

from invfunc.operations.naming import argument, function_name

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """What is known of an operation."""

    batch_axis: Rule | None = None
    """From a `Call` to where the samples are in its result (`batch_axis.propagation`)."""
    equation: Rule | None = None
    """From its arguments to their `Equation`."""
    factor: Rule | None = None
    """From a `Site` and a parameter that it reads there to the `Recipe` of its share."""
    receptive_field: Rule | None = None
    """From a `Step` of aten's operation to what the entries of its result depend on."""
    entries: Rule | None = None
    """From a `Call` that sums over the samples to what each of them adds to the sum, `[N, *sum]`, or None."""
    instead: Rule | None = None
    """From a `Call` that is to be made, the parameters that it reads by their ids, and what each sample adds to a sum
    over the samples (where that is known), to what is run in its place, or None."""
    composed: Rule | None = None
    """The operations that it is composed of, where it is better followed in those, as its own derivative is fragile or
    its insides move the samples: takes its arguments."""
    composed_if: Rule | None = None
    """From its name to whether it is followed in those now; None: always."""
    at_once: Rule | None = None
    """From a `Call` that is to be made and the parameters that it reads by their ids to what is followed in place of
    `composed` where only first derivatives are taken, or None."""
    twice: Rule | None = None
    """A form whose second derivative is right, where torch's is missing or wrong: takes torch's function and its
    arguments. It is not used where only first derivatives are taken."""
    once: Rule | None = None
    """A form whose first derivative is right, where torch's is wrong: takes torch's function and its arguments."""
    only_nn: bool = False
    """Whether `composed`, `twice` and `once` take the arguments of the function of torch.nn.functional, and not of
    another one of that name."""
    linear: Literal["no", "all", "each"] | int = "no"
    """In which of the floating-point tensors that it reads it is linear, up to a constant: in all of them at once, in
    each of them while the others are fixed, or in so many of the first ones at once."""
    piecewise: bool = False
    """Whether it is linear only piece by piece."""
    unless: str = ""
    """The name of an argument with which it is not linear."""
    added: Sequence[str] = ()
    """The names of the arguments that it adds to a product of the others, if it is linear in each of these."""
    biased: bool = False
    """Whether it adds its argument `bias` to a product with its argument `weight`, of d dimensions, along the last
    dimension of the result but d - 2."""
    loss: Literal["no", "convex", "logarithm", "of logarithm"] = "no"
    """What it is to a model whose outputs are its first argument: a loss that is convex in them, the logarithm of
    likelihoods, or a loss that is linear in such a logarithm."""
    hessian: Literal["unknown", "elementwise", "softmax", "log_softmax"] = "unknown"
    """The structure of its second derivative in its first argument: diagonal, or `k (diag p - p p^T)` over the classes
    with p their softmax; k is the weight of a target of a cross entropy, or minus the sum of its slopes."""
    predictive: Literal["signs", "normal", "bernoulli"] = "signs"
    """What targets are drawn from if its second derivative is diagonal, and the variance of the slopes there: a normal
    distribution, 0 and 1 with its first argument as logits, or random signs, which serve all."""
    cornered: bool = False
    """Whether its second derivative is the outcome of a comparison, so that torch's is 0 at NaN."""
    picks: Literal["no", "any", "once"] = "no"
    """Whether each entry of the result is one of the first floating-point argument, and whether none is there twice."""
    places: Literal["no", "reads", "writes"] = "no"
    """Whether it reads what belongs to single samples from some places (or joins such tensors), or writes it there."""
    rows_only: bool = False
    """Whether it reads its first argument only where its indices say."""
    counts: bool = False
    """Whether it writes what is not of samples in places that it counts over the whole batch."""
    permutes: bool = False
    """Whether it can bring the samples of data into another order."""
    paired: Rule | None = None
    """From its arguments, one of samples, their dimension there and a parameter to the dimension of the parameter whose
    entries belong to these samples, or None; an equation tells it too."""
    asks: Literal["no", "form", "memory"] = "no"
    """Whether it only asks something about a tensor, other than its values: about its form, or its memory."""
    reads: Literal["all", "first", "none"] = "all"
    """Of which tensors among its arguments it reads the values, and not only the shape."""
    fills: bool = False
    """Whether it writes all of its first argument, and does not read it."""
    writes_if: tuple[str, Sequence[str]] | None = None
    """The name of an argument that says whether it writes to others, though its schema does not say so; and theirs."""
    aside: bool = False
    """Whether its result does not depend on what it writes to so."""
    keeps: bool = False
    """Whether its form in place writes no values."""
    constant: bool = False
    """Whether its result has no derivative."""
    elsewhere: Rule | None = None
    """From its arguments to those of its results that are computed before it is called; they depend on all it reads."""
    differentiates: bool = False
    """Whether it takes derivatives of its first argument."""
    registers: bool = False
    """Whether it registers something for the backward pass, and reads no values."""
    exits: bool = False
    """Whether it hands the memory of a tensor to another one, which is not followed."""
    draws: bool | Rule = False
    """Whether it draws random numbers; or from torch's function and its arguments to whether it does."""


OPERATIONS: dict[str, Operation] = {}
_TAGGED: dict[torch.Tag, Operation] = {}
_PLAIN = Operation()


def define(names: str | Iterable[str], **facts: Any) -> None:
    """Add facts to the entries of operations, by the names of torch's functions or of aten's operations."""
    for name in names.split() if isinstance(names, str) else names:
        entry = OPERATIONS.get(name, _PLAIN)
        known = [fact for fact in facts if getattr(entry, fact) != getattr(_PLAIN, fact)]
        if known:
            raise ValueError(f"`{name}`: {known[0]} is stated twice.")
        OPERATIONS[name] = replace(entry, **facts)


def define_tagged(tag: torch.Tag, **facts: Any) -> None:
    """Facts of all operations with one of torch's tags, where their own entries leave them out."""
    _TAGGED[tag] = Operation(**facts)


@cache
def known(name: str) -> Operation:
    """What is known of an operation, by its name."""
    return _completed(OPERATIONS.get(name, _PLAIN), _tags(name.removeprefix("special_")))


@cache
def known_of_aten(name: str, *tags: torch.Tag) -> Operation:
    """What is known of an operation of aten, by its name and its own tags."""
    entry = OPERATIONS.get(name) or OPERATIONS.get(name.rstrip("_"), _PLAIN)
    return _completed(entry, tags)


def _tags(name: str) -> set[torch.Tag]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return set()
    return {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}


def _completed(entry: Operation, tags: Iterable[torch.Tag]) -> Operation:
    """An entry with what tags say of its operation in the place of what it leaves out."""
    for facts in (_TAGGED[tag] for tag in tags if tag in _TAGGED):
        for fact in (field.name for field in fields(Operation)):
            if getattr(entry, fact) == getattr(_PLAIN, fact) != getattr(facts, fact):
                entry = replace(entry, **{fact: getattr(facts, fact)})
    return entry


def linear(
    func: Rule, args: tuple, kwargs: dict[str, Any], read: Sequence[torch.Tensor], among: Sequence[torch.Tensor]
) -> bool:
    """Whether a call is linear, perhaps piece by piece, in some of the tensors that it reads, all at once."""
    op = known(function_name(func))
    if op.unless and argument(func, args, kwargs, op.unless):
        return False
    if op.linear == "all":
        return True
    many = sum(x is y for x in among for y in read)
    if op.linear == "each":
        return many <= 1
    if op.linear == "no":
        return False
    leading = args[: op.linear] or (kwargs.get("input"),)
    return many == len(among) and all(any(x is y for y in leading) for x in among)


def not_torchs(form: Rule) -> Rule:
    """What `twice` states, of a form that does not call torch's function."""
    return lambda func, *args, **kwargs: form(*args, **kwargs)
