"""Paths in the graph that autograd recorded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from invfunc._torch.functorch import gradient_edge


def node_of(x: torch.Tensor) -> Any:
    """The node whose gradient is that of x."""
    return gradient_edge(x).node if x.requires_grad else None


def nodes_of(tensors: Iterable[torch.Tensor], stops: Container[Any] = ()) -> list[Any]:
    """The nodes of the graphs of tensors, no further than the stops."""
    waiting = []
    for x in tensors:
        if x.requires_grad:
            waiting.append(gradient_edge(x).node)
    return nodes_below(waiting, stops)


def nodes_below(
    waiting: list[Any], stops: Container[Any] = (), known: Mapping[Any, Sequence[Any]] | None = None
) -> list[Any]:
    """These nodes and all below them; from known nodes it goes on with those stated alone."""
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        seen[node] = None
        if known is not None and node in known:
            waiting += known[node]
        elif node not in stops:
            for parent, _ in node.next_functions:
                waiting.append(parent)
    return [*seen]
