"""Tensors and modules that torch divides among processes.

It is known by names, as to import DTensor or fully_shard takes a second, and some of what is known is private to torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from invfunc._torch.functorch import function_of

_FSDP = "torch.distributed.fsdp"
_STATE = "__composable_api_state_key"


def sharded(x: Any) -> bool:
    """Tells whether it is a DTensor, of which this process may have a part only."""
    return type(x) is not torch.Tensor and type(x) is not nn.Parameter and hasattr(x, "full_tensor")


def gathered(x: Any) -> torch.Tensor:
    """A DTensor as a whole, which all processes ask for at once."""
    return x.detach().full_tensor().contiguous()


def laid_out(x: torch.Tensor, like: Any, lead: int = 0) -> Any:
    """The DTensor of a whole tensor, laid out as another one is, with `lead` axes in front."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = like.device_mesh, [_behind(p, lead) for p in like.placements]
    own = distribute_tensor(x.contiguous(), mesh, placements, src_data_rank=None)
    local = own.to_local().clone()  # which does not keep the whole alive
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())


def _behind(placement: Any, lead: int) -> Any:
    """A placement whose dimension comes behind some more."""
    if not (lead and hasattr(placement, "dim")):
        return placement
    options = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + lead, **options)


@lru_cache(maxsize=1024)
def divided(kind: type) -> bool:
    """Tells whether it is the type of modules to which `fully_shard` was applied, or of what it keeps of them."""
    return any(base.__module__.startswith(_FSDP) for base in kind.__mro__)


def undivided(module: nn.Module, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module, without what `fully_shard` has put there."""
    if not divided(type(module)):
        return dict(attributes)
    found = {name: _unwrapped(x) for name, x in attributes.items() if not name.startswith(_STATE)}
    for part in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = attributes[part].items()
        found[part] = OrderedDict((key, hook) for key, hook in hooks if not _of_state(hook))
    return found


def why_not_whole(module: nn.Module) -> str:
    """The reason why f cannot compute what a module does to which `fully_shard` was applied; empty if it can."""
    kind = type(module)
    for state in _states(module) if divided(kind) else ():
        if not all(group.is_sharded for group in state._fsdp_param_groups):
            return (
                f"the parameters of {kind.__name__} are gathered, as a forward pass may leave them behind. Call its "
                "`reshard()` first"
            )
        dtypes = [dtype for dtype in (state._mp_policy.param_dtype, state._mp_policy.output_dtype) if dtype is not None]
        if dtypes:
            return (
                f"fully_shard has {kind.__name__} compute in {dtypes[0]}, by its mp_policy, but f computes in the "
                "dtype of its params. Leave mp_policy out; f may be called within torch.autocast"
            )
    return ""


def gathers(node: Any) -> Any:
    """The function that gathers the parameters of a module, of a node of autograd that `fully_shard` has put before
    its call.
    """
    made = function_of(node)
    return getattr(node, "param_group", None) if made is not None and divided(made) else None


@contextmanager
def gathered_again(groups: Sequence[Any]) -> Iterator[None]:
    """A context in which parameters are whole that `fully_shard` gathers, where their memory was freed behind a call,
    and is not back as no backward pass comes through it."""
    missing = [group for group in groups if not group.is_unsharded]
    for group in missing:
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group in missing:
            group.reshard()


def _states(module: nn.Module) -> list[Any]:
    kept = [held for name, held in vars(module).items() if name.startswith(_STATE)]
    return [state for held in kept for state in held.values() if divided(type(state))]


def _of_state(hook: Any) -> bool:
    """Tells whether a hook is one of `fully_shard`, also of several modules together."""
    while hook is not None:
        if divided(type(getattr(hook, "__self__", None))):
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _unwrapped(x: Any) -> Any:
    """A method as it was before `register_fsdp_forward_method`."""
    made_by = getattr(getattr(x, "__func__", None), "__globals__", {}).get("__name__", "")
    return x.__wrapped__ if made_by.startswith(_FSDP) and hasattr(x, "__wrapped__") else x
