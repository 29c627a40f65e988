"""A function split into model outputs and loss, and the columns that the loss sends back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc.core.lots import Lot
from invfunc.errors import ArgumentError, unreached
from invfunc.loss.drawn import Drawn, drawn, targets
from invfunc.loss.hessian import gradient, hessian
from invfunc.loss.outputs import LossTerm, ModelOutput, OutputFinder, check_seen, check_split, marking, shown
from invfunc.loss.square_root import Columns, Gradient, rooted
from invfunc.operations.axis import Axis
from invfunc.recording import Trace
from invfunc.recording.checks import check_loss
from invfunc.recording.graph import node_of, reaches
from invfunc.recording.scope import Scope
from invfunc.recording.steps import Step
from invfunc.recording.tags import Sampled
from invfunc.reductions.quantity import Drawing, Quantity

Made = dict[Hashable, list[Columns]]
"""The columns of each kind, by `Quantity.columns`."""
Sampler = Callable[[Any], Any]
"""Gives a target for the outputs of the model."""


@dataclass
class Split:
    """The loss part of a function, run once on all outputs of the model part: `result` as a function of `roots`."""

    scope: Scope
    n: int
    result: torch.Tensor
    roots: list[ModelOutput]
    """The outputs as the loss sees them; none where the result is the losses of the samples themselves."""
    terms: list[LossTerm] = field(default_factory=list)
    again: Callable[[Sampler], torch.Tensor] | None = None
    """The loss at another target; None where it is not known which argument that is."""
    values: list[torch.Tensor] = field(default_factory=list)
    """The outputs as the model gives them, if its graph is kept to be differentiated."""
    bottlenecks: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """The places where that graph is split, from first to last: what goes on, and what came before."""
    steps: list[Step] = field(default_factory=list)
    """The nonlinear calls of the model, where they were to be remembered."""

    def __post_init__(self) -> None:
        if self.roots and not reaches(self.result, {node_of(r.value) for r in self.roots}, {}):
            raise unreached()

    def gradient(self) -> Gradient:
        return gradient(self.scope, self.result, self.roots, self.n)

    def hessian(self, convex: bool = True) -> list[Columns]:
        return hessian(self.scope, self.result, self.roots, self.terms, self.n, convex)

    def made(self, quantities: Iterable[Quantity]) -> Made:
        """The columns of each quantity."""
        made: Made = {}
        for q in quantities:
            if q.columns in made:
                continue
            if q.kind.first_order:
                made[q.columns] = [self.gradient()]
            elif q.drawing is None:
                columns = self.hessian(convex=q.kind.convex)
                made[q.columns] = [rooted(c, q.reduction.rooted) for c in columns]
            else:
                made[q.columns] = self.drawn(q.drawing, "diag_ggn")
        return made

    def drawn(self, drawing: Drawing, transform: str) -> list[Columns]:
        """Columns at targets that are drawn from the predictive of a known loss, or by a sampler of the user's."""
        if drawing.sample is None:
            return drawn(self.hessian(), drawing.count, drawing.source(self.n), drawing.peel)
        if self.again is None:
            raise ArgumentError(
                f"with `sample=`, the loss has to be given apart from the model, as in `{transform}(f, loss, ...)`: a "
                "function of all arguments does not say which is the target."
            )
        found, sample, source = [], drawing.sample, drawing.source(self.n)
        dims = [r.axis.dim for r in self.roots]
        for _ in range(drawing.count):
            losses = self.again(lambda outputs: targets(sample, outputs, dims, source))
            if not losses.ndim:
                raise ArgumentError(
                    "with `sample=`, the loss has to return the [N] losses of the samples: a scalar does not say "
                    "whether it is their mean or their sum. Return the negative log-likelihoods, without a factor."
                )
            found.append(gradient(self.scope, losses, self.roots, self.n).cotangents)
        roots = {i for one in found for i in one}
        scale = drawing.count**-0.5
        return [Drawn({i: scale * torch.stack([one[i] for one in found]) for i in roots})]


def lots(made: Sequence[Columns], part: slice | torch.Tensor) -> list[Lot]:
    """The columns that are drawn, of some samples, where all of them are pulled back together."""
    found, start = [], 0
    for kind in made:
        if isinstance(kind, Drawn):
            exact = None if kind.exact is None else kind.exact[part]
            found.append(Lot(start, start + kind.count, exact))
        start += kind.count
    return found


def at_given(
    trace: Trace,
    outputs: Sequence[tuple[torch.Tensor, Axis]],
    structure: Any,
    loss: Callable[[Any, Any], Any],
    target: Any,
    seen: Callable[[Any], Any],
) -> Split:
    """Run a loss that is given apart on the outputs of the model; `seen` is a drawn target as the trace has to see it.

    The trace, which the output finder watches, knows where the samples are, or takes all of them for one.
    """
    finder, given = trace.watcher, []
    assert isinstance(finder, OutputFinder)
    for z, axis in outputs:
        trace.set(z, Sampled(axis))
        given.append(finder.add(trace, z, "f", marked=True))

    def lost(given: list[torch.Tensor], target: Any) -> torch.Tensor:
        with trace:
            result = loss(tree.unflatten(given, structure), target)
        check_loss(trace, result, "the loss")
        return result

    def again(sample: Sampler) -> torch.Tensor:
        with torch.no_grad():
            target = sample(tree.unflatten([r.value.detach() for r in roots], structure))
        return lost([shown(trace, r, r.value.clone()) for r in roots], seen(target))

    with marking(trace):
        result = lost(given, target)
    roots = list(finder.roots.values())
    return Split(trace.scope, trace.n, result, roots, finder.terms, again)


def at_found(
    trace: Trace,
    finder: OutputFinder,
    wanted: list[int],
    result: torch.Tensor,
    params: list[torch.Tensor],
) -> Split:
    """Split the result of a loss function at the outputs that were found, of which those of these ordinals count.

    Raises SplitError where a path from the parameters to the result does not cross them.
    """
    roots = [finder.roots[i] for i in wanted]
    candidates = [r.value for r in finder.roots.values()]
    if not wanted and not reaches(result, {node_of(x) for x in (*params, *candidates)} - {None}, {}):
        raise unreached()
    check_split(check_loss(trace, result), finder, wanted)
    check_seen(result, params, roots, finder)
    return Split(trace.scope, trace.n, result, roots, finder.terms)
