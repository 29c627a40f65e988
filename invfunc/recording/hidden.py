"""What f does where no call of torch tells of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.checkpoint import CheckpointFunction

from invfunc.errors import SampleAxisError, samples_lost
from invfunc.recording.graph import functions_below, node_of, reaches
from invfunc.recording.tags import Derived, Sampled


def unseen(x: torch.Tensor, tag: Derived | Sampled | None, entered: list[torch.Tensor]) -> bool:
    """Whether autograd knows that x depends on the parameters, though no call said so."""
    if not (x.requires_grad and torch.is_grad_enabled()) or isinstance(tag, Derived) or (tag and tag.active):
        return False
    return reaches(x, {node_of(p) for p in entered}, {})


def hidden(x: torch.Tensor, calls: Iterable[str]) -> SampleAxisError:
    """The error that names what hides that a tensor depends on parameters."""
    found = functions_below(x)
    if CheckpointFunction in found:
        return reentrant()
    if found:
        names = ", ".join(f"`{kind.__name__}`" for kind in found)
        return samples_lost(f"{names} (a custom autograd.Function cannot be seen)", unknown=True)
    if not {"grad", "backward"}.isdisjoint(calls):
        return samples_lost("`torch.autograd.grad` in f (its pass back cannot be seen)", unknown=True)
    return samples_lost("an operation that cannot be seen (torch.jit or torch.func in f, a write to a view?)", True)


def reentrant() -> SampleAxisError:
    return SampleAxisError(
        "`torch.utils.checkpoint` with use_reentrant=True cannot be differentiated in chosen tensors, which is what "
        "statistics are made of; pass use_reentrant=False."
    )
