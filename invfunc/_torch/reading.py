"""Tensors whose numbers are brought where an operation reads them, and gone behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, number_of, storage, unwatched
from invfunc.errors import ArgumentError


def absent(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Plain tensors of the same shapes, dtypes and devices, that have no numbers of their own.

    Each is in a storage of its own, but all in the memory of one, which has NaN in it (of any dtype: all bits are 1):
    what reads it unseen, as another thread or numpy does, gets that.
    """
    most: dict[torch.device, int] = {}
    for x in like:
        most[x.device] = max(most.get(x.device, 1), x.numel() * x.itemsize)
    nothing = {device: torch.full((size,), 255, dtype=torch.uint8, device=device) for device, size in most.items()}

    def one(x: torch.Tensor) -> torch.Tensor:
        shared = storage(torch.from_dlpack(nothing[x.device]))
        strides = torch.empty(x.shape, device="meta").stride()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(shared, 0, x.shape, strides)

    with torch.inference_mode(False):
        return [one(x) for x in like]


class AbsentReading(TorchDispatchMode):
    """Has operations, of a forward or a backward pass, read `absent` tensors: `bring` gives the one at a place.

    It `watches` also where other modes are switched off.
    """

    supports_higher_order_operators = watches = True

    def __init__(self, tensors: Sequence[torch.Tensor], bring: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._bring = bring
        self.of(tensors)

    def of(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take these for the tensors that are absent."""
        self._places = {number_of(x): place for place, x in enumerate(tensors)}

    def holds(self, x: torch.Tensor) -> bool:
        """Tells whether a tensor is one of them, or a view of one."""
        return number_of(x) in self._places

    def present(self, x: Any) -> Any:
        """A tree with the numbers of those that are in it."""
        return tree.map_tensors(partial(self._present, {}), x)

    def _present(self, brought: dict[int, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        place = self._places.get(number_of(x))
        if place is None:
            return x
        if place not in brought:
            brought[place] = self._bring(place)
        return x.new_empty(0).set_(storage(brought[place]), x.storage_offset(), x.shape, x.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(self.holds(x) for x in tree.tensors((_written(func, args, kwargs or {}),))):
            raise ArgumentError(
                "f writes into a parameter in place, of which this process has a part only. Write into a copy, as "
                "p.clone(), or before the call."
            )
        with unwatched():  # what brings numbers is not f's, also where it is torch.jit that calls
            args, kwargs = self.present((args, kwargs or {})) if _reads(func) else (args, kwargs or {})
            return func(*args, **kwargs)


@cache
def _reads(func: Any) -> bool:
    """Tells whether an operation looks at numbers: not to make a view, or a tensor of the same shape."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    name = schema.name.removeprefix("aten::")
    views = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
    return not (views or name.startswith("new_") or name.endswith("_like"))


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    given = [*args, *kwargs.values()]
    return [given[k] for k in _places_written(func, len(args), tuple(kwargs))]


@cache
def _places_written(func: Any, positional: int, names: tuple[str, ...]) -> list[int]:
    known = getattr(getattr(func, "_schema", None), "arguments", [])
    written = {a.name for a in known if a.alias_info is not None and a.alias_info.is_write}
    given = [*(a.name for a in known[:positional]), *names]
    return [k for k, name in enumerate(given) if name in written]
