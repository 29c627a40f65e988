"""One run of a function: where its parameters are used, and where the samples are meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc._torch.functorch import unviewed
from invfunc._torch.values import differentiable
from invfunc.errors import ArgumentError, part_mixed, samples_lost, unreached
from invfunc.operations import batch_axis
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM, Call, Mixed, Unknown
from invfunc.operations.batch_axis.orders import MIXED, composed, moved
from invfunc.operations.heard import Function, Listener
from invfunc.operations.losses import counts
from invfunc.operations.recurrent import states
from invfunc.recording.follower import Follower
from invfunc.recording.graph import node_of, reaches
from invfunc.recording.hidden import hidden, unseen
from invfunc.recording.provenance import NOTHING, Beforehand
from invfunc.recording.random import Draws
from invfunc.recording.result import NO_PATH, Result, path
from invfunc.recording.scope import Scope
from invfunc.recording.seen import Seen
from invfunc.recording.steps import Remember, Step, any_step, is_view, nonlinear, step
from invfunc.recording.tags import Derived, Sampled, in_order
from invfunc.recording.uses import ParameterUses, Watcher


class Trace(ParameterUses, Listener):
    """Watches a function run.

    Args:
        n: how many samples there are.
        fast: whether not to use the generic path at every operation.
        with_uses: whether parameter uses are noted, or samples only followed.
        partial: whether n is less than the batch, so that a sum over the samples is not what it would be.
        scaled: whether the loss is that of a chunk, and it matters what a mean divides by.
        draws: what is done about random numbers.
        apart: whether it matters how samples share a term.
        remember: which calls become `steps`.
        pattern: follows entries of tensors beside the run.
        watcher: watches the calls that read parameters or samples.
        beforehand: what is known before the run.
    """

    def __init__(
        self,
        scope: Scope,
        n: int,
        *,
        fast: bool = True,
        with_uses: bool = True,
        partial: bool = False,
        scaled: bool = False,
        draws: Draws | None = None,
        apart: bool = True,
        remember: Remember | None = None,
        pattern: Follower | None = None,
        watcher: Watcher | None = None,
        beforehand: Beforehand = NOTHING,
    ) -> None:
        super().__init__(scope, n, fast, with_uses, apart, remember, pattern, watcher, beforehand)
        self.draws, self.partial, self.scaled = draws, partial, scaled
        self.counted = False  # whether data summed over the samples met samples or parameters
        self.steps: list[Step] = []
        self.within: str | None = None  # the call of f that is followed in those that it is made of

    def parameters(self, leaves: Sequence[torch.Tensor], enter: bool = True) -> list[torch.Tensor]:
        """The leaves as this run is to see them, differentiable or not."""
        seen = [*map(self.scope.enter if enter else self.scope.alias, leaves)]
        self.entered += seen if enter else []
        for i, leaf in enumerate(seen):
            self.set(leaf, Derived(frozenset({i}), True, picked=True))
        return seen

    def samples(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """A batch tensor as this run is to see it."""
        x = self.scope.alias(x) if self.pattern is None else self.pattern.samples(x)
        self.set(x, Sampled(Axis(None) if self.n == 1 else axis))
        return x

    # The run

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        func = function.func
        self.calls.append(function.name)
        if function.entry.registers:
            return self.register(func, *args, **kwargs)
        if self.draws is not None and function.entry.draws is not False:
            self.draws.before(function, args, kwargs)
        seen = self.seen(function, args, kwargs)
        self.look_at(seen)
        if not seen.tags:
            return self._of_others(seen)
        if function.entry.constant and not seen.writes:
            return self._of_constants(seen)
        if self.watcher is not None:
            seen = self.watcher.before_call(self, seen)
        body = function.written_out()
        if body is not None:
            self._tag_states(seen)
            body = self.at_once(seen) or body
            outer, self.within = self.within, self.within or seen.name
            try:
                with self:
                    return body(*seen.args, **seen.kwargs)
            finally:
                self.within = outer
        return self._of_followed(seen)

    def _tag_states(self, seen: Seen) -> None:
        """Tag the initial states of a recurrent module, zeros that have an entry for each sample."""
        for x, dim in states(seen.func, seen.args):
            if isinstance(x, torch.Tensor) and self.tag(x) is None and self.n in (1, x.shape[dim]):
                self.scope.closes_over(x)
                self.set(x, Sampled(Axis(None) if self.n == 1 else Axis(dim)))

    def _of_followed(self, seen: Seen) -> Any:
        """Run a call that reads parameters or samples."""
        for x in seen.read:
            if id(x) not in seen.tags:
                self.scope.closes_over(x)
        of_data = seen.forget_sums()
        self.counted |= of_data and bool(seen.tags)
        if seen.sampled:
            return self._of_samples(seen)
        if seen.tags:
            return self._of_parameters(seen, of_data)
        out = seen.run()
        for x in seen.produced(out):
            self.set(x, Sampled(BATCH_SUM))
        return out

    def _of_others(self, seen: Seen) -> Any:
        untraced = False
        for x in seen.read:
            self.scope.closes_over(x)
            untraced = untraced or self.untraced(x)
        out = seen.run()
        produced = seen.produced(out)
        if not untraced:
            for x in produced:
                self.constants.add(x)
        elif not produced:
            self.escaped = self.escaped or seen.name
        return out

    def _of_constants(self, seen: Seen) -> Any:
        """Run a call whose result has no derivative; a tensor among what it returns is still of samples."""
        out, tag = seen.run(), next(iter(seen.tags.values()))
        if isinstance(tag, Sampled) and tag.place is not None:
            if isinstance(out, torch.Tensor):
                self.set(out, Sampled(tag.place, tag.lost, order=tag.order))
            elif self.partial and out is not None:  # `item` and its like
                raise part_mixed(seen.name)
        if not isinstance(out, torch.Tensor):
            self.values_left(seen)
        return out

    def _of_parameters(self, seen: Seen, of_data: bool) -> Any:
        out = seen.run()
        if torch.is_grad_enabled():
            produced = seen.produced(out)
            alone = self.n == 1 and self.partial
            derived = seen.derived(produced, of_data, self.untraced_call(seen), alone)
            for x in produced:
                self.set(x, derived if differentiable(x) else None)
                if seen.writes:
                    self.known.written(x, derived)
        return out

    def _of_samples(self, seen: Seen) -> Any:
        lost, params = seen.lost, seen.params
        if params and not lost:
            seen = self.promote(seen, params)
            params = seen.params
        if self.pattern is not None:
            self.pattern.before(len(self.edges), seen)
        if seen.through_view and (params or self._remembers(seen)):
            return self._through_view(seen)
        instead = self.instead(seen, params)
        if instead is not None:
            with self:
                return instead()
        out, kept, remembered = self._run(seen, bool(params))
        if not seen.produced(out):
            self.values_left(seen)
            return out
        return self._noted(seen, params, out, kept, remembered, lost)

    def _noted(
        self,
        seen: Seen,
        params: dict[int, torch.Tensor],
        out: Any,
        kept: torch.Tensor | None,
        remembered: bool,
        lost: str | None,
    ) -> Any:
        """Note a call that was run on samples; returns its result, which is another one of a sum that is kept apart."""
        produced = seen.produced(out)
        if kept is not None:
            params.pop(id(seen.args[0]), None)
            seen.read_instead(kept)
        if not differentiable(produced[0]):
            params = {}
        call = seen.call(out, self.n, self.partial, self.beforehand.by_rows)
        result = self._followed(call, seen, params, lost)
        self.counted |= self.scaled and (result.found is BATCH_SUM or self.n == 1) and counts(call)
        if result.found is BATCH_SUM and not (params or seen.writes or "out" in seen.kwargs):
            out = call.out = self.of_sum(call, seen, remembered)
            produced = seen.produced(out)
        if self.read and self.apart and result.lost is None:
            self.note(call, result.found)
        if params:
            self.meet(call, seen, produced, result, params)
        if remembered:
            self.steps.append(step(seen, call, produced, result.first))
        self._tell(call, seen, produced, result, bool(params))
        return out

    def _remembers(self, seen: Seen) -> bool:
        return self.remember is not None and self.remember(seen)

    def _run(self, seen: Seen, met: bool) -> tuple[Any, torch.Tensor | None, bool]:
        """Run a call; returns also a copy of what it reads and overwrites, and whether it becomes a step.

        Where a derivative is taken at it, the result is not a view: a write to it would change its place in the graph.
        """
        if seen.writes and not isinstance(seen.args[0], torch.Tensor):
            raise samples_lost(f"`{seen.name}` (it writes into several tensors; write into one at a time)", True)
        remembered = self._remembers(seen)
        kept = self._kept(seen) if seen.writes and (met or remembered) else None
        before = seen.args[0].detach() if seen.writes and kept is None else None
        out = seen.run()
        if before is not None and (before.shape, before.stride()) != (
            seen.args[0].shape,
            seen.args[0].stride(),
        ):  # `unsqueeze_` and its like
            kept = before
            self.set(kept, seen.tags.get(id(seen.args[0])))
        view = remembered and is_view(out, seen)
        remembered = remembered and not (view and self.remember is nonlinear)
        used = (remembered and not view) or (met and self.with_uses)
        if used and isinstance(out, torch.Tensor) and not seen.writes:
            out = unviewed(out)
        return out, kept, remembered

    def _through_view(self, seen: Seen) -> Any:
        """Run a call that writes through a view on a copy, which is then written: autograd makes the base of the view
        anew from what is written, and leaves the result of the call itself aside."""
        if self.remember is any_step:
            raise ArgumentError(
                f"f is not a chain of layers: `{seen.name}` writes into a view in place. Let it work on a copy; `kflr` "
                "is defined for any model."
            )
        written = seen.args[0]
        with self:
            copy = written.clone()
            seen.func(copy, *seen.args[1:], **seen.kwargs)
            if isinstance(self.tag(copy), Sampled) and isinstance(self.tag(written), Derived):
                self.set(written, None)  # what it held is gone
            written.copy_(copy)
        return written

    def _kept(self, seen: Seen) -> torch.Tensor:
        """A copy of what an operation reads and then overwrites."""
        kept = seen.args[0].clone()
        self.set(kept, seen.tags.get(id(seen.args[0])))
        return kept

    def _followed(self, call: Call, seen: Seen, params: dict[int, torch.Tensor], lost: str | None) -> Result:
        """Find where the samples are in the result, unless that was lost before."""
        found, order = None, None
        if lost is None:
            try:
                found = batch_axis.propagate(call)
                then = moved(call, found)
                self.moved |= then is not None
                order = composed(in_order(seen.sampled, seen.writes or "out" in seen.kwargs), then)
                if order == MIXED:
                    self.orders.setdefault(order, seen.name)
                if params and seen.name == "setitem":
                    raise Unknown("it writes parameters into a tensor in place")
            except Mixed as reason:
                lost = f"`{self.within}`, by `{seen.name}`: {reason}" if self.within else f"`{seen.name}`: {reason}"
                self.unknown |= isinstance(reason, Unknown)
                self.moved |= seen.function.entry.permutes and not call.active  # whose rows may still be followed
        if self.partial and (found is BATCH_SUM or (lost is not None and not self.unknown)):
            raise part_mixed(seen.name)
        return Result(found, lost, order)

    def _tell(self, call: Call, seen: Seen, produced: list[torch.Tensor], result: Result, met: bool) -> None:
        """Tag the results of a call, and tell of it who wants to know."""
        found = result.found
        depends = path(seen, met) if torch.is_grad_enabled() else NO_PATH
        for i, x in enumerate(produced):
            place = found[i] if isinstance(found, list) else found
            tag = Sampled(place, result.lost, *(depends if differentiable(x) else NO_PATH), result.order)
            if tag.active:
                self.complex |= x.is_complex()
                self.displaced |= isinstance(place, Axis) and place.rows is not None
            self.set(x, tag if place is not None or tag.lost or tag.active else None)
            if seen.writes:
                self.known.written(x, tag)
        if self.watcher is not None:
            self.watcher.after_call(self, call)

    def check(self, outputs: list[torch.Tensor], params: list[torch.Tensor]) -> None:
        """Check in the graph of autograd that paths from the outputs come to parameters, and at their uses alone."""
        targets = {node_of(p) for p in params}
        beneath = dict[Any, list[Any]]()
        for edge, below in zip(self.edges, self.below, strict=True):
            beneath.setdefault(edge.node, []).extend(below)
        for z in outputs:
            if reaches(z, targets, beneath) or unseen(z, self.tag(z), self.entered):
                raise hidden(z, self.calls)
        if not any(reaches(z, beneath, {}) for z in outputs):
            raise unreached()
