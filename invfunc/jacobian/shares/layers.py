"""What the operations that read a parameter send back and read, position by position: the operands of K-factors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from invfunc.errors import ArgumentError
from invfunc.jacobian.contract import Term, contract, present, squeezed, widened
from invfunc.jacobian.follow import Call
from invfunc.jacobian.rules import Part, Recipe
from invfunc.jacobian.shares.pulled import Deltas
from invfunc.jacobian.shares.shares import Shares
from invfunc.jacobian.trace.tags import Tap


@dataclass
class Place:
    """Where the entries of a factor lie in the parameter: over which dims, and where among theirs."""

    dims: tuple[int, ...]
    size: int
    at: torch.Tensor | None = None
    """Places among the entries of the dims; None for all in their order."""

    def spread(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Entries of the factor along a dim as entries of the dims."""
        if self.at is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.size
        return x.new_zeros(shape).index_add(dim, self.at, x)


_PART = "it is read in a part that is no product of its dimensions"


@dataclass
class Operands:
    """Of some samples: cotangents `s [V, b, K, R]`, and `a [b, I, R]` (or the rows `picked [b, R]`) that they met."""

    s: torch.Tensor
    a: torch.Tensor | None = None
    picked: torch.Tensor | None = None
    gram: torch.Tensor | None = None
    """`sum_nr a a^T` in place of a."""


@dataclass
class Layer:
    """One operation that reads a parameter: its share is `sum_r s[k, r] a[i, r]`, or `sum_r s[k, r]` without an a."""

    shares: Shares
    tap: Tap
    joint: bool = False
    """Whether a bias is one more input that is always 1."""
    read: bool = True
    """Whether what it reads is wanted, too."""
    places: list[Place] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return self.tap.recipe.factored or self.tap.recipe

    def __post_init__(self) -> None:
        if not self.recipe.linear:
            raise self.refused(f"`{self.called}` is not known to be linear in it")
        if not self.tap.derived.selected:
            raise self.refused("it is read through a computation with parameters")

    @property
    def called(self) -> str:
        return self.tap.call.name if self.tap.call is not None else "f"

    @property
    def covered(self) -> tuple[float, float]:
        """Which part of the parameter it reads: of what is sent back, and of what is read."""
        parts = [(p.size if p.at is None else len(p.at)) / max(1, p.size) for p in self.places]
        return parts[0], parts[1] if len(parts) > 1 else 1.0

    @property
    def flipped(self) -> bool:
        """Whether the dims of what is read come before those of what is sent back."""
        return len(self.places) > 1 and self.places[1].dims < self.places[0].dims

    def operands(self, deltas: Deltas, part: Part) -> Operands:
        delta = deltas[self.tap.site]
        assert delta is not None
        return self.of(delta[:, part], part)

    def products(self, deltas: Deltas, part: Part) -> Operands:
        """The operands, with the sum of the products of what is read in its place where that is cheaper."""
        gram = self.recipe.gram(part) if self.read and not self.joint and self.recipe.gram is not None else None
        if gram is None:
            return self.operands(deltas, part)
        self.look(deltas, part[:1] if isinstance(part, torch.Tensor) else slice(part.start, part.start + 1))
        sent = replace(self, read=False).operands(deltas, part)
        return replace(sent, gram=self.places[1].spread(self.places[1].spread(gram, 0), 1))

    def look(self, deltas: Deltas, part: Part) -> None:
        """Find out where the factors lie in the parameter, from one column of some samples."""
        delta = deltas[self.tap.site]
        assert delta is not None
        self.of(delta[:1, part], part)

    def of(self, delta: torch.Tensor, part: Part) -> Operands:
        """The operands for the cotangents `[V, b, *one]` of some samples."""
        if not self.read and self.recipe.sent is not None and "layer" in self.tap.memory:
            self.places, outs, inner = self.tap.memory["layer"]
            s = self._formed(widened([self.recipe.sent(delta)]), outs, inner, *delta.shape[:2])
            return Operands(self.places[0].spread(s, 2))
        terms = widened(self.recipe.build(delta, part))
        sizes = {c: n for labels, x in terms for c, n in zip(labels, x.shape, strict=True) if n != 1}
        sizes = {c: sizes[c] for c in self.recipe.output if c in sizes}
        first, *others = squeezed(terms)
        v, b, kept = *delta.shape[:2], list(sizes)
        outs = [c for c in kept if c in first[0]]
        ins = [c for c in kept if c not in outs]
        both = [c for c in outs if any(c in labels for labels, _ in others)]
        picks = self.recipe.selects
        if picks is not None:
            inner = [c for c in first[0] if c not in "VN" and c not in outs]
            s = self._formed([first], outs, inner, v, b)
            self._place_rows()
            return Operands(self.places[0].spread(s, 2), picked=picks(part))
        if both and ins:
            raise self.refused(f"`{self.called}` reads it in groups")
        if not ins and (both or not others or (not outs and self.shares.leaf.ndim < 2)):
            terms = [first, *others]
            inner = sorted({c for labels, _ in terms for c in labels} - set("VN") - set(outs))
            self._place([outs], sizes)
            return Operands(self.places[0].spread(self._formed(terms, outs, inner, v, b), 2))
        inner = [c for c in first[0] if c not in "VN" and c not in outs and any(c in labels for labels, _ in others)]
        self._place([outs, ins], sizes)
        self.tap.memory["layer"] = self.places, outs, inner
        s = self._formed([first], outs, inner, v, b)
        a = self._formed([("V" + labels, x.unsqueeze(0)) for labels, x in others], ins, inner, 1, b)[0]
        a = self.places[1].spread(a, 1)
        if self.joint:
            a = torch.cat([a, a.new_ones(b, 1, a.shape[2])], 1)
        return Operands(self.places[0].spread(s, 2), a)

    def _formed(self, terms: list[Term], kept: list[str], inner: list[str], v: int, b: int) -> torch.Tensor:
        """`[V, b, kept, inner]`"""
        sizes = {c: n for labels, x in terms for c, n in zip(labels, x.shape, strict=True)}
        terms = squeezed(terms)
        output = present("".join(["V", "N", *kept, *inner]), terms)
        x = contract(terms, output)
        shape = [math.prod(sizes[c] for c in labels) for labels in (kept, inner)]
        lead = [n if c in output else 1 for c, n in (("V", v), ("N", b))]
        return x.reshape(*lead, *shape).expand(v, b, *shape)

    # Where the labels lie in the parameter

    def _place(self, groups: list[list[str]], sizes: dict[str, int]) -> None:
        if self.places:
            return
        leaf, direct = self.shares.leaf, self.tap.param is self.shares.leaf and self.recipe.finish is None
        found = [(self._directly if direct else self._pulled)(labels, sizes) for labels in groups]
        rest = [d for d in range(leaf.ndim) if not any(d in p.dims for p in found)]
        if any(leaf.shape[d] != 1 for d in rest):
            raise self.refused(_PART)
        for d in rest:  # of one entry: with the factor that is empty so far
            k = next((k for k, p in enumerate(found) if not p.dims), len(found) - 1)
            found[k] = replace(found[k], dims=tuple(sorted((*found[k].dims, d))))
        self.places = found

    def _place_rows(self) -> None:
        shape = self.shares.leaf.shape
        if self.tap.param is not self.shares.leaf:
            raise self.refused(_PART)
        self.places = [Place(tuple(range(1, len(shape))), math.prod(shape[1:])), Place((0,), shape[0])]

    def _directly(self, labels: list[str], sizes: dict[str, int]) -> Place:
        """The labels of the output enumerate the entries of the parameter in their order."""
        dims, waiting, covered = [], list(sizes), 1
        for d, n in enumerate(self.shares.leaf.shape):
            if n == 1:
                continue
            if waiting[0] in labels:
                dims.append(d)
            covered *= n
            if covered == sizes[waiting[0]]:
                waiting, covered = waiting[1:], 1
        return Place(tuple(dims), math.prod(sizes[c] for c in labels))

    def _pulled(self, labels: list[str], sizes: dict[str, int]) -> Place:
        """Pull the numbers of the entries back to the parameter, and read off there which dims they enumerate."""
        leaf, k = self.shares.leaf, math.prod(sizes[c] for c in labels)
        number = torch.arange(1, k + 1, device=leaf.device).reshape([sizes[c] if c in labels else 1 for c in sizes])
        number = number.expand(list(sizes.values()))
        number = number if self.recipe.finish is None else self.recipe.finish(number, 0)
        found = self.shares.located(self.tap.param, number.reshape(self.tap.param.shape))
        first = [int(i) for i in (found > 0).nonzero()[0]]
        lines = [found[tuple(slice(None) if e == d else i for e, i in enumerate(first))] for d in range(leaf.ndim)]
        dims = [
            d for d, line in enumerate(lines) if len(line.unique()) > (1 if k == 1 else 1 + bool((line == 0).any()))
        ]
        section = found[tuple(slice(None) if d in dims else i for d, i in enumerate(first))].flatten()
        places = section.nonzero().flatten()
        if len(places) != k:
            raise self.refused(_PART)
        at = torch.empty_like(places)
        at[section[places] - 1] = places
        return Place(tuple(dims), len(section), at)

    def refused(self, why: str) -> ArgumentError:
        name = self.shares.name(self.shares.place)
        return ArgumentError(
            f"{name} has no Kronecker factors: {why}. They are of parameters that a linear layer, convolution, "
            "embedding, scale or shift reads. Close over it, or keep it in another argument."
        )


