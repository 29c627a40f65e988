"""Tensors whose numbers are brought where an operation reads them, and gone behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage


def absent(like: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same shape, dtype and device, that has no memory: to read it is an error of torch."""
    memory = torch._C._construct_storage_from_data_pointer(0, like.device, like.numel() * like.itemsize)
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=like.dtype, device=like.device).set_(memory)
        return flat.view(like.shape)


class Reading(TorchDispatchMode):
    """Has operations, of a forward or a backward pass, read `absent` tensors: `bring` gives the one at a place.

    It `watches` also where other modes are switched off.
    """

    supports_higher_order_operators = watches = True

    def __init__(self, tensors: Sequence[torch.Tensor], bring: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._places = {storage(x)._cdata: place for place, x in enumerate(tensors)}
        self._bring = bring

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _reads(func):
            return func(*args, **kwargs)
        brought: dict[int, torch.Tensor] = {}

        def present(x: torch.Tensor) -> torch.Tensor:
            place = self._places.get(storage(x)._cdata)
            if place is None:
                return x
            if place not in brought:
                brought[place] = self._bring(place)
            return x.new_empty(0).set_(storage(brought[place]), x.storage_offset(), x.shape, x.stride())

        args, kwargs = tree.map_tensors(present, (args, kwargs))
        return func(*args, **kwargs)


@cache
def _reads(func: Any) -> bool:
    """Whether an operation looks at numbers: not to make a view, or a tensor of the same shape."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    name = schema.name.removeprefix("aten::")
    views = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
    return not (views or name.startswith("new_") or name.endswith("_like"))
