"""What the Hessian has beyond the GGN: the second derivatives of the model's own operations.

With `g` the cotangent at the output of a call and `J` the Jacobian of its inputs in the parameters, the Hessian is the
GGN and, for each nonlinear call, `J^T (sum_k g_k hess call_k) J`. A parameter that is not read linearly, or read again
downstream of itself, has more: there the entries are differentiated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc._torch.values import any_of, fake
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.loss.hessian import columns
from invfunc.loss.outputs import LossTerm
from invfunc.loss.square_root import Block, Columns, Elementwise, Gradient, Softmax, Units
from invfunc.operations.axis import Axis
from invfunc.operations.heard import function_of
from invfunc.operations.operation import known
from invfunc.operations.pointwise import entrywise
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.passes.run import Run
from invfunc.per_sample.cotangents import Samples
from invfunc.plan import even
from invfunc.recording.graph import node_of, reaches
from invfunc.recording.scope import Scope
from invfunc.recording.steps import Step
from invfunc.recording.tags import ParameterUse


@dataclass
class CallHessian:
    """The Hessian of one call in its inputs: unit columns e_k on the left, H e_k on the right."""

    scope: Scope
    n: int
    units: Units
    inputs: dict[int, tuple[torch.Tensor, Axis]]
    slopes: dict[int, torch.Tensor]
    """The gradients in the inputs, as functions of the inputs."""

    @property
    def count(self) -> int:
        return self.units.count

    def block(self, start: int, stop: int, part: slice) -> Block:
        left = self.units.block(start, stop, slice(None)).left
        pairs = [(self.slopes[i], self.inputs[i][1].restore(u, self.n, 1)) for i, u in left.items() if i in self.slopes]
        found = self.scope.grad([s for s, _ in pairs], [x for x, _ in self.inputs.values()], [u for _, u in pairs])
        right = {
            i: torch.zeros_like(left[i]) if h is None else axis.expose(self.scope.leave(h), self.n, 1)
            for (i, (_, axis)), h in zip(self.inputs.items(), found, strict=True)
        }
        return Block(left, right)


@dataclass
class Local:
    """Columns of the samples of one run, whichever part of the batch it is."""

    inner: Elementwise | Softmax | CallHessian | Columns
    step: int
    """The place of the call among the steps of the run."""

    @property
    def count(self) -> int:
        return self.inner.count

    def block(self, start: int, stop: int, part: slice) -> Block:
        return self.inner.block(start, stop, slice(None))


def second_order_columns(scope: Scope, run: Run, steps: Sequence[Step], gradient: Gradient) -> list[Local]:
    """The columns of the nonlinear calls of a run; their inputs join the outputs of the run."""
    if not steps:
        return []
    edges = [edge for step in steps for edge in step.edges]
    outputs, given = cotangents(run, gradient)
    found = iter(scope.grad(outputs, edges, given, batched=False))
    made: list[Local] = []
    for k, step in enumerate(steps):
        slopes = [None if g is None else scope.leave(g) for g in [next(found) for _ in step.edges]]
        if any(g is not None for g in slopes):
            made += [Local(columns, k) for columns in _columns(scope, run, step, slopes)]
    weights = [_weight(c.inner) for c in made]
    there = iter(any_of([w != 0 for w in weights if w is not None and not fake(w)]))
    return [c for c, w in zip(made, weights, strict=True) if w is None or fake(w) or next(there)]


def cotangents(run: Run, gradient: Gradient) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of a run with the gradient of the loss in them."""
    outputs, given = [], []
    for i, c in gradient.block(0, 1, run.part).left.items():
        z, axis = run.outputs[i]
        outputs.append(z)
        given.append(axis.restore(c[0], 1 if axis.whole else run.trace.n).to(z.dtype))
    return outputs, given


