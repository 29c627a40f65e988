"""A look at a function: it runs on one sample, and what its outputs depend on at each use of a parameter is noted.

A site is a place where parameters meet samples: the uses with one edge of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from invfunc._torch.functorch import undispatched, unwatched
from invfunc.arguments.problem import Problem
from invfunc.core.columns import lost, split
from invfunc.core.marks import Known, Node
from invfunc.core.run import Run
from invfunc.core.split import Finder, marked_for
from invfunc.core.uses import WHOLE, Block, Expanded, Grown, Pair, Rows, Use
from invfunc.structure.labels import Labels, Root, coordinates
from invfunc.structure.rules import NONE, core


def sites_of(uses: Sequence[Use]) -> list[int]:
    """The site of each use."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(u.edge), len(numbers)) for u in uses]


def sent(use: Use, run: Run, block: Block = WHOLE, read: bool = True) -> torch.Tensor | None:
    """The cotangent of a use position by position, `[V, n, g, p, o]`; None if it has no positions.

    With `read`, that of a scale is multiplied with what it scales.
    """
    if isinstance(use, Pair):
        return use.sends(run, block)
    if isinstance(use, Rows):
        d = use.sent(run, block)
        return d.reshape(*d.shape[:2], 1, -1, use.shape[1:].numel())
    if not isinstance(use, Expanded):
        return None
    view, at = use.view or use.shape, use.axis[0]
    if run.n > 1 and -at <= len(view) and view[at] != 1:
        return None  # it has an entry for each sample
    s = use.sent(run, block)
    s = s * use.factor(run, block) if read and use.factor is not None else s
    wide = [i - len(view) for i, size in enumerate(view) if size != 1]
    if any(-i > s.ndim - 2 or s.shape[i] != view[i] for i in wide):
        return None
    s = s.movedim(wide, (*range(-len(wide), 0),)) if wide else s.unsqueeze(-1)
    return s.reshape(*s.shape[:2], 1, -1, use.shape.numel())


