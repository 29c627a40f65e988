"""The pattern of a function: which entries of its outputs depend on which entries at its parameter uses and
bottlenecks.

It is derived from the operations of a run of one sample, never read off numbers: a dead unit hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc._functorch import undispatched
from invfunc.operations.factors import Recipe
from invfunc.operations.receptive_fields.propagation import Labels
from invfunc.passes.run import Run
from invfunc.recording.checks import same_values
from invfunc.recording.seen import Seen
from invfunc.recording.tags import ParameterUse
from invfunc.sparsity.cells import Layout, layout, layout_at
from invfunc.sparsity.paths import Bottleneck

INPUTS = 0
"""The frame in which the inputs have coordinates."""
ALL = 1
"""The frame of all sites."""
LAST = 2
"""The frame of the last site by itself."""


@dataclass
class Frame:
    """Labels that start at the first of some sites: what lies below them is of no interest there."""

    number: int
    sites: frozenset[int]
    first: frozenset[int]
    base: int
    """The frame whose boxes say where several first sites are in relation to each other."""
    hulls: bool = True
    """Whether all that meets the parameters at one position gets one box."""


class Pattern:
    """Labels of one run: those of frames, and of narrow layers from which a frame of its own starts."""

    def __init__(self, frames: Sequence[Frame], bottlenecks: dict[int, tuple[int, Bottleneck]]) -> None:
        """`bottlenecks` gives the frame that starts at a bottleneck, and the bottleneck, by the site of the operation
        that reads it."""
        self.frames, self.bottlenecks = frames, bottlenecks
        self.labels = Labels()
        self.layouts: dict[int, list[Layout | None]] = {}
        """The layouts of the parameter uses of each site."""
        self.boxes: dict[tuple[int, int], torch.Tensor] = {}
        """The boxes `[2, k, *one]` by frame and site."""
        self.run: Run | None = None
        apart = any(frame.base == INPUTS and len(frame.first) > 1 for frame in frames)
        self._axes: dict[int, int] = {INPUTS: 3 if apart else 1}

    # What a trace tells

    def samples(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of an input, whose entries get their coordinates as labels."""
        x = x.clone()
        with undispatched():
            self._root(x, INPUTS)
        return x

    def before(self, site: int, seen: Seen) -> None:
        """Called before an operation that reads samples: a frame starts at what it reads if that is a bottleneck."""
        if hasattr(seen.func, "recipe"):  # the derivative of one's own operation may reach further than its values
            self.labels.lost = seen.name
        if site in self.bottlenecks and seen.params:
            frame, bottleneck = self.bottlenecks[site]
            with undispatched():
                self._root(seen.read[bottleneck.read], frame)

    def used(self, site: int, out: torch.Tensor, recipe: Recipe) -> None:
        """Called when parameters have met samples: keep the boxes of what came out."""
        with undispatched(), torch.no_grad():
            self._keep_boxes(site, out, recipe)

    def _keep_boxes(self, site: int, out: torch.Tensor, recipe: Recipe) -> None:
        known = layout(recipe, out.shape, out.device)
        again = site in self.layouts
        self.layouts.setdefault(site, []).append(known)
        for frame in self.frames:
            if site not in frame.sites:
                continue
            if site in frame.first and not again:
                self._start(out, frame)
            rows = self.labels.of(out, frame.number)
            if rows is None:
                rows = out.new_full((2, self._axes[frame.number], *out.shape), -torch.inf, dtype=torch.float32)
            rows = torch.where(rows == -torch.inf, 0, rows)  # what depends on nothing labelled may have any label
            rows = _over_outs(rows, known) if frame.hulls and known is not None and known.inner else rows
            self.labels.set(out, rows, frame.number)
            self.boxes[frame.number, site] = rows

    def _start(self, out: torch.Tensor, frame: Frame) -> None:
        if len(frame.first) == 1:
            self._root(out, frame.number)
            return
        base, k = self.labels.of(out, frame.base), self._axes.get(frame.base, 4)
        centre = [out.new_zeros(out.shape, dtype=torch.float32) for _ in range(k)]
        if base is not None:
            hull = base.flatten(2).amax(2).reshape(2, k, *[1] * out.ndim)
            base = torch.where(base == -torch.inf, torch.where(hull == -torch.inf, 0, hull), base)
            centre = list((base[1] - base[0]) / 2)
        self._axes[frame.number] = k
        self.labels.enter(out, centre, frame.number)

    def _root(self, x: torch.Tensor, frame: int) -> None:
        """Each entry gets its own coordinates, along the dimensions that have several."""
        dims = [d for d in range(x.ndim) if x.shape[d] > 1]
        k = self._axes.setdefault(frame, max(1, len(dims)))
        dims = [*[-1] * k, *dims][-k:]  # -1 for an axis along which there is nothing to tell apart
        at = []
        for d in dims:
            numbers = torch.arange(1 if d < 0 else x.shape[d], dtype=torch.float32, device=x.device)
            at.append(numbers.reshape([x.shape[d] if e == d else 1 for e in range(x.ndim)]))
        self.labels.enter(x, at, frame)

    # What is asked afterwards

    def frame_at(self, bottleneck: Bottleneck) -> int:
        """The frame that starts at a bottleneck."""
        return next(frame for frame, other in self.bottlenecks.values() if other is bottleneck)

    def frame_above(self, bottleneck: Bottleneck) -> int:
        """The frame of the sites above a bottleneck."""
        return self.frame_at(bottleneck) + 1

    def affine(self, bottleneck: Bottleneck) -> bool:
        """Whether the outputs are affine in what is at a bottleneck, with the same coefficients for all samples."""
        assert self.run is not None
        return all(self.labels.affine(z, self.frame_at(bottleneck)) for z, _ in self.run.outputs.values())

    def fits(self, run: Run) -> bool:
        """Whether a run of other samples calls the same functions."""
        assert self.run is not None
        return run.trace.calls == self.run.trace.calls

    @property
    def complete(self) -> bool:
        """Whether all outputs with a derivative have labels."""
        assert self.run is not None
        frames = [frame.number for frame in self.frames if frame.number == ALL]
        active = [z for z, _ in self.run.outputs.values() if z.requires_grad]
        return all(self.labels.of(z, frame) is not None for z in active for frame in frames)

    def at_outputs(self, frame: int) -> dict[int, torch.Tensor | None]:
        assert self.run is not None
        return {i: self.labels.of(z, frame) for i, (z, _) in self.run.outputs.items()}

    def at_bottleneck(self, bottleneck: Bottleneck, frame: int) -> torch.Tensor | None:
        assert self.run is not None
        return self.labels.of(bottleneck.of(self.run)[0], frame)


