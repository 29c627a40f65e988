"""One run of a function: where its parameters are used, and where the samples are meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._functorch import opened, unviewed
from invfunc.errors import part_mixed, samples_lost
from invfunc.operations import batch_axis, factors
from invfunc.operations.axis import Axis, Everyone
from invfunc.operations.batch_axis import BATCH_SUM, Call, Mixed, Unknown
from invfunc.operations.batch_axis.orders import MIXED, Order, composed, moved
from invfunc.operations.calls import CONSTANT, EXITS, HOOKS, QUERIES, alignment, function_name, picking, read_by
from invfunc.operations.compositions import composition, states
from invfunc.operations.factors import Site
from invfunc.operations.factors.generic import generic
from invfunc.operations.factors.recomputed import read_of, reader, released
from invfunc.recording.graph import node_of, reaches
from invfunc.recording.hidden import hidden, unseen
from invfunc.recording.provenance import Provenance
from invfunc.recording.random import Draws
from invfunc.recording.scope import Scope
from invfunc.recording.seen import Seen, cannot_meet
from invfunc.recording.steps import Remember, Step, is_view, nonlinear, step
from invfunc.recording.tags import Derived, Sampled, in_order
from invfunc.recording.uses import ParameterUses


class Trace(ParameterUses, Provenance, TorchFunctionMode):
    """Watches a function run. `fast=False` uses the generic path at every operation; `with_uses=False` only follows."""

    def __init__(
        self,
        scope: Scope,
        n: int,
        *,
        fast: bool = True,
        with_uses: bool = True,
        partial: bool = False,
        draws: Draws | None = None,
    ) -> None:
        super().__init__(n)
        self.scope, self.fast, self.with_uses, self.draws = scope, fast, with_uses, draws
        self.partial = partial  # n is less than the batch: a sum over the samples is not what it would be
        self.entered: list[torch.Tensor] = []  # what is differentiated: parameters, outputs of the model
        self.unknown = False
        """Whether an operation without a rule, rather than one that mixes, has lost the samples."""
        self.watcher: Callable[[Trace, str, Callable, tuple, dict], tuple[tuple, dict] | None] | None = None
        self.after: Callable[[Trace, Call], None] | None = None
        self.remember: Remember | None = None  # which calls become `steps`
        self.steps: list[Step] = []
        self.calls: list[str] = []

    def parameters(self, leaves: Sequence[torch.Tensor], enter: bool = True) -> list[torch.Tensor]:
        """The leaves as this run is to see them, differentiable or not."""
        seen = []
        for i, leaf in enumerate(leaves):
            leaf = self.scope.enter(leaf) if enter else self.scope.alias(leaf)
            if enter:
                self.entered.append(leaf)
            self.set(leaf, Derived(frozenset({i}), True, picked=True))
            seen.append(leaf)
            self.introduce(leaf)
        return seen

    def samples(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """A batch tensor as this run is to see it."""
        x = self.scope.alias(x) if self.pattern is None else self.pattern.samples(x)
        self.set(x, Sampled(Axis(None) if self.n == 1 else axis))
        self.introduce(x)
        return x

    # The run

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in QUERIES:
            return func(*args, **kwargs)
        self.calls.append(name)
        if name in HOOKS:
            return func(*args, **kwargs)
        if self.draws is not None:
            self.draws.before(name, args, kwargs)
        seen = self._seen(name, func, args, kwargs)
        for x in seen.read:
            if x.requires_grad and unseen(x, seen.tags.get(id(x)), self.entered):
                raise hidden(x, self.calls)
        if name in EXITS and seen.tags or self.known.holds_samples(x for x in seen.read if id(x) not in seen.tags):
            self.escaped = self.escaped or name
        if not seen.tags:
            return self._of_others(seen)
        if name in CONSTANT and not seen.writes:
            return self._of_constants(seen)
        if self.watcher is not None:
            changed = self.watcher(self, name, func, args, kwargs)
            seen = seen if changed is None else self._seen(name, func, *changed)
        body = composition(func) or (opened(func) if batch_axis.find(name) is None else None)
        if body is not None:
            self._tag_states(seen)
            with self:
                return body(*seen.args, **seen.kwargs)
        for x in seen.read:
            if id(x) not in seen.tags:
                self.scope.closes_over(x)
        tags = seen.tags.items()
        data = [i for i, t in tags if isinstance(t, Sampled) and t.place is BATCH_SUM and not t.active]
        for i in data:  # data summed over the samples is a constant
            seen.forget(i)
        if not seen.tags:
            out = seen.run()
            for x in seen.produced(out):
                self.set(x, Sampled(BATCH_SUM))
            return out
        if all(isinstance(tag, Derived) for tag in seen.tags.values()):
            return self._of_parameters(seen, bool(data))
        return self._of_samples(seen)

    def _seen(self, name: str, func: Callable, args: tuple, kwargs: dict) -> Seen:
        read = read_by(name, args, kwargs)
        return Seen(name, func, args, kwargs, read, {id(x): tag for x in read if (tag := self.tag(x)) is not None})

    def _tag_states(self, seen: Seen) -> None:
        """Tag the initial states of a recurrent module, zeros that have an entry for each sample."""
        for x, dim in states(seen.func, seen.args):
            if isinstance(x, torch.Tensor) and self.tag(x) is None:
                self.scope.closes_over(x)
                self.set(x, Sampled(Axis(None) if self.n == 1 else Axis(dim)))

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
            elif self.partial and seen.name in ("item", "tolist", "numpy"):
                raise part_mixed(seen.name)
        if not isinstance(out, torch.Tensor):
            self.values_left(seen)
        return out

    def _of_parameters(self, seen: Seen, of_data: bool) -> Any:
        out = seen.run()
        if torch.is_grad_enabled():
            tags = [tag for tag in seen.tags.values() if isinstance(tag, Derived)]
            picks, once = (False, False) if seen.writes or len(tags) > 1 else picking(seen.name, seen.args)
            picked, selected = picks and tags[0].picked, once and len(seen.read) == 1 and tags[0].selected
            of_data = of_data or any(t.of_data for t in tags)
            untraced_at = self.untraced_call(seen) or next((t.untraced_at for t in tags if t.untraced_at), None)
            derived = Derived(frozenset().union(*(t.leaves for t in tags)), selected, of_data, untraced_at, picked)
            for x in seen.produced(out):
                self.set(x, derived if x.is_floating_point() or x.is_complex() else None)
                if seen.writes:
                    self.known.written(x, derived)
        return out

    def _of_samples(self, seen: Seen) -> Any:
        params = seen.params
        if params and not any(tag.lost for tag in seen.sampled):
            seen = self._promote(seen)
            params = seen.params
        if self.pattern is not None:
            self.pattern.before(len(self.edges), seen)
        remembered = self.remember is not None and self.remember(seen)
        kept = self._kept(seen) if seen.writes and (params or remembered) else None
        out = seen.run()
        view = remembered and is_view(out, seen)
        remembered = remembered and not (view and self.remember is nonlinear)
        used = (remembered and not view) or (params and self.with_uses)
        if used and isinstance(out, torch.Tensor) and not seen.writes:
            out = unviewed(out)
        produced = seen.produced(out)
        if not produced:
            self.values_left(seen)
            return out
        if kept is not None:
            params.pop(id(seen.args[0]), None)
            seen.read_instead(kept)
        call = seen.call(out, self.n, self.partial, self.by_rows)
        if not (produced[0].is_floating_point() or produced[0].is_complex()):
            params = {}
        found, lost, order = self._followed(call, seen, params)
        if self.read and self.apart and lost is None:
            self.note(call, found)
        if params:
            tags = [seen.tags.get(i) for i in params]
            lost = lost or cannot_meet(call, produced, found, tags, self.apart, self.left)
            if lost is None:
                if found is not BATCH_SUM:
                    self.orders.setdefault(order, call.name)
                self._meet(call, produced[0], Everyone(None) if found is BATCH_SUM else found, params)
            elif self.with_uses or found is None:
                self.untraced_call(seen)
                raise samples_lost(lost, self.unknown)
        if remembered:
            self.steps.append(step(seen, call, produced, found[0] if isinstance(found, list) else found))
        self._tell(seen, produced, found, lost, bool(params), order)
        if self.after is not None:
            self.after(self, call)
        return out

    def _kept(self, seen: Seen) -> torch.Tensor:
        """A copy of what an operation reads and then overwrites."""
        kept = seen.args[0].clone()
        self.set(kept, seen.tags.get(id(seen.args[0])))
        return kept

    def _followed(self, call: Call, seen: Seen, params: dict[int, torch.Tensor]) -> tuple[Any, str | None, Order]:
        """Where the samples are in the result, or why that is lost, and in which order they are."""
        found, order, lost = None, None, next((tag.lost for tag in seen.sampled if tag.lost), None)
        if lost is None:
            try:
                found = batch_axis.propagate(call)
                then = moved(call, found)
                self.moved |= then is not None
                order = composed(in_order(seen.sampled, seen.writes or "out" in seen.kwargs), then)
                if order == MIXED:
                    self.orders.setdefault(order, seen.name)
                if params and seen.name == "setitem":
                    raise Mixed("it writes parameters into a tensor in place")
            except Mixed as reason:
                lost = f"`{seen.name}`: {reason}"
                self.unknown |= isinstance(reason, Unknown)
        if self.partial and (found is BATCH_SUM or (lost is not None and not self.unknown)):
            raise part_mixed(seen.name)
        return found, lost, order

    def _tell(
        self, seen: Seen, produced: list[torch.Tensor], found: Any, lost: str | None, met: bool, order: Order
    ) -> None:
        """Tag the results of a call."""
        sampled, name = seen.sampled, seen.name
        around = name if met or any(tag.around for tag in sampled) else None
        crossed = frozenset[int]().union(*(tag.crossed for tag in sampled if tag.crossed))
        if crossed:
            around = next((tag.around for tag in sampled if tag.around and tag.crossed), around)
        affine, logarithm = (False, False) if around or not crossed else seen.affine()
        differentiable = torch.is_grad_enabled()
        for i, x in enumerate(produced):
            place = found[i] if isinstance(found, list) else found
            if differentiable and (x.is_floating_point() or x.is_complex()):
                tag = Sampled(place, lost, around, crossed, affine, logarithm, order)
                self.complex |= tag.active and x.is_complex()
            else:
                tag = Sampled(place, lost, order=order)
            self.set(x, tag if place is not None or lost or tag.active else None)
            if seen.writes:
                self.known.written(x, tag)

    def check(self, outputs: list[torch.Tensor], params: list[torch.Tensor]) -> None:
        """Check in the graph of autograd that every path from the outputs to the parameters crosses a parameter use."""
        stops, targets = {edge.node for edge in self.edges}, {node_of(p) for p in params}
        for z in outputs:
            if reaches(z, targets, stops) or unseen(z, self.tag(z), self.entered):
                raise hidden(z, self.calls)

    # Parameters meet samples

    def _promote(self, seen: Seen) -> Seen:
        """Replace parameters that have an entry for each sample by tensors of samples; each such place is a use."""
        new: dict[int, torch.Tensor] = {}
        tagged = [(x, seen.tags.get(id(x))) for x in seen.read]
        placed = [(x, t.place) for x, t in tagged if isinstance(t, Sampled) and isinstance(t.place, Axis)]
        for i, x in seen.params.items():
            axis = alignment(seen.name, seen.args, seen.kwargs, x, placed)
            if axis is None:
                continue
            self.align(seen, x, axis)
            alias = x.view_as(x)
            new[i] = alias
            order = in_order(seen.sampled)
            self.orders.setdefault(order, seen.name)
            self.set(alias, Sampled(axis, around=seen.name, order=order))
            if self.with_uses:
                tag = self.tag(x)
                assert isinstance(tag, Derived)
                recipe = factors.aligned(axis, x, self.n)
                self.use(x, tag, recipe, alias, axis)
        if not new:
            return seen
        return self._seen(
            seen.name, seen.func, *tree.map_tensors(lambda t: new.get(id(t), t), (seen.args, seen.kwargs))
        )

    def _meet(self, call: Call, out: torch.Tensor, axis: Axis, params: dict[int, torch.Tensor]) -> None:
        if not self.with_uses:
            return
        call = replace(call, out=torch.empty(call.out.shape, device="meta"))  # its values need not be kept
        rule = factors.find(call) if self.fast and not out.is_complex() else None
        once = rule and self.remember is None and self.after is None and not self.scope.create_graph
        lean, recomputed = released(call, params) if once else (call, [])
        for x in params.values():
            tag = self.tag(x)
            assert isinstance(tag, Derived)
            recipe = rule(Site(lean, axis, reader(recomputed, self.scope.leave)), x) if rule else None
            if recipe is None:
                self.use(x, tag, generic(Site(call, axis, self.scope.leave), x), out, axis, call)
            else:
                self.use(x, tag, replace(recipe, recomputed=read_of(recomputed, recipe.reads)), out, axis, lean)
