"""Paths in the graph that autograd recorded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from invfunc._torch.functorch import function_of
from invfunc.errors import ArgumentError
from invfunc.operations.recurrences import OWN


def node_of(x: torch.Tensor) -> Any:
    """The node whose gradient is that of x; None inside a torch.func transform that f itself uses."""
    if x.grad_fn is not None:
        return x.grad_fn
    view = x.view_as(x)  # of a leaf
    return view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None


def reaches(x: torch.Tensor, targets: Container[Any], known: Mapping[Any, Iterable[Any]]) -> bool:
    """Whether the graph of x comes to one of the target nodes; from known nodes it goes on with those stated alone."""
    waiting, seen = [node_of(x)] if x.requires_grad else [], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in targets:
            return True
        seen.add(node)
        below = known.get(node)
        waiting.extend((parent for parent, _ in node.next_functions) if below is None else below)
    return False


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """All nodes of the graphs of some tensors."""
    waiting, seen = [node_of(x) for x in tensors if x.requires_grad], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
        yield node


def leaves_below(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves from which some tensors are computed."""
    return [node.variable for node in nodes_of(tensors) if hasattr(node, "variable")]


def functions_below(x: torch.Tensor) -> list[type]:
    """The autograd.Functions of the user's, and of torch.utils.checkpoint, through which a tensor is computed."""
    found = dict.fromkeys(function_of(node) for node in nodes_of([x]))
    return [kind for kind in found if kind is not None and kind not in OWN]


def lowest(starts: list[torch.Tensor], nodes: set[Any]) -> set[Any]:
    """Those of the nodes that are reached from the starts and have no other of them below."""
    below: dict[Any, bool] = {}
    waiting: list[tuple[Any, list[Any] | None]] = [(node_of(x), None) for x in starts]
    while waiting:
        node, parents = waiting.pop()
        if parents is not None:  # which were all seen since
            below[node] = any([below[parent] or parent in nodes for parent in parents])
        elif node not in below:
            below[node], parents = False, [parent for parent, _ in node.next_functions if parent is not None]
            waiting.append((node, parents))
            waiting += [(parent, None) for parent in parents]
    return {node for node in nodes if node in below and not below[node]}


def pulled_back(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], cotangents: Sequence[torch.Tensor], **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, which gives None for what has no influence; it says what has no further derivative."""
    try:
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    except RuntimeError as error:
        if all(type(node).__name__ != "NotImplemented" for node in nodes_of(outputs)):
            raise
        raise ArgumentError(
            f"torch cannot differentiate what f or the loss calls once more ({error}). Write it in other operations."
        ) from error
