"""A chain within `torch.compile`: one operation of its graph, whose backward pass inverts block after block.

The compiler looks into the first part: it writes down what each block does and how it is inverted, with all that they
close over; the second part reads the blocks in that graph, and the third makes one node of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.eager import BROKEN, CHAIN, FOUND, higher_order, say, say_now, transformed
from invfunc._torch.functorch import TorchDispatchMode, after_backward, storage_of, undispatched
from invfunc._torch.values import differentiable, doubled
from invfunc.blocks.looks import tell
from invfunc.blocks.series import Known
from invfunc.blocks.surroundings import Casts, autocast_as, casts_now
from invfunc.errors import InverseError, ReplayError
from invfunc.invertible.checkpoint import Checkpointed, Step, opened
from invfunc.pairs.exact import Optimiser
from invfunc.pairs.found import Automatic
from invfunc.pairs.pair import behind
from invfunc.plans.recorder import Operator, draws, written


def fits(steps: Sequence[Step]) -> bool:
    """Tells whether blocks can be one operation."""
    return not (transformed() or any(g.pair.hidden or isinstance(g.pair, Optimiser) for g, _ in steps))


def within(steps: Sequence[Step], x: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call some blocks, one after the other."""
    blocks = [*opened(steps)]
    if not blocks:
        return x
    for leaf in tree.leaves((x, args, kwargs, [p for _, p in blocks])):
        if isinstance(leaf, float):  # one that changes is an input, which a graph within cannot make one
            abs(leaf)

    def all_blocks() -> Any:
        torch.ops.invfunc.block([], [], [], "", 0.0)  # torch cannot break out of a graph without an operation
        state = x
        for g, p in blocks:
            state = _one(g, state, behind(p, args, kwargs), kwargs)
        return state

    return higher_order.dynamo_bypassing_wrapper(as_one_node, all_blocks)


def _one(g: Checkpointed, state: Any, given: tuple, more: dict[str, Any]) -> Any:
    """The state behind a block, with what says how it is inverted written beside it where the compiler looks on."""
    if not torch.compiler.is_compiling():
        return g(state, *given, **more)
    pair = g.pair
    xs, form = tree.separate(state)

    def forth() -> Any:
        return tree.map_tensors(_another, pair.forward(*pair.shared, state, *given, **more))

    y = higher_order.wrap(forth)

    def back() -> list[torch.Tensor]:
        came = form.leaves(pair.inverse(*pair.shared, y, *given, **more))
        if came is None:
            raise InverseError("the inverse gives x in another form.")
        return [_another(came[i]) for i in form.places]

    found = isinstance(pair, Automatic)
    if found:
        say(FOUND)
    kept = [*range(len(xs))] if g.keep is True or found or not g.has_inverse else [*(g.keep or ())]
    came = higher_order.wrap(back) if len(kept) < len(xs) else []
    check, tolerance = (g.check, 0.0) if isinstance(g.check, str) else ("", float(g.check))
    torch.ops.invfunc.block(xs, came, kept, check, tolerance)
    return y


def _another(t: torch.Tensor) -> torch.Tensor:
    """The same tensor as another one: what is returned may not be what was given."""
    return torch.ops.aten.alias(t)


Env = dict[fx.Node, Any]
"""The values of nodes."""


@dataclass
class PartCall:
    """A function of tensors, as a call in the graph of the blocks."""

    body: Callable[..., Any]
    args: tuple
    results: list[tuple[int, fx.Node]] = field(default_factory=list)
    """Results that are used, by their places."""

    def run(self, env: Env) -> Env:
        """The values of its results."""
        found = self.body(*fx.map_arg(self.args, env.__getitem__))
        return {node: found[i] for i, node in self.results}

    def reads(self) -> set[fx.Node]:
        """The nodes that it is called with."""
        return {a for a in self.args if isinstance(a, fx.Node)}


