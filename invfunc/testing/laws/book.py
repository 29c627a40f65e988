"""All laws, by their names; those of one subject in the order in which they are tried: the cheap and telling first."""

from __future__ import annotations

from collections.abc import Iterable

from invfunc.errors import ArgumentError
from invfunc.testing.laws import (
    derivatives,
    effects,
    mapped,
    mixing,
    operations,
    pairs,
    products,
    statistics,
    surroundings,
    transforms,
)
from invfunc.testing.laws.law import Law

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        statistics.shares_sum,
        mixing.apart,
        statistics.first_order,
        statistics.ggn,
        statistics.hessian,
        statistics.agreement,
        products.of_matrices,
        products.jacobians,
        products.factors,
        statistics.order,
        statistics.samples,
        statistics.several,
        effects.arguments,
        effects.memory,
        effects.random_numbers,
        effects.life,
        surroundings.modes,
        statistics.generic,
        statistics.blocks,
        statistics.chunks,
        statistics.nested_chunks,
        derivatives.differentiated,
        mapped.batched,
        derivatives.jacobian,
        derivatives.forward,
        derivatives.of_chunks,
        derivatives.differentiated_in_data,
        mapped.batched_in_data,
        mapped.batched_slopes,
        surroundings.closed_over,
        derivatives.differentiated_twice,
        derivatives.of_hessian,
        pairs.restores,
        pairs.values,
        pairs.first,
        pairs.composed,
        pairs.volume,
        pairs.arguments,
        pairs.states,
        pairs.life,
        transforms.equals,
        transforms.differentiated,
        transforms.batched,
        transforms.passes,
        transforms.effects,
        operations.apart,
        operations.effects,
        operations.rules,
        operations.linear,
        operations.differentiated,
        operations.single,
    )
}


def chosen(call: str, subject: str, only: Iterable[str] | str | None) -> list[Law]:
    """The laws of a subject, or those of these names."""
    own = {name: law for name, law in LAWS.items() if law.subject == subject}
    if only is None:
        return list(own.values())
    names = [only] if isinstance(only, str) else list(only)
    known, unknown = ", ".join(map(repr, own)), [name for name in names if name not in own]
    if unknown:
        raise ArgumentError(f"{call}(..., only={names}): there is no law {unknown[0]!r}; the names are {known}.")
    if not names:
        raise ArgumentError(f"{call}(..., only=[]): leave `only` out for all laws, or name some: {known}.")
    return [law for name, law in own.items() if name in names]
