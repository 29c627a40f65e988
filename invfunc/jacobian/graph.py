"""Paths in the graph that autograd recorded."""

from __future__ import annotations

from typing import Any

import torch


def node_of(x: torch.Tensor) -> Any:
    """The node whose gradient is that of x; None inside a torch.func transform that f itself uses."""
    if x.grad_fn is not None:
        return x.grad_fn
    view = x.view_as(x)  # of a leaf
    return view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None


def reaches(x: torch.Tensor, targets: set[Any], stops: set[Any]) -> bool:
    """Whether the graph of x comes to one of the target nodes on a way around the stops."""
    waiting, seen = [node_of(x)] if x.requires_grad else [], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in stops:
            continue
        if node in targets:
            return True
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
    return False
