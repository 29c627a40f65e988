"""The terms of the share of an operation, and what their labels count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from invfunc.linear_algebra.contract import Term, squeezed
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import length


class Labels(NamedTuple):
    """What the labels of a factor count, besides columns and samples."""

    shared: list[str]
    """Blocks of the parameter, each with factors of its own."""
    entries: list[str]
    """The entries of the factor."""
    positions: list[str]


@dataclass(frozen=True)
class Terms:
    """What an operation sends back, and what it is multiplied with: what the operation read."""

    sent: Term
    read: list[Term]
    sizes: dict[str, int]
    """How many entries of the parameter the labels count that count any, in their order."""
    lead: tuple[int, int]
    """How many columns and samples there are."""
    contracted: bool
    """Whether a dimension of the parameter, of one entry or more, is summed over with what was read."""

    @classmethod
    def of(cls, terms: list[Term], output: str, lead: tuple[int, int]) -> Terms:
        sizes = {c: n for labels, x in terms for c, n in zip(labels, x.shape, strict=True) if n != 1}
        contracted = not set(output) <= set(terms[0][0])
        sent, *read = squeezed(terms)
        return cls(sent, read, {c: sizes[c] for c in output if c in sizes}, lead, contracted)

    @property
    def all(self) -> list[Term]:
        return [self.sent, *self.read]

    @property
    def outs(self) -> list[str]:
        """The labels of the entries that what is sent back has."""
        return [c for c in self.sizes if c in self.sent[0]]

    @property
    def ins(self) -> list[str]:
        """The labels of the entries that only what was read has."""
        return [c for c in self.sizes if c not in self.sent[0]]

    @property
    def both(self) -> list[str]:
        return [c for c in self.outs if self._read(c)]

    @property
    def positions(self) -> list[str]:
        """Those that count no entries, in what is sent back."""
        return [c for c in self.sent[0] if c not in "VN" and c not in self.sizes]

    def factors(self) -> tuple[Labels, Labels]:
        """What is sent back and what was read, as factors of the parameter; what one alone has is summed first."""
        outs, positions = [c for c in self.outs if c not in self.both], [c for c in self.positions if self._read(c)]
        return Labels(self.both, outs, positions), Labels(self.both, self.ins, positions)

    def entry_by_entry(self, dims: int) -> bool:
        """Whether the entries of a parameter with some dims are scaled or added, each by itself."""
        scaled = bool(self.both) and not self.contracted
        return not self.ins and (scaled or not self.read or (not self.outs and dims < 2))

    def _read(self, label: str) -> bool:
        return any(label in labels for labels, _ in self.read)


def sizes_of(terms: list[Term]) -> dict[str, int]:
    """How many values each label has."""
    return {c: n for labels, x in terms for c, n in zip(labels, x.shape, strict=True)}


def shape_of(terms: list[Term], output: str, part: Part | None = None) -> list[int]:
    """How many values the labels of an output have, 1 where a dimension of size 1 was dropped; of a block of samples,
    if one is given."""
    sizes = sizes_of(terms) if part is None else {**sizes_of(terms), "N": length(part)}
    return [sizes.get(c, 1) for c in output]
