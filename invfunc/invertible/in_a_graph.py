"""The node of a chain within a graph of torch.compile: its backward pass inverts block after block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from invfunc._torch.eager import BROKEN, CHAIN, say_now
from invfunc._torch.functorch import after_backward
from invfunc._torch.precision import doubled
from invfunc._torch.values import differentiable
from invfunc.blocks.looks import tell
from invfunc.blocks.series import Known
from invfunc.errors import ReplayError
from invfunc.invertible.blocks_in_a_graph import Block, Blocks, Env, tensors_of


def as_one_node(module: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a graph of blocks: as one node, unless that would give something else, or a break is within it."""
    if not isinstance(module, fx.GraphModule):
        say_now(BROKEN)
        return module
    blocks = Blocks(module)
    if blocks.why:
        say_now(CHAIN.format(blocks.why))
        return blocks.plainly
    return lambda *given: _Node.apply(blocks, *given)


class _Autocast(ExitStack):
    """Autocast as it was."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("cpu", "cuda")
        self._was = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]

    def __enter__(self) -> _Autocast:
        super().__enter__()
        for kind, enabled, dtype in self._was:
            if enabled != torch.is_autocast_enabled(kind):
                self.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        return self


class _Node(torch.autograd.Function):
    """`(blocks, inputs) -> y`, of which y, what blocks read beside x, and what they keep of x is saved."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, *given: Any) -> tuple[torch.Tensor, ...]:
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
        ctx.save_for_backward(*ys, *tensors_of(rest.values()), *linked, *kept, *seen)
        ctx.blocks, ctx.autocast = blocks, _Autocast()
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
        way = _Back(blocks, ctx.autocast, rest, kept, [*saved])
        found = way.through(ys, dict(zip(blocks.outputs, slopes, strict=True)))
        for node in [node for node in found if linked and needs[node]][:1]:
            found[node] = torch.ops.invfunc.linked(found[node], linked)
        return None, *(found.get(node) if need else None for node, need in needs.items())


@dataclass
class _Back:
    """The way back through blocks, with what is kept of each, and what is seen where inverses come to an end."""

    blocks: Blocks
    autocast: _Autocast
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
            with torch.no_grad(), self.autocast:
                xs = block.inverted({**self.rest, **ys}, kept)
            slopes = self._pulled_back(block, xs, slopes)
            if j in self.blocks.ends:
                self._compare(block, xs, slopes, finite)
            ys = dict(zip(block.x, xs, strict=True))
        for node, slope in slopes.items():
            _add(self.found, node, slope)
        return self.found

    def _pulled_back(self, block: Block, xs: Sequence[torch.Tensor], slopes: Env) -> Env:
        """The gradients of x, from those of y; those of what is read beside it are added to what is found."""
        x = {node: _leaf(value, True) for node, value in zip(block.x, xs, strict=True)}
        with torch.enable_grad(), self.autocast:  # derivatives are not taken under autocast
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

    def _compare(self, block: Block, xs: Sequence[torch.Tensor], slopes: Env, finite: torch.Tensor) -> None:
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
"""What is known of the chains in graphs, by their places."""
