"""What is looked at: numbers of a result at drawn entries, and the same ones by another path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.certificates.draws import Places, Tape, drawn
from invfunc.certificates.reference import Reference, wide
from invfunc.recording.problem import Problem
from invfunc.statistic import Statistic

Tensors = list[torch.Tensor]
Size = float | Callable[[], float]


@dataclass
class Look:
    """Numbers of a result, along axis 0 those of one entry each, which stand beside `expected(other path)`."""

    found: torch.Tensor
    expected: Callable[[Any], torch.Tensor]
    called: Callable[[int], str]
    """What the entry of a place along axis 0 is called."""
    dtype: torch.dtype
    terms: int
    """How many numbers are added up in one."""
    size: Callable[[], float]
    """The size of these, where they may cancel; known once there is what is expected."""


def entry(name: str, shape: Sequence[int], place: int) -> str:
    """What an entry of a tensor of this name is called."""
    at = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), tuple(shape)))
    return name + (f"[{at}]" if at else "")


@dataclass
class Member:
    """One statistic with its result, and what is drawn of it."""

    t: Statistic
    problem: Problem
    result: Any
    k: int
    tape: Tape
    largest: float = 0.0
    """The largest square of a share that was met, where they cancel."""

    @property
    def chosen(self) -> torch.Tensor:
        """The samples of the result, as places in the batch."""
        n, chosen = self.problem.n, self.problem.samples
        return torch.arange(n) if chosen is None else torch.tensor(chosen)

    def leaves(self, result: Any) -> Tensors:
        return tree.flatten(result, none_is_leaf=False)[0]

    def drawn(self, trees: Sequence[Tensors]) -> Places:
        """Entries of the parameters, by the size of what the results have there."""
        sizes = []
        for i, p in enumerate(self.problem.leaves):
            parts = [wide(leaves[i]).abs().reshape(-1, p.numel()).sum(0) for leaves in trees]
            sizes.append(torch.stack([x / (x.sum() or 1) for x in parts]).sum(0) * max(float(x.sum()) for x in parts))
        return self.tape.draw(lambda generator: drawn(sizes, self.k, generator))

    def rows(self, sizes: torch.Tensor) -> torch.Tensor:
        """Rows of a result that is of samples, by their size."""
        return self.tape.draw(lambda generator: drawn([sizes], self.k, generator)).of[0]

    def entry(self, leaf: int, place: int) -> str:
        """What an entry of a parameter is called."""
        return entry(self.problem.name(leaf), self.problem.leaves[leaf].shape, place)

    def look(self, found: torch.Tensor, expected: Callable, called: Callable, terms: int = 1, size: Size = 0.0) -> Look:
        dtype = max((p.dtype for p in self.problem.leaves), key=lambda d: torch.finfo(d).eps)
        sized = size if callable(size) else partial(float, size)
        return Look(wide(found), expected, called, dtype, max(1, terms) * self.problem.n, sized)

    def at_entries(self, trees: Sequence[Tensors], numbers: Numbers, size: Size = 0.0) -> Iterator[Look]:
        """The leaves `[*lead, *p]` of some trees at drawn entries, beside `[K, *lead]` for each of the trees."""
        places = self.drawn(trees)
        for i, at in enumerate(places.of):
            if not len(at):
                continue
            computed = Remembered(numbers, i, at)
            for k, leaves in enumerate(trees):
                x, count = leaves[i], self.problem.leaves[i].numel()
                found = wide(x).reshape(*x.shape[: x.ndim - self.problem.leaves[i].ndim], count)[..., at].movedim(-1, 0)
                yield self.look(
                    found,
                    lambda r, c=computed, k=k: c(r)[k],
                    lambda j, i=i, at=at: self.entry(i, int(at[j])),
                    size=size,
                )


Numbers = Callable[[Reference, int, torch.Tensor], Tensors]
"""From a leaf and places in it to the numbers `[K, ...]` of each tree of results."""


class Remembered:
    """The numbers of all trees at the places of a leaf, computed once for each reference, in parts that fit."""

    def __init__(self, numbers: Numbers, leaf: int, places: torch.Tensor) -> None:
        self.numbers, self.leaf, self.places = numbers, leaf, places
        self.last: tuple[Reference, Tensors] | None = None

    def __call__(self, r: Reference) -> Tensors:
        if self.last is None or self.last[0] is not r:
            parts = [self.numbers(r, self.leaf, part) for part in r.parts(self.leaf, self.places)]
            self.last = r, [torch.cat(list(x)) for x in zip(*parts, strict=True)]
        return self.last[1]
