"""The result of a block in a call that need not be watched."""

from __future__ import annotations

from typing import Any

from invfunc import tree
from invfunc._torch.functorch import transforming
from invfunc.recomputation.report import Known, Report, way
from invfunc.recomputation.straight_hooks import straight_hooked
from invfunc.recomputation.straight_nodes import straight_noded


def unwatched(block: Any, known: Known, x: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any] | None:
    """The result of a block in such a call, in a tuple; None for all others.

    Args:
        block: a `Checkpointed`, which has a pair and options.
        known: what is known of it.
        x, args, kwargs: what it is given.
    """
    if known.calls <= _WATCHED:
        return None
    leaves, structure = tree.flatten((x, args, kwargs))
    node, straight = transforming(), known.straight
    found = straight.find(block.pair, (*block.options, node), leaves, structure)
    if found is None:
        return None
    report = Report(block, way(block.check), None, known)
    if node:
        return straight_noded(block.pair, found, report, leaves)
    return straight_hooked(block.pair, found, report, leaves, (x, args, kwargs))


_WATCHED = 4
"""How many calls are watched at least: as many as compare the values of what is saved."""
