"""Which functions are followed in the operations that they are composed of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from invfunc._functorch import checkpointing
from invfunc.errors import samples_lost
from invfunc.operations.operation import known


def composition(func: Callable) -> Callable[..., Any] | None:
    """The operations of which a function is composed, where it is better followed in those."""
    name = getattr(func, "__name__", "")
    entry = known(name)
    if entry.composed is None or (entry.only_nn and getattr(func, "__module__", None) != "torch.nn.functional"):
        return None
    return entry.composed if entry.composed_if is None or entry.composed_if(name) else None


def step_by_step(name: str) -> bool:
    """Say that a function is followed in several steps, which cannot be done inside of a checkpoint."""
    if checkpointing():
        raise samples_lost(
            f"`{name}` inside of torch.utils.checkpoint (it is followed step by step, but the hooks on saved tensors "
            "have to meet the same operations again; it can be taken out of the checkpoint)",
            unknown=True,
        )
    return True
