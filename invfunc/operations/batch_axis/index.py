"""Indices as they are spelled out, and the samples of the entries that they read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.indices import advanced
from invfunc.operations.batch_axis.propagation import Call, Unknown
from invfunc.operations.batch_axis.samples import samples_of


@dataclass
class Index:
    """An index as it is spelled out: a part for each dimension, or None for a new one."""

    parts: list[Any]
    dims: list[int | None]
    """The dimension of each part."""
    samples: dict[int, torch.Tensor]
    """The samples of the entries of those parts that are tensors of samples, by the number of the part."""
    masks: list[Axis] = field(default_factory=list)
    """Where the samples are in what is indexed, as masks say, also of entries that they do not select."""

    @property
    def key(self) -> tuple:
        return tuple(self.parts)

    def append(self, part: Any, samples: torch.Tensor | None = None) -> None:
        """Add the part for the next dimension (or a new one), with the samples of its entries if they are of some."""
        if samples is not None:
            self.samples[len(self.parts)] = samples
        self.dims.append(None if part is None else len(self.dims) - self.dims.count(None))
        self.parts.append(part)

    def at(self, dim: int) -> Any:
        """The part of the index that picks from a dimension."""
        return self.parts[self.dims.index(dim)]

    def read(self, table: torch.Tensor | None, shape: torch.Size) -> list[torch.Tensor]:
        """The samples of the entries that the index reads: those of the entries of the table, if it has any (`table`),
        and those of each index."""
        found = [] if table is None else [table[self.key]]
        for at, samples in self.samples.items():
            dim, parts = self.dims[at], list(self.parts)
            assert dim is not None
            parts[at] = torch.arange(samples.numel(), device=samples.device).view(samples.shape)
            along = samples.reshape([-1 if d == dim else 1 for d in range(len(shape))])
            wide = [samples.numel() if d == dim else size for d, size in enumerate(shape)]
            found.append(along.expand(wide)[tuple(parts)])
        return found


def spelled(call: Call, x: torch.Tensor, index: Any) -> Index:
    """Masks become the indices of their entries, lists become tensors, and an ellipsis is filled in."""
    found = Index([], [], {})
    for part in _filled(index, x):
        if isinstance(part, torch.Tensor):
            indices, samples = _indices(call, part)
            place = call.place(part)
            if _is_mask(part) and isinstance(place, Axis) and place.dim is not None:
                found.masks.append(place.at(place.dim + len(found.dims) - found.dims.count(None)))
            for one in indices:
                found.append(one, samples)
        elif advanced(part):
            raise Unknown("it indexes by something else than ints, slices, lists and tensors")
        else:
            found.append(part)
    return found


def _filled(index: Any, x: torch.Tensor) -> list[Any]:
    """Return the parts of an index of x, with full slices for an ellipsis and for dimensions that are not named."""
    given = index if isinstance(index, tuple) else (index,)
    parts = [_tensor(p, x.device) if _is_list(p) else p for p in given]
    full = [slice(None)] * (x.ndim - sum(_width(p) for p in parts))
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    return [*parts[:at], *full, *parts[at + 1 :]]


def _indices(call: Call, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the indices of a part along each of its dimensions, and their samples if they are of some."""
    if not part.ndim and part.dtype == torch.bool:
        raise Unknown("it indexes by a mask without dimensions")
    samples = samples_of(call, part) if isinstance(call.place(part), Axis) else None
    if not _is_mask(part):
        return (part,), samples
    return part.nonzero(as_tuple=True), None if samples is None else samples[part.bool()]


def _width(part: Any) -> int:
    """How many dimensions a part of an index stands for."""
    return part.ndim if _is_mask(part) else int(part is not None and part is not Ellipsis)


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _is_list(p: Any) -> bool:
    return not isinstance(p, torch.Tensor) and hasattr(p, "__len__") and hasattr(p, "__getitem__")


def _tensor(p: Any, device: torch.device) -> torch.Tensor:
    found = torch.as_tensor(p, device=device)
    return found if found.numel() else found.long()  # an empty list is one of indices
