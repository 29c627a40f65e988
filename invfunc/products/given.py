"""The arguments of a product: its function run on them, whole or split into model and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.evaluation.weights import LossPart
from invfunc.loss.outputs import ModelOutput, OutputFinder, marking, searched
from invfunc.operations.axis import Axis
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.passes.by_rows import Places
from invfunc.passes.evidence import Evidence
from invfunc.passes.loss import Split, at_found, at_given
from invfunc.passes.run import WHOLE, Run
from invfunc.recording import Trace
from invfunc.recording.checks import check_loss, no_outputs, output_axis
from invfunc.recording.joined import check_fewer, moved
from invfunc.recording.problem import InDims, batch_dims, batch_size, check_params, problem, with_aux
from invfunc.recording.random import Draws
from invfunc.recording.scope import Scope
from invfunc.recording.seen import Seen
from invfunc.recording.steps import nonlinear
from invfunc.reductions.quantity import Drawing


class Given:
    """The arguments of one call, and the scope in which its derivatives are taken."""

    def __init__(
        self,
        f: Callable,
        loss: Callable | None,
        args: tuple,
        kwargs: dict[str, Any],
        names: Sequence[str],
        in_dims: InDims = 0,
        out_dims: int = 0,
        has_aux: bool = False,
        drawing: Drawing | None = None,
    ) -> None:
        self.f, self.loss, self.args, self.kwargs, self.names = f, loss, args, kwargs, names
        self.in_dims, self.out_dims, self.has_aux, self.drawing = in_dims, out_dims, has_aux, drawing
        if len(args) < 1 + (loss is not None):
            raise ArgumentError("arguments are missing: the parameters come first, and the target last for a loss.")
        check_params(args[0], names, 0)
        self.leaves, self.structure = tree.flatten(args[0], none_is_leaf=False)
        if not self.leaves:
            raise ArgumentError(f"{names[0]} has no tensors in it.")
        self.scope = Scope(tree.tensors((args, kwargs)))
        self.mode = TwiceDifferentiable()
        self.params: list[torch.Tensor] = []
        """The leaves, as the function has got them."""
        self.aux: Any = None
        self.result: Any = None
        """What f returned, without aux."""
        self.losses: Any = None
        """The loss that was evaluated last."""

    def run(self) -> Any:
        """What f returns, without aux."""
        self.params = [self.scope.enter(x) for x in self.leaves]
        return self._at(self.args[1:])

    def _at(self, batch: Sequence[Any]) -> Any:
        """What f returns for a batch, with the target of the loss at its end."""
        inputs = tree.map_tensors(self.scope.alias, batch[: len(batch) - (self.loss is not None)])
        with self.mode:
            result = self.f(tree.unflatten(self.params, self.structure), *inputs, **self.kwargs)
        if self.has_aux:
            result, self.aux = with_aux(result)
        _tell_constants(self.scope, result, self.params)
        self.result = self.losses = result
        return result

    def value(self) -> torch.Tensor:
        """The loss; of `[N]` losses the sum."""
        return self._valued(self.run())

    def value_of(self, batch: Sequence[Any]) -> torch.Tensor:
        """The loss of another batch, at the parameters of the last run."""
        return self._valued(self._at(batch), batch[-1])

    def _valued(self, result: Any, target: Any = None) -> torch.Tensor:
        if self.loss is None:
            return _checked_value(result, "f").sum()
        result = self._called(result, target)
        _tell_constants(self.scope, result, self.params)
        return _checked_value(result, "the loss").sum()

    def outputs(self) -> tuple[list[torch.Tensor], Any]:
        """The outputs of a model function, and their structure."""
        result = self.run()
        named, structure = tree.outputs(result)
        for path, z in named:
            if not z.is_floating_point():
                among = f" at {path}" if path else ""
                raise ArgumentError(f"f returned a tensor of {z.dtype}{among}, but outputs are floating-point tensors.")
        if not named:
            raise no_outputs(result)
        return [z for _, z in named], structure

    def _called(self, outputs: Any, target: Any = None) -> Any:
        """What the loss returns."""
        assert self.loss is not None
        target = tree.map_tensors(self.scope.alias, self.args[-1]) if target is None else target
        with self.mode:
            self.losses = self.loss(outputs, target)
        return self.losses

    # Other batches

    @property
    def n(self) -> int:
        """How many samples there are."""
        return batch_size(self.args, self._dims, self.names)

    @property
    def _dims(self) -> dict[int, int | None]:
        return batch_dims(self.in_dims, list(range(1, len(self.args))))

    @property
    def loss_part(self) -> LossPart:
        """The loss that was given apart, at the outputs of this batch."""
        assert self.loss is not None
        outputs, place = tree.map_tensors(torch.Tensor.detach, self.result), len(self.args) - 1
        return LossPart(self.loss, outputs, self.args[place], self.n, self.out_dims, self._dims[place])

    def check_apart(self) -> bool:
        """Check that f gives samples alone what they have here, unless it draws; whether that has told anything."""
        whole, given = tree.tensors(self.result), tree.tensors((self.args, self.kwargs))
        return check_fewer(whole, self.out_dims, self.n, given, self._of_part, traced=False)

    def _of_part(self, part: slice, *, elsewhere: bool = False) -> Any:
        """What f returns for some samples alone, perhaps at other parameters."""
        start, n = part.start, part.stop - part.start
        inputs = []
        for i, x in enumerate(self.args[1 : len(self.args) - (self.loss is not None)], 1):
            dim = self._dims[i]
            inputs.append(x if dim is None else tree.map_tensors(lambda t, d=dim: t.narrow(d, start, n), x))
        devices = [x.device.index for x in self.leaves if x.device.type == "cuda"]
        with torch.no_grad(), torch.random.fork_rng([i for i in set(devices) if i is not None]):
            params = tree.unflatten(moved(self.leaves), self.structure) if elsewhere else self.args[0]
            result = self.f(params, *inputs, **self.kwargs)
        return with_aux(result)[0] if self.has_aux else result

    # Splits

    def given_split(self, each: bool) -> Split:
        """Split a model function from its loss. Only with `each` the loss has to keep the samples apart."""
        dims = batch_dims(self.in_dims, list(range(1, len(self.args))))
        values, structure = self.outputs()
        draws = Draws(stop=False)
        try:
            n = batch_size(self.args, dims, self.names)
            trace = Trace(self.scope, n, with_uses=False, draws=draws, watcher=OutputFinder())
            axes = [output_axis(trace, z, self.out_dims) for z in values]
            return self._followed(trace, values, structure, axes, dims[len(self.args) - 1])
        except (ArgumentError, SampleAxisError):
            if each:
                raise
        draws.rewind()
        whole = Trace(self.scope, 1, with_uses=False, draws=draws, watcher=OutputFinder())
        try:
            return self._followed(whole, values, structure, [Axis(None)] * len(values), 0)
        except (ArgumentError, SampleAxisError):
            draws.rewind()
        bottleneck = [self.scope.enter(self.scope.leave(z)) for z in values]
        roots = [ModelOutput(i, z, z.clone(), Axis(None), True, "f") for i, z in enumerate(bottleneck)]
        result = self._called(tree.unflatten([r.shown for r in roots], structure))
        _tell_constants(self.scope, result, bottleneck)
        return Split(self.scope, 1, _checked_value(result, "the loss"), roots, values=values)

    def followed_split(self) -> Split:
        """Split a model function from its loss, or a loss function, and remember the nonlinear calls of the model."""
        if self.loss is None:
            return self.found_split(calls=True)
        names, in_dims, out_dims = self.names, self.in_dims, self.out_dims
        given = problem(self.f, self.loss, self.args, self.kwargs, 0, in_dims, out_dims, self.has_aux, names)
        trace = Trace(self.scope, given.n, with_uses=False, remember=_nonlinear_before_the_loss)
        self.params = trace.parameters(self.leaves)
        with self.mode:
            self.result, self.aux = given.call(trace, self.params, slice(None))
        named, structure = tree.outputs(self.result)
        values, dims = [z for _, z in named], batch_dims(in_dims, [*range(1, len(self.args))])
        axes = [output_axis(trace, z, out_dims, path) for path, z in named]
        whole = Trace(self.scope, given.n, with_uses=False, watcher=OutputFinder())
        split = self._followed(whole, values, structure, axes, dims[len(self.args) - 1])
        return replace(split, steps=trace.steps)

    def _followed(self, trace: Trace, values: list[torch.Tensor], structure: Any, axes: list[Axis], dim: Any) -> Split:
        """The loss under a trace that knows the samples, or takes all of them for one."""

        def seen(target: Any, dim: int | None = 0) -> Any:
            if dim is None:
                return target
            return tree.map_tensors(lambda x: trace.samples(x, Axis(dim % x.ndim if x.ndim else None)), target)

        outputs = [(self.scope.alias(z), axis) for z, axis in zip(values, axes, strict=True)]  # one may come twice
        split = at_given(trace, outputs, structure, self._called, seen(self.args[-1], dim), seen)
        return replace(split, values=values)

    def found_split(self, losses: bool = False, calls: bool = False) -> Split:
        """Split a loss function at its outputs; with `losses`, `[N]` losses are taken as they are."""
        names, in_dims, out_dims = self.names, self.in_dims, self.out_dims
        given = problem(self.f, None, self.args, self.kwargs, 0, in_dims, out_dims, self.has_aux, names)
        draws, places, within = Draws(stop=False), Places(given, Evidence(given, self.scope)), set[int]()

        def run(part: Any) -> Run:
            trace = Trace(
                self.scope,
                given.n,
                with_uses=False,
                draws=draws,
                remember=_nonlinear_before_the_loss if calls else None,
                watcher=OutputFinder(within=within, keep=True),
                beforehand=places.beforehand(given.n),
            )
            found = Run(trace, trace.parameters(self.leaves), part, {})
            try:
                with marking(trace), self.mode:
                    found.result, found.aux = given.call(trace, found.params, part)
            finally:
                places.hear(trace)
            return found

        def checked() -> Run:
            found = run(WHOLE)
            check_loss(found.trace, found.result)
            if losses:
                places.check(found, draws, run)
            return found

        try:
            found = places.settled(lambda: searched(checked, draws), draws, loss=True)
        except SampleAxisError:
            alone = self._losses(draws, given.n) if losses else None
            if alone is None:
                raise
            return alone
        self.params, self.aux, self.result, self.losses = found.params, found.aux, found.result, found.result
        trace, finder, result = found.trace, found.trace.watcher, found.result
        assert isinstance(finder, OutputFinder)
        tag = check_loss(trace, result)
        bottlenecks = {i: (r.value, finder.kept[i]) for i, r in finder.roots.items() if r.value.is_leaf}
        if losses and result.ndim:
            above = list(bottlenecks.values())
            return Split(self.scope, given.n, result, [], values=[result], bottlenecks=above)
        wanted = finder.selected(tag, self.scope.wanted)
        split = at_found(trace, finder, wanted, result, self.params)
        above = [bottleneck for i, bottleneck in bottlenecks.items() if i < wanted[-1]]
        return replace(split, values=[finder.kept[i] for i in wanted], bottlenecks=above, steps=trace.steps)

    def _losses(self, draws: Draws, n: int) -> Split | None:
        """The `[N]` losses of a function that cannot be followed; None of a scalar."""
        draws.rewind()
        result = self.run()
        if not isinstance(result, torch.Tensor) or result.shape != (n,) or not result.is_floating_point():
            return None
        return Split(self.scope, n, result, [], values=[result])


def _nonlinear_before_the_loss(seen: Seen) -> bool:
    return nonlinear(seen) and not any(tag.crossed for tag in seen.sampled)


def _checked_value(result: Any, name: str) -> torch.Tensor:
    wanted = "but a loss is a floating-point tensor: a scalar or [N]"
    if not isinstance(result, torch.Tensor):
        raise ArgumentError(f"{name} returned an object of type {type(result).__name__}, {wanted}.")
    if not result.is_floating_point():
        raise ArgumentError(f"{name} returned a tensor of {result.dtype}, {wanted}.")
    if result.ndim > 1:
        give = " Is it a model function? Then give the loss too." if name == "f" else ""
        raise ArgumentError(f"{name} returned shape {tuple(result.shape)}, {wanted}.{give}")
    return result


def _tell_constants(scope: Scope, result: Any, own: list[torch.Tensor]) -> None:
    """What a function closes over makes the result differentiable too: autograd has seen it."""
    if scope.wanted or not (scope.plain and scope.outside):
        return
    known = {id(x) for x in own}
    waiting, seen = [x.grad_fn for x in tree.tensors(result)], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaf: Any = node
            if id(leaf.variable) not in known:
                scope.closes_over(leaf.variable)
                return
        waiting.extend(parent for parent, _ in node.next_functions)
