"""Functions of flat lists of tensors: a call forwards and backwards, its derivative, and any of them for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from invfunc import tree
from invfunc._torch.functorch import leaf_level, unwatched, unwrapped, vmaps_of
from invfunc._torch.opened import raised_in
from invfunc._torch.values import differentiable
from invfunc.errors import ReplayError
from invfunc.operations.heard import Function, Listener
from invfunc.recomputation.call import Call, Evaluate, Tensors
from invfunc.recomputation.shared import Evaluation
from invfunc.recomputation.sparse import is_sparse

Map = Callable[[Tensors], list[torch.Tensor]]


class Maps:
    """A call, as functions of flat lists of tensors."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def first(self, xs: Tensors, rest: Tensors) -> list[torch.Tensor]:
        """The tensors of y, for the first time."""
        return self.call.flat(self.call.first(xs, rest, closed=True))

    def forward(
        self, xs: Tensors, rest: Tensors, known: Evaluate | None = None, compare: bool = True, exact: bool = False
    ) -> list[torch.Tensor]:
        """The tensors of y, another time, perhaps with known results of shared functions; `exact` says that x is."""
        return self.call.flat(self.call.run(xs, rest, known, known is not None, compare, exact))

    def inverse(self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None) -> list[torch.Tensor]:
        """The tensors of x."""
        return self.call.inverse(sources, rest, evaluate)


class BatchedMaps(Maps):
    """Those of every entry of a batch, which some of xs and rest have in front."""

    def __init__(self, maps: Maps, xs: Sequence[bool], rest: Sequence[bool], randomness: str) -> None:
        super().__init__(maps.call)
        self._maps = maps
        self._xs = _dims(xs)
        self._rest = _dims(rest)
        self._randomness = randomness

    def first(self, xs: Tensors, rest: Tensors) -> list[torch.Tensor]:
        return self._each(self._maps.first, self._xs)(list(xs), list(rest))

    def forward(
        self, xs: Tensors, rest: Tensors, known: Evaluate | None = None, compare: bool = True, exact: bool = False
    ) -> list[torch.Tensor]:
        return self._each(lambda a, b: self._maps.forward(a, b, known, compare, exact), self._xs)(list(xs), list(rest))

    def inverse(self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None) -> list[torch.Tensor]:
        kept = [self._xs[i] for i in self.call.kept]
        dims = [0] * (len(sources) - len(kept)) + kept
        inverse = self._each(lambda a, b: self._maps.inverse(a, b, evaluate), dims)
        return unbatched(inverse(list(sources), list(rest)), [dim == 0 for dim in self._xs])

    def _each(self, fn: Callable, dims: Sequence[int | None]) -> Callable[[list, list], list[torch.Tensor]]:
        return cast(Any, torch.vmap(fn, in_dims=(list(dims), self._rest), randomness=self._randomness))


def _dims(has: Sequence[bool]) -> list[int | None]:
    return [0 if h else None for h in has]


def unbatched(tensors: Tensors, has: Sequence[bool]) -> list[torch.Tensor]:
    """One entry of what is the same for all of a batch, and is not to have it in front."""
    return [t if h else t.select(0, 0) for t, h in zip(tensors, has, strict=True)]


def batched(fn: Map, has: Sequence[bool], randomness: str) -> Map:
    """A map for every entry of a batch, which some of its inputs have in front."""
    dims = (_dims(has),)
    return lambda tensors: cast(Any, torch.vmap(fn, in_dims=dims, randomness=randomness))(list(tensors))


def pulled(fn: Map, number: int, wanted: Sequence[int], given: Sequence[int], idle: set[int]) -> Map:
    """The gradients of a map: `(inputs, gradients of outputs) -> gradients of inputs`.

    Args:
        fn: a map of `number` inputs.
        wanted: the inputs whose gradients are asked for.
        given: the outputs that have a gradient; that of the others is zero.
        idle: grows by the inputs that no such output depends on, whose gradients are zeros.
    """

    def slope(tensors: Tensors) -> list[torch.Tensor]:
        create_graph = torch.is_grad_enabled()
        with _differentiating(create_graph, tensors) as (tensors, level):
            inputs, gs = tensors[:number], tensors[number:]
            return pulled_back(fn, inputs, gs, (wanted, given, idle), level, partial(_gradients, create_graph))

    return slope


