"""The pattern of a function: which entries of its outputs depend on which entries at its parameter uses and
bottlenecks.

It is derived from the operations of a run of one sample, never read off numbers: a dead unit hides nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from invfunc._torch.functorch import undispatched
from invfunc._torch.values import same_values
from invfunc.errors import InvFuncWarning
from invfunc.operations.factors import Recipe
from invfunc.operations.receptive_fields.propagation import Following, Labels, told
from invfunc.operations.receptive_fields.regions import core
from invfunc.passes.run import Run
from invfunc.recording.seen import Seen
from invfunc.recording.tags import ParameterUse
from invfunc.sparsity.bottleneck import Bottleneck
from invfunc.sparsity.cells import Layout, layout, layout_at


class Frame:
    """Labels that start at the first of some sites, of what lies between these and the outputs, and boxes there."""

    def __init__(
        self, sites: frozenset[int], first: frozenset[int], base: Labels, hulls: bool = True, one: bool = False
    ) -> None:
        """The boxes of `base` say where several first sites are in relation to each other; `hulls` that all that meets
        the parameters at one position gets one box, and `one` that so it does where there is only one position."""
        self.sites, self.first, self.base, self.hulls, self.one = sites, first, base, hulls, one
        self.labels = Labels()
        self.boxes: dict[int, torch.Tensor] = {}
        """The boxes `[2, k, *one]` by site."""

    def used(
        self, site: int, out: torch.Tensor, known: Layout | None, start: bool, beside: Sequence[torch.Tensor]
    ) -> None:
        """Keep the boxes of what came out where parameters have met samples; `start` where they do so for the first
        time."""
        if site not in self.sites:
            return
        if start and site in self.first:
            self._start(out, beside)
        rows = self.labels.of(out)
        if rows is None:
            rows = out.new_full((2, self.labels.axes, *out.shape), -torch.inf, dtype=torch.float32)
        one = core(rows)  # what depends on nothing labelled may have any label
        rows = torch.where(one == -torch.inf, 0, one).expand(rows.shape)
        rows = (
            _over_outs(rows, known.entries) if self.hulls and known is not None and (known.inner or self.one) else rows
        )
        self.labels.set(out, rows)
        self.boxes[site] = rows

    def _start(self, out: torch.Tensor, beside: Sequence[torch.Tensor]) -> None:
        if len(self.first) == 1:
            root(self.labels, out)
            return
        known, k = (self.base.of(x) for x in (out, *(x for x in beside if x.shape == out.shape))), self.base.axes
        base = next((rows for rows in known if rows is not None), None)
        centre = coordinates(out, k)
        if base is not None:
            hull = base.flatten(2).amax(2).reshape(2, k, *[1] * out.ndim)
            base = torch.where(base == -torch.inf, torch.where(hull == -torch.inf, 0, hull), base)
            centre = list(((base[1] - base[0]) / 2).floor())  # boxes are told apart as whole numbers
        self.labels.enter(out, centre)


def root(labels: Labels, x: torch.Tensor) -> None:
    """Each entry gets its own coordinates, along the dimensions that have several."""
    labels.enter(x, coordinates(x, labels.axes or max(1, sum(size > 1 for size in x.shape))))


def coordinates(x: torch.Tensor, k: int) -> list[torch.Tensor]:
    """The places of the entries along the last k dimensions that have several, to be broadcast."""
    dims = [*[-1] * k, *(d for d in range(x.ndim) if x.shape[d] > 1)][-k:]
    at = []
    for d in dims:  # -1 for an axis along which there is nothing to tell apart
        numbers = torch.arange(1 if d < 0 else x.shape[d], dtype=torch.float32, device=x.device)
        at.append(numbers.reshape([x.shape[d] if e == d else 1 for e in range(x.ndim)]))
    return at


class Pattern:
    """What a run of one sample tells, in several frames."""

    def __init__(
        self,
        inputs: Labels,
        everything: Frame | None,
        last: Frame | None,
        at: dict[Bottleneck, Labels],
        above: dict[Bottleneck, Frame],
        near: dict[int, Frame],
    ) -> None:
        """Labels of the inputs and at each bottleneck, frames of all sites, of the last one by itself, of those above
        each bottleneck, and of each that is near the outputs by itself."""
        self.inputs, self.everything, self.last, self.at, self.above = inputs, everything, last, at, above
        self.near = near
        self.frames = [f for f in (everything, last, *above.values(), *near.values()) if f is not None]
        self.labels = Following(inputs, *at.values(), *(frame.labels for frame in self.frames))
        self.layouts: dict[int, list[Layout | None]] = {}
        """The layouts of the parameter uses of each site."""
        self.raised: str | None = None
        """What the function raised when it ran on one sample."""

    # What a trace tells

    def samples(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of an input, whose entries get their coordinates as labels."""
        x = x.clone()
        with undispatched(), self.labels.blamed("the labels of an input"):
            root(self.inputs, x)
        return x

    def before(self, site: int, seen: Seen) -> None:
        """Called before an operation that reads samples: labels start at what it reads if that is a bottleneck."""
        if hasattr(seen.func, "recipe"):  # the derivative of one's own operation may reach further than its values
            self.labels.lose(seen.name)
        if (elsewhere := seen.function.entry.elsewhere) is not None:
            with undispatched(), self.labels.blamed(f"`{seen.name}`"):
                for labels in self.labels.labels:
                    labels.reach(seen.read, elsewhere(*seen.args))
        for bottleneck, labels in self.at.items():
            if bottleneck.site == site and seen.params:
                with undispatched(), self.labels.blamed("the labels of a narrow layer"):
                    root(labels, seen.read[bottleneck.read])

    def used(self, site: int, out: torch.Tensor, recipe: Recipe, beside: Sequence[torch.Tensor]) -> None:
        """Called when parameters have met samples: keep the boxes of what came out."""
        with undispatched(), torch.no_grad(), self.labels.blamed("the labels of a parameter use"):
            known, start = layout(recipe, out.shape, out.device), site not in self.layouts
            self.layouts.setdefault(site, []).append(known)
            for frame in self.frames:
                frame.used(site, out, known, start, beside)

    def failed(self, error: Exception) -> None:
        """Note what the run of one sample raised; a fault that is not the function's is a warning."""
        self.raised = told(error)
        if self.labels.fault is not None:
            warnings.warn(
                f"{self.hidden}, so that no structure is used. The result is right, but this is a fault of invfunc, "
                'or of a rule: please report it. `method="dense"` does not look.',
                InvFuncWarning,
                stacklevel=2,
            )

    # What is asked afterwards

    @property
    def hidden(self) -> str:
        """Why there is no pattern of the batch, after a run of one sample that does not stand for it."""
        if self.labels.lost is not None:
            return f"`{self.labels.lost}` hides the pattern"
        if self.labels.fault is not None:
            return f"to follow the function failed at {self.labels.fault}"
        raised = f" ({self.raised})" if self.raised is not None else ""
        return f"one sample does not run as it does in the batch{raised}"

    @property
    def blurred(self) -> str:
        """Which operations count as reading everything, since their rules failed."""
        each = self.labels.whole.items()
        return "".join(f"; all that `{name}` gives counts as read from everything ({why})" for name, why in each)

    def affine(self, bottleneck: Bottleneck, alone: Run) -> bool:
        """Whether the outputs are affine in what is at a bottleneck, with the same coefficients for all samples."""
        affine = self.at[bottleneck].affine
        return all(affine(z) for z, _ in alone.outputs.values())

    def complete(self, alone: Run) -> bool:
        """Whether all outputs with a derivative have labels."""
        active = [z for z, _ in alone.outputs.values() if z.requires_grad]
        return self.everything is None or all(self.everything.labels.of(z) is not None for z in active)


