"""The split of functions that the core does not follow, by the recording that came before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import SplitError
from invfunc.evaluation.joined import check_fewer, moved
from invfunc.loss.outputs import OutputFinder, marking, searched
from invfunc.operations.axis import Axis
from invfunc.passes.by_rows import Places
from invfunc.passes.evidence import Evidence
from invfunc.passes.loss import at_found, at_given
from invfunc.passes.run import WHOLE, Run
from invfunc.recording import Trace
from invfunc.recording.checks import check_loss, output_axis
from invfunc.recording.problem import with_aux
from invfunc.recording.random import Draws


def split_as_before(given: Any, values: Sequence[torch.Tensor] | None = None, structure: Any = None) -> Any:
    """Split a loss function; or, of the outputs of a model, split off its loss."""
    return _found(given) if values is None else _at(given, list(values), structure, Draws(stop=False))


def _at(given: Any, values: list[torch.Tensor], structure: Any, draws: Draws | None = None) -> Any:
    trace = Trace(given.scope, given.n, with_uses=False, draws=draws, watcher=OutputFinder())
    axes, dim = [output_axis(trace, z, given.out_dims) for z in values], given.dims[len(given.args) - 1]

    def seen(target: Any, dim: int | None = 0) -> Any:
        if dim is None:
            return target
        return tree.map_tensors(lambda x: trace.samples(x, Axis(dim % x.ndim if x.ndim else None)), target)

    outputs = [(given.scope.alias(z), axis) for z, axis in zip(values, axes, strict=True)]  # one may come twice
    split = at_given(trace, outputs, structure, given.called, seen(given.args[-1], dim), seen)
    return replace(split, values=values)


def _found(given: Any) -> Any:
    own = given.problem
    draws, places, within = Draws(stop=False), Places(own, Evidence(own, given.scope)), set[int]()

    def run(part: Any) -> Run:
        trace = Trace(
            given.scope,
            own.n,
            with_uses=False,
            draws=draws,
            watcher=OutputFinder(within=within, keep=True),
            beforehand=places.beforehand(own.n),
        )
        found = Run(trace, trace.parameters(given.leaves), part, {})
        try:
            with marking(trace), given.mode:
                found.result, found.aux = own.call(trace, found.params, part)
        finally:
            places.hear(trace)
        return found

    def checked() -> Run:
        found = run(WHOLE)
        check_loss(found.trace, found.result)
        return found

    found = places.settled(lambda: searched(checked, draws), draws, loss=True)
    given.params, given.aux, given.result, given.losses = found.params, found.aux, found.result, found.result
    trace, finder, result = found.trace, found.trace.watcher, found.result
    assert isinstance(finder, OutputFinder)
    wanted = finder.selected(check_loss(trace, result), given.scope.wanted)
    split = at_found(trace, finder, wanted, result, given.params)
    if any([i < wanted[-1] and i not in wanted and r.value.is_leaf for i, r in finder.roots.items()]):
        raise SplitError("a logarithm of the model is taken for its outputs. Give the model and the loss apart.")
    return replace(split, values=[finder.kept[i] for i in wanted])


def check_apart(given: Any) -> bool:
    """Check that f gives samples alone what they have beside others, unless it draws; says if that told anything."""
    whole, tensors = tree.tensors(given.result), tree.tensors((given.args, given.kwargs))

    def alone(part: slice, *, elsewhere: bool = False) -> Any:
        start, n, inputs = part.start, part.stop - part.start, []
        for i, x in enumerate(given.args[1 : len(given.args) - (given.loss is not None)], 1):
            dim = given.dims[i]
            inputs.append(x if dim is None else tree.map_tensors(lambda t, d=dim: t.narrow(d, start, n), x))
        devices = [x.device.index for x in given.leaves if x.device.type == "cuda"]
        with torch.no_grad(), torch.random.fork_rng([i for i in set(devices) if i is not None]):
            params = tree.unflatten(moved(given.leaves), given.structure) if elsewhere else given.args[0]
            result = given.f(params, *inputs, **given.kwargs)
        return with_aux(result)[0] if given.has_aux else result

    return check_fewer(whole, given.out_dims, given.n, tensors, alone, traced=False)
