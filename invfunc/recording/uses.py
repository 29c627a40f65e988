"""Where a run uses its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from invfunc import tree
from invfunc._torch.functorch import saving_hooks, storage_of, version
from invfunc._torch.values import near
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import samples_lost
from invfunc.operations import factors
from invfunc.operations.axis import Axis, Everyone
from invfunc.operations.batch_axis import BATCH_SUM, Call
from invfunc.operations.batch_axis.orders import Order
from invfunc.operations.calls import alignment
from invfunc.operations.factors import Recipe, Site
from invfunc.operations.factors.generic import generic
from invfunc.operations.factors.recomputed import Recomputed, read_of, reader, released
from invfunc.recording import entries
from invfunc.recording.follower import Follower
from invfunc.recording.graph import node_of
from invfunc.recording.hidden import hidden
from invfunc.recording.provenance import Beforehand, Provenance
from invfunc.recording.result import Result, path
from invfunc.recording.scope import Scope
from invfunc.recording.seen import Seen, cannot_meet, not_shared
from invfunc.recording.steps import Remember
from invfunc.recording.tags import Derived, ParameterUse, Sampled, in_order


class Watcher(Protocol):
    """Watches the calls of a run that read parameters or samples."""

    def before_call(self, run: ParameterUses, seen: Seen) -> Seen:
        """The call that is to be made in place of another one."""
        ...

    def after_call(self, run: ParameterUses, call: Call) -> None:
        """Called when a call on samples was made."""
        ...


class ParameterUses(Provenance):
    """The parameter uses of a run, and its sites: the outputs of the operations that have parameter uses."""

    def __init__(
        self,
        scope: Scope,
        n: int,
        fast: bool,
        with_uses: bool,
        apart: bool,
        remember: Remember | None,
        pattern: Follower | None,
        watcher: Watcher | None,
        beforehand: Beforehand,
    ) -> None:
        super().__init__(apart, beforehand)
        self.scope, self.n, self.fast, self.with_uses = scope, n, fast, with_uses
        self.remember, self.pattern, self.watcher = remember, pattern, watcher
        self.unknown = False
        """Whether an operation without a rule, rather than one that mixes, has lost the samples."""
        self.uses: list[ParameterUse] = []
        self.edges: list[Any] = []
        self._sites: dict[tuple[Any, Axis], int] = {}  # the place of each edge, with its axis, among these
        self.below: list[Sequence[Any]] = []  # the nodes of what the operation at each site reads beside parameters
        self.axes: list[Axis] = []
        self.sizes: list[int] = []  # of the output at each site, for one sample
        self.largest = 1  # of these, also where sites are not kept
        self.complex = False  # whether complex numbers depend on parameters and samples
        self.orders: dict[Order, str] = {}  # those in which samples meet parameters, and a call where they do
        self.moved = False  # whether data were put in another order
        self.displaced = False  # whether what depends on parameters was selected or moved
        self.multiplied = False  # whether parameters met sums over the samples
        self.repeated: dict[tuple[int, int], int] = {}  # parameters with an entry for each sample, as in `Beforehand`
        self._added: WeakIdMap[tuple[torch.Tensor, int]] = WeakIdMap()
        """What each sample adds to a sum, and the version of that."""
        self.sums: list[tuple[torch.Tensor, Axis]] = []  # what was summed over the samples since then

    def use(
        self,
        param: torch.Tensor,
        tag: Derived,
        recipe: Recipe,
        out: torch.Tensor,
        axis: Axis,
        call: Call | None = None,
        recomputed: Sequence[Recomputed] = (),
        below: Sequence[Any] = (),
        beside: Sequence[torch.Tensor] = (),
    ) -> None:
        """`beside` is what a parameter with an entry for each sample meets."""
        if not out.requires_grad:  # it lies in a transform that f itself uses
            raise hidden(out, ())
        edge = torch.autograd.graph.get_gradient_edge(out)
        at = self._sites.setdefault((edge, axis), len(self.edges))
        if at == len(self.edges):
            self.edges.append(edge)
            self.below.append(below)
            self.axes.append(axis)
            self.sizes.append(max(1, out.numel() // self.n))
            self.largest = max(self.largest, self.sizes[-1])
        versions = tuple((x, version(x)) for x in (param, *recipe.reads))
        self.uses.append(ParameterUse(param, tag, recipe, at, call, axis, versions, read_of(recomputed, recipe.reads)))
        if self.pattern is not None:
            self.pattern.used(at, out, recipe, beside)

    def register(self, func: Callable, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Register a hook; raise at a tensor whose gradient is taken as it was before the hook."""
        at_use = x.requires_grad and torch.autograd.graph.get_gradient_edge(x) in self.edges
        if self.with_uses and (at_use or any(x is p for p in self.entered)):
            what = "a parameter" if x.is_leaf else "what an operation with a parameter gives"
            raise samples_lost(f"`register_hook` of {what} (of a copy of it, as x * 1, it is seen)", unknown=True)
        return func(x, *args, **kwargs)

    def _active(self, x: torch.Tensor) -> bool:
        tag = self.tag(x)
        return isinstance(tag, Sampled) and tag.active and x.requires_grad

    def promote(self, seen: Seen, params: dict[int, torch.Tensor]) -> Seen:
        """Replace parameters that have an entry for each sample by tensors of samples; each such place is a use."""
        new: dict[int, torch.Tensor] = {}
        tagged = [(x, seen.tags.get(id(x))) for x in seen.read]
        placed = [(x, t.place) for x, t in tagged if isinstance(t, Sampled) and isinstance(t.place, Axis)]
        for k, (i, x) in enumerate(params.items()):
            axis = self._paired(alignment(seen.name, seen.args, seen.kwargs, x, placed), k, x)
            if axis is None:
                continue
            self.align(seen, x, axis)
            alias = x.view_as(x) if self.pattern is None else x.clone()  # labels belong to a memory
            new[i] = alias
            order = in_order(seen.sampled)
            self.orders.setdefault(order, seen.name)
            self.set(alias, Sampled(axis, around=seen.name, order=order))
            if self.with_uses:
                self.use(*self._each(x, axis), alias, axis, beside=[y for y, _ in placed])
        if not new:
            return seen
        return self.seen(seen.function, *tree.map_tensors(lambda t: new.get(id(t), t), (seen.args, seen.kwargs)))

    def _paired(self, axis: Axis | None, k: int, x: torch.Tensor) -> Axis | None:
        """The sample axis of the k-th parameter that a call reads, also where the only sample has all of it."""
        at, size = (len(self.calls), k), x.numel() // max(1, self.n)
        if axis is not None and self.n > 1:
            self.repeated[at] = size
        return Axis(None) if axis is None and self.n == 1 and self.beforehand.repeated.get(at) == size else axis

    def _each(self, x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Derived, Recipe]:
        """A parameter with an entry for each sample, as it is used; where all are one entry in memory, that one."""
        tag = self.tag(x)
        assert isinstance(tag, Derived)
        same = axis.dim is not None and axis.regular and x.stride(axis.dim) == 0
        same = same and all(_apart(self.entered[i]) for i in tag.leaves)  # else that may be how the caller gave them
        if axis.dim is not None and not same:
            return x, tag, factors.aligned(axis, x, self.n)
        one, once = x if axis.dim is None else x.narrow(axis.dim, 0, 1), tag.selected
        if tag.picked and len(tag.leaves) == 1:
            (leaf,) = tag.leaves
            once |= storage_of(one) == storage_of(self.entered[leaf]) and _apart(one)
        return one, replace(tag, selected=once), factors.alike(one)

    def added(self, x: torch.Tensor) -> torch.Tensor | None:
        """What each sample adds to a sum over the samples, `[N, *sum]`; None where that is not known."""
        found, then = self._added.get(x) or (None, 0)
        return found if then == version(x) else None

    def _kept_apart(self, call: Call, seen: Seen) -> torch.Tensor | None:
        """The result of a call that sums over the samples, once it is kept what each of them adds to it."""
        wanted = self.beforehand.entries and self.watcher is None and not in_order(seen.sampled)
        found = entries.added(call, self.added) if wanted else None
        if found is None:
            return None
        if not near(found.detach().sum(0), call.out.detach(), found.detach().abs().sum(0)):
            return None
        if self.displaced:
            found = found.view_as(found)
            self.sums.append((found, Axis(0)))
        out = found.sum(0)
        self._added.set(out, (found, version(out)))
        self.set(found, Sampled(Axis(0), None, *path(seen, False)))
        return out

    def of_sum(self, call: Call, seen: Seen, remembered: bool) -> Any:
        """The result of a sum over samples, as it is followed further."""
        again = self._kept_apart(call, seen) if call.active and not remembered else None
        if again is None and self.displaced:
            again = self._summed(seen)
        return call.out if again is None else again

    def _summed(self, seen: Seen) -> Any:
        """The result of a sum over samples once more: of aliases, at which arrives what it sends back, and no more."""
        tagged = [(x, seen.tags.get(id(x))) for x in seen.read]
        aliases = dict[int, torch.Tensor]()
        for x, tag in tagged:
            if isinstance(tag, Sampled) and tag.active and isinstance(tag.place, Axis) and x.requires_grad:
                aliases[id(x)] = x.view_as(x)
                self.sums.append((aliases[id(x)], tag.place))
        args, kwargs = tree.map_tensors(lambda x: aliases.get(id(x), x), (seen.args, seen.kwargs))
        return seen.func(*args, **kwargs)

    def instead(self, seen: Seen, params: dict[int, torch.Tensor]) -> Callable[[], Any] | None:
        """What is run in place of a call in which parameters meet samples, or sums of what each of them adds."""
        entry = seen.function.entry
        rule = entry.instead or (entries.product if entry.equation and self.beforehand.entries else None)
        if rule is None or not params:
            return None
        shared = not any(not_shared(seen.tags[i], self.left) for i in params)
        return rule(seen.call(None, self.n, False, False), params, self.added if shared else lambda x: None)

    def at_once(self, seen: Seen) -> Callable[..., Any] | None:
        """What a call is followed in where no second derivative is taken and no operation is looked at by itself."""
        rule = seen.function.forms.at_once
        if rule is None or not (self.with_uses and self.fast) or self.remember is not None:
            return None
        if saving_hooks() is not None:  # of invertible_checkpoint, which meets the steps again
            return None
        for x in seen.read:
            if id(x) not in seen.tags:
                self.scope.closes_over(x)
        twice = self.scope.twice or self.scope.create_graph or any(tag.crossed for tag in seen.sampled)
        return None if twice or seen.lost else rule(seen.call(None, self.n, False, False), seen.params)

    def meet(
        self,
        call: Call,
        seen: Seen,
        produced: list[torch.Tensor],
        result: Result,
        params: dict[int, torch.Tensor],
    ) -> None:
        """Note the parameter uses of a call, or raise why the parameters have no shares there."""
        tags = [seen.tags.get(i) for i in params]
        self.multiplied |= result.found is BATCH_SUM and BATCH_SUM in call.places.values()
        result.lost = result.lost or cannot_meet(call, produced, result.found, tags, self.apart, self.left)
        if result.lost is not None:
            if self.with_uses or result.found is None:
                self.untraced_call(seen)
                raise samples_lost(result.lost, self.unknown)
            return
        everyone = result.found is BATCH_SUM
        if not everyone:
            self.orders.setdefault(result.order, call.name)
        if self.with_uses:
            self._use(call, produced[0], Everyone(None) if everyone else result.found, params)
        else:
            self.largest = max(self.largest, produced[0].numel() // self.n)

    def _use(self, call: Call, out: torch.Tensor, axis: Axis, params: dict[int, torch.Tensor]) -> None:
        below = [node_of(x) for x in call.read if self._active(x)]
        call = replace(call, out=torch.empty(call.out.shape, device="meta"))  # its values need not be kept
        rule = factors.find(call) if self.fast and not out.is_complex() else None
        once = rule and self.remember is None and self.watcher is None and not self.scope.create_graph
        lean, recomputed = released(call, params) if once else (call, [])
        for x in params.values():
            tag = self.tag(x)
            assert isinstance(tag, Derived)
            recipe = rule(Site(lean, axis, reader(recomputed, self.scope.leave)), x) if rule else None
            if recipe is None:
                self.use(x, tag, generic(Site(call, axis, self.scope.leave), x), out, axis, call, below=below)
            else:
                self.use(x, tag, recipe, out, axis, lean, recomputed, below)


def _apart(x: torch.Tensor) -> bool:
    """Whether no two entries of a tensor are at one place in memory."""
    reached = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= reached:
            return False
        reached += stride * (size - 1)
    return True
