"""The blocks of a chain, as torch.compile has written them down in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from invfunc._torch.eager import part
from invfunc._torch.functorch import FakeTensor, TorchDispatchMode, storage_of, undispatched
from invfunc._torch.values import differentiable
from invfunc.errors import InverseError, ReplayError
from invfunc.plans.operators import Operator, draws, written

Env = dict[fx.Node, Any]
"""The values of nodes."""


@dataclass
class Part:
    """A function of tensors, as a call in the graph of the blocks."""

    body: Callable[..., Any]
    args: tuple
    results: list[tuple[int, fx.Node]] = field(default_factory=list)
    """Those that are used, by their places."""

    def run(self, env: Env) -> Env:
        """The values of its results."""
        found = self.body(*fx.map_arg(self.args, env.__getitem__))
        return {node: found[i] for i, node in self.results}

    def reads(self) -> set[fx.Node]:
        """The nodes that it is called with."""
        return {a for a in self.args if isinstance(a, fx.Node)}


@dataclass
class Block:
    """One of them, with the nodes of x, those that the inverse gives for it, and the places of those that are kept."""

    forth: Part
    back: Part | None
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


class Blocks:
    """Those of a graph, in their order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.inputs: list[fx.Node] = []
        self.blocks: list[Block] = []
        self.outputs: list[fx.Node] = []
        parts: list[Part] = []
        by_node: dict[fx.Node, Part] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.inputs.append(node)
            elif node.op == "output":
                fx.map_arg(node.args[0], self.outputs.append)
            elif node.target is part:
                parts.append(Part(getattr(module, node.args[0].target), node.args[1:]))
                by_node[node] = parts[-1]
            elif node.op == "call_function" and node.args and node.args[0] in by_node:
                by_node[node.args[0]].results.append((node.args[1], node))
            elif node.target in (torch.ops.invfunc.block, torch.ops.invfunc.block.default):
                x, came, kept, check, tolerance = node.args
                if parts:  # and not the one that begins
                    forth, back = parts if len(parts) == 2 else (*parts, None)
                    self.blocks.append(Block(forth, back, [*x], [*came], {*kept}, check, tolerance))
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
        """Whether a gradient is asked for of an input that the caller's graph or the node holds in any case."""
        x = node.meta["example_value"]
        return isinstance(x, torch.Tensor) and x.requires_grad and (x.is_leaf or node in self.rest)

    def _why_not(self) -> str:
        """Why blocks cannot be evaluated again: looked at without numbers."""
        env = {node: node.meta["example_value"] for node in self.inputs}
        given = tensors_of(env.values())
        look, modes = Look(given), [x.fake_mode for x in given if isinstance(x, FakeTensor)]
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
        """What the blocks give, one after the other."""
        env = dict(zip(self.inputs, given, strict=True))
        for block in self.blocks:
            env |= block.forth.run(env)
        return [env[node] for node in self.outputs]


_PLACES = count()


class Look(TorchDispatchMode):
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


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among some values."""
    return [x for x in values if isinstance(x, torch.Tensor)]


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
