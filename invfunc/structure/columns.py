"""Columns in groups, which boxes of coordinates tell apart, and the fewer that are left of them at a bottleneck.

Entries of the outputs that the loss couples, such as the classes of a pixel, belong to one group. Columns of different
groups are zero where the other is not, so one cotangent can hold one column of every group. The entries of a sample are
flat: `[n, M]`. A box is two rows for each axis, `-lo` and `hi` (`[2, k, ...]`, so that a hull is a maximum), `-inf`
where it is empty: boxes say which groups can share a pass, and to which of them a position belongs.

A bottleneck is a tensor that every path from the outputs to what lies below has to cross. Any R with `R^T R = S^T S`
has the same GGN below, so as many columns as it is wide will do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from invfunc import thresholds
from invfunc._torch.functorch import gradient_edge, version
from invfunc._torch.generators import uniform
from invfunc.core.run import Run
from invfunc.core.uses import ProductUse, Use
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import joined
from invfunc.loss.square_root import Columns, Elementwise, Softmax, Weighted, safe_root
from invfunc.plan import even

Some = torch.Tensor | slice
"""The numbers of some groups, or of all."""


class Groups:
    """A square root S of the Hessian of each sample, group by group."""

    rank: int
    """The number of columns of a group."""
    rows: int
    """The number of rows that `products` gives for a group."""
    count: int
    alike: bool
    """True if the columns of all samples are equal."""
    ids: torch.Tensor
    """The group of each entry, `[M]`; -1 for an entry that no column reaches."""

    layer: Callable[[int, int], torch.Tensor]
    """Columns from one to another of every group at once: `[V, n, M]`."""
    block: Callable[[int, int], torch.Tensor]
    """Columns among all, group by group, which are zero outside of their group: `[V, n, M]`."""

    def diagonal(self) -> torch.Tensor | None:
        """The root of the diagonal of the Hessian, `[n, M]`, where it is known without the columns."""
        return None

    def coupling(self) -> torch.Tensor | None:
        """The u, `[n, M]`, with which the part of a group is `-u u^T` beside that diagonal; None where it is zero."""
        return None

    def entries(self, some: Some) -> Some:
        """The entries that belong to some groups, group by group."""
        return some

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        """`S^T u` of directions `[d, n, entries]`, those of some groups, for some samples: `[n, groups, rows, d]`.

        The rows of a group are those of any square root of its part of the Hessian.
        """
        raise NotImplementedError


class OfEntries(Groups):
    """A diagonal Hessian: each entry is a group with one column."""

    rank = rows = 1

    def __init__(self, inner: Elementwise) -> None:
        self.inner, self.count = inner, inner.count
        h = inner.diagonal.flatten(1)
        self.root, self.alike = safe_root(h), bool((h == h[:1]).all())
        self.ids = torch.arange(self.count, device=h.device)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        return self.root[None]

    def block(self, start: int, stop: int) -> torch.Tensor:
        return torch.where(self.ids[start:stop, None, None] == self.ids, self.root, 0)

    def diagonal(self) -> torch.Tensor:
        return self.root

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        return (moved * self.root[part, some]).permute(1, 2, 0).unsqueeze(2)


class OfPositions(Groups):
    """A softmax at each position: the classes there are a group."""

    alike = False

    def __init__(self, inner: Softmax, shape: torch.Size) -> None:
        """`shape` is that of the outputs, of all samples."""
        self.inner, logits = inner, inner.logits
        n, self.rows, self.count = logits.shape
        self.rank = self.rows - 1
        self.roots = (logits.log_softmax(1) / 2).exp()
        self.scale = safe_root(inner.weight)[:, None]
        # the entries lie as [more, C, rest], where `more` and `rest` are the positions
        self.rest = shape[2:].numel()
        at = torch.arange(self.count, device=logits.device).view(-1, 1, self.rest)
        self.ids = at.expand(-1, self.rows, -1).flatten()

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., C, positions]` as `[..., M]`."""
        return x.unflatten(-1, (-1, self.rest)).transpose(-3, -2).flatten(-3)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        q = self.roots
        units = torch.eye(self.rows, dtype=q.dtype, device=q.device)[start:stop, :, None]
        found = [Softmax.columns(q, unit, q[:, v : v + 1]) * self.scale for v, unit in enumerate(units, start)]
        return self.laid(torch.stack(found))

    def block(self, start: int, stop: int) -> torch.Tensor:
        found = Weighted(self.inner).block(start, stop, slice(None)).left[0]
        return found.reshape(stop - start, len(self.roots), -1)

    def diagonal(self) -> torch.Tensor:
        q = self.roots
        p = q.square()
        largest = torch.zeros_like(p).scatter(1, p.argmax(1, keepdim=True), 1)
        others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)  # 1 - p near 1 cancels
        return self.laid(q * safe_root(others) * self.scale)

    def coupling(self) -> torch.Tensor:
        return self.laid(self.roots.square() * self.scale)

    def entries(self, some: Some) -> Some:
        numbers = torch.arange(len(self.ids), device=self.ids.device).view(-1, self.rows, self.rest)
        return numbers.transpose(1, 2).flatten(0, 1)[some].flatten()

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        q, scale = (x[part][:, :, some].mT.unsqueeze(3) for x in (self.roots, self.scale))  # [n, groups, C, 1]
        u = moved.unflatten(2, q.shape[1:3]).permute(1, 2, 3, 0)
        centred = u - (q.square().mT.to(u.dtype) @ u)
        return centred.mul_((q * scale).to(u.dtype))  # in its own memory, as there may be many classes