def _over_outs(rows: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The labels with those of all entries at a position, `[outs, positions]`, replaced by their hull."""
    one = core(rows)
    numbers = torch.arange(one[0, 0].numel(), dtype=torch.int32, device=rows.device).reshape(one.shape[2:])
    numbers = numbers.expand(rows.shape[2:]).flatten()[entries]
    if bool((numbers == numbers[:1]).all()):  # there is one label at each position
        return rows
    found = [_hull(row, entries) for row in rows.flatten(0, 1)]
    shape = torch.broadcast_shapes(*(row.shape for row in found))
    return torch.stack([row.expand(shape) for row in found]).unflatten(0, rows.shape[:2]).expand(rows.shape)


def _hull(row: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The largest of the numbers of all entries at a position, once along each dimension in which all are equal."""
    flat = row.flatten().clone()
    flat[entries] = flat[entries].amax(0).expand(entries.shape)
    found = flat.reshape(row.shape)
    for dim in range(found.ndim):
        first = found.narrow(dim, 0, 1)
        found = first if bool((found == first).all()) else found
    return found.clone()


def positions_apart(run: Run, pattern: Pattern, uses: list[ParameterUse]) -> Layout | None:
    """How the cotangents of a parameter fall apart into positions; None if columns have to be told apart first."""
    (use, *others) = uses
    found = None if others or not use.derived.selected else layout_at(run, use, use.param.device)
    if found is None:
        return None
    known = [k.entries for k in pattern.layouts[use.site] if k is not None]  # whose hulls were taken
    return found if any(torch.equal(found.entries, entries) for entries in known) else None


def same_calls(run: Run, other: Run) -> bool:
    """Whether two runs call the same functions, and use the same parameters at the same places: one that is repeated
    for the samples has its place there in a run of several, but not in one of one."""

    def called(run: Run) -> list[Any]:
        uses = [(t.site, t.derived.leaves, None if t.call is None else t.call.name) for t in run.trace.uses]
        return [run.trace.calls, uses, run.trace.sizes]

    return called(run) == called(other)


def alike(run: Run, alone: Run) -> bool:
    """Whether a run of the first sample alone does what one of several does, as far as can be seen."""
    if alone.trace.pattern is None or alone.trace.escaped not in (None, "set"):
        return False
    if any(name.startswith("register_") for name in alone.trace.calls):  # a hook may change what flows back
        return False
    return same_calls(run, alone) and same_outputs(run, alone)


def same_outputs(run: Run, other: Run, shift: int = 0) -> bool:
    """Whether the first samples of another run, which come some places later there, have the same outputs."""
    n = other.trace.n
    pairs = zip(run.outputs.values(), other.outputs.values(), strict=True)
    return all(
        same_values(axis.expose(z, run.trace.n)[:n].roll(shift, 0), own.expose(y, n)) for (z, axis), (y, own) in pairs
    )
