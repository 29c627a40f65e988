"""The order of the samples along their axis: data may be put into another one before they meet the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.indices import advanced
from invfunc.operations.batch_axis.propagation import Call, Mixed
from invfunc.operations.operation import known

Order = tuple[int, ...] | None
"""The sample at each place; None where each is at its own."""
MIXED: Order = ()
"""The order of a tensor whose parts are in different orders."""


def moved(call: Call, place: Any) -> Order:
    """The place in the data that each sample is taken from, found by the same call on the numbers of the places."""
    if not known(call.name).permutes or call.active or call.by_rows:
        return None
    x, axis = call.first, call.place(call.first)
    place = place[0] if isinstance(place, list) else place
    if not isinstance(place, Axis) or not isinstance(axis, Axis) or axis.dim is None or place.dim is None:
        return None
    if axis.rows is not None or place.rows is not None:  # which tell it themselves
        return None
    if call.name == "getitem" and not advanced(call.args[1]):
        return None
    each = torch.arange(call.n, device=x.device).repeat_interleave(axis.inner).repeat(axis.outer)
    places = each.view(-1, *[1] * (x.ndim - axis.dim - 1)).expand(x.shape)
    rows = innermost(place.expose(_moved(call, places), call.n).flatten(1))
    if rows.ndim != 2 or not bool((rows == rows[:, :1]).all()):
        raise Mixed("it puts entries of a sample where those of another are")
    order = tuple(rows[:, 0].tolist()) if rows.numel() else tuple(range(call.n))
    return None if order == tuple(range(call.n)) else order


def _moved(call: Call, places: torch.Tensor) -> torch.Tensor:
    """The result of a call if its input held the numbers of the places."""
    if call.name in ("sort", "topk"):  # by its values
        return places.gather(call.arg("dim", -1), call.out[1])
    given = {name: a for name, a in call.kwargs.items() if name != "out"}
    args, kwargs = tree.map_tensors(lambda a: places if a is call.first else a, (call.args, given))
    return call.func(*args, **kwargs)


def composed(before: Order, then: Order) -> Order:
    """The order of a tensor that was in the order `before` and is then reordered by `then`."""
    if not before or then is None:
        return before if then is None else then if before is None else MIXED
    return tuple(before[i] for i in then)


def joined(active: Iterable[Order], data: Iterable[Order], written: bool) -> Order:
    """The order of a result that combines tensors which depend on parameters (`active`) with `data`.

    Data that came to another place belong to the sample in that place, unless its own entries were written over.
    """
    wanted, given = set(active), set(data)
    if written and len(wanted | given) > 1:
        return MIXED
    if not wanted:
        return None if None in given else given.pop() if len(given) == 1 else MIXED if given else None
    order = wanted.pop()
    return order if not wanted and (order is None or given <= {order}) else MIXED