def unwound(
    maps: Maps, counts: tuple[int, int, int], wanted: Sequence[int], given: Sequence[int], idle: set[int]
) -> Map:
    """A step back: `(sources, rest, gradients of ys) -> (xs, gradients of xs and rest)`.

    Every shared function is evaluated once, for the inverse, and its graph serves the gradients as well. What remains
    of forward is evaluated between them, with their known outputs.

    Args:
        maps: those of a call.
        counts: how many sources, xs and tensors of rest there are.
        wanted: the inputs (xs, then rest) whose gradients are asked for.
        given: the ys that have a gradient; that of the others is zero.
        idle: grows by the inputs that no such y depends on.
    """
    n_sources, n_xs, n_rest = counts

    def step(tensors: Tensors) -> list[torch.Tensor]:
        create_graph = torch.is_grad_enabled()
        with _differentiating(create_graph, tensors) as (tensors, level):
            sources, rest = tensors[:n_sources], tensors[n_sources : n_sources + n_rest]
            constant = among([t for i, t in enumerate(rest, n_xs) if i not in wanted])
            shared, leave = Shared(level, constant, create_graph), level[2]
            xs = [leave(x) for x in maps.inverse(sources, rest, shared.evaluate)]
            inputs, gs = [*xs, *rest], tensors[n_sources + n_rest :]

            def forward(tensors: Tensors) -> list[torch.Tensor]:
                return maps.forward(tensors[:n_xs], tensors[n_xs:], shared.recall)

            return xs + pulled_back(forward, inputs, gs, (wanted, given, idle), level, shared.gradients)

    return step


def pulled_back(
    fn: Map,
    tensors: Tensors,
    gs: Tensors,
    asked: tuple[Sequence[int], Sequence[int], set[int]],
    level: _Level,
    gradients: Callable[[Ends, Sequence[Edge | None]], list[torch.Tensor | None]],
) -> list[torch.Tensor]:
    """The gradients of a map at a level of our own, as `pulled` is asked for them: `(wanted, given, idle)`."""
    (wanted, given, idle), (enter, edge, leave) = asked, level
    inputs = [enter(t) if i in wanted else t for i, t in enumerate(tensors)]
    places = [edge(inputs[i]) for i in wanted]
    outputs = fn(inputs)
    back = [(edge(outputs[i]), g) for i, g in zip(given, gs, strict=True)]
    del inputs, outputs  # autograd knows what it needs of them
    found = gradients(back, places)
    idle.update(i for i, g in zip(wanted, found, strict=True) if g is None)
    return [leave(torch.zeros_like(tensors[i]) if g is None else g) for i, g in zip(wanted, found, strict=True)]


class Shared:
    """Shared functions as the inverse evaluates them: forward is given their results, and its gradients go through
    their graphs.

    Args:
        level: of the graphs.
        constant: whether no gradient is asked of a tensor that they are given.
        create_graph: whether the gradients have a graph.
    """

    def __init__(self, level: _Level, constant: Callable[[torch.Tensor], bool], create_graph: bool) -> None:
        self._level, self._constant, self._create_graph = level, constant, create_graph
        self._graphs: dict[int, _Graph] = {}
        self._places: dict[int, _Graph] = {}
        """Where forward has given them their inputs, and got their outputs."""
        self._values: dict[int, tuple[list[torch.Tensor], tree.Form]] = {}
        self._zeros: dict[int, list[torch.Tensor | None]] = {}

    def evaluate(self, index: int, evaluation: Evaluation) -> Any:
        """One of them, for the inverse."""
        enter, edge, leave = self._level
        given = evaluation.tensors
        inputs = [t if is_sparse(t) or self._constant(t) or not differentiable(t) else enter(t) for t in given]
        outputs, form = tree.separate(evaluation.at(inputs))
        self._graphs[index] = [*map(edge, inputs)], [*map(edge, outputs)]
        values = [leave(t) for t in outputs]
        self._values[index] = values, form
        with unwatched():
            self._zeros[index] = [leave(t).new_zeros(()) if vmaps_of(t) else None for t in inputs]
        return form.join(values)

    def recall(self, index: int, evaluation: Evaluation) -> Any:
        """What one of them gave, for forward."""
        enter, edge, _ = self._level
        found, form = self._values.pop(index)
        found = [enter(t) if differentiable(t) else t for t in found]
        inputs = [_for_each(t, zero) for t, zero in zip(evaluation.tensors, self._zeros[index], strict=True)]
        if any(t.requires_grad for t in inputs if is_sparse(t)):
            raise ReplayError(_SPARSE)
        self._places[index] = [*map(edge, inputs)], [*map(edge, found)]
        return form.join(found)

    def gradients(self, back: Ends, asked: Sequence[Edge | None]) -> list[torch.Tensor | None]:
        """Those of forward, from the gradients of its outputs."""
        for index in sorted(self._graphs, reverse=True):
            (inner, outer), (own_inner, own_outer) = self._places.pop(index), self._graphs.pop(index)
            of_outer = _gradients(self._create_graph, back, outer, retain=True)
            within = [own if place is not None else None for place, own in zip(inner, own_inner, strict=True)]
            pairs = [(place, g) for place, g in zip(own_outer, of_outer, strict=True) if g is not None]
            of_inner = _gradients(self._create_graph, pairs, within)
            back = [*back, *((place, g) for place, g in zip(inner, of_inner, strict=True) if g is not None)]
        return _gradients(self._create_graph, back, asked)


