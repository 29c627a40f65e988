"""The pair of a function whose inverse is found in what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import unwrapped
from invfunc._torch.generators import same_state, state_of
from invfunc.callables import describe
from invfunc.errors import InverseError
from invfunc.pairs.automatic.derived import Derived
from invfunc.pairs.automatic.formula import formulas
from invfunc.pairs.automatic.graph import Call, Node, Tracer, like_of
from invfunc.pairs.automatic.search import search
from invfunc.pairs.automatic.symbolic import Symbolic
from invfunc.pairs.automatic.values import Order, Values
from invfunc.pairs.pair import Closed, Invertible
from invfunc.pairs.value import Value

_MOST = 64
"""How many kinds of calls are remembered."""


class Input(NamedTuple):
    """What x was like: its tree without its tensors, the form of each, and which of them are known."""

    form: tree.Form
    like: Sequence[Any]
    """With shape, stride, dtype and device."""
    kept: Mapping[int, torch.Tensor]


class _Watching(Tracer):
    """Looks on while f runs with its numbers, of which none are kept."""

    def __init__(self, xs: Sequence[torch.Tensor], drawing: set[str]) -> None:
        super().__init__()
        self._drawing = drawing
        self.inputs = [self.known(x, self.node(x, x.device, [], None)) for x in xs]

    def run(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        args, kwargs = tree.unflatten(leaves, structure)
        before = state_of(torch.default_generator)
        result = call.function.func(*args, **kwargs)
        if not same_state(state_of(torch.default_generator), before):
            self._drawing.add(call.function.called)
        return result

    def of_form(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        args, kwargs = tree.unflatten(leaves, structure)
        return call.function.func(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Found(Value):
    """Both directions of f: forward looks for the inverse in the first call of each kind, and the inverse takes it."""

    f: Callable
    keep: tuple[int, ...] = ()
    """The tensors of x that are known to the inverse."""
    told: dict[Any, str] = field(default_factory=dict)
    """How x is computed, by the kinds of calls."""
    drawing: set[str] = field(default_factory=set)
    """The functions that were seen to draw."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.f(x, *args, **kwargs)
        xs, form = tree.separate(x)
        flags = [a for a in (*args, *kwargs.values(), getattr(self.f, "training", None)) if isinstance(a, (bool, str))]
        kind = tree.hashable(form.structure), *((t.shape, t.dtype) for t in xs), *flags
        apart = len(set(map(id, xs))) == len(xs)  # one tensor in two places has one name
        if not xs or kind in self.told or not apart or any(unwrapped(t) is not None for t in xs):
            return self.f(x, *args, **kwargs)
        watching = _Watching(xs, self.drawing)
        try:
            with watching:
                y = self.f(x, *args, **kwargs)
            while len(self.told) >= _MOST:  # of ever new shapes
                self.told.pop(next(iter(self.told)), None)
            self.told[kind] = self._told(watching, x, y)
        finally:
            watching.forget()
        return y

    def _told(self, watching: _Watching, x: Any, y: Any) -> str:
        """How x is computed from y; an error if it is not."""
        inputs, named = watching.inputs, _names("x", x, watching) | _names("y", y, watching)
        known = [node for t in tree.tensors(y) if (node := _not_stale(watching, t)) is not None]
        steps = search(inputs, [*known, *(inputs[i] for i in self.keep if i < len(inputs))], named)
        return formulas(steps, named)

    def inverse(self, y: Any, *args: Any, **kwargs: Any) -> Any:
        """x, of the form of y."""
        module = self.f if isinstance(self.f, nn.Module) else getattr(self.f, "__self__", None)
        parts = module.modules() if isinstance(module, nn.Module) else ()
        if any(m.training and [*m.buffers(recurse=False)] for m in parts):
            raise InverseError(
                "outside of a block there is no inverse of a module in training mode with buffers (running means): it "
                "runs f, which would write them. Call eval() first."
            )
        ys, form = tree.separate(y)
        return self._solved(Input(form, [like_of(t) for t in ys], {}), y, args, kwargs)

    def inverse_like(self, x: Input, y: Any, *args: Any, **kwargs: Any) -> Any:
        """x, of its own form; only its values are wanted."""
        with torch.no_grad():
            return self._solved(x, y, args, kwargs)

    def _solved(self, x: Input, y: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        ys = tree.tensors(y)
        near = next((t for t in ys if unwrapped(t) is not None), ys[0])
        run = Symbolic(near, self.drawing)
        try:
            return self._traced(run, x, ys, near, args, kwargs)
        finally:
            run.forget()

    def _traced(
        self, run: Symbolic, x: Input, ys: list[torch.Tensor], near: torch.Tensor, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        stand_ins = [run.stand_in(like, like.device) for like in x.like]
        with torch.enable_grad(), run:
            came = self.f(x.form.join(stand_ins), *args, **kwargs)
        found = tree.tensors(came)
        if [t.shape for t in found] != [t.shape for t in ys]:
            raise InverseError("f gives something of another form when its inverse is looked for.")
        given = {run.inputs[i]: t for i, t in x.kept.items()}
        for t, number in zip(found, ys, strict=True):
            if (node := _not_stale(run, t)) is not None:
                given.setdefault(node, number)
        steps = search(run.inputs, given, _names("x", x.form.join(stand_ins), run))
        states = [state_of(generator) for generator in run.generators]
        values = Values(given, Order(steps, run.inputs), near).compute()
        if not all(same_state(state_of(g), then) for g, then in zip(run.generators, states, strict=True)):
            raise InverseError("f draws random numbers that were not seen when its inverse was looked for.")
        return x.form.join(values)


class Automatic(Invertible):
    """A pair whose inverse is found; its repr tells it, once it was called."""

    derived = True

    @property
    def found(self) -> Found:
        return self.forward.__self__  # pyright: ignore[reportFunctionMemberAccess]

    def inverse_of(self, x: tree.Form, like: Sequence[Any], kept: Mapping[int, torch.Tensor]) -> Callable:
        return partial(self.found.inverse_like, Input(x, like, kept))

    @property
    def made_of(self) -> tuple[Callable, ...]:
        return (self.found.f,)

    def directions(self, x: tree.Form, like: Sequence[Any], closed: Closed) -> tuple[Callable, Callable]:
        f = self.found.f
        return f, Derived(f, x, like, closed, self.inverse_of(x, like, {}))

    def __repr__(self) -> str:
        told = dict.fromkeys(self.found.told.values())
        return ", or ".join([describe(self.found.f), *told]).replace(", or ", ", ", 1)


def automatic(f: Callable, keep: tuple[int, ...] = ()) -> Automatic:
    """The pair of f and the inverse that is found in what f does."""
    found = Found(f, keep)
    return Automatic(found.forward, found.inverse)


def _not_stale(tracer: Tracer, tensor: torch.Tensor) -> Node | None:
    node = tracer.of(tensor)
    if node is not None and node.stale:
        raise InverseError(f"no inverse is found: f returns a tensor that {node.stale} has written by another view.")
    return node


def _names(name: str, value: Any, tracer: Tracer) -> dict[Node, str]:
    named = tree.named_leaves(value)
    return {node: name + path for path, leaf in named if (node := tracer.of(leaf)) is not None}
