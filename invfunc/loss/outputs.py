"""Where a function is split into model and loss: marked outputs, and torch's convex losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc.errors import SplitError
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.operation import known
from invfunc.recording.graph import node_of, reaches
from invfunc.recording.random import Draws
from invfunc.recording.seen import Seen
from invfunc.recording.tags import Sampled
from invfunc.recording.uses import ParameterUses

T = TypeVar("T")


@dataclass(eq=False)
class ModelOutput:
    """Outputs of the model, as the loss part sees them."""

    ordinal: int
    value: torch.Tensor
    shown: torch.Tensor
    """The value that the loss gets and may even write to: the same numbers, but not a leaf."""
    axis: Axis
    marked: bool
    called: str

    @property
    def edge(self) -> torch.Tensor:
        return self.value

    @property
    def node(self) -> Any:
        return node_of(self.value)


@dataclass
class LossTerm:
    """A loss whose Hessian in `input`, an affine function of roots, has a known structure."""

    kind: str
    roots: frozenset[int]
    input: torch.Tensor
    axis: Axis
    output: torch.Tensor
    call: Call
    at_root: bool
    """Whether the input is the root, not computed from it."""
    version: int = 0
    """The version of the output; one that is modified afterwards is not what the loss returned."""

    @property
    def root(self) -> int:
        """The first of its roots."""
        return min(self.roots)


class Reached(BaseException):
    """Ends a run on a part of the batch once all outputs are there."""


class DifferentiatedWithin(BaseException):
    """Ends a run in which f itself differentiates what depends on a candidate."""


def searched(run: Callable[[], T], draws: Draws) -> T:
    """A run for outputs; it begins anew where f itself takes a gradient through a candidate, which is none then."""
    while True:
        try:
            return run()
        except DifferentiatedWithin:
            draws.rewind()


class OutputFinder:
    """Watches one run for outputs, in the order in which they come.

    Looking for them (`wanted=None`), each candidate becomes a root: the rest of the function is differentiated there.
    With `wanted`, the run ends when the candidates of these ordinals are there.

    Args:
        within: the ordinals of those that f itself takes a gradient through, as an attack of an adversary does; more
            of them are added.
        keep: whether roots are `kept` as the model has computed them, with its graph.
    """

    def __init__(self, wanted: list[int] | None = None, within: set[int] | None = None, keep: bool = False) -> None:
        self.wanted, self.within, self.keep = wanted, set() if within is None else within, keep
        self.kept: dict[int, torch.Tensor] = {}
        self.count = 0
        self.roots: dict[int, ModelOutput] = {}
        self.behind: dict[int, frozenset[int]] = {}
        """The candidates that each candidate depends on."""
        self.confirmed: set[int] = set()
        self.marks: set[int] = set()
        self.terms: list[LossTerm] = []

    def add(self, run: ParameterUses, value: torch.Tensor, called: str, marked: bool = False) -> torch.Tensor:
        """A candidate for outputs; returns what the rest of the run is to compute with."""
        tag = run.tag(value)
        assert isinstance(tag, Sampled)
        ordinal, self.count = self.count, self.count + 1
        if tag.lost or not isinstance(tag.place, Axis) or ordinal in self.within:
            return value
        if marked:
            self.marks.add(ordinal)
        self.behind[ordinal] = tag.crossed
        if self.wanted is not None:
            run.set(value, replace(tag, crossed=frozenset({ordinal})))
            if ordinal in self.wanted:
                self.roots[ordinal] = ModelOutput(ordinal, value, value, tag.place, marked, called)
                if len(self.roots) == len(self.wanted):
                    raise Reached
            return value
        root = run.scope.enter(run.scope.leave(value))
        given = root.clone()
        run.entered.append(root)
        if self.keep:
            self.kept[ordinal] = value
        self.roots[ordinal] = found = ModelOutput(ordinal, root, given, tag.place, marked, called)
        return shown(run, found, given)

    def marked_before(self, tag: Sampled) -> bool:
        return not self.marks.isdisjoint(tag.crossed)

    def before_call(self, run: ParameterUses, seen: Seen) -> Seen:
        entry, args, kwargs = seen.function.entry, seen.args, seen.kwargs
        if entry.differentiates and self.wanted is None:
            self._not_through(seen)
        if entry.loss not in ("convex", "logarithm"):
            return seen
        value = args[0] if args else kwargs.get("input")
        if not isinstance(value, torch.Tensor):
            return seen
        tag = run.tag(value)
        if not isinstance(tag, Sampled) or not tag.active or self.marked_before(tag):
            return seen
        root = self.add(run, value, seen.name)
        changed = ((root, *args[1:]), kwargs) if args else (args, {**kwargs, "input": root})
        return run.seen(seen.function, *changed)

    def _not_through(self, seen: Seen) -> None:
        """Begin anew if f takes a gradient through roots, where its graph ends."""
        inputs = tree.tensors(seen.function.argument(seen.args, seen.kwargs, "inputs"))
        of = tree.tensors(seen.args[:1] or list(seen.kwargs.values())[:1])

        def above(root: ModelOutput, x: torch.Tensor) -> bool:
            return reaches(x, {node_of(root.value)}, {})

        through = {i for i, r in self.roots.items() if any(above(r, x) for x in of)}
        through = {i for i in through if not inputs or not all(above(self.roots[i], x) for x in inputs)}
        if through:
            self.within |= through
            raise DifferentiatedWithin

    def after_call(self, run: ParameterUses, call: Call) -> None:
        """Note what a loss has made of a candidate."""
        if self.wanted is not None:
            return
        value = call.first
        tag = run.tag(value) if isinstance(value, torch.Tensor) else None
        if not isinstance(tag, Sampled) or not isinstance(tag.place, Axis):
            return
        entry = known(call.name)
        if entry.loss == "of logarithm" and tag.logarithm:
            self.confirmed |= tag.crossed
        if entry.hessian == "unknown" or not tag.crossed or not tag.crossed <= self.roots.keys():
            return
        at_root = any(self.roots[i].shown is value for i in tag.crossed) and version(value) == 0
        if at_root and entry.loss == "convex":
            self.confirmed |= tag.crossed
        if entry.loss == "logarithm":
            seen = run.tag(call.out)
            assert isinstance(seen, Sampled)
            run.set(call.out, replace(seen, logarithm=True))
        if tag.affine and _others_constant(run, call):
            written = version(call.out)
            self.terms.append(LossTerm(entry.hessian, tag.crossed, value, tag.place, call.out, call, at_root, written))

    def selected(self, tag: Sampled, wanted: bool) -> list[int]:
        """The ordinals of the outputs that a result depends on: those marked by hand, or those of known losses;
        `wanted` says that the result has to be differentiable."""
        marked = [i for i, root in self.roots.items() if root.marked]
        found = [i for i in marked or sorted(self.confirmed) if i in tag.crossed]
        if wanted and any(not self.behind[i].isdisjoint(found) for i in found):
            raise SplitError(
                "outputs depend on other outputs (one known loss of another?), and the derivative of the result cannot "
                "keep them apart. Mark the outputs with `outputs(z)`."
            )
        return found


def shown(run: ParameterUses, root: ModelOutput, value: torch.Tensor) -> torch.Tensor:
    """A copy of a root, as a run of the loss gets it."""
    run.set(value, Sampled(root.axis, crossed=frozenset({root.ordinal}), affine=True))
    return value


def _others_constant(run: ParameterUses, call: Call) -> bool:
    """Whether only the first argument depends on the parameters."""
    others = [x for x in (*call.args[1:], *call.kwargs.values()) if isinstance(x, torch.Tensor)]
    tags = [run.tag(x) for x in others if x is not call.first]
    return all(tag is None or (isinstance(tag, Sampled) and not tag.active) for tag in tags)


def check_split(tag: Sampled, finder: OutputFinder, wanted: list[int]) -> None:
    """Check that every path from the parameters to the result crosses the outputs."""
    ways_out = (
        "Mark the outputs with `outputs(z)`, use one of torch's convex losses, or give the model and the loss apart."
    )
    if not wanted:
        raise SplitError(
            f"no outputs are found in f: no known convex loss of the model's outputs is called. {ways_out}"
        )
    if tag.around is not None:
        raise SplitError(
            f"a path from the parameters to the result goes around the outputs (it comes in at `{tag.around}`), as an "
            f"L2 term or a loss that is not known does. Take it out of f, or: {ways_out[0].lower()}{ways_out[1:]}"
        )
    astray = [finder.roots[i].called for i in tag.crossed if i not in wanted]
    if astray:
        raise SplitError(
            f"a path from the parameters to the result goes around the outputs, through `{astray[0]}`. {ways_out}"
        )


def check_seen(
    result: torch.Tensor, params: list[torch.Tensor], roots: list[ModelOutput], finder: OutputFinder
) -> None:
    """Check in the graph of autograd that no path, also of calls that were not seen, goes around the outputs."""
    astray = [root.value for root in finder.roots.values() if root not in roots]
    targets = {node_of(x) for x in (*params, *astray)} - {None}
    if reaches(result, targets, {node_of(r.value): () for r in roots}):
        raise SplitError(
            "a path from the parameters to the result goes around the outputs, through an operation that cannot be "
            "seen (a custom autograd.Function, or torch.func inside f)."
        )


class _Marked:
    """Takes marked outputs for the finder of a run."""

    def __init__(self, run: ParameterUses) -> None:
        self.run = run

    def mark(self, z: torch.Tensor) -> torch.Tensor | None:
        finder, tag = self.run.watcher, self.run.tag(z)
        if not isinstance(finder, OutputFinder) or not isinstance(tag, Sampled) or finder.marked_before(tag):
            return None
        return finder.add(self.run, z, "outputs", marked=True)


def marking(run: ParameterUses) -> AbstractContextManager[None]:
    """Makes a run the one whose output finder `outputs` reports to."""
    from invfunc.core.split import marked_for

    return marked_for(_Marked(run))
