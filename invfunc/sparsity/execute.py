"""A way that was planned, as pullbacks of other parameters each: plain ones, and those of several groups at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from invfunc import thresholds
from invfunc.loss.square_root import Block
from invfunc.passes.part import Pass, Reached
from invfunc.passes.pullback import Pullback
from invfunc.passes.run import WHOLE
from invfunc.per_sample.cotangents import Columns as PulledBack
from invfunc.per_sample.cotangents import Cotangents
from invfunc.plan import even
from invfunc.recording.tags import ParameterUse
from invfunc.reductions import Reduction
from invfunc.sparsity.cells import Layout, Memory, by_position, celled, laid_out
from invfunc.sparsity.colouring import Colouring, Placed, positions_of
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.narrowed import Narrowed
from invfunc.sparsity.pattern import Frame, Pattern, positions_apart, same_calls
from invfunc.sparsity.planner import Way


def pullbacks(pullback: Pullback, way: Way | None, columns: Sequence[Grouped]) -> list[Pullback]:
    """What is pulled back in place of all columns; what is to be factored at bottlenecks waits until it is used."""
    if way is None or not same_calls(pullback.run, way.alone):
        return [pullback]
    found, at, sources = list[Pullback](), replace(pullback, last=False), columns
    for stage in way.stages:
        for reach in stage.reaches:
            part = replace(at, leaves=reach.leaves)
            if reach.colourings is not None and reach.frame is not None:
                told = {"pattern": way.pattern, "colourings": reach.colourings, "frame": reach.frame}
                part = Shared(**vars(part), **told, sources=sources, apart=way.cells)
            found += [part] if reach.leaves else []
        if stage.end is not None:
            narrowed = Narrowed(sources, at.run, way.alone, stage.end, pullback.budget)
            below = replace(pullback.run, outputs={0: stage.end.bottleneck.of(pullback.run)})
            at, sources = replace(at, run=below, made=[narrowed]), [narrowed]
    if way.closed:
        closed = replace(pullback, leaves=way.closed, last=False)
        found.append(Closed(**vars(closed), sources=columns, pattern=way.pattern, squares=way.cells))
    return [*found, replace(pullback, leaves=way.dense)] if way.dense else found


def possible(pullbacks: Sequence[Pullback]) -> bool:
    """Whether all columns at bottlenecks can be had."""
    return all(c.triangles is not None for p in pullbacks for c in p.made if isinstance(c, Narrowed))


@dataclass(kw_only=True)
class Closed(Pullback):
    """The last operation: each position has columns of its own, and the sum of their squares is the diagonal of the
    Hessian; the sum of their products is the part of the Hessian at that position."""

    sources: Sequence[Grouped]
    pattern: Pattern
    squares: bool
    """Whether squares are wanted, and not products."""

    @property
    def total(self) -> int:
        return 0

    def passes(self, reductions: Sequence[Reduction]) -> list[Pass]:
        uses, count = self._uses(0, len(self.run.params)), len(self.sources)
        return [Pass(uses, k, k + 1, completes=k + 1 == count, source=k) for k in range(count)]

    def block(self, each: Pass) -> Block:
        source, part = self.sources[each.source], self.run.part
        diagonal = source.diagonal(part)
        assert diagonal is not None
        beside = source.signed(diagonal, part) if self.squares else source.coupling(part)
        right = None if beside is None else {i: u[None] for i, u in beside.items()}
        return Block({i: d[None] for i, d in diagonal.items()}, right)

    def told_apart(self, each: Pass, leaf: int, uses: list[ParameterUse], pulled: PulledBack) -> Iterable[Reached]:
        (use,) = uses
        if not self.squares:
            return [(uses, replace(pulled, of_hessian=True))]
        known = positions_apart(self.run, self.pattern, uses)
        assert known is not None
        recipe = by_position(known) if known.inner else known.recipe
        return [([replace(use, recipe=recipe)], PulledBack(pulled.left, pulled.right))]


@dataclass(kw_only=True)
class Shared(Pullback):
    """Groups of columns that share passes, as they were coloured; they are told apart cell by cell."""

    sources: Sequence[Grouped]
    pattern: Pattern
    colourings: list[Colouring]
    """Those of each of the sources."""
    frame: Frame
    apart: bool
    """Whether the shares of each group are wanted by themselves; else each position, which has columns of one group."""
    _layouts: dict[int, Layout | None] = field(default_factory=dict)
    """How the cotangents of each parameter fall apart."""
    _alike_after: dict[int, int | None] = field(default_factory=dict)
    """The parameter that comes later, and whose cotangents fall apart as those of another."""
    _laid_out: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those, as they are for the one before."""
    _memory: dict[tuple[int, int], Memory] = field(default_factory=dict)
    """By source and parameter."""
    _index: dict[tuple[int, int, range], list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    """The cells of some positions, and their boxes, by source, site and classes."""
    _placed: dict[tuple[int, int], list[tuple[Any, Placed]]] = field(default_factory=dict)
    """Where some entries of a site lie among the groups of a source."""

    @property
    def total(self) -> int:
        return sum(s.rank * c.passes for s, c in zip(self.sources, self.colourings, strict=True))

    @property
    def sides(self) -> int:
        return 1

    def streams(self, passes: list[Pass]) -> bool:
        return False

    def passes(self, reductions: Sequence[Reduction]) -> list[Pass]:
        uses = self._uses(0, len(self.run.params))
        passes = [p for k in range(len(self.sources)) for p in self._of_source(k, uses)]
        return [replace(p, completes=p is passes[-1]) for p in passes]

    def _of_source(self, source: int, uses: dict[int, list[ParameterUse]]) -> list[Pass]:
        """Ranges of colours, and of the columns of their groups."""
        colouring, rank, trace = self.colourings[source], self.sources[source].rank, self.run.trace
        if not colouring.count or not rank:
            return []
        size = max(trace.sizes[s] for s in Pass(uses, 0, 0).sites) * trace.n
        columns, width = columns_at_once(size, self.budget), colouring.copies * rank
        if width <= columns:
            some = even(colouring.count, columns // width)
            return [Pass(uses, 0, rank, source=source, classes=range(a, b)) for a, b in some]
        ranges, each = even(rank, max(1, columns // colouring.copies)), range(colouring.count)
        return [Pass(uses, a, b, source=source, classes=range(k, k + 1)) for k in each for a, b in ranges]

    def block(self, each: Pass) -> Block:
        """Cotangents `[classes * copies * columns, n, *one]`: zero but where the groups of a class are."""
        source, colouring = self.sources[each.source], self.colourings[each.source]
        layers, some, columns = source.layer(each.start, each.stop, self.run.part), each.classes, {}
        copies = colouring.copies_in(some)
        for i, ids in source.groups.items():
            layer, flat = layers[i], ids.flatten()
            klass = torch.where(flat < 0, -1, colouring.klass[flat])
            copy = torch.where(flat < 0, -1, colouring.copy[flat])
            masks = [(klass == k) & (copy == c) for k in some for c in range(copies)]
            mask = torch.stack(masks).to(layer.dtype).reshape(len(masks), 1, 1, *ids.shape)
            columns[i] = (layer * mask).flatten(0, 1)
        v, n = next(iter(columns.values())).shape[:2]
        for i, (z, axis) in self.run.outputs.items() if self.everywhere else ():
            if i not in columns:
                columns[i] = z.new_zeros(v, n, *axis.expose(z, n).shape[1:])
        return Block(columns)

    def told_apart(self, each: Pass, leaf: int, uses: list[ParameterUse], pulled: PulledBack) -> Iterator[Reached]:
        """The shares of each group by itself."""
        if leaf not in self._layouts:
            self._arrange(each.uses)
        layout, uses = self._layouts[leaf], [t for t in uses if pulled.left[t.site] is not None]
        if not uses:
            return
        if layout is None:
            for cotangents, boxes in self._boxed(each, uses, pulled.left):
                signs = self._signs(each, boxes)
                weight = None if signs is None else signs.movedim(2, 0).flatten(0, 1)
                yield uses, PulledBack(cotangents, weight=weight)
            return
        (use,) = uses
        if not self.apart:
            yield [replace(use, recipe=layout.recipe)], PulledBack(pulled.left)
        elif not layout.inner:  # at the one position, entries are of several groups
            signs = self._signs(each, self._cells(each, use.site))
            right = None if signs is None else _times(pulled.left, use.site, signs.movedim(2, 0).flatten(0, 1))
            yield [replace(use, recipe=layout.recipe)], PulledBack(pulled.left, right)
        else:
            index, boxes = self._positions(each, use.site, layout)
            recurs = each.stop - each.start < self.sources[each.source].rank
            signs = self._signs(each, boxes)
            weight = None if signs is None else signs.flatten(2)
            if weight is None and index.shape == (1, len(layout.first), 1):  # all positions, in any order
                recipe = by_position(layout)
            else:
                cotangent, memory = pulled.left[use.site], self._memory.setdefault((each.source, leaf), Memory(recurs))
                assert cotangent is not None
                first = self._laid_out.pop(leaf, None)
                first = laid_out(layout, index, cotangent) if first is None else first
                if (other := self._alike_after[leaf]) is not None:
                    self._laid_out[other] = first
                recipe = celled(layout, index, first, memory)
            yield [replace(use, recipe=recipe)], PulledBack(pulled.left, weight=weight)

    def _arrange(self, uses: dict[int, list[ParameterUse]]) -> None:
        """Find out how the cotangents of parameters fall apart, and which of them, as of a weight and a bias, alike."""
        entries: dict[int, tuple[int, torch.Tensor]] = {}
        for leaf, own in uses.items():
            self._layouts[leaf], self._alike_after[leaf] = positions_apart(self.run, self.pattern, own), None
            if (known := self._layouts[leaf]) is None:
                continue
            site, found = own[0].site, known.entries
            before, other = entries.get(site, (leaf, found[:0]))
            if torch.equal(found, other):
                self._alike_after[before] = leaf
            entries[site] = leaf, found

    def _positions(self, each: Pass, site: int, layout: Layout) -> tuple[torch.Tensor, ...]:
        """The positions in each cell, and the box of the cell; all that is sent back at one position has the same box
        in the pattern."""
        known = self._index.setdefault((each.source, site, each.classes), [])
        for positions, *found in known:
            if torch.equal(positions, layout.first):
                return tuple(found)
        cells = self._cells(each, site, layout.first)
        index = positions_of(cells)
        boxes = torch.nn.functional.pad(cells, (0, 1), value=-1).gather(1, index[:, :, 0])
        known.append((layout.first, index, boxes))
        return index, boxes

    def _signs(self, each: Pass, boxes: torch.Tensor) -> torch.Tensor | None:
        """The signs with which the squares of the groups in boxes count, `[copies * columns, n, *boxes]`; None if all
        are added."""
        source, colouring = self.sources[each.source], self.colourings[each.source]
        signs = source.signs(self.run.part)
        if signs is None:
            return None
        groups = colouring.members[boxes.clamp(min=0), : colouring.copies_in(each.classes)]
        return signs[:, groups].movedim(-1, 0).repeat_interleave(each.stop - each.start, 0)

    def _cells(self, each: Pass, site: int, entries: Any = WHOLE) -> torch.Tensor:
        """The box in which each entry of a site lies, for each class."""
        known = self._placed.setdefault((each.source, site), [])
        placed = next((found for wanted, found in known if _same(wanted, entries)), None)
        if placed is None:
            placed = self.colourings[each.source].placed(self.frame.boxes[site].flatten(2)[:, :, entries])
            known.append((entries, placed))
        return placed.cells(each.classes)

    def _boxed(
        self, each: Pass, uses: list[ParameterUse], cotangents: Cotangents
    ) -> Iterator[tuple[Cotangents, torch.Tensor]]:
        """The columns of each group separate again: what lies in its box, and zeros elsewhere; and these boxes."""
        found = {t.site: cotangents[t.site] for t in uses}
        wholes = {s: x.unflatten(0, (len(each.classes), -1)) for s, x in found.items() if x is not None}
        cells = {site: self._cells(each, site) for site in wholes}
        largest = max(x[0, 0].numel() for x in wholes.values())
        for k in range(len(each.classes)):
            boxes = torch.cat([c[k] for c in cells.values()]).unique()
            boxes = boxes[boxes >= 0]
            for a, b in even(len(boxes), max(1, self.budget // largest)):
                own: Cotangents = [None] * len(cotangents)
                for site, x in wholes.items():
                    mask = (cells[site][k] == boxes[a:b, None]).to(x.dtype).reshape(b - a, 1, 1, *x.shape[3:])
                    own[site] = (x[k] * mask).flatten(0, 1)
                yield own, boxes[a:b]


def _same(some: Any, others: Any) -> bool:
    """Whether two choices of entries are one."""
    tensors = isinstance(some, torch.Tensor) and isinstance(others, torch.Tensor)
    return torch.equal(some, others) if tensors else some is others


def columns_at_once(size: int, budget: int) -> int:
    """How many columns are pulled back together through a site of so many numbers."""
    return max(1, min(thresholds.TOGETHER, budget) // size)


def _times(cotangents: Cotangents, site: int, signs: torch.Tensor) -> Cotangents:
    """Those at a site, times the signs of their entries `[V, n, entries]`."""
    x = cotangents[site]
    assert x is not None
    return [x * signs.reshape(x.shape) if s == site else None for s in range(len(cotangents))]
