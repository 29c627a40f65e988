"""One run of a function: where its parameters meet the samples (taps), and where the samples are meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._functorch import base_of, opened, storage_of, unviewed, version
from invfunc.errors import part_mixed, samples_lost
from invfunc.jacobian import follow, rules
from invfunc.jacobian.axis import Axis, Everyone
from invfunc.jacobian.calls import (
    AFFINE,
    CONSTANT,
    SELECTIONS,
    alignment,
    function_name,
    in_place,
    produced_by,
    read_by,
)
from invfunc.jacobian.follow import TOTAL, Call, Mixed, Total, Unknown
from invfunc.jacobian.generic import generic
from invfunc.jacobian.graph import node_of, reaches
from invfunc.jacobian.indices import advanced
from invfunc.jacobian.random import Draws
from invfunc.jacobian.rules import Recipe, Site
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.tags import Derived, Sampled, Tap


class Trace(TorchFunctionMode):
    """Watches a function run. `fast=False` uses the generic path at every operation; `tapped=False` only follows."""

    def __init__(
        self,
        scope: Scope,
        n: int,
        *,
        fast: bool = True,
        tapped: bool = True,
        partial: bool = False,
        draws: Draws | None = None,
    ) -> None:
        super().__init__()
        self.scope, self.n, self.fast, self.tapped, self.draws = scope, n, fast, tapped, draws
        self.partial = partial
        """Whether it is a model function on a part of the batch, where data must not be mixed either."""
        self.taps: list[Tap] = []
        self.entered: list[torch.Tensor] = []  # what is differentiated: parameters, outputs of the model
        self.edges: list[Any] = []
        self.axes: list[Axis] = []
        self.sizes: list[int] = []
        """Of the output at each site, for one sample."""
        self.unknown = False
        """Whether an operation without a rule, rather than one that mixes, has lost the samples."""
        self.watcher: Callable[[Trace, str, Callable, tuple, dict], tuple[tuple, dict] | None] | None = None
        self.after: Callable[[Trace, Call], None] | None = None
        self._tags: dict[int, tuple[weakref.ref, Derived | Sampled]] = {}

    # Tags

    def tag(self, x: torch.Tensor) -> Derived | Sampled | None:
        found = self._tags.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def set(self, x: torch.Tensor, tag: Derived | Sampled | None) -> None:
        if tag is None:
            self._tags.pop(id(x), None)
        else:
            self._tags[id(x)] = (weakref.ref(x), tag)

    def parameters(self, leaves: Sequence[torch.Tensor], enter: bool = True) -> list[torch.Tensor]:
        """The leaves as this run is to see them, differentiable or not."""
        seen = []
        for i, leaf in enumerate(leaves):
            leaf = self.scope.enter(leaf) if enter else self.scope.alias(leaf)
            if enter:
                self.entered.append(leaf)
            self.set(leaf, Derived(frozenset({i}), True))
            seen.append(leaf)
        return seen

    def samples(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """A batch tensor as this run is to see it."""
        x = self.scope.alias(x)
        self.set(x, Sampled(Axis(None) if self.n == 1 else axis))
        return x

    # The run

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if self.draws is not None:
            self.draws.before(name, args, kwargs)
        read = read_by(name, args, kwargs)
        tags = {id(x): tag for x in read if (tag := self.tag(x)) is not None}
        if any(self._unseen(x, tags.get(id(x))) for x in read):
            raise samples_lost(_UNSEEN, unknown=True)
        if not tags:
            for x in read:
                self.scope.closes_over(x)
            return func(*args, **kwargs)
        if name in CONSTANT and not in_place(func):
            return self._of_constants(name, func(*args, **kwargs), list(tags.values()))
        if self.watcher is not None:
            changed = self.watcher(self, name, func, args, kwargs)
            if changed is not None:
                args, kwargs = changed
                read = read_by(name, args, kwargs)
                tags = {id(x): tag for x in read if (tag := self.tag(x)) is not None}
        if follow.find(name) is None and (body := opened(func)) is not None:
            with self:
                return body(*args, **kwargs)
        for x in read:
            if id(x) not in tags:
                self.scope.closes_over(x)
        data = {i for i, tag in tags.items() if isinstance(tag, Sampled) and tag.place is TOTAL and not tag.active}
        tags = {i: tag for i, tag in tags.items() if i not in data}  # data summed over the samples is a constant
        if not tags:
            return self._of_constants("detach", func(*args, **kwargs), [Sampled(TOTAL)])
        if all(isinstance(tag, Derived) for tag in tags.values()):
            return self._of_parameters(name, func, args, kwargs, list(tags.values()), len(read), bool(data))
        return self._of_samples(name, func, args, kwargs, read, tags)

    def _of_constants(self, name: str, out: Any, tags: list[Derived | Sampled]) -> Any:
        """What has no derivative: still samples, if it is a tensor."""
        tag = tags[0]
        if isinstance(tag, Sampled) and tag.place is not None:
            if isinstance(out, torch.Tensor):
                self.set(out, Sampled(tag.place, tag.lost))
            elif self.partial and name in ("item", "tolist", "numpy"):
                raise part_mixed(name)
        return out

    def _of_parameters(
        self, name: str, func: Callable, args: tuple, kwargs: dict, tags: list[Any], count: int, of_data: bool
    ) -> Any:
        out = func(*args, **kwargs)
        if torch.is_grad_enabled():
            basic = not in_place(func) and name in SELECTIONS or (name == "getitem" and not advanced(args[1]))
            selected = basic and count == 1 and tags[0].selected
            of_data = of_data or any(t.of_data for t in tags)
            derived = Derived(frozenset().union(*(t.leaves for t in tags)), selected, of_data)
            for x in [args[0]] if name == "setitem" else produced_by(out):
                self.set(x, derived if x.is_floating_point() or x.is_complex() else None)
                if in_place(func):
                    self._written(x, derived)
        return out

    def _of_samples(
        self, name: str, func: Callable, args: tuple, kwargs: dict, read: list[torch.Tensor], tags: dict
    ) -> Any:
        params = {id(x): x for x in read if isinstance(tags.get(id(x)), Derived)} if torch.is_grad_enabled() else {}
        sampled = [tag for tag in tags.values() if isinstance(tag, Sampled)]
        if params and in_place(func):  # what the operation read is overwritten
            target = args[0]
            kept = target.clone()
            self.set(kept, tags.get(id(target)))
        else:
            target = kept = None
        if params and not any(tag.lost for tag in sampled):
            args, kwargs = self._promote(name, args, kwargs, params, read)
            read = read_by(name, args, kwargs)
            tags = {id(x): tag for x in read if (tag := self.tag(x)) is not None}
            sampled = [tag for tag in tags.values() if isinstance(tag, Sampled)]
            params = {i: x for i, x in params.items() if any(x is y for y in read)}
        out = func(*args, **kwargs)
        if params and self.tapped and isinstance(out, torch.Tensor) and not in_place(func):
            out = unviewed(out)
        produced = [args[0]] if name == "setitem" else produced_by(out)
        if not produced:
            return out
        if target is not None and kept is not None:
            args = (kept, *args[1:])
            tags[id(kept)] = tags.pop(id(target), None)
            params = {i: x for i, x in params.items() if x is not target}
        places: dict[int, Axis | Total] = {
            i: tag.place for i, tag in tags.items() if isinstance(tag, Sampled) and tag.place is not None
        }
        active = self.partial or (any(tag.active for tag in sampled) and torch.is_grad_enabled())
        call = Call(name, func, args, kwargs, out if name != "setitem" else produced[0], places, self.n, active)
        lost = next((tag.lost for tag in sampled if tag.lost), None)
        found: Any = None
        if lost is None:
            try:
                found = follow.follow(call)
                if params and name == "setitem":
                    raise Mixed("it writes parameters into a tensor in place")
            except Mixed as reason:
                lost = f"`{name}`: {reason}"
                self.unknown |= isinstance(reason, Unknown)
        if self.partial and (found is TOTAL or (lost is not None and not self.unknown)):
            raise part_mixed(name)
        if not (produced[0].is_floating_point() or produced[0].is_complex()):
            params = {}
        if params and lost is None:
            if len(produced) > 1:
                lost = f"`{name}`: a parameter meets samples in an operation with several outputs"
            elif found is TOTAL and name not in ("add", "sub", "rsub", "subtract"):
                lost = f"`{name}`: a parameter meets a sum over the samples"
            elif found is TOTAL and any(getattr(self.tag(x), "of_data", False) for x in params.values()):
                lost = f"`{name}`: its share of each sample is gone where the data were summed"
            else:
                self._meet(call, produced[0], Everyone(None) if found is TOTAL else found, params)
        if params and lost is not None and (self.tapped or found is None):
            raise samples_lost(lost, self.unknown)
        met = next((tag.around for tag in sampled if tag.around and tag.crossed), None)
        around = met or (name if params or any(tag.around for tag in sampled) else None)
        crossed = frozenset().union(*(tag.crossed for tag in sampled))
        differentiable = torch.is_grad_enabled()
        moved = [x for x in read if isinstance(t := tags.get(id(x)), Sampled) and t.crossed]
        keeps = name in AFFINE and not around and len(moved) == 1
        keeps = keeps and (
            name not in ("div", "divide", "true_divide") or moved[0] is (args[0] if args else kwargs.get("input"))
        )
        affine, logarithm = (keeps and any(getattr(t, k) for t in sampled) for k in ("affine", "logarithm"))
        for i, x in enumerate(produced):
            place = found[i] if isinstance(found, list) else found
            if not (differentiable and x.is_floating_point()):
                tag = Sampled(place, lost)
            else:
                tag = Sampled(place, lost, around, crossed, affine, logarithm)
            self.set(x, tag if place is not None or lost or tag.active else None)
            if in_place(func):
                self._written(x, tag)
        if self.after is not None:
            self.after(self, call)
        return out

    def _written(self, x: torch.Tensor, new: Derived | Sampled) -> None:
        """What is written into a tensor is written into all that share its memory."""
        base = base_of(x)
        if base is not None and self.tag(base) is None:
            self.set(base, Derived(frozenset(), False) if isinstance(new, Derived) else Sampled(None))
        memory = storage_of(x)
        for reference, old in list(self._tags.values()):
            y = reference()
            if y is None or y is x or storage_of(y) != memory:
                continue
            if isinstance(old, Derived) and isinstance(new, Derived):
                self.set(y, Derived(old.leaves | new.leaves, False, old.of_data or new.of_data))
            elif isinstance(old, Sampled) and isinstance(new, Sampled) and old.active == new.active and old.place:
                crossed = old.crossed | new.crossed
                self.set(y, Sampled(old.place, old.lost or new.lost, old.around or new.around, crossed))
            else:
                around, crossed = getattr(new, "around", "a parameter"), getattr(new, "crossed", frozenset())
                self.set(y, Sampled(None, "an in-place write through a view", around, crossed))

    def check(self, outputs: list[torch.Tensor], params: list[torch.Tensor]) -> None:
        """Every path from the outputs to the parameters has to cross a tap: autograd knows more than was seen."""
        stops, targets = {edge.node for edge in self.edges}, {node_of(p) for p in params}
        if any(reaches(z, targets, stops) or self._unseen(z, self.tag(z)) for z in outputs):
            raise samples_lost(_UNSEEN, unknown=True)

    def _unseen(self, x: torch.Tensor, tag: Derived | Sampled | None) -> bool:
        """Whether autograd knows that x depends on the parameters, though no call said so."""
        if (
            not (x.requires_grad and torch.is_grad_enabled())
            or isinstance(tag, Derived)
            or (tag is not None and tag.active)
        ):
            return False
        return reaches(x, {node_of(p) for p in self.entered}, set())

    # Parameters meet samples

    def _promote(
        self, name: str, args: tuple, kwargs: dict, params: dict[int, torch.Tensor], read: list[torch.Tensor]
    ) -> tuple[tuple, dict]:
        """A parameter that has an entry for each sample becomes a tensor of samples, tapped where it does."""
        new: dict[int, torch.Tensor] = {}
        placed = [(x, t.place) for x in read if isinstance(t := self.tag(x), Sampled) and isinstance(t.place, Axis)]
        for i, x in params.items():
            axis = alignment(name, args, kwargs, x, placed)
            if axis is None:
                continue
            alias = x.view_as(x)
            new[i] = alias
            self.set(alias, Sampled(axis, around=name))
            if self.tapped:
                tag = self.tag(x)
                assert isinstance(tag, Derived)
                recipe = rules.aligned(axis, x, self.n)
                self.tap(x, tag, recipe, alias, axis)
        if not new:
            return args, kwargs
        return tree.map_tensors(lambda t: new.get(id(t), t), (args, kwargs))

    def _meet(self, call: Call, out: torch.Tensor, axis: Axis, params: dict[int, torch.Tensor]) -> None:
        if not self.tapped:
            return
        site = Site(call, axis, self.scope.leave)
        rule = rules.find(call.name) if self.fast else None
        for x in params.values():
            tag = self.tag(x)
            assert isinstance(tag, Derived)
            recipe = (rule(site, x) if rule else None) or generic(site, x)
            self.tap(x, tag, recipe, out, axis)

    def tap(self, param: torch.Tensor, tag: Derived, recipe: Recipe, out: torch.Tensor, axis: Axis) -> None:
        edge = torch.autograd.graph.get_gradient_edge(out)
        at = next((i for i, e in enumerate(self.edges) if e == edge and self.axes[i] == axis), None)
        if at is None:
            at = len(self.edges)
            self.edges.append(edge)
            self.axes.append(axis)
            self.sizes.append(max(1, out.numel() // self.n))
        self.taps.append(Tap(param, tag, recipe, at, tuple((x, version(x)) for x in (param, *recipe.reads))))


_UNSEEN = "an operation that cannot be seen (a custom autograd.Function, torch.func inside f, a write into a view?)"
