"""One call of an operation of aten on tensors with labels, and what rules do with labels.

A rule (`receptive_field` of an entry) takes such a `Step` and its (first) result, and returns the labels of the result
or a list with those of each result. With None in their place a result has no rule: each of its entries may depend on
all that the call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from invfunc.operations.receptive_fields.regions import Region, blank, core

Rows = torch.Tensor | None
"""Labels `[rows, *shape]`; None: of nothing."""


@lru_cache(maxsize=4096)
def _places(func: Any) -> dict[str, tuple[int, Any]]:
    """The position and the default of each argument of an operation."""
    return {a.name: (i, a.default_value) for i, a in enumerate(func._schema.arguments)}


class Step:
    """One call of an operation with labelled arguments."""

    def __init__(self, func: Any, args: tuple, kwargs: dict) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.labelled: list[torch.Tensor] = []
        """The arguments with labels, as often as they are there."""
        self.height = 0
        """How many rows labels have."""
        self.failed: str | None = None
        """What its rule raised, if it did."""
        self._regions: dict[int, Region | None] = {}

    def reads(self, found: Sequence[tuple[torch.Tensor, Region | None]], height: int) -> None:
        """Set which arguments have labels, of how many rows; one without a region has others, and here blank ones."""
        self.labelled = [x for x, _ in found if x.numel()]
        self.height, self._regions = height, {id(x): region for x, region in found}

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the operation's schema."""
        at, default = _places(self.func)[name]
        if at < len(self.args):
            return self.args[at]
        return self.kwargs.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in _places(self.func)

    def rows(self, x: Any) -> Rows:
        """The labels of an argument; None if it has none (or is not a tensor)."""
        if not isinstance(x, torch.Tensor) or not x.numel() or id(x) not in self._regions:
            return None
        region = self._regions[id(x)]
        return blank(x, (self.height, *x.shape)) if region is None else region.of(x)

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """The labels of an argument, also if it has none."""
        rows = self.rows(x)
        return blank(x, (self.height, *x.shape)) if rows is None else rows

    def only(self, x: torch.Tensor) -> bool:
        """Whether no other argument has labels."""
        return len(self.labelled) == 1 and self.labelled[0] is x

    def hull(self, *tensors: torch.Tensor) -> Rows:
        """One label for all that these tensors (or all arguments) depend on, `[rows]`."""
        found = [self.rows(x) for x in tensors or self.labelled]
        return joined(*(most(r, range(1, r.ndim)).flatten() for r in found if r is not None))


def joined(*parts: Rows) -> Rows:
    """The entrywise maximum of those labels that are not None: the hull of their boxes."""
    result = None
    for part in parts:
        if part is None or (result is not None and part.is_set_to(result)):
            continue
        result = part if result is None else _maximum(result, part)
    return result


def _maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.maximum(core(a), core(b)).expand(torch.broadcast_shapes(a.shape, b.shape))


def most(rows: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The maximum over some dimensions, which stay as ones."""
    dims = [d for d in dims if rows.shape[d] != 1]
    if not dims:
        return rows
    if not rows.numel():
        return blank(rows, [1 if d in dims else s for d, s in enumerate(rows.shape)])
    one, kept = core(rows), [1 if d in dims else s for d, s in enumerate(rows.shape)]
    dims = [d for d in dims if one.shape[d] != 1]
    return (one.amax(dims, keepdim=True) if dims else one).expand(kept)


def raised(rows: torch.Tensor, ndim: int) -> torch.Tensor:
    """Labels `[rows, *shape]` with ones before the shape, as broadcasting puts them."""
    missing = ndim + 1 - rows.ndim
    return rows if missing <= 0 else rows[(slice(None), *[None] * missing)]


def behind(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Where dimensions of a tensor are in its labels; all of them for None."""
    if dims is None or ndim == 0:
        return list(range(1, ndim + 1))
    return [d % ndim + 1 for d in ([dims] if isinstance(dims, int) else dims)] or list(range(1, ndim + 1))


def flattened(rows: torch.Tensor, d: int, then: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What comes of the last d dimensions of labels, when all others are flattened into one."""
    first, last = rows.shape[: rows.ndim - d], rows.shape[rows.ndim - d :]
    one = core(rows.expand(*first, *last))
    one = one.expand(*one.shape[: rows.ndim - d], *last)
    found = then(one.reshape(-1, *last))
    found = found.reshape(*one.shape[: rows.ndim - d], *found.shape[1:])
    return found.expand(*first, *found.shape[rows.ndim - d :])


def elementwise(step: Step, out: torch.Tensor) -> Rows:
    """The rule of entrywise operations: each entry reads those at its own place."""
    return joined(*(raised(step.filled(x), out.ndim) for x in step.labelled))


def rows_of(rows: Rows) -> Rows:
    """The labels of matrices with those of each row joined."""
    return None if rows is None else most(rows, (rows.ndim - 1,))


def columns_of(rows: Rows) -> Rows:
    """The labels of matrices with those of each column joined."""
    return None if rows is None else most(rows, (rows.ndim - 2,))
