"""Checkpointing inside of torch.func, where saved tensors have no hooks: a Function at every level that has a graph.

At a level the graph of `y = f(x)` is one node, which holds the further arguments and the slot of y. Its backward is a
step

    (x, gradients) = step(y, args, gradients of y)

that is computed on plain tensors, below all levels, and is a Function again for the levels below that of the node,
which may differentiate it. For the level of the node itself nothing of the step is saved.

Who differentiates a step needs an x with a graph, and saving x would keep it in memory. So each node gives out *ghosts*
of x, zeros without memory of its shape, whose gradients go where those of x go: a step takes x as a value, and its
ghost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from invfunc._signed import signed
from invfunc._torch.functorch import alive, leaf_level, level_of, levels
from invfunc._torch.levels import each_of_batch
from invfunc._torch.values import differentiable
from invfunc.errors import ReplayError
from invfunc.recomputation.block import Block
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.maps import BatchedMaps, Map, Maps, batched, pulled, unbatched, unwound
from invfunc.recomputation.slots import Held, fetch
from invfunc.recomputation.straight_learning import learn, looked

Gradients = Sequence[torch.Tensor | None]
NOT_TWICE = (
    "the gradient of an invertible block is differentiated within the transform of torch.func that it was made in, by "
    "torch.autograd.grad. Use torch.func.grad for the first derivative too."
)


class Op(ABC):
    """What a node computes, and how it is differentiated."""

    @abstractmethod
    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs, from plain tensors."""

    @abstractmethod
    def batched(self, has: Sequence[bool], randomness: str) -> Op:
        """The operation for every entry of a batch, which some inputs have in front."""

    @abstractmethod
    def aligned(self, tensors: list[torch.Tensor], has: list[bool]) -> None:
        """Change inputs in place before they are batched, where some have to have a batch only if others do."""

    @abstractmethod
    def spread(self, has: Sequence[bool], number: int) -> Sequence[bool]:
        """Which of its outputs have a batch in front that these inputs have."""

    @abstractmethod
    def save(self, ctx: Any, tensors: Tensors, outputs: Tensors) -> None:
        """Keep what the backward needs."""

    @abstractmethod
    def backward(self, ctx: Any, gradients: Gradients) -> Gradients:
        """The gradients of the inputs."""


class Node(torch.autograd.Function):
    """One operation at each level of torch.func."""

    @staticmethod
    @signed
    def forward(op: Op, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {id(t) for t in tensors}
        return tuple(t.view_as(t) if id(t) in given else t for t in op.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
        op, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output if not differentiable(t)))
        ctx.op = op
        ctx.around = [level for kind, level in levels() if kind == "vmap"]
        if any(ctx.needs_input_grad):
            op.save(ctx, tensors, output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *each_of_batch(partial(ctx.op.backward, ctx), [None if g is None else alive(g) for g in gradients])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: Op, *tensors: torch.Tensor) -> tuple:
        dims = in_dims[1:]
        first = [t if dim is None else t.movedim(dim, 0) if dim else t for t, dim in zip(tensors, dims, strict=True)]
        has = [dim is not None for dim in dims]
        op.aligned(first, has)
        outputs = Node.apply(op.batched(has, info.randomness), *first)
        return outputs, tuple(0 if out else None for out in op.spread(has, len(outputs)))


