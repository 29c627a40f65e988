"""Which entries are looked at: some evenly, which a promise rests on, and some by size, where a fault costs most."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from invfunc._torch.generators import set_states, state_of

T = TypeVar("T")
States = list[tuple[torch.Generator, torch.Tensor]]


def needed(confidence: float, share: float) -> int:
    """How many entries find a fault in a `share` of them with this confidence: `(1 - share)^k <= 1 - confidence`."""
    k = math.log1p(-confidence) / math.log1p(-share) - 1e-9
    return math.ceil(min(k, sys.maxsize))


@dataclass(frozen=True)
class Places:
    """Entries of a list of tensors: those of each one, as places in it when it is flat."""

    of: list[torch.Tensor]

    def __len__(self) -> int:
        return sum(map(len, self.of))


@dataclass
class Tape:
    """What is drawn by a seed, in order: the same again, whatever it would depend on, from a tape that was kept."""

    generator: torch.Generator
    kept: list = field(default_factory=list)
    at: int = 0

    def draw(self, draw: Callable[[torch.Generator], T]) -> T:
        """The next draw."""
        if self.at == len(self.kept):
            self.kept.append(draw(self.generator))
        self.at += 1
        return self.kept[self.at - 1]

    def again(self) -> Tape:
        """The tape from its beginning."""
        return Tape(self.generator, self.kept)


def drawn(sizes: Sequence[torch.Tensor], k: int, generator: torch.Generator) -> Places:
    """k entries evenly and k by size, from the sizes of all entries of each tensor; all of them where there are few."""
    flat = [x.detach().flatten().cpu() for x in sizes]
    counts = [x.numel() for x in flat]
    if sum(counts) <= k:
        return Places([torch.arange(n) for n in counts])
    found = [*_evenly(counts, k, generator), *_by_size(flat, k, generator)]
    of = [[place for i, place in found if i == leaf] for leaf in range(len(flat))]
    return Places([torch.tensor(sorted(set(places)), dtype=torch.int64) for places in of])


def _evenly(counts: Sequence[int], k: int, generator: torch.Generator) -> list[tuple[int, int]]:
    ends = torch.tensor(counts).cumsum(0)
    places = torch.randint(int(ends[-1]), (k,), generator=generator)
    leaves = torch.searchsorted(ends, places, right=True)
    starts = ends - torch.tensor(counts)
    return list(zip(leaves.tolist(), (places - starts[leaves]).tolist(), strict=True))


def _by_size(flat: Sequence[torch.Tensor], k: int, generator: torch.Generator) -> list[tuple[int, int]]:
    ends = [x.double().abs().nan_to_num(0, 0, 0).cumsum(0) for x in flat]
    totals = torch.stack([e[-1] if len(e) else e.new_zeros(()) for e in ends]).cumsum(0)
    if not totals[-1] > 0:
        return []
    found = []
    for at in (torch.rand(k, generator=generator, dtype=torch.float64) * totals[-1]).tolist():
        leaf = min(int(torch.searchsorted(totals, at, right=True)), len(flat) - 1)
        rest = at - (float(totals[leaf - 1]) if leaf else 0.0)
        found.append((leaf, min(int(torch.searchsorted(ends[leaf], rest, right=True)), len(flat[leaf]) - 1)))
    return found


def states(*others: torch.Generator) -> States:
    """The states of the generators that f may draw from, and of some more."""
    generators = [torch.default_generator, *others]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += list(torch.cuda.default_generators)
    return [(g, state_of(g)) for g in generators]


def rewound(before: States) -> None:
    """Set generators to states that they had."""
    set_states(before)