def grouped(columns: Columns, shape: torch.Size) -> Groups | None:
    """The columns of a criterion in groups; `shape` is that of the outputs."""
    inner: Any = columns.inner if isinstance(columns, Weighted) else columns
    if isinstance(inner, Elementwise):
        return OfEntries(replace(inner, diagonal=inner.diagonal.flatten(1)))
    return OfPositions(inner, shape) if isinstance(inner, Softmax) else None


def hulls(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The hull `[2, k, Q]` of the boxes of the entries of each group, of `[2, k, *one]` and `[*one]`."""
    count, flat = int(groups.max()) + 1, groups.flatten()
    found = rows.new_full((*rows.shape[:2], max(1, count)), -torch.inf)
    some = flat >= 0
    index = flat[some].expand(*rows.shape[:2], -1)
    return found.scatter_reduce(2, index, rows.flatten(2)[:, :, some], "amax")


def empty(rows: torch.Tensor) -> torch.Tensor:
    """True for a box that depends on nothing, `[...]`."""
    return (rows == -torch.inf).any(0).any(0)


def _ranked(of: torch.Tensor, count: int) -> torch.Tensor:
    """The number of each member among those of its set before it, given the set of each."""
    sizes, order, found = torch.bincount(of, minlength=count), of.argsort(stable=True), torch.empty_like(of)
    found[order] = torch.arange(len(of), device=of.device) - (sizes.cumsum(0) - sizes)[of[order]]
    return found


_FAR = 2**24
"""Above every coordinate, so that two of them are one number."""


def _numbered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different entries in their order, and which of them each is."""
    ordered, order = x.sort()
    unique, of = ordered.unique_consecutive(return_inverse=True)
    return unique, torch.empty_like(order).scatter(0, order, of.to(order.dtype))


@dataclass
class Intervals:
    """The intervals of one axis, of which those of one colour are disjoint."""

    lo: torch.Tensor
    hi: torch.Tensor
    of: torch.Tensor
    """The interval of each box."""
    colour: torch.Tensor
    """The colour of each interval."""

    @property
    def count(self) -> int:
        return int(self.colour.max()) + 1 if len(self.colour) else 0

    @classmethod
    def along(cls, lo: torch.Tensor, hi: torch.Tensor) -> Intervals:
        """Colour intervals greedily from left to right, which takes as few colours as possible."""
        code, of = _numbered(lo.long() * _FAR + hi.long())
        lo, hi = code // _FAR, code % _FAR
        last: list[float] = []
        colour = []
        for start, stop in zip(lo.tolist(), hi.tolist(), strict=True):
            free = next((c for c, end in enumerate(last) if end < start), len(last))
            last[free : free + 1] = [stop]
            colour.append(free)
        return cls(lo, hi, of, torch.tensor(colour, device=lo.device, dtype=torch.long))

    def holding(self, colour: int, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        """The interval of a colour in which others lie; -1 for none."""
        own = (self.colour == colour).nonzero().flatten()
        at = torch.searchsorted(self.lo[own], lo, right=True) - 1
        place = own[at.clamp(min=0)]
        return torch.where((at >= 0) & (self.hi[place] >= hi), place, -1)


class Colouring:
    """Groups in classes: in a class, boxes are disjoint or equal; equal ones are told apart by their `copy`."""

    def __init__(self, boxes: torch.Tensor) -> None:
        """Colour the boxes `[2, k, Q]` of groups."""
        some = ~empty(boxes)
        lo, hi = -boxes[0][:, some], boxes[1][:, some]
        self.axes = [Intervals.along(a, b) for a, b in zip(lo, hi, strict=True)]
        code = colour = torch.zeros_like(lo[0], dtype=torch.long)
        for axis in self.axes:
            code = code * len(axis.lo) + axis.of
            colour = colour * axis.count + axis.colour[axis.of]
        self.codes, box = _numbered(code)
        """The codes of the different boxes."""
        self.colours, klass = _numbered(colour)
        """The colours of the classes."""
        self.klass, self.copy, self.box = (box.new_full((boxes.shape[2],), -1) for _ in range(3))
        """The class, the copy and the box of each group; -1 for a group without influence."""
        self.klass[some], self.copy[some], self.box[some] = klass, _ranked(box, len(self.codes)), box

    @property
    def count(self) -> int:
        return len(self.colours)

    @property
    def copies(self) -> int:
        """The most groups that have the same box."""
        return int(self.copy.max()) + 1 if len(self.copy) else 0

    @property
    def passes(self) -> int:
        """The number of columns that hold one column of every group."""
        most = torch.zeros(self.count, dtype=torch.long, device=self.klass.device)
        some = self.klass >= 0
        return int(most.scatter_reduce(0, self.klass[some], self.copy[some] + 1, "amax").sum())

    def copies_in(self, classes: range) -> int:
        """The same in some classes."""
        return int(self.copy[(self.klass >= classes.start) & (self.klass < classes.stop)].max()) + 1

    @cached_property
    def members(self) -> torch.Tensor:
        """The group of each box and copy, `[boxes, copies]`; 0 where there is none."""
        found, some = self.box.new_zeros(len(self.codes), self.copies), self.box >= 0
        found[self.box[some], self.copy[some]] = some.nonzero().flatten()
        return found

    def placed(self, rows: torch.Tensor) -> Callable[[range], torch.Tensor]:
        """A function that gives, for some classes, the box of their groups in which each of other boxes `[2, k, P]`
        lies, `[classes, P]`; -1 for none."""
        inside, along = rows[1, 0] > -torch.inf, []
        for axis, a, b in zip(self.axes, -rows[0], rows[1], strict=True):
            code, of = _numbered(torch.where(inside, a.long() * _FAR + b.long(), 0))
            holding = torch.stack([axis.holding(c, code // _FAR, code % _FAR) for c in range(axis.count)])
            along.append((holding, of))

        def cells(wanted: range) -> torch.Tensor:
            colours, own = self.colours[wanted.start : wanted.stop], list[torch.Tensor]()
            for axis in reversed(self.axes):
                own.insert(0, colours % axis.count)
                colours = colours // axis.count
            code, within = torch.zeros((), dtype=torch.long, device=rows.device), inside
            for axis, c, (holding, of) in zip(self.axes, own, along, strict=True):
                intervals = holding[c][:, of]
                code = code * len(axis.lo) + intervals.clamp(min=0)
                within = within & (intervals >= 0)
            at = torch.searchsorted(self.codes, code).clamp(max=len(self.codes) - 1)
            return torch.where(within & (self.codes[at] == code), at, -1)

        return cells


def positions_of(cells: torch.Tensor) -> torch.Tensor:
    """The positions in each cell, `[classes, C, r]`, from the cell of each position `[classes, P]`; P is padding."""
    (count, p), width = cells.shape, int(cells.max()) + 1
    flat = torch.where(cells >= 0, torch.arange(count, device=cells.device)[:, None] * width + cells, -1).flatten()
    code, of = _numbered(flat[flat >= 0])
    klass = code // max(1, width)
    most = max(1, int(torch.bincount(klass, minlength=count).max()))
    flat[flat >= 0] = (klass * most + _ranked(klass, count))[of]
    index = members_of(flat, count * most, -1).view(count, most, -1)
    return torch.where(index < 0, p, index % p)


def members_of(of: torch.Tensor, count: int, filling: int) -> torch.Tensor:
    """The members of each of several sets, `[count, most]`, given the set of each; -1 is in none."""
    some = (of >= 0).nonzero().flatten()
    within = _ranked(of[some], count)
    found = of.new_full((count, int(within.max()) + 1 if len(some) else 1), filling)
    found[of[some], within] = some
    return found


# Bottlenecks


@dataclass(frozen=True, eq=False)
class Bottleneck:
    """A tensor that an operation with parameters reads and that all paths to the sites `below` cross."""

    use: int
    """The number of a use that reads it."""
    x: torch.Tensor
    dim: int | None
    """The axis of the samples; None if there is one, and all entries are its."""
    width: int
    """The number of entries for one sample."""
    below: frozenset[int]

    def exposed(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of its form as `[n, entries]`."""
        return x.reshape(1, -1) if self.dim is None else x.movedim(self.dim, 0).flatten(1)

    def restored(self, columns: torch.Tensor) -> torch.Tensor:
        """Numbers `[V, n, entries]` as the tensor has them."""
        if self.dim is None:
            return columns.reshape(len(columns), *self.x.shape)
        x = self.x.movedim(self.dim, 0)
        return columns.reshape(len(columns), columns.shape[1], *x.shape[1:]).movedim(1, 1 + self.dim)


def paths(z: torch.Tensor, run: Run, sites: Sequence[int]) -> tuple[list[list[int]], list[Bottleneck]]:
    """The sites through which a path from the outputs to each site may lead, and the bottlenecks, the upper ones first.

    They are those of the graph that autograd recorded, so that nothing is assumed about the function.
    """
    edges = {s: gradient_edge(u.edge) if copy else u.edge for s, u, copy in _each(run, sites)}
    parents, order = _sorted(gradient_edge(z).node)
    copies, at = {edges[s].node for s, _, copy in _each(run, sites) if copy}, dict[Any, list[int]]()
    reader = {p: node for node in order for p, _ in parents[node] if p in copies}  # the operation that got a copy
    for s, edge in edges.items():
        at.setdefault(reader.get(edge.node, edge.node), []).append(s)
    lower: dict[Any, frozenset[int]] = {}  # the sites at a node or below it
    for node in reversed(order):
        lower[node] = frozenset(at.get(node, ())).union(*(lower[p] for p, _ in parents[node]))
    above: list[list[int]] = [[] for _ in edges]
    for node, own in at.items():
        for low in lower.get(node, ()):
            above[low] += [s for s in own if s != low]
    return above, _bottlenecks(z, run, parents, order, lower)


_FORMS = "Accumulate View UnsafeView Reshape Clone Expand Squeeze Unsqueeze TBack Transpose Permute AsStrided".split()
"""Beginnings of the names of operations that torch takes by how entries lie in memory."""
_PARTS = {"Addmm": ("Mm", "Add"), "Baddbmm": ("Mm", "Add"), "Bmm": ("Mm",)}
"""Operations that torch takes in place of others, by shapes."""


def operations(z: torch.Tensor) -> Counter[str]:
    """Counts of the operations that z is computed by, as autograd has recorded them, but for those of its form."""
    names = [node.name().split("::")[-1] for node in _sorted(gradient_edge(z).node)[1]]
    names = [name.split("Backward")[0] for name in names if not name.startswith((*_FORMS,))]
    return Counter(part for name in names for part in _PARTS.get(name, (name,)))


def _each(run: Run, sites: Sequence[int]) -> list[tuple[int, Use, bool]]:
    """The uses with their sites, and whether the edge is a copy of the parameter."""
    return [(s, u, isinstance(u.edge, torch.Tensor)) for s, u in zip(sites, run.uses, strict=True)]


def _sorted(top: Any) -> tuple[dict[Any, list[tuple[Any, int]]], list[Any]]:
    """The nodes of the graph, each before those that it leads to."""
    parents: dict[Any, list[tuple[Any, int]]] = {}
    order: list[Any] = []
    waiting = [(top, False)]
    while waiting:
        node, left = waiting.pop()
        if left:
            order.append(node)
        elif node not in parents:
            parents[node] = [(p, nr) for p, nr in node.next_functions if p is not None]
            waiting.append((node, True))
            waiting += [(p, False) for p, _ in parents[node] if p not in parents]
    return parents, order[::-1]


def _bottlenecks(z: torch.Tensor, run: Run, parents: dict, order: list, lower: dict) -> list[Bottleneck]:
    """The bottlenecks of the graph. Walk down with all edges that are reached but not passed: a single one is one."""
    candidates: dict[Any, tuple[int, ProductUse]] = {}
    for i, use in enumerate(run.uses):
        if not isinstance(use, ProductUse) or not use.a.requires_grad or version(use.a) != use.version:
            continue
        if run.n == 1 or use.a_axis[1:] == (1, 1):
            candidates.setdefault(gradient_edge(use.a).node, (i, use))
    readers: dict[Any, int] = {}
    for node in order:
        for p, _ in parents[node]:
            readers[p] = readers.get(p, 0) + 1
    top = gradient_edge(z)
    open_edges, found = {(top.node, top.output_nr)}, []
    for node in order:
        if not lower[node]:
            continue
        own = {edge for edge in open_edges if edge[0] == node}
        if own == open_edges and len(own) == 1 and node in candidates and readers.get(node) == 1:
            i, use = candidates[node]
            if gradient_edge(use.a).output_nr == next(iter(own))[1]:
                dim = None if run.n == 1 else use.a_axis[0] % use.a.ndim
                found.append(Bottleneck(i, use.a, dim, use.a.numel() // run.n, lower[node]))
        open_edges -= own
        open_edges |= {edge for edge in parents[node] if lower[edge[0]]}
    return found


def forward(z: torch.Tensor, x: torch.Tensor, given: torch.Tensor, n: int, entries: Some) -> torch.Tensor:
    """Jacobian vector products of directions at x, up to entries of z: `[d, n, entries]`.

    They are the derivative of a pullback in its cotangent, so that no other run is needed.
    """
    found, most = None, max(1, thresholds.ELSEWHERE // 16 // z.numel())
    with torch.enable_grad():
        w = torch.zeros_like(z).requires_grad_()
        (slope,) = torch.autograd.grad(z, x, w, create_graph=True)
        for a, b in even(len(given), most):
            (u,) = torch.autograd.grad(
                slope, w, given[a:b], retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            u = w.new_zeros(b - a, *w.shape) if u is None else u.detach()
            u = u.reshape(b - a, n, -1)[:, :, entries]
            if found is None:
                found = u.new_empty(len(given), *u.shape[1:], dtype=torch.promote_types(u.dtype, torch.float32))
            found[a:b] = u
    assert found is not None
    return found


class Narrowed(Groups):
    """The columns that are left of others at a bottleneck: a triangle for each block of its entries."""

    def __init__(
        self,
        source: Groups,
        z: torch.Tensor,
        n: int,
        one: tuple[torch.Tensor, torch.Tensor],
        bottleneck: Bottleneck,
        places: torch.Tensor,
        members: torch.Tensor,
        shared: bool,
    ) -> None:
        """`source` are the columns above, at z; `one` is that of one sample, with what it has at the bottleneck.

        `places [Q, m]` are the entries of each block, of which one behind the last fills a block up; `members [Q, G]`
        the groups that reach it, -1 fills up. If `shared`, the columns may be the same for all samples, as those of the
        layers above are.
        """
        self.source, self.z, self.n, self.one, self.bottleneck = source, z, n, one, bottleneck
        self.places, self.members, self.shared = places, members, shared
        self.count, self.width = places.shape
        self.most = members.shape[1] * source.rows
        """The most rows of the factor of a block."""
        self.rank = self.rows = min(self.most, self.width)
        self.runs = 1 if shared else n
        self.whole = self.count == 1 and self.width == bottleneck.width
        """True if there is one block, of all entries in their order."""
        ids = places.new_full((bottleneck.width + 1,), -1)
        ids[places.flatten()] = torch.arange(self.count, device=ids.device).repeat_interleave(self.width)
        self.ids = ids[:-1]

    @cached_property
    def triangles(self) -> torch.Tensor | None:
        """`[n, Q, rank, m]`, or `[1, ...]` if they are the same for all samples; None if they cannot be had.

        Unit vectors are moved forwards from there, in this run or in that of one sample, which stands for all.
        """
        if isinstance(self.source, Narrowed) and self.source.triangles is None:
            return None
        n, bottleneck, runs = self.n, self.bottleneck, self.runs
        z, x = self.one if self.shared else (self.z, bottleneck.x)
        seeds = torch.zeros(self.width, bottleneck.width + 1, dtype=x.dtype, device=x.device)
        seeds = seeds.scatter(1, self.places.T, 1)[:, :-1]
        given = seeds.view(-1, *x.shape) if self.shared else bottleneck.restored(seeds[:, None].expand(-1, n, -1))
        count = 1 if runs == 1 and self.source.alike else n
        each = self.width * runs * -(-z.numel() // runs // self.count)
        ranges = [range(a, b) for a, b in even(self.count, max(1, thresholds.MOVED // max(1, each)))]
        met = [self.source.entries(self._members(some)) for some in ranges]
        numbers, theirs = self._sent_back(met)
        ours, bound, found = torch.zeros_like(theirs), torch.zeros_like(theirs), list[torch.Tensor]()
        try:
            for some, entries in zip(ranges, met, strict=True):
                u = forward(z, x, given, runs, entries)
                w = numbers[:, entries].to(u.dtype)
                ours = ours + (w @ u[:, 0].T if u.shape[1] == 1 else torch.einsum("dnk,nk->nd", u, w))
                bound = bound + w.norm(dim=1)[:, None] * u.norm(dim=2).T
                found.append(self._factored(u, some, count))
                del u  # before those to the next blocks are made
        except (RuntimeError, ArgumentError):  # no second derivative, as of fused attention, or no batching rule
            return None
        right = (ours - theirs).abs() <= 1000 * torch.finfo(bottleneck.x.dtype).eps * bound
        return joined(found, 1) if bool(right.all()) else None

    def _sent_back(self, met: Sequence[Some]) -> tuple[torch.Tensor, torch.Tensor]:
        """Random numbers at the entries to which is moved forwards, `[n, M]`, and their one pullback, `[n, m]`.

        Both have to agree for every sample: torch differentiates some backward passes wrongly, and f may treat the
        places of a batch differently.
        """
        flat = uniform(self.z.numel(), 0).reshape(self.n, -1).to(self.z)
        some = torch.zeros_like(flat[:1])
        for entries in met:
            some[:, entries] = 1
        numbers = flat * some
        (back,) = torch.autograd.grad(self.z, self.bottleneck.x, numbers.reshape(self.z.shape), retain_graph=True)
        wide = torch.promote_types(back.dtype, torch.float32)
        theirs = torch.nn.functional.pad(self.bottleneck.exposed(back).to(wide), (0, 1))
        return numbers, theirs[:, self.places].sum(1)

    def _factored(self, u: torch.Tensor, some: range, count: int) -> torch.Tensor:
        """The triangles of some blocks, `[count, blocks, rank, m]`, from what was moved to what they reach."""
        budget = thresholds.CACHE.get(u.device.type, thresholds.ELSEWHERE)
        most, found = max(1, budget // (self.most * self.width * len(some))), []
        members = self.members[some.start : some.stop]
        for a, b in even(count, most):
            rows = self.source.products(u if u.shape[1] == 1 else u[:, a:b], self._members(some), slice(a, b))
            if self.count == 1:
                rows = rows.reshape(len(rows), 1, -1, self.width)
            elif members.shape[1] > 1:
                place = members.clone()
                place[place >= 0] = torch.arange(rows.shape[1], device=rows.device)
                rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 1))[:, place].flatten(2, 3)  # -1: the row behind
            found.append(torch.linalg.qr(rows, mode="r").R)  # not a Gram matrix, which squares the condition
        return joined(found)

    def _members(self, some: range) -> Some:
        """The groups that reach some of the blocks; all, if there is one block."""
        members = self.members[some.start : some.stop]
        return slice(None) if self.count == 1 else members[members >= 0]

    @property
    def _known(self) -> torch.Tensor:
        assert self.triangles is not None
        return self.triangles

    @property
    def alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: known when asked
        return len(self._known) == 1 and self.n > 1

    def layer(self, start: int, stop: int) -> torch.Tensor:
        columns = self._known[:, :, start:stop].movedim(2, 0)  # [V, n, Q, m]
        return self._spread(columns.flatten(2), self.places.flatten())

    def block(self, start: int, stop: int) -> torch.Tensor:
        found = []
        for q in range(start // self.rank, -(-stop // self.rank)):
            a, b = max(start - q * self.rank, 0), min(stop - q * self.rank, self.rank)
            found.append(self._spread(self._known[:, q, a:b].movedim(1, 0), self.places[q]))
        return joined(found)

    def entries(self, some: Some) -> Some:
        places = self.places[some]
        return places[places < self.bottleneck.width]

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        places, known = self.places[some], self._known
        if self.whole:
            u = moved.unsqueeze(2)
        else:
            u = moved.new_zeros(*moved.shape[:2], *places.shape)
            u[:, :, places < self.bottleneck.width] = moved
        if len(known) == 1 and len(known[0, some]) == 1:
            return (u[:, :, 0].transpose(0, 1) @ known[0, 0].T).mT.unsqueeze(1)
        if len(known) == 1:
            return torch.einsum("qrm,dnqm->nqrd", known[0, some], u)
        own = known[part][:, some]
        return torch.einsum("nqrm,dnqm->nqrd", own, u.expand(-1, len(own), -1, -1))

    def _spread(self, columns: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Columns `[V, n, entries]` put at the places of these entries, with zeros elsewhere."""
        if self.whole:
            return columns.expand(-1, self.n, -1)
        target = columns.new_zeros(*columns.shape[:2], self.bottleneck.width + 1)
        target[:, :, places] = columns
        return target[:, :, :-1].expand(-1, self.n, -1)
