"""What blocks note on the nodes of autograd: which slot a tensor has that one of them gave out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

_KEY = "invfunc.slots"


def note(of_node: dict, number: int, slot: Any, block: Any) -> None:
    """Note the slot of an output of a node, and the block that gives it out."""
    of_node.setdefault(_KEY, {})[number] = weakref.ref(slot), weakref.ref(block)


def slot_of(tensor: torch.Tensor) -> Any:
    """The slot of a tensor that a block gave out, found from the node of autograd that it comes from."""
    slot = _given_out(tensor)[0]
    return slot if slot is not None and slot.is_of(tensor) else None


def block_of(tensor: torch.Tensor) -> Any:
    """The block that gave a tensor out. Those of its tensors that have no node are found among its slots."""
    return _given_out(tensor)[1]


def found_beside(tensors: Sequence[torch.Tensor], slots: Sequence[Any]) -> list[Any]:
    """The slots of tensors, of which some are found: those without a node are among what the same blocks gave out."""
    beside = [slot for t in tensors if (block := block_of(t)) is not None for slot in block._ys]
    return [slot or next((s for s in beside if s.is_slot_of(t)), None) for t, slot in zip(tensors, slots, strict=True)]


def _given_out(tensor: torch.Tensor) -> tuple[Any, Any]:
    metadata = metadata_of(tensor)
    found = None if metadata is None else metadata.get(_KEY, {}).get(tensor.output_nr)
    return (None, None) if found is None else (found[0](), found[1]())


def metadata_of(tensor: torch.Tensor) -> dict | None:
    """What may be noted on the node of autograd that a tensor comes from."""
    node: Any = tensor.grad_fn
    return None if node is None else node.metadata
