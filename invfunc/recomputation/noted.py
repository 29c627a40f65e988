"""What blocks note on the nodes of autograd: which slot a tensor has that one of them gave out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from invfunc._torch.functorch import function_of
from invfunc._torch.sharded import gathers

_KEY = "invfunc.slots"


def note(of_node: dict, number: int, slot: Any, block: Any) -> None:
    """Note the slot of an output of a node, and the block that gives it out."""
    of_node.setdefault(_KEY, {})[number] = weakref.ref(slot), weakref.ref(block), slot.state


def slot_of(tensor: torch.Tensor) -> Any:
    """The slot of a tensor that a block gave out, found from the node of autograd that it comes from."""
    slot = _given_out(tensor)[0]
    return slot if slot is not None and slot.is_of(tensor) else None


def block_of(tensor: torch.Tensor) -> Any:
    """The block that gave a tensor out. Those of its tensors that have no node are found among its slots."""
    return _given_out(tensor)[1]


def state_of(tensor: torch.Tensor) -> Any:
    """What is noted of a tensor that a block gave out whose slot is gone, as autograd saves nothing that needs it."""
    node: Any = tensor.grad_fn
    found = None if node is None else node.metadata.get(_KEY, {}).get(tensor.output_nr)
    return found[2] if found is not None and found[0]() is None else None


def found_otherwise(tensors: Sequence[torch.Tensor], slots: Sequence[Any]) -> list[Any]:
    """The slots of tensors, of which some are found: others were handed on by functions as another object, and those
    without a node are among what the same blocks gave out.

    Whatever these functions are, and do to gradients: their output is what a block gave out if it is the same memory,
    laid out alike and not written since.
    """
    behind = [_noted(*_way_back(t)[-1]) for t in tensors]
    handed = [s if s is not None and s.is_in_memory_of(t) else None for t, (s, _) in zip(tensors, behind, strict=True)]
    beside = [slot for _, block in behind if block is not None for slot in block._ys]
    return [
        slot or other or next((s for s in beside if s.is_slot_of(t)), None)
        for t, slot, other in zip(tensors, slots, handed, strict=True)
    ]


def gathering(tensor: torch.Tensor) -> list[Any]:
    """What `fully_shard` gathers parameters with, in modules to which a tensor was handed on."""
    return [found for node, _ in _way_back(tensor) if (found := gathers(node)) is not None]


def _way_back(tensor: torch.Tensor) -> list[tuple[Any, int]]:
    """The node of a tensor and which of its outputs it is, and those before it, as far as functions only may have
    handed it on; a block gave out the last one, or none."""
    way: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while _noted(*way[-1])[0] is None and function_of(way[-1][0]) is not None:
        node, number = way[-1]
        if number >= len(node.next_functions):
            break
        way.append(node.next_functions[number])
    return way


def _given_out(tensor: torch.Tensor) -> tuple[Any, Any]:
    return _noted(tensor.grad_fn, tensor.output_nr)


def _noted(node: Any, number: int) -> tuple[Any, Any]:
    found = None if node is None else node.metadata.get(_KEY, {}).get(number)
    return (None, None) if found is None else (found[0](), found[1]())


def metadata_of(tensor: torch.Tensor) -> dict | None:
    """What may be noted on the node of autograd that a tensor comes from."""
    node: Any = tensor.grad_fn
    return None if node is None else node.metadata