@dataclass
class GraphBlock:
    """One of them, with the nodes of x, those that the inverse gives for it, and the places of those that are kept."""

    forth: PartCall
    back: PartCall | None
    x: list[fx.Node]
    came: list[fx.Node]
    kept: set[int]
    check: str
    tolerance: float
    looks: list[int] = field(default_factory=list)
    """The places of those tensors of x of which some entries are compared when they have come back."""

    def inverted(self, env: Env, kept: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """x, of y and what is kept."""
        found = {} if self.back is None else self.back.run(env)
        return [kept[i] if i in kept else found[self.came[i]] for i in range(len(self.x))]

    def looked_at(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Some entries of x."""
        return torch.cat([_seen(xs[i]) for i in self.looks])


class GraphBlocks:
    """Blocks of a graph, in their order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.inputs: list[fx.Node] = []
        self.blocks: list[GraphBlock] = []
        self.outputs: list[fx.Node] = []
        parts: list[PartCall] = []
        by_node: dict[fx.Node, PartCall] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(node)
            elif node.op == "output":
                fx.map_arg(node.args[0], self.outputs.append)
            elif node.target is higher_order.wrap:
                parts.append(PartCall(getattr(module, node.args[0].target), node.args[1:]))
                by_node[node] = parts[-1]
            elif node.op == "call_function" and node.args and node.args[0] in by_node:
                by_node[node.args[0]].results.append((node.args[1], node))
            elif node.target in (torch.ops.invfunc.block, torch.ops.invfunc.block.default):
                x, came, kept, check, tolerance = node.args
                if parts:  # and not the one that begins
                    forth, back = parts if len(parts) == 2 else (*parts, None)
                    self.blocks.append(GraphBlock(forth, back, [*x], [*came], {*kept}, check, tolerance))
                parts = []
            elif node.op != "get_attr":
                raise ReplayError(f"a chain within torch.compile: {node.format_node()} is between its blocks.")
        self.rest = self._read_beside_x()
        self.linked = [node for node in self.inputs if self._is_linked(node)]
        self.place = next(_PLACES)
        with undispatched():
            self.ends = self._ends()
            self.why = self._why_not()

    def _read_beside_x(self) -> list[fx.Node]:
        """The inputs that blocks read beside what the block before gives."""
        found = dict[fx.Node, None]()
        for block in self.blocks:
            y = {node for _, node in block.forth.results}
            found |= dict.fromkeys(block.forth.reads() - {*block.x})
            found |= dict.fromkeys(set() if block.back is None else block.back.reads() - y)
        return [node for node in self.inputs if node in found]

    def _is_linked(self, node: fx.Node) -> bool:
        """Tells whether a gradient is asked for of an input that the caller's graph or the node holds in any case."""
        x = node.meta["example_value"]
        return isinstance(x, torch.Tensor) and x.requires_grad and (x.is_leaf or node in self.rest)

    def _why_not(self) -> str:
        """The reason why blocks cannot be evaluated again: looked at without numbers."""
        env = {node: node.meta["example_value"] for node in self.inputs}
        given = tree.tensors([*env.values()])
        look, modes = OperationLook(given), [mode for x in given if (mode := getattr(x, "fake_mode", None))]
        for block in self.blocks:
            with modes[0] if modes else nullcontext(), look, torch.no_grad():
                after = {**env, **block.forth.run(env)}
                xs = [env[node] for node in block.x]
                came = block.inverted(after, {i: xs[i] for i in block.kept})
            _check_alike(xs, came)
            env = after
        return look.why

    def _ends(self) -> set[int]:
        """The blocks where inverses come to an end: the first one, and those behind one whose x is kept."""
        for block in self.blocks:
            if block.check != "off" and block.back is not None:
                given = [node.meta["example_value"] for node in block.x]
                there = (i for i, x in enumerate(given) if i not in block.kept and differentiable(x) and x.numel())
                block.looks = [*there]
        whole = [block.back is None for block in self.blocks]
        return {j for j, block in enumerate(self.blocks) if block.looks and (j == 0 or whole[j - 1])}

    def plainly(self, *given: Any) -> list[torch.Tensor]:
        """Call the blocks, one after the other."""
        env = dict(zip(self.inputs, given, strict=True))
        for block in self.blocks:
            env |= block.forth.run(env)
        return [env[node] for node in self.outputs]


_PLACES = count()


class OperationLook(TorchDispatchMode):
    """Looks at operations: whether one of them would do something else, or once too often, when it is done again."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.why = ""
        self._given = {storage_of(x) for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, Operator):
            if draws(func, args, kwargs):
                self.why = f"with random numbers ({func})"
            elif any(storage_of(x) in self._given for x in written(func, args, kwargs)):
                self.why = f"with a function that writes into what it is given or closes over ({func})"
        return func(*args, **kwargs)


def _check_alike(xs: Sequence[torch.Tensor], came: Sequence[torch.Tensor]) -> None:
    for x, other in zip(xs, came, strict=True):
        if (x.shape, x.dtype) != (other.shape, other.dtype):
            raise InverseError(
                "a block of a chain within torch.compile: of a tensor of x the inverse gives another shape or dtype, "
                f"{list(other.shape)} and {other.dtype} in place of {list(x.shape)} and {x.dtype}."
            )


def _seen(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(_SEEN, device=x.device) * (x.numel() - 1) // (_SEEN - 1)  # whose sizes need not be numbers
    entries = x.detach().reshape(-1)[at]
    return entries.abs() if x.is_complex() else entries


_SEEN = 64


torch.library.define("invfunc::block", "(Tensor[] x, Tensor[] came, int[] kept, str check, float tolerance) -> ()")


@torch.library.impl("invfunc::block", "CompositeExplicitAutograd")
def _block(x: Any, came: Any, kept: Any, check: str, tolerance: float) -> None:
    """Nothing: it only says where a block ends."""


@torch.library.register_fake("invfunc::block")
def _(x: Any, came: Any, kept: Any, check: str, tolerance: float) -> None: ...


def as_one_node(module: Callable[..., Any]) -> Callable[..., Any]:
    """Function that runs a graph of blocks: as one node, unless that would give something else, or it has a break."""
    if not isinstance(module, fx.GraphModule):
        say_now(BROKEN)
        return module
    blocks = GraphBlocks(module)
    if blocks.why:
        say_now(CHAIN.format(blocks.why))
        return blocks.plainly
    return lambda *given: _ChainNode.apply(blocks, *given)


class _ChainNode(torch.autograd.Function):
    """`(blocks, inputs) -> y`, of which y, what blocks read beside x, and what they keep of x is saved."""

    @staticmethod
    def forward(ctx: Any, blocks: GraphBlocks, *given: Any) -> tuple[torch.Tensor, ...]:
        env = dict(zip(blocks.inputs, given, strict=True))
        linked = [env[node] for node in blocks.linked]
        rest, kept, seen = {node: env[node] for node in blocks.rest}, [], []
        for j, block in enumerate(blocks.blocks):
            xs = [env[node] for node in block.x]
            kept += [xs[i] for i in sorted(block.kept)]
            seen += [block.looked_at(xs)] if j in blocks.ends else []
            env = {**rest, **block.forth.run({**rest, **env})}
        ys = [env[node] for node in blocks.outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in ys if not differentiable(y)))
        ctx.save_for_backward(*ys, *tree.tensors([*rest.values()]), *linked, *kept, *seen)
        ctx.blocks, ctx.casts = blocks, casts_now()
        ctx.rest = {node: None if isinstance(x, torch.Tensor) else x for node, x in rest.items()}
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ReplayError("a chain within torch.compile has first derivatives only. Differentiate it outside.")
        blocks, saved = ctx.blocks, iter(ctx.saved_tensors)
        needs = dict(zip(blocks.inputs, ctx.needs_input_grad[1:], strict=True))
        ys = {node: next(saved) for node in blocks.outputs}
        rest = {node: _leaf(next(saved), needs[node]) if x is None else x for node, x in ctx.rest.items()}
        linked = [next(saved) for _ in blocks.linked]
        kept = [next(saved) for block in blocks.blocks for _ in block.kept]
        way = _Back(blocks, ctx.casts, rest, kept, [*saved])
        found = way.through(ys, dict(zip(blocks.outputs, slopes, strict=True)))
        for node in [node for node in found if linked and needs[node]][:1]:
            found[node] = torch.ops.invfunc.linked(found[node], linked)
        return None, *(found.get(node) if need else None for node, need in needs.items())


@dataclass
class _Back:
    """The way back through blocks, with what is kept of each, and what is seen where inverses come to an end."""

    blocks: GraphBlocks
    casts: Casts
    rest: Env
    kept: list[torch.Tensor]
    seen: list[torch.Tensor]
    found: Env = field(default_factory=dict)
    """The gradients of what is read beside x."""

    def through(self, ys: Env, slopes: Env) -> Env:
        """The gradients of all inputs."""
        finite = torch.stack([y.sum().isfinite() for y in ys.values() if differentiable(y)]).all()
        for j in reversed(range(len(self.blocks.blocks))):
            block = self.blocks.blocks[j]
            kept = {i: self.kept.pop() for i in sorted(block.kept, reverse=True)}
            with torch.no_grad(), autocast_as(self.casts):
                xs = block.inverted({**self.rest, **ys}, kept)
            slopes = self._pulled_back(block, xs, slopes)
            if j in self.blocks.ends:
                self._compare(block, xs, slopes, finite)
            ys = dict(zip(block.x, xs, strict=True))
        for node, slope in slopes.items():
            _add(self.found, node, slope)
        return self.found

    def _pulled_back(self, block: GraphBlock, xs: Sequence[torch.Tensor], slopes: Env) -> Env:
        """The gradients of x, from those of y; those of what is read beside it are added to what is found."""
        x = {node: _leaf(value, True) for node, value in zip(block.x, xs, strict=True)}
        with torch.enable_grad(), autocast_as(self.casts):  # derivatives are not taken under autocast
            y = block.forth.run({**self.rest, **x})
        back = [(y[n], g) for n, g in slopes.items() if g is not None and y[n].requires_grad]
        given = {n: x[n] if n in x else self.rest[n] for n in block.forth.reads()}
        asked = {n: t for n, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad}
        if not back or not asked:
            return {}
        outs, gs = zip(*back, strict=True)
        came = dict(zip(asked, torch.autograd.grad(outs, [*asked.values()], gs, allow_unused=True), strict=True))
        for node in asked.keys() - x.keys():
            _add(self.found, node, came[node])
        return {node: came.get(node) for node in x}

    def _compare(self, block: GraphBlock, xs: Sequence[torch.Tensor], slopes: Env, finite: torch.Tensor) -> None:
        """Have it told if x does not come back, by an operation that the gradients go through."""
        then, now = self.seen.pop(), block.looked_at(xs)
        error = (now - then).abs().max() / then.abs().max().clamp(min=torch.finfo(then.dtype).tiny)
        error = doubled(torch.where(finite, error, 0))
        given = block.check, block.tolerance, torch.finfo(then.dtype).eps, self.blocks.place
        for gradients in (self.found, slopes):
            for node, slope in gradients.items():
                if slope is not None:
                    gradients[node] = torch.ops.invfunc.came_back(error, slope, *given)
                    break


torch.library.define("invfunc::linked", "(Tensor slope, Tensor[] given) -> Tensor")


@torch.library.register_fake("invfunc::linked")
def _(slope: torch.Tensor, given: Any) -> torch.Tensor:
    return torch.empty_like(slope)


@torch.library.impl("invfunc::linked", "CompositeExplicitAutograd")
def _linked(slope: torch.Tensor, given: Any) -> torch.Tensor:
    """A gradient: of what a backward pass reads, torch refuses second derivatives, and it takes others for zero."""
    return slope.clone()


def _leaf(x: torch.Tensor, needed: bool) -> torch.Tensor:
    return x.detach().requires_grad_(needed and differentiable(x))


def _add(found: Env, node: fx.Node, slope: torch.Tensor | None) -> None:
    if slope is not None:
        found[node] = found[node] + slope if node in found else slope


torch.library.define(
    "invfunc::came_back",
    "(Tensor error, Tensor slope, str check, float tolerance, float precision, int place) -> Tensor",
)


@torch.library.register_fake("invfunc::came_back")
def _(error: Any, slope: torch.Tensor, check: str, tolerance: float, precision: float, place: int) -> torch.Tensor:
    return torch.empty_like(slope)


@torch.library.impl("invfunc::came_back", "CompositeExplicitAutograd")
def _came_back(
    error: torch.Tensor, slope: torch.Tensor, check: str, tolerance: float, precision: float, place: int
) -> torch.Tensor:
    """A gradient, once it is told if x has not come back."""
    block = _InGraph(tolerance or check or "error", _KNOWN.setdefault(place, Known()))

    def judge() -> None:
        tell(block, float(error), precision, "x", torch.get_default_dtype())

    if error.device.type == "cpu":
        judge()
    else:
        after_backward(judge)
    return slope.clone()


@dataclass
class _InGraph:
    """The blocks of a chain, as those that tell of an inverse."""

    check: Any
    known: Known

    def __repr__(self) -> str:
        return "a chain within torch.compile"


_KNOWN: dict[int, Known] = {}
"""Facts about the chains in graphs, by their places."""