_WITH_BIAS = {"linear", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3))}


def _channels(call: Call) -> int:
    """How many entries a bias has that is not broadcast."""
    weight = call.arg(1, "weight")
    if "transpose" in call.name:
        return weight.shape[1] * call.arg(6, "groups", 1)
    return weight.shape[0] if weight.ndim > 1 else 1


def roles(params: list[torch.Tensor], taps: list[Tap]) -> dict[int, str]:
    """Weights and biases that the same operations read, and nothing else does."""
    number = {id(x): i for i, x in enumerate(params)}
    of: dict[int, list[Tap]] = {}
    for tap in taps:
        for i in tap.derived.leaves:
            of.setdefault(i, []).append(tap)
    found = {}
    for i, some in of.items():
        calls = [tap.call for tap in some if tap.param is params[i]]
        calls = [c for c in calls if c is not None and c.name in _WITH_BIAS and c.arg(1, "weight") is params[i]]
        biases = {number.get(id(c.arg(2, "bias"))) for c in calls}
        if len(calls) < len(some) or len(biases) > 1:
            continue
        (bias,) = biases
        if bias is None or bias == i or any(c.arg(2, "bias").numel() != _channels(c) for c in calls):
            continue
        if {id(t.call) for t in of.get(bias, [])} == {id(c) for c in calls}:
            found |= {i: "weight", bias: "bias"}
    return found