class Frame:
    """Labels that start at the first of some sites, of what lies between these and the outputs, and boxes there."""

    def __init__(
        self,
        root: Root,
        sites: frozenset[int],
        first: frozenset[int],
        base: Root,
        hulls: bool = True,
        one: bool = False,
    ) -> None:
        """The boxes of `base` say where several first sites are in relation to each other; `hulls` that all that meets
        the parameters at one position gets one box, and `one` that so it does where there is only one position."""
        self.root, self.sites, self.first, self.base, self.hulls, self.one = root, sites, first, base, hulls, one
        self.boxes: dict[int, torch.Tensor] = {}
        """The boxes `[2, k, *one]` by site."""

    def used(
        self, labels: Labels, site: int, out: torch.Tensor, layouts: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Keep the boxes of what came out where parameters have met samples; returns its new labels."""
        rows = labels.of(out, self.root)
        if rows is None or not bool((core(rows) > NONE).any()):
            rows = self._start(labels, out)
        one = core(rows)  # what depends on nothing labelled may have any label
        rows = torch.where(one == NONE, 0, one).expand(2, self.root.axes, *out.shape)
        for entries in layouts if self.hulls else ():
            if entries is not None and (entries.shape[1] > 1 or self.one):
                rows = _over_outs(rows, entries)
        self.boxes[site] = rows.flatten(2)
        return rows

    def _start(self, labels: Labels, out: torch.Tensor) -> torch.Tensor:
        """Coordinates of the entries, or the centres of what they depend on."""
        base = labels.of(out, self.base) if len(self.first) > 1 else None
        if base is None or self.base.axes != self.root.axes:
            return coordinates(out, self.root.axes)
        hull = base.flatten(2).amax(2).reshape(2, -1, *[1] * out.ndim)
        base = torch.where(base == NONE, torch.where(hull == NONE, 0, hull), base)
        centre = ((base[1] - base[0]) / 2).floor()  # boxes are told apart as whole numbers
        return torch.stack([-centre, centre])


def _over_outs(rows: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The labels with those of all entries at a position, `[outs, positions]`, replaced by their hull."""
    one = core(rows)
    numbers = torch.arange(one[0, 0].numel(), dtype=torch.int32, device=rows.device).reshape(one.shape[2:])
    numbers = numbers.expand(rows.shape[2:]).flatten()[entries]
    if bool((numbers == numbers[:1]).all()):  # there is one label at each position
        return rows
    flat = rows.reshape(*rows.shape[:2], -1).clone()
    flat[:, :, entries] = flat[:, :, entries].amax(2, keepdim=True).expand(-1, -1, *entries.shape)
    return flat.view(rows.shape)


class Look:
    """What a run of one sample tells."""

    def __init__(self) -> None:
        self.labels = Labels()
        self.inputs = self.labels.root(3)
        self.frames: list[Frame] = []
        self.starts: dict[int, Root] = {}
        """The roots that start at what an operation reads, by the number of its first use."""
        self.layouts: dict[int, torch.Tensor | None] = {}
        """The entries of the result of its operation at each position of a use, `[outs, positions]`."""
        self.run: One
        self.output: torch.Tensor
        """The output of the model."""

    def frame(self, sites: frozenset[int], first: frozenset[int], base: Root, **options: bool) -> Frame:
        """Add a frame."""
        axes = 3 if options.get("hulls", True) else 1
        self.frames.append(found := Frame(self.labels.root(axes), sites, first, base, **options))
        return found

    def at(self, use: int) -> Root:
        """Add a root at what an operation reads."""
        return self.starts.setdefault(use, self.labels.root(3))

    def of(self, problem: Problem, uses: Sequence[Use]) -> None:
        """Run the function on the first sample; `uses` are those of all."""
        own = problem.chunk(slice(0, 1), 1)
        self.run = run = One(self, uses)
        run.criterion = None if own.loss is not None else Finder()
        run.alone = False
        leaves = [run.leaf(i, p) for i, p in enumerate(own.leaves)]
        device = own.leaves[0].device.type
        auto = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if auto else None
        with torch.enable_grad(), marked_for(run.criterion), self.labels:
            with torch.autocast(device, kind, cache_enabled=False) if auto else nullcontext():
                out, _ = own.call(run, leaves, slice(None))
                out = out if own.loss is None else lost(own, run, out)
        (root,) = split(run, out).roots
        self.output = root.source

    def used(self, site: int, out: torch.Tensor, layouts: Sequence[torch.Tensor | None]) -> None:
        """Keep the boxes of what came out where parameters have met samples, in all frames."""
        found = {f.root: f.used(self.labels, site, out, layouts) for f in self.frames if site in f.sites}
        if found:
            self.labels.write(out, found)

    def rows(self, x: torch.Tensor, root: Root) -> torch.Tensor:
        """The labels of the entries of a tensor of the run, `[2, k, entries]`."""
        rows = self.labels.of(x, root)
        return x.new_full((2, root.axes, x.numel()), NONE, dtype=torch.float32) if rows is None else rows.flatten(2)


class One(Run):
    """A run of one sample, of which a look is taken."""

    def __init__(self, look: Look, uses: Sequence[Use]) -> None:
        """`uses` are those of all samples."""
        super().__init__(1, deep=False)
        self.look_taken, self.read, self.edges = look, dict[int, torch.Tensor](), dict[int, int]()
        self.grown = {i: use for i, use in enumerate(uses) if isinstance(use, Grown)}

    def samples(self, x: torch.Tensor, axis: Any) -> torch.Tensor:
        look = self.look_taken
        with undispatched():
            x = super().samples(x.clone(), axis)
            look.labels.set(x, look.inputs, coordinates(x, look.inputs.axes))
        return x

    def meet(self, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
        look, first = self.look_taken, len(self.uses)
        if (root := look.starts.get(first)) is not None:
            self.read[first] = x = data[0][0]
            with undispatched():
                look.labels.set(x, root, coordinates(x, root.axes), fresh=True)
        out = super().meet(func, rule, args, kwargs, data, params)
        met: dict[int, list[int]] = {}
        for i, use in enumerate(self.uses[first:], first):
            site = self.edges.setdefault(id(use.edge), len(self.edges))
            met.setdefault(site, []).append(i)
        if isinstance(out, torch.Tensor):
            with undispatched(), unwatched(), torch.no_grad():
                for site, uses in met.items():
                    for i in uses:
                        look.layouts[i] = self.layout(self.uses[i], out)
                    look.used(site, out, [look.layouts[i] for i in uses])
        return out

    def grown_at(self, node: Node, shape: Any, before: Any) -> int | None:
        use = self.grown.get(len(self.uses))
        return None if use is None or use.node.leaf != node.leaf or -use.axis[0] > len(shape) else use.axis[0]

    def use(self, use: Use, edge: Any, end: bool = True) -> None:
        super().use(use, edge, end)
        site = self.edges.setdefault(id(edge), len(self.edges))
        if isinstance(use, Grown):
            with undispatched(), unwatched(), torch.no_grad():
                number = len(self.uses) - 1
                self.look_taken.layouts[number] = layout = self.layout(use, edge)
                self.look_taken.used(site, edge, [layout])

    def layout(self, use: Use, out: torch.Tensor) -> torch.Tensor | None:
        """The entries of a result `[outs, positions]` that meet what is read at a position."""
        use.d = torch.arange(out.numel(), device=out.device).reshape(1, *out.shape)
        found = sent(use, self, read=False)
        use.d = None
        return None if found is None or found.numel() != out.numel() else found[0, 0].transpose(1, 2).flatten(0, 1)