def _columns(
    scope: Scope, run: Run, step: Step, slopes: list[torch.Tensor | None]
) -> Sequence[Elementwise | Softmax | CallHessian | Columns]:
    """The columns of one call: it runs again on copies of its inputs, so that nothing lies between these and its
    results."""
    copies, args, kwargs, out = recomputed(scope, step)
    results = [x for x in tree.tensors(out) if x.is_floating_point() and x.requires_grad]
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, slopes, strict=True) if g is not None]
    first, kind = max(run.outputs) + 1, kind_of(step)
    values = {first + k: copies[id(x)] for k, x in enumerate(step.inputs)}
    if kind is None:
        return _dense(scope, run, step, values, pairs)
    y, g = pairs[0]
    call, axis = replace(step.call, args=args, kwargs=kwargs), _axis(step, 0)
    term = LossTerm(kind, frozenset({first}), values[first], axis, y, call, at_root=True)
    made = columns(scope, term, g, [], run.trace.n, convex=False)
    run.outputs[first] = step.inputs[0], term.axis
    return [made]


def _weight(made: Any) -> torch.Tensor | None:
    """What is zero where columns are, of those whose structure is known."""
    return made.diagonal if isinstance(made, Elementwise) else made.weight if isinstance(made, Softmax) else None


def _dense(
    scope: Scope, run: Run, step: Step, values: dict[int, torch.Tensor], pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[CallHessian]:
    """The Hessian of a call of which no structure is known, given what it read, and its results with their slopes."""
    results, slopes = [y for y, _ in pairs], [g for _, g in pairs]
    found = scope.grad(results, list(values.values()), slopes, batched=False, create_graph=True)
    nodes = {node_of(x) for x in values.values()}
    nonlinear = {i: s for i, s in zip(values, found, strict=True) if s is not None and reaches(s, nodes, {})}
    if not nonlinear:  # it is linear after all
        return []
    places = {i: (x, _axis(step, k)) for k, (i, x) in enumerate(values.items())}
    run.outputs |= {i: (x, axis) for x, (i, (_, axis)) in zip(step.inputs, places.items(), strict=True)}
    units = Units({i: axis.expose(scope.leave(x), run.trace.n) for i, (x, axis) in places.items()})
    return [CallHessian(scope, run.trace.n, units, places, nonlinear)]


def recomputed(scope: Scope, step: Step) -> tuple[dict[int, torch.Tensor], tuple, dict, Any]:
    """Run a call on copies of its inputs; returns them (by the ids of the originals), its arguments and its result."""
    call = step.call
    if any(version(x) != before for x, before in zip(step.inputs, step.versions, strict=True)):
        raise ArgumentError(
            f"what `{call.name}` read was modified in place afterwards, so its derivatives cannot be computed; modify "
            "a copy."
        )
    copies = {id(x): scope.enter(scope.leave(x)) for x in step.inputs}
    flat, structure = tree.flatten((call.args, call.kwargs))
    args, kwargs = tree.unflatten([copies.get(id(x), x) for x in flat], structure)
    device = step.inputs[0].device.type
    cast = torch.autocast(device, step.autocast) if step.autocast is not None else nullcontext()
    with TwiceDifferentiable(), cast:
        args = (args[0].clone(), *args[1:]) if function_of(call.func).writes(args, kwargs) else args
        out = call.func(*args, **kwargs)
    return copies, args, kwargs, out


def _axis(step: Step, k: int) -> Axis:
    """Where the samples are in an input."""
    place = step.call.place(step.inputs[k])
    if not isinstance(place, Axis):
        raise SampleAxisError(f"`{step.call.name}` is nonlinear in a sum over the samples, so the Hessian mixes them.")
    return place


def kind_of(step: Step) -> str | None:
    """The structure of the Hessian of a call, where it is known."""
    if len(step.inputs) > 1 or len(step.outputs) > 1:
        return None
    hessian = known(step.call.name).hessian
    if hessian != "unknown":
        return hessian
    pointwise = entrywise(step.call.name) and not hasattr(step.call.func, "follow")
    return "elementwise" if pointwise and step.outputs[0].shape == step.inputs[0].shape else None


# Parameters whose second derivatives are not all at the nonlinear calls


def read_once(run: Run) -> frozenset[int]:
    """The parameters that are read linearly, and not again by what depends on them."""
    uses: dict[int, list[ParameterUse]] = {}
    if run.trace.complex:  # nonlinear calls on complex numbers are not followed
        return frozenset()
    for use in run.trace.uses:
        for i in use.derived.leaves:
            uses.setdefault(i, []).append(use)
    straight = {i for i, found in uses.items() if all(t.derived.selected and t.recipe.linear for t in found)}
    return frozenset(i for i in straight if len(uses[i]) == 1 or not _downstream(run.params[i], uses[i]))


def _downstream(leaf: torch.Tensor, uses: list[ParameterUse]) -> bool:
    """Whether an operation that reads a parameter reads something that depends on it, too."""
    nodes = {node_of(leaf)}
    read = [x for t in uses if t.call is not None for x in t.call.read if x is not t.param and x.requires_grad]
    return any(reaches(x, nodes, {}) for x in {id(x): x for x in read if x is not leaf}.values())


def entries(
    scope: Scope, run: Run, gradient: Gradient, leaf: int, samples: Samples, each: bool, budget: int
) -> torch.Tensor:
    """The diagonal of the second-order terms in one parameter, entry by entry: of each sample, or `[1, *p]` of their
    sum."""
    param, n = run.params[leaf], run.trace.n
    outputs, given = cotangents(run, gradient)
    chosen = samples.chosen
    share = given[0].new_ones(n) if chosen is None else torch.bincount(chosen, minlength=n).to(given[0].dtype)
    share = scope.enter(scope.leave(torch.ones_like(share))) if each else share
    if each or chosen is not None:
        axes = [run.outputs[i][1] for i in gradient.cotangents]
        given = [_weighted(c, axis, share, n) for c, axis in zip(given, axes, strict=True)]
    (slope,) = scope.grad(outputs, [param], given, batched=False, create_graph=True)
    count = samples.count if each else 1
    found = param.detach().new_zeros(count, param.numel())
    if slope is None or not slope.requires_grad or not param.numel():
        return scope.leave(found).reshape(count, *param.shape)
    size = max(1, budget // (max(run.trace.sizes, default=1) * n))
    blocks = []
    for start, stop in even(param.numel(), size):
        at = torch.arange(start, stop, device=param.device)
        unit = torch.nn.functional.one_hot(at, param.numel()).to(param.dtype).reshape(-1, *param.shape)
        (rows,) = scope.grad([slope], [param], [unit], create_graph=each or None)
        diagonal = unit.new_zeros(stop - start) if rows is None else (rows * unit).reshape(stop - start, -1).sum(1)
        if each:
            eye = torch.eye(stop - start, dtype=param.dtype, device=param.device)
            (apart,) = scope.grad([diagonal], [share], [eye])
            diagonal = eye.new_zeros(stop - start, n) if apart is None else scope.leave(apart)
            diagonal = diagonal[:, samples.all].T
        blocks.append(scope.leave(diagonal) if not each else diagonal)
    return torch.cat(blocks, -1).reshape(count, *param.shape)


def _weighted(cotangent: torch.Tensor, axis: Axis, share: torch.Tensor, n: int) -> torch.Tensor:
    """The cotangent with a factor for each sample."""
    if axis.whole and n > 1:
        if cotangent.shape != (n,):
            raise SampleAxisError(
                "a parameter is read again by what depends on it, and the scalar loss does not say what is of which "
                "sample. Return the [N] losses, or mark the outputs with `outputs(z)`."
            )
        return cotangent * share
    exposed = axis.expose(cotangent, n)
    return axis.restore(exposed * share.reshape(n, *[1] * (exposed.ndim - 1)), n)
