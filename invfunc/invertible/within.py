"""A chain within `torch.compile`: one operation of its graph, whose backward pass inverts block after block.

What is here is looked into by the compiler: it writes down what each block does and how it is inverted, with all that
they close over, and `in_a_graph` makes one node of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.eager import FOUND, part, say, transformed, whole
from invfunc.errors import InverseError
from invfunc.invertible.checkpoint import Checkpointed, Step, opened
from invfunc.invertible.in_a_graph import as_one_node
from invfunc.pairs.automatic.found import Automatic
from invfunc.pairs.pair import behind
from invfunc.pairs.training import Optimiser


def fits(steps: Sequence[Step]) -> bool:
    """Whether blocks can be one operation."""
    return not (transformed() or any(g.pair.hidden or isinstance(g.pair, Optimiser) for g, _ in steps))


def within(steps: Sequence[Step], x: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What some blocks give, one after the other."""
    blocks = [*opened(steps)]
    if not blocks:
        return x
    for leaf in tree.leaves((x, args, kwargs, [p for _, p in blocks])):
        if isinstance(leaf, float):  # one that changes is an input, which a graph within cannot make one
            abs(leaf)

    def all_blocks() -> Any:
        torch.ops.invfunc.block([], [], [], "", 0.0)  # torch cannot break out of a graph without an operation
        state, one = x, _one if torch.compiler.is_compiling() else _called
        for g, p in blocks:
            state = one(g, state, behind(p, args, kwargs), kwargs)
        return state

    return whole(as_one_node, all_blocks)


def _called(g: Checkpointed, state: Any, given: tuple, more: dict[str, Any]) -> Any:
    """The state behind a block, that is not looked into."""
    return g(state, *given, **more)


def _one(g: Checkpointed, state: Any, given: tuple, more: dict[str, Any]) -> Any:
    """The state behind a block, with what says how it is inverted written beside it."""
    pair = g.pair
    xs, form = tree.separate(state)

    def forth() -> Any:
        return tree.map_tensors(_another, pair.forward(*pair.shared, state, *given, **more))

    y = part(forth)

    def back() -> list[torch.Tensor]:
        came = form.leaves(pair.inverse(*pair.shared, y, *given, **more))
        if came is None:
            raise InverseError("the inverse gives x in another form.")
        return [_another(came[i]) for i in form.places]

    found = isinstance(pair, Automatic)
    if found:
        say(FOUND)
    kept = [*range(len(xs))] if g.keep is True or found or not g.has_inverse else [*(g.keep or ())]
    came = part(back) if len(kept) < len(xs) else []
    check, tolerance = (g.check, 0.0) if isinstance(g.check, str) else ("", float(g.check))
    torch.ops.invfunc.block(xs, came, kept, check, tolerance)
    return y


def _another(t: torch.Tensor) -> torch.Tensor:
    """The same tensor as another one: what is returned may not be what was given."""
    return torch.ops.aten.alias(t)
