"""One call of a torch function, with what is known of the tensors that it reads."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import base_of, version
from invfunc.errors import ArgumentError, Unseen
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM, BatchSum, Call
from invfunc.operations.calls import picking, produced_by, spelled
from invfunc.operations.heard import Function
from invfunc.operations.operation import linear
from invfunc.recording.tags import Derived, Sampled, derived_from


class Seen:
    """One call of a torch function as the trace sees it, with what is known of what it reads."""

    def __init__(
        self,
        function: Function,
        args: tuple,
        kwargs: dict[str, Any],
        read: list[torch.Tensor],
        tags: dict[int, Derived | Sampled],
    ) -> None:
        self.function, self.name, self.func = function, function.name, function.func
        self.args, self.kwargs, self.read, self.tags = args, kwargs, read, tags
        self.writes = function.in_place or (function.inplace_at is not None and function.writes(args, kwargs))

    @property
    def through_view(self) -> bool:
        """Whether it writes to a view of what has a derivative, or will have one."""
        if not self.writes or not isinstance(self.args[0], torch.Tensor):
            return False
        return base_of(self.args[0]) is not None

    @property
    def params(self) -> dict[int, torch.Tensor]:
        """Parameters among what it reads that a derivative reaches."""
        if not torch.is_grad_enabled():
            return {}
        return {id(x): x for x in self.read if isinstance(self.tags.get(id(x)), Derived)}

    @cached_property
    def sampled(self) -> list[Sampled]:
        return [tag for tag in self.tags.values() if isinstance(tag, Sampled)]

    @property
    def lost(self) -> str | None:
        """Why samples that it reads are lost already."""
        for tag in self.sampled:
            if tag.lost:
                return tag.lost
        return None

    def forget_sums(self) -> bool:
        """Take data summed over the samples for constants; returns whether the call reads any."""
        sums = [i for i, t in self.tags.items() if isinstance(t, Sampled) and t.place is BATCH_SUM and not t.active]
        for i in sums:
            self.forget(i)
        return bool(sums)

    def forget(self, key: int) -> Derived | Sampled | None:
        """Drop what is known of a tensor that the call reads; returns it."""
        self.__dict__.pop("sampled", None)
        return self.tags.pop(key, None)

    def run(self) -> Any:
        once = self.function.forms.once
        if once is not None:
            return once(self.func, *self.args, **self.kwargs)
        if not hasattr(self.func, "recipe"):
            return self.func(*self.args, **self.kwargs)
        before = [version(x) for x in self.read]  # what one's own operation does is not looked into
        out = self.func(*self.args, **self.kwargs)
        if before != [version(x) for x in self.read]:
            raise ArgumentError(f"`{self.name}` writes into one of its arguments in place; let it work on a copy.")
        return out

    def affine(self) -> tuple[bool, bool]:
        """Whether the result is an affine function of marked outputs, and of the log_softmax of one."""
        moved = [(x, t) for x in self.read if isinstance(t := self.tags.get(id(x)), Sampled) and t.crossed]
        outputs = [x for x, _ in moved]
        keeps = not self.function.entry.piecewise and linear(self.func, self.args, self.kwargs, self.read, outputs)
        return keeps and all(t.affine for _, t in moved), keeps and len(moved) == 1 and moved[0][1].logarithm

    def derived(self, produced: list[torch.Tensor], of_data: bool, untraced_at: str | None, alone: bool) -> Derived:
        """What is known of the results of a call that reads parameters, sums of data (`of_data`) and perhaps a tensor
        of which nothing is known; `alone` says that it is of one sample of several."""
        tags = [tag for tag in self.tags.values() if isinstance(tag, Derived)]
        picks, once = (False, False) if self.writes or len(tags) > 1 else picking(self.name, self.args)
        entry = self.function.entry
        repeats = (entry.picks == "any" or entry.places == "reads") and any(1 in x.shape for x in produced)
        selected = once and len(self.read) == 1 and tags[0].selected
        return derived_from(tags, selected, of_data, untraced_at, picks and tags[0].picked, alone and repeats)

    def read_instead(self, kept: torch.Tensor) -> None:
        """A copy of the first argument, from before it was written to."""
        tag = self.forget(id(self.args[0]))
        if tag is not None:
            self.tags[id(kept)] = tag
        self.args = (kept, *self.args[1:])
        self.read = tree.tensors((self.args, self.kwargs))

    def call(self, out: Any, n: int, partial: bool, by_rows: bool) -> Call:
        """The call as the batch axis rules take it: with its result, and where the samples are in what it read."""
        places = self._places()
        active = partial or (any(tag.active for tag in self.sampled) and torch.is_grad_enabled())
        result = self.args[0] if self.name == "setitem" else out
        return Call(self.name, self.func, self.args, self.kwargs, result, places, n, active, self.read, by_rows)

    def _places(self) -> dict[int, Axis | BatchSum]:
        places = {i: t.place for i, t in self.tags.items() if isinstance(t, Sampled) and t.place is not None}
        if not any(tag.order for tag in self.sampled):
            return places
        moved = {p.rows for p in places.values() if isinstance(p, Axis)}
        for i, tag in self.tags.items():  # data in the order in which outputs are, which no parameter has met there
            if (
                isinstance(tag, Sampled)
                and not tag.active
                and tag.order
                and tag.order in moved
                and isinstance(tag.place, Axis)
                and tag.place.regular
            ):
                places[i] = replace(tag.place, rows=tag.order)
        return places

    def produced(self, out: Any) -> list[torch.Tensor]:
        return [self.args[0]] if self.name == "setitem" else produced_by(out)


def cannot_meet(
    call: Call, produced: list[torch.Tensor], found: Any, params: list[Any], apart: bool, escaped: str | None
) -> str | None:
    """Why parameters with these tags have no shares at an operation."""
    if len(produced) > 1:
        return f"`{call.name}`: a parameter meets samples in an operation with several outputs"
    if found is None:
        return f"`{call.name}`: a parameter overwrites what all samples had there"
    if found is not BATCH_SUM:
        return None
    terms = call.equation
    sums = terms is not None and not terms.operands
    why = next((why for tag in params if (why := not_shared(tag, escaped))), None) if apart or not sums else None
    if sums or isinstance(why, Unseen):
        return why
    if BATCH_SUM in call.places.values():
        return (
            f"`{call.name}`: a parameter meets a sum to which it is not known what each sample adds (let it meet those)"
        )
    alone = "a parameter that has met none is in every term (does f close over its inputs?)"
    return f"`{call.name}`: it sums over the samples, and {alone}"


def not_shared(tag: Any, escaped: str | None) -> str | None:
    """Why the samples may have no equal shares in what was computed from parameters, it seems, and from constants."""
    if not isinstance(tag, Derived):
        return None
    if escaped:
        return Unseen(f"{spelled(escaped)}, which takes them to where they cannot be followed")
    if tag.untraced_at:
        return Unseen(f"{spelled(tag.untraced_at)}, which reads a tensor of which nothing is known")
    return "a sum over the data, in which the single samples are gone" if tag.of_data else None
