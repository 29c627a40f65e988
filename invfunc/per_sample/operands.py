"""What the operations that read a parameter send back and read, position by position: the operands of K-factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from invfunc.kronecker.places import PART, Grid, Place, Rows, Unfactored, grid, rows
from invfunc.linear_algebra.contract import Term, contract, present, squeezed, widened
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import Cotangents, length
from invfunc.per_sample.gradients import Shares
from invfunc.per_sample.terms import Labels, Terms, sizes_of
from invfunc.recording.tags import ParameterUse


@dataclass
class Operands:
    """The operands of some samples: cotangents `s [V, b, K, R]` and what was read, `a [b, I, R]` or the rows
    `picked [b, R]`.

    Grouped operations have them as `[V, b, G, K, R]` and `[b, G, I, R]`.
    """

    s: torch.Tensor
    a: torch.Tensor | None = None
    picked: torch.Tensor | None = None
    gram: torch.Tensor | None = None
    """`sum_nr a a^T` in place of a."""


@dataclass
class Layer:
    """One operation that reads a parameter: its share is `sum_r s[k, r] a[i, r]`, or `sum_r s[k, r]` without an a."""

    shares: Shares
    use: ParameterUse
    joint: bool = False
    """Whether a bias is one more input that is always 1."""
    read: bool = True
    """Whether what it reads is wanted, too."""
    places: list[Place] = field(default_factory=list)
    blocks: tuple[int, ...] | None = None
    """Into how many parts of its own factors each dim of the parameter is divided, if it is."""
    picked: Callable[[Part], torch.Tensor] | None = None
    """The rows that the positions pick, `[b, R]`, if they do."""

    def __post_init__(self) -> None:
        self.recipe = self.use.recipe
        if not self.recipe.linear:
            raise Unfactored(f"`{self.called}` is not known to be linear in it")
        if not self.use.derived.picked:
            raise Unfactored("it is read through a computation with parameters")

    @property
    def called(self) -> str:
        return self.use.call.name if self.use.call is not None else "f"

    def positions(self, x: Operands, part: Part) -> Sequence[float]:
        """How many positions each sample has."""
        most, axis = x.s.shape[-1], self.use.axis
        if axis.rows is None:
            return [most] * length(part)
        owned = axis.owned(self.shares.samples.n)
        return [most * owned[i] for i in (range(part.start, part.stop) if isinstance(part, slice) else part.tolist())]

    @property
    def covered(self) -> tuple[float, float]:
        """The fractions of the parameter that the operation uses: along what is sent back, and along what is read."""
        parts = [(p.size if p.at is None else len(p.at)) / max(1, p.size) for p in self.places]
        return parts[0], parts[1] if len(parts) > 1 else 1.0

    @property
    def role(self) -> Hashable:
        """A key that operations share if they read the parameter with its dims in the same roles."""
        return (*(p.dims for p in self.places), self.blocks or ())

    @property
    def flipped(self) -> bool:
        """Whether the dims of what is read come before those of what is sent back."""
        return len(self.places) > 1 and self.places[1].dims < self.places[0].dims

    def operands(self, cotangents: Cotangents, part: Part) -> Operands:
        cotangent = cotangents[self.use.site]
        assert cotangent is not None
        return self.of(cotangent[:, part], part)

    def products(self, cotangents: Cotangents, part: Part) -> Operands:
        """The operands, with the sum of the products of what is read in its place where that is cheaper."""
        gram = self.recipe.gram(part) if self.read and not self.joint and self.recipe.gram is not None else None
        if gram is None:
            return self.operands(cotangents, part)
        self.look(cotangents, part[:1] if isinstance(part, torch.Tensor) else slice(part.start, part.start + 1))
        sent = replace(self, read=False).operands(cotangents, part)
        return replace(sent, gram=self.places[1].spread(self.places[1].spread(gram, 0), 1))

    def look(self, cotangents: Cotangents, part: Part) -> None:
        """Find out where the factors lie in the parameter, from one column of some samples."""
        if "looked" not in self.use.memory:
            cotangent = cotangents[self.use.site]
            assert cotangent is not None
            self.of(cotangent[:1, part], part)
            self.use.memory["looked"] = self.places, self.blocks, self.picked
        self.places, self.blocks, self.picked = self.use.memory["looked"]

    def of(self, cotangent: torch.Tensor, part: Part) -> Operands:
        """The operands for the cotangents `[V, b, *one]` of some samples."""
        v, b = cotangent.shape[:2]
        sent = self.recipe.sends(cotangent, part)
        if not self.read and "layer" in self.use.memory:
            self.places, self.blocks, labels = self.use.memory["layer"]
            return Operands(self._sent(widened([sent]), labels, (v, b)))
        read = [] if self.recipe.own else self.recipe.read(part)
        terms = Terms.of(widened([sent, *read]), self.recipe.output, (v, b))
        if self.recipe.picks is not None:
            self.picked = self._place_rows(self.recipe.picks)
            s = self._sent([terms.sent], Labels([], terms.outs, terms.positions), terms.lead)
            return Operands(s, picked=self.picked(part))
        if terms.entry_by_entry(self.shares.leaf.ndim):
            return self._entry_by_entry(terms, part)
        return self._two_factors(terms, part)

    def _two_factors(self, terms: Terms, part: Part) -> Operands:
        if not self.use.derived.selected:
            raise Unfactored(f"`{self.called}` reads entries of it several times")
        outs, ins = terms.factors()
        self._place([outs.entries, ins.entries], outs.shared, terms.sizes)
        self.use.memory["layer"] = self.places, self.blocks, outs
        s = self._sent([terms.sent], outs, terms.lead)
        read = [("V" + labels, x.unsqueeze(0)) for labels, x in terms.read]
        a = self._formed(read, ins, (1, terms.lead[1]))[0]
        a = self.places[1].spread(a, a.ndim - 2)
        if self.joint:
            ones = torch.ones_like(a[..., :1, :])
            a = torch.cat([a, ones if self.use.axis.rows is None else self._real(part).reshape(ones.shape)], -2)
        return Operands(s, a)

    def _real(self, part: Part) -> torch.Tensor:
        """A mask: 1 at the positions of samples, 0 at those that stand for missing ones."""
        use = self.use
        assert use.call is not None
        ones = torch.ones(use.call.out.shape, dtype=use.param.dtype, device=use.param.device)
        real = use.axis.expose(ones, self.shares.samples.n)[part]
        return replace(self, joint=False).of(real.unsqueeze(0), part).s[:, :, :1]

    def _entry_by_entry(self, terms: Terms, part: Part) -> Operands:
        """The operands of a scale or shift, taken as a table of which each row is picked at positions of its own."""
        leaf, outs, sizes = self.shares.leaf, terms.outs, terms.sizes
        inner = sorted({c for labels, _ in terms.all for c in labels} - set("VN") - set(outs))
        if sum(n != 1 for n in leaf.shape) < 2 and self.use.derived.selected and not self.recipe.own:
            self._place([outs], [], sizes)
            return Operands(self._sent(terms.all, Labels([], outs, inner), terms.lead))
        found, dims = self._rows(sizes), list(range(leaf.ndim))
        along, lines = ([c for i, c in enumerate(outs) if (i in found.along) is kind] for kind in (True, False))
        last = max((d for d in dims if leaf.shape[d] != 1), default=0)
        n, of_all, count = self.shares.samples.n, found.picked, math.prod(leaf.shape[:last])
        each = math.prod(sizes_of(terms.all)[c] for c in inner)
        of_all = of_all if of_all.ndim > len(lines) else of_all.unsqueeze(0).expand(n, *of_all.shape)

        def picked(part: Part) -> torch.Tensor:
            return of_all[part].reshape(-1, math.prod(of_all.shape[1:])).repeat_interleave(each, 1)

        self.places = [replace(found.place, dims=tuple(dims[last:] if count > 1 else dims))]
        s = self._sent(terms.all, Labels([], along, lines + inner), terms.lead)
        s = s * (picked(part) < count)[:, None]
        if count == 1:
            return Operands(s)
        self.places, self.picked = [*self.places, Place(tuple(dims[:last]), count)], picked
        return Operands(s, picked=picked(part))

    def _sent(self, terms: list[Term], labels: Labels, lead: tuple[int, int]) -> torch.Tensor:
        """What is sent back, over all entries of the dims."""
        s = self._formed(terms, labels, lead)
        return self.places[0].spread(s, s.ndim - 2)

    def _formed(self, terms: list[Term], kinds: Labels, lead: tuple[int, int]) -> torch.Tensor:
        """`[V, b, shared, entries, positions]`, the first of them only where there is any."""
        sizes = sizes_of(terms)
        terms = squeezed(terms)
        output = present("".join(["V", "N", *(c for labels in kinds for c in labels)]), terms)
        x = contract(terms, output)
        shape = [math.prod(sizes[c] for c in labels) for labels in (kinds if kinds.shared else kinds[1:])]
        found = [n if c in output else 1 for c, n in zip("VN", lead, strict=True)]
        return x.reshape(*found, *shape).expand(*lead, *shape)

    # Where the labels lie in the parameter

    def _place(self, factors: list[list[str]], shared: list[str], sizes: dict[str, int]) -> None:
        if self.places:
            return
        leaf, direct = self.shares.leaf, self.use.param is self.shares.leaf
        known = self.use.memory
        if direct and not shared:
            known["grid"] = Grid(self._directly(factors, sizes))
        if "grid" not in known:
            names = list(sizes)
            axes, common = ([[names.index(c) for c in labels] for labels in kind] for kind in (factors, [shared]))
            known["grid"] = grid(self._entries(sizes), leaf.shape, axes, common[0])
        self.places, self.blocks = known["grid"].places, known["grid"].blocks

    def _place_rows(self, selects: Callable[[Part], torch.Tensor]) -> Callable[[Part], torch.Tensor]:
        """Which rows of the parameter are picked, given those of what the operation reads."""
        leaf, known = self.shares.leaf, self.use.memory
        if self.use.param is leaf:
            self.places = [Place(tuple(range(1, leaf.ndim)), leaf[0].numel()), Place((0,), len(leaf))]
            return selects
        if not self.use.derived.selected:
            raise Unfactored(f"`{self.called}` reads entries of it several times")
        if "grid" not in known:
            known["grid"] = grid(self.shares.origins(self.use.param), leaf.shape, [[1], [0]], [])
        self.places = known["grid"].places
        at, size = self.places[1].at, self.places[1].size
        return selects if at is None else lambda part: torch.cat([at, at.new_tensor([size])])[selects(part)]

    def _rows(self, sizes: dict[str, int]) -> Rows:
        """How the entries that the labels read lie in the rows of the parameter; some may be read several times."""
        if "rows" not in self.use.memory:
            shape = [n for n in self.shares.leaf.shape if n != 1] or [1]
            found = rows(self._entries(sizes), math.prod(shape[:-1]), shape[-1])
            if self.recipe.own is not None:  # the axis of the samples comes first
                if 0 in found.along:
                    raise Unfactored(PART)
                found = replace(found, along=[d - 1 for d in found.along])
            self.use.memory["rows"] = found
        return cast(Rows, self.use.memory["rows"])

    def _entries(self, sizes: dict[str, int]) -> torch.Tensor:
        """The entry of the parameter that each combination of labels reads; for a parameter with an entry for each
        sample, that of each sample, in front."""
        found, own = self.shares.origins(self.use.param), self.recipe.own
        if own is not None:
            return own.expose(found, self.shares.samples.n, fill=-1).reshape([-1, *sizes.values()])
        return found.reshape(list(sizes.values()))

    def _directly(self, factors: list[list[str]], sizes: dict[str, int]) -> list[Place]:
        """The places of factors whose labels enumerate the entries of the parameter in their order."""
        leaf, found = self.shares.leaf, []
        for labels in factors:
            dims, waiting, covered = [], list(sizes), 1
            for d, n in enumerate(leaf.shape):
                if n == 1:
                    continue
                if waiting[0] in labels:
                    dims.append(d)
                covered *= n
                if covered == sizes[waiting[0]]:
                    waiting, covered = waiting[1:], 1
            found.append(Place(tuple(dims), math.prod(sizes[c] for c in labels)))
        for d in range(leaf.ndim):  # of one entry: with the factor that is empty so far
            if not any(d in p.dims for p in found):
                k = next((k for k, p in enumerate(found) if not p.dims), len(found) - 1)
                found[k] = replace(found[k], dims=tuple(sorted((*found[k].dims, d))))
        return found
