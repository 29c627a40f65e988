"""Which functions are followed in the operations that they are composed of."""

from __future__ import annotations

from invfunc._torch.functorch import checkpointing
from invfunc.errors import samples_lost


def step_by_step(name: str) -> bool:
    """Say that a function is followed in several steps, which cannot be done inside of a checkpoint."""
    if checkpointing():
        raise samples_lost(
            f"`{name}` inside of torch.utils.checkpoint (it is followed step by step, but the hooks on saved tensors "
            "have to meet the same operations again; it can be taken out of the checkpoint)",
            unknown=True,
        )
    return True
