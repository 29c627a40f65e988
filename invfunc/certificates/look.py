"""What is looked at: numbers of a result at drawn entries, and the same ones by another path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc.arguments.problem import Problem
from invfunc.certificates.draws import Places, Tape, drawn
from invfunc.certificates.reference import Reference
from invfunc.certificates.rounding import Numbers, Tensors
from invfunc.certificates.run import wide
from invfunc.statistic import Statistic


@dataclass
class Look:
    """Numbers of a result, along axis 0 those of one entry each, which stand beside `expected(other path)`."""

    found: torch.Tensor
    expected: Callable[[Any], Numbers]
    called: Callable[..., str]
    """What the number at an index is called."""
    dtype: torch.dtype
    other: str = "by derivatives along single entries"
    """How the same numbers are had."""


def entry(name: str, shape: Sequence[int], place: int) -> str:
    """What an entry of a tensor of this name is called."""
    at = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), tuple(shape)))
    return name + (f"[{at}]" if at else "")


def at_places(x: torch.Tensor, p: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A result `[*lead, *p]` at entries of the parameter p: `[K, *lead]`."""
    lead = x.shape[: x.ndim - p.ndim]
    return wide(x).reshape(*lead, p.numel())[..., places].movedim(-1, 0)


def magnitudes(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """How large a result `[*lead, *p]` is at each entry of the parameter p, without numbers that are not finite."""
    return wide(x).abs().nan_to_num(0, 0, 0).reshape(x.shape[: x.ndim - p.ndim].numel(), p.numel()).sum(0)


@dataclass
class Member:
    """One statistic with its result, and what is drawn of it."""

    t: Statistic
    problem: Problem
    result: Any
    k: int
    tape: Tape
    of: str = ""
    """What is said behind the names of its numbers."""

    @property
    def dtype(self) -> torch.dtype:
        """The least precise of the parameters."""
        return max((p.dtype for p in self.problem.leaves), key=lambda d: torch.finfo(d).eps)

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
            parts = [magnitudes(leaves[i], p) for leaves in trees]
            sizes.append(torch.stack([x / (x.sum() or 1) for x in parts]).sum(0) * max(float(x.sum()) for x in parts))
        return self.tape.draw(lambda generator: drawn(sizes, self.k, generator))

    def rows(self, sizes: torch.Tensor) -> torch.Tensor:
        """Rows of a result that is of samples, by their size."""
        return self.tape.draw(lambda generator: drawn([sizes], self.k, generator)).of[0]

    def entry(self, leaf: int, place: int) -> str:
        """What an entry of a parameter is called."""
        return entry(self.problem.name(leaf), self.problem.leaves[leaf].shape, place)

    def sample(self, *at: int) -> str:
        """Whose number it is, by its index behind the entry: of a sample, and of which of its outputs."""
        if not at:
            return ""
        output = f", output {', '.join(map(str, at[1:]))}" if at[1:] else ""
        return f" of sample {int(self.chosen[at[0]])}{output}"

    def look(self, found: torch.Tensor, expected: Callable[[Reference], Numbers], called: Callable[..., str]) -> Look:
        return Look(wide(found), expected, lambda *at: called(*at) + self.of, self.dtype)

    def at_entries(self, trees: Sequence[Tensors], numbers: AtEntries) -> Iterator[Look]:
        """The leaves `[*lead, *p]` of some trees at drawn entries, beside `[K, *lead]` for each of the trees."""
        places = self.drawn(trees)
        for i, (p, at) in enumerate(zip(self.problem.leaves, places.of, strict=True)):
            if not len(at):
                continue
            computed = Remembered(lambda r, i=i, at=at: _joined(numbers(r, i, part) for part in r.in_parts(at)))
            for k, leaves in enumerate(trees):
                yield self.look(
                    at_places(leaves[i], p, at),
                    lambda r, c=computed, k=k: c(r)[k],
                    lambda j, *more, i=i, at=at: self.entry(i, int(at[j])) + self.sample(*more),
                )


AtEntries = Callable[[Reference, int, torch.Tensor], list[Numbers]]
"""From a leaf and places in it to the numbers `[K, ...]` of each tree of results."""


def _joined(parts: Iterator[list[Numbers]]) -> list[Numbers]:
    """The numbers of each tree, from parts of the entries."""
    return [(torch.cat([x for x, _ in of]), max(size for _, size in of)) for of in zip(*parts, strict=True)]


class Remembered:
    """Numbers of several looks, computed once for each reference."""

    def __init__(self, numbers: Callable[[Reference], list[Numbers]]) -> None:
        self.numbers, self.last = numbers, (None, [])

    def __call__(self, r: Reference) -> list[Numbers]:
        if self.last[0] is not r:
            self.last = r, self.numbers(r)
        return self.last[1]