class LevelBlock(Block):
    """A call at a level of torch.func."""

    def __init__(self, maps: Maps, rest: Tensors) -> None:
        super().__init__(maps.call.kept, maps.call.report)
        self._maps = maps
        self._rest = [Held(t) for t in rest]

    @property
    def call(self) -> Call:
        """The call that it is."""
        return self._maps.call

    def arguments(self) -> list[torch.Tensor]:
        """The further arguments, as they were."""
        return [held.get().detach() for held in self._rest]

    def invert(self) -> None:
        sources = fetch(self.sources)
        with torch.enable_grad(), self._maps.call.named():
            rest = self.arguments()
            with leaf_level() as (_, _, leave):  # as it was evaluated; a pullback may have left that of its transform
                xs = [leave(x) for x in self._maps.inverse(sources, rest, None)]
                if self._maps.call.reads_outside:
                    self._maps.forward(xs, rest)  # which says if it reads something else by now
            self.give_back_and_tell([x.detach() for x in xs])

    def names(self, of: str = "x") -> list[str]:
        return self._maps.call.names(of)

    def dtypes(self) -> list[torch.dtype]:
        return [*self._maps.call.dtypes(), *(held.get().dtype for held in self._rest)]

    def once_more(self, sources: Tensors, xs: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rest = self.arguments()
        return self._maps.inverse(sources, rest, None), self._maps.forward(xs, rest, compare=False)


class Forward(Op):
    """`(xs, rest) -> (ys, ghosts of xs)`."""

    def __init__(self, maps: Maps, count: int) -> None:
        self._maps = maps
        self._count = count

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():  # as it is evaluated again; of plain tensors there is no graph
            detached = [t.detach() for t in tensors]
            ys = self._maps.first(detached[: self._count], detached[self._count :])
        given = {id(d): t for d, t in zip(detached, tensors, strict=True)}
        xs, ys = tensors[: self._count], [given.get(id(y), y) for y in ys]
        return *ys, *(x.new_zeros(()).expand(x.shape) for x in xs)

    def batched(self, has: Sequence[bool], randomness: str) -> Op:
        return Forward(BatchedMaps(self._maps, has[: self._count], has[self._count :], randomness), self._count)

    def aligned(self, tensors: list[torch.Tensor], has: list[bool]) -> None:
        """Nothing to change: each input has a batch or not by itself."""

    def spread(self, has: Sequence[bool], number: int) -> Sequence[bool]:
        return [*[True] * (number - self._count), *has[: self._count]]

    def save(self, ctx: Any, tensors: Tensors, outputs: Tensors) -> None:
        xs, rest = tensors[: self._count], tensors[self._count :]
        ys, ghosts = outputs[: len(outputs) - self._count], outputs[len(outputs) - self._count :]
        ctx.block = LevelBlock(self._maps, rest)
        ctx.block.connect(xs, ys, [ctx.metadata] * len(ys))
        ctx.save_for_backward(*ghosts, *rest)

    def backward(self, ctx: Any, gradients: Gradients) -> Gradients:
        needs = ctx.needs_input_grad[1:]
        wanted = [i for i, need in enumerate(needs) if need]
        level, saved = _saved(ctx, wanted[0])
        ghosts, rest = saved[: self._count], saved[self._count :]
        of_ys, of_ghosts = gradients[: len(gradients) - self._count], gradients[len(gradients) - self._count :]
        given = [i for i, g in enumerate(of_ys) if g is not None]
        gs = [g for g in of_ys if g is not None]

        start, idle = None, set[int]()
        with self._maps.call.named():
            sources = ctx.block.xs()
            if sources is None:
                sources = fetch(ctx.block.sources)
                start = unwound(self._maps, (len(sources), self._count, len(rest)), wanted, given, idle)
            forward = partial(self._forward, exact=start is None and ctx.block.exact())
            outputs = derivative(forward, ghosts, sources, rest, gs, wanted, given, idle, level, ctx.around, start)
        if start is not None:
            with self._maps.call.named():
                ctx.block.give_back_and_tell([x.detach() for x in outputs[: self._count]])
            outputs = outputs[self._count :]
        found = {i: g for i, g in zip(wanted, outputs, strict=True) if i not in idle}  # as .grad stays None
        for i, g in enumerate(of_ghosts):
            if g is not None:
                found[i] = found[i] + g if i in found else g
        return [found.get(i) for i in range(len(needs))]

    def _forward(self, tensors: Tensors, exact: bool) -> list[torch.Tensor]:
        return self._maps.forward(tensors[: self._count], tensors[self._count :], exact=exact)


class Step(Op):
    """`(ghosts, sources, rest, gradients of ys) -> (xs, gradients)`; where xs is known, it is the source and no output.

    Args:
        slope: the gradients as a function of `(xs, rest, gradients of ys)`.
        start: xs and the gradients as a function of `(sources, rest, gradients of ys)`, or None where xs is known.
        counts: the numbers of xs and of sources.
        level: the level that does not differentiate.
        around: the vmaps below that were around the call. Inside of any other the random numbers are the same for all.
    """

    def __init__(
        self, slope: Map, start: Map | None, counts: tuple[int, int], level: int | None, around: Sequence[int]
    ) -> None:
        self._slope = slope
        self._start = start
        self._n_xs, self._n_sources = counts
        self._level = level
        self._around = around

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple((self._start or self._slope)(tensors[self._n_xs :]))

    def aligned(self, tensors: list[torch.Tensor], has: list[bool]) -> None:
        if self._start is None:
            for ghost, value in zip(range(self._n_xs), range(self._n_xs, 2 * self._n_xs), strict=True):
                if has[value] and not has[ghost]:
                    tensors[value], has[value] = tensors[value].select(0, 0), False

    def batched(self, has: Sequence[bool], randomness: str) -> Op:
        ghosts, given = has[: self._n_xs], has[self._n_xs :]
        tail = given[self._n_sources :]
        start = self._start
        own = levels()[-1][1] + 1 if levels() else 1
        randomness = randomness if own in self._around else "same"
        if start is not None:
            start = self._with_batches_of(ghosts, batched(start, given, randomness))
        slope = batched(self._slope, [*ghosts, *tail], randomness)
        return Step(slope, start, (self._n_xs, self._n_sources), self._level, self._around)

    def _with_batches_of(self, ghosts: Sequence[bool], start: Map) -> Map:
        """A map whose xs have a batch where their ghosts do."""

        def aligned(tensors: Tensors) -> list[torch.Tensor]:
            outputs = start(tensors)
            return unbatched(outputs[: self._n_xs], ghosts) + outputs[self._n_xs :]

        return aligned

    def spread(self, has: Sequence[bool], number: int) -> Sequence[bool]:
        computed = [] if self._start is None else list(has[: self._n_xs])
        return computed + [True] * (number - len(computed))

    def save(self, ctx: Any, tensors: Tensors, outputs: Tensors) -> None:
        around = levels()
        ctx.left_out = self._level is not None and bool(around) and around[-1][1] == self._level
        if ctx.left_out:
            return
        end = self._n_xs + self._n_sources
        xs = tensors[self._n_xs : end] if self._start is None else outputs[: self._n_xs]
        if self._start is not None:
            ctx.mark_non_differentiable(*xs, *(t for t in outputs if not differentiable(t)))
        ctx.save_for_backward(*tensors[: self._n_xs], *xs, *tensors[end:])

    def backward(self, ctx: Any, gradients: Gradients) -> Gradients:
        if ctx.left_out:
            raise ReplayError(NOT_TWICE)
        needs = ctx.needs_input_grad[1:]
        needs = [*needs[: self._n_xs], *needs[self._n_xs + self._n_sources :]]
        wanted = [i for i, need in enumerate(needs) if need]
        level, saved = _saved(ctx, wanted[0] if wanted[0] < self._n_xs else wanted[0] + self._n_xs)
        ghosts, xs, tail = saved[: self._n_xs], saved[self._n_xs : 2 * self._n_xs], saved[2 * self._n_xs :]
        of_slope = gradients if self._start is None else gradients[self._n_xs :]
        given = [i for i, g in enumerate(of_slope) if g is not None]
        gs = [g for g in of_slope if g is not None]
        slope = derivative(self._slope, ghosts, xs, tail, gs, wanted, given, set(), level, ctx.around)
        found = dict(zip(wanted, slope, strict=True))
        of_ghosts = [found.get(i) for i in range(self._n_xs)]
        return *of_ghosts, *[None] * self._n_sources, *(found.get(i) for i in range(self._n_xs, len(needs)))


def _saved(ctx: Any, needed: int) -> tuple[int | None, list[torch.Tensor]]:
    """The level of a node, None if its transform has ended, and its saved tensors without what has ended.

    A saved tensor that needs a gradient from the node is wrapped at the level of the node.
    """
    return level_of(ctx.saved_tensors[needed]), [alive(t) for t in ctx.saved_tensors]


def derivative(
    fn: Map,
    ghosts: Tensors,
    sources: Tensors,
    rest: Tensors,
    gs: Tensors,
    wanted: Sequence[int],
    given: Sequence[int],
    idle: set[int],
    level: int | None,
    around: Sequence[int],
    start: Map | None = None,
) -> Sequence[torch.Tensor]:
    """The gradients of a map, as one more node for the levels below that of the one that asks."""
    slope = pulled(fn, len(ghosts) + len(rest), wanted, given, idle)
    return Node.apply(Step(slope, start, (len(ghosts), len(sources)), level, around), *ghosts, *sources, *rest, *gs)


def noded(call: Call, xs: Tensors, rest: Tensors) -> tuple[Any, list[torch.Tensor]]:
    """The result of a call whose graph at every level of torch.func is one node, and its tensors."""
    call.look = look = looked(call, node=True)
    outputs = Node.apply(Forward(Maps(call), len(xs)), *xs, *rest)
    ys = list(outputs[: len(outputs) - len(xs)])
    if look is not None and look.harmless:
        learn(call, xs, rest, [], [], [[False]] * len(call.moments), [], node=True)
    return call.joined(ys), ys