def _over_outs(rows: torch.Tensor, known: Layout) -> torch.Tensor:
    """The labels with those of all entries at a position replaced by their hull."""
    flat, entries = rows.flatten(2).clone(), known.entries
    flat[:, :, entries.flatten()] = flat[:, :, entries].amax(2, keepdim=True).expand(-1, -1, *entries.shape).flatten(2)
    return flat.reshape(rows.shape)


def positions_apart(run: Run, pattern: Pattern, uses: list[ParameterUse]) -> Layout | None:
    """How the cotangents of a parameter fall apart into positions; None if columns have to be told apart first."""
    (use, *others) = uses
    found = None if others or not use.derived.selected else layout_at(run, use, use.param.device)
    if found is None:
        return None
    known = [k.entries for k in pattern.layouts[use.site] if k is not None]  # whose hulls were taken
    return found if any(torch.equal(found.entries, entries) for entries in known) else None


def alike(run: Run, alone: Run) -> bool:
    """Whether a run of the first sample alone does what one of several does, as far as can be seen."""

    def uses(run: Run) -> list[Any]:
        return [(t.site, t.derived.leaves, None if t.call is None else t.call.name) for t in run.trace.uses]

    if alone.trace.pattern is None or alone.trace.escaped not in (None, "set") or run.trace.calls != alone.trace.calls:
        return False
    if any(name.startswith("register_") for name in alone.trace.calls):  # a hook may change what flows back
        return False
    return uses(run) == uses(alone) and run.trace.sizes == alone.trace.sizes and same_outputs(run, alone)


def same_outputs(run: Run, other: Run, shift: int = 0) -> bool:
    """Whether the first samples of another run, which come some places later there, have the same outputs."""
    n = other.trace.n
    pairs = zip(run.outputs.values(), other.outputs.values(), strict=True)
    return all(
        same_values(axis.expose(z, run.trace.n)[:n].roll(shift, 0), own.expose(y, n)) for (z, axis), (y, own) in pairs
    )