@contextmanager
def _differentiating(create_graph: bool, tensors: Tensors) -> Iterator[tuple[Tensors, _Level]]:
    """A level of our own, and the tensors; below it gradients are enabled, too, for kernels that ask (mkldnn's LSTM),
    but there is no graph unless one is to be created."""
    hooks = _NoHooks() if create_graph else nullcontext()
    try:
        with torch.enable_grad(), disable_saved_tensors_hooks(_PARTS), leaf_level() as level, hooks:
            yield tensors if create_graph else [t.detach() for t in tensors], level
    except RuntimeError as error:
        if not (str(error) == _PARTS or raised_in(torch.autograd.Function.apply, error)):
            raise
        raise ReplayError(_PARTS) from error


_PARTS = (
    "a block that uses torch.func is differentiated by torch.func, which takes no torch.utils.checkpoint or other "
    "hooks for saved tensors, no full backward hooks of modules and no autograd.Function without setup_context. Give "
    "the Function a setup_context, leave out a checkpoint (the block frees what it saves), or put the parts that use "
    "torch.func and the others into blocks of their own."
)


_SPARSE = (
    "a sparse tensor that needs a gradient is an argument of a function that both directions share. Make it within "
    "that function, of its values: torch.sparse_coo_tensor(indices, values, size)."
)


class _NoHooks(Listener):
    """Refuses hooks of tensors: they belong to one level, and a second derivative takes another way beside it."""

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function.func is torch.Tensor.register_hook:
            raise ReplayError(
                "a block that uses torch.func has no second derivatives beside a hook of a tensor (register_hook), "
                "which would not reach them. Leave out the hook, or put the part with it into a block of its own."
            )
        return function.func(*args, **kwargs)


Edge = torch.autograd.graph.GradientEdge | torch.Tensor
_Graph = tuple[list[Edge | None], list[Edge | None]]
"""Where the inputs and the outputs of an evaluation are in the graph; None where they have none."""
Ends = Sequence[tuple[Edge | None, torch.Tensor]]
"""Where outputs are in the graph, with their gradients."""
_Level = tuple[Callable, Callable, Callable]
"""What `leaf_level` yields: a tensor becomes a leaf there, where it is in the graph of the level, and it without that.
"""


def _for_each(tensor: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """The tensor for every entry of the vmaps of a zero; x may be one for all where the inverse gives one for each."""
    return tensor if zero is None or vmaps_of(tensor) >= vmaps_of(zero) else tensor + zero


def among(tensors: Tensors) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is one of these, or its entry of a batch."""
    ids = set(map(id, tensors))

    def is_one(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and (id(tensor) in ids or is_one(unwrapped(tensor)))

    return is_one


def _gradients(
    create_graph: bool, outputs: Ends, inputs: Sequence[Edge | None], retain: bool = False
) -> list[torch.Tensor | None]:
    """`torch.autograd.grad` where nothing has to depend on anything."""
    ends = [(edge, g) for edge, g in outputs if edge is not None]
    asked = [i for i, edge in enumerate(inputs) if edge is not None]
    found: list[torch.Tensor | None] = [None] * len(inputs)
    if ends and asked:
        grad: Any = torch.autograd.grad  # which takes edges and leaves side by side, though it does not say so
        gradients = grad(
            [edge for edge, _ in ends],
            [edge for edge in inputs if edge is not None],
            [g for _, g in ends],
            retain_graph=retain or create_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
        for i, gradient in zip(asked, gradients, strict=True):
            found[i] = gradient
    return found
