"""What a call depends on beside the numbers of its arguments: calls with the same key may share a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import storage_of, under, unwatched
from invfunc.budget.peak import settings

_PLAIN = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...)}


@dataclass(frozen=True)
class Call:
    """The arguments of a call: its tensors, what else there is that has to be watched, and its key."""

    tensors: list[torch.Tensor]
    watched: list[Any]
    key: Hashable
    why: str = ""
    """Why no plan can be made for such arguments."""


def call_of(args: tuple, kwargs: dict[str, Any]) -> Call:
    """Sort the arguments of a call."""
    leaves, structure = tree.flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    others = [x for x in leaves if not isinstance(x, torch.Tensor)]
    watched = [x for x in others if type(x) not in _PLAIN and type(x) not in (float, complex)]
    if why := next(filter(None, map(no_plan, tensors)), "") or kept(structure):
        return Call(tensors, watched, None, why)
    form = tree.hashable(structure)
    around = settings(), torch.get_default_device() if under(TorchFunctionMode) else None  # it is a mode
    key = form, tuple(map(signature, tensors)), shared(tensors), tuple(map(_token, others)), around
    return Call(tensors, watched, key)


Described = tuple[Hashable, tuple, tuple]


def described(args: tuple, kwargs: dict[str, Any]) -> Described:
    """The arguments of a call without numbers: their tree, what is known of its tensors, and its other leaves."""
    leaves, structure = tree.flatten((args, kwargs))
    known = [(x.dtype, x.device, x.shape, x.stride()) for x in leaves if isinstance(x, torch.Tensor)]
    others = [_token(x) for x in leaves if not isinstance(x, torch.Tensor)]
    return tree.hashable(structure), tuple(known), tuple(others)


def matches(key: Any, given: Described) -> bool:
    """Whether a key is that of such arguments, none of which shares memory with another, apart from gradients."""
    form, signatures, sharing, others, (around, _) = key
    known = tuple((dtype, device, shape, steps) for _, dtype, device, shape, steps, *_ in signatures)
    return sharing is None and (form, known, others) == given and around[2:6] == settings()[2:6]


def no_plan(x: torch.Tensor) -> str:
    """Why a tensor cannot be an input of a plan; empty if it can."""
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return f"an argument is a {type(x).__name__}, not a plain tensor"
    if x.__dict__ and not all(name.startswith("_dynamo") for name in x.__dict__):
        return "an argument is a tensor with attributes of its own"
    return "" if x.layout is torch.strided and not x.is_quantized else "an argument is not a dense tensor"


def kept(structure: Any) -> str:
    """Why a tree cannot be kept; empty if it can."""
    return "a tree has mappings or dataclasses that torch does not know as nodes" if tree.templates(structure) else ""


def signature(x: torch.Tensor) -> Hashable:
    """What operations know of a tensor without its numbers."""
    own = type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad
    return *own, x.is_inference(), x.is_conj(), x.is_neg()


def content(x: torch.Tensor) -> Hashable:
    """What a small tensor on the CPU is, with its numbers; None of another one."""
    if x.numel() > thresholds.SAME_NUMBERS or x.device.type != "cpu" or x.is_conj() or x.is_neg():
        return None
    with unwatched():
        return signature(x), repr(x.tolist())


def shared(tensors: list[torch.Tensor]) -> Hashable:
    """Which tensors are the same, or in the same memory, and where there."""
    places = [*map(storage_of, tensors)]
    if len(set(places)) == len(places):
        return None
    same, count = [*map(id, tensors)], Counter(places)
    return tuple(
        (places.index(p), same.index(id(x)), x.storage_offset()) if count[p] > 1 else None
        for p, x in zip(places, tensors, strict=True)
    )


def _token(x: Any) -> Hashable:
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    return (kind, repr(x)) if kind in (float, complex) else (kind, id(x))
