"""How each torch function moves the sample axis: from the axes of what it read to that of what it returned.

A rule takes a `Call` and returns an `Axis`, `BATCH_SUM` (summed over the samples) or None (no sample in it): one for
all tensors that came out, or a list with one for each. It raises `Mixed` where samples meet or the axis cannot be
followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc.operations.axis import Axis


class Mixed(Exception):
    """Samples are mixed by an operation, or it moves the sample axis where nothing can follow; says how."""


class Unknown(Mixed):
    """Nothing is known about the operation; it may well keep the samples apart."""


class BatchSum:
    """What stands in place of an axis for a tensor that is a sum over the samples, as a scalar loss is."""

    def __repr__(self) -> str:
        return "BATCH_SUM"


BATCH_SUM = BatchSum()
Place = Axis | BatchSum | None


@dataclass
class Call:
    """One call of a torch function: what it read, what it returned, and where the samples are in what it read."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    places: dict[int, Axis | BatchSum]
    n: int
    active: bool
    """Whether the sample tensors depend on the parameters."""
    read: list[torch.Tensor]
    by_rows: bool = False
    """Whether data that change places are followed to their samples, and not only their order is known."""

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def place(self, x: Any) -> Place:
        return self.places.get(id(x))

    @cached_property
    def samples(self) -> list[tuple[torch.Tensor, Axis | BatchSum]]:
        return [(x, self.places[id(x)]) for x in self.read if id(x) in self.places]

    @property
    def first(self) -> torch.Tensor:
        if self.args:
            return self.args[0]
        return next(self.kwargs[k] for k in ("input", "tensors", "self", *self.kwargs) if k in self.kwargs)


Rule = Callable[[Call], Any]
"""Returns a `Place`, or a list with one for each tensor that came out."""
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[R], R]:
    def register(fn: R) -> R:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


@cache
def find(name: str) -> Rule | None:
    """The rule of a function, by its name; functions that torch itself tags as pointwise share one."""
    if name in RULES:
        return RULES[name]
    packet = getattr(torch.ops.aten, name.removeprefix("special_"), None)
    if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
        return pointwise
    return None


def propagate(call: Call) -> Place | list[Place]:
    """Where the samples are in the result of a call."""
    places = [place for _, place in call.samples]
    alone = [place for place in places if isinstance(place, Axis) and place.dim is None]
    if alone and all(place == alone[0] for place in places):  # nothing to mix: everything is of the one sample
        if call.n == 1 or call.name not in _WRITES:
            return alone[0]
    summed = BATCH_SUM in places or (bool(alone) and call.name not in _PLACES)
    if summed and len(alone) + places.count(BATCH_SUM) == len(places):
        return total(call)
    if summed:
        what = "a sum over the samples" if BATCH_SUM in places else "one sample"
        raise Mixed(f"it combines {what} with tensors that keep them apart")
    of_mask = call.name == "where" and not isinstance(call.out, torch.Tensor)
    found = getattr(call.func, "follow", None) or find("nonzero" if of_mask else call.name)  # one's own say it
    if found is None:
        raise Unknown("it has no rule that follows the sample axis")
    return _checked(call, found(call))


def _checked(call: Call, found: Place | list[Place]) -> Place | list[Place]:
    """What a rule has found, once checked: each result has room for n samples along its axis, or is left empty."""
    produced = tree.tensors(call.out)
    places = list(found) if isinstance(found, list) else [found] * len(produced)
    for i, (x, place) in enumerate(zip(produced, places, strict=True)):
        if isinstance(place, Axis) and not place.fits(x, call.n):
            if x.numel() or i == 0:
                raise Mixed(f"{tuple(x.shape)} is not the shape of {call.n} samples along {place}")
            places[i] = None
    return places if None in places and found is not None else found


# Sums over the samples: linear operations keep them a total


_PRODUCTS = set("mul multiply matmul rmatmul mm bmm mv dot inner outer einsum tensordot linear vdot kron".split())
_LINEAR = _PRODUCTS | set(
    "add sub rsub mul div neg sum mean stack cat to float double half bfloat16 type clone contiguous squeeze unsqueeze "
    "reshape view flatten subtract multiply divide true_divide negative positive getitem expand detach "
    "permute transpose t get:T get:mT get:H get:mH adjoint movedim moveaxis swapaxes swapdims unbind chunk split "
    "split_with_sizes tensor_split unsafe_chunk unsafe_split hsplit vsplit dsplit narrow select expand_as broadcast_to "
    "unflatten ravel view_as reshape_as repeat tile repeat_interleave concat concatenate hstack vstack dstack "
    "column_stack index_select flip fliplr flipud rot90 roll diagonal trace tril triu cumsum diff atleast_1d "
    "atleast_2d atleast_3d gather take take_along_dim masked_select masked_fill where pad index_add scatter_add".split()
)


_WRITES = set(
    "setitem index_put index_add index_copy index_fill scatter scatter_add select_scatter slice_scatter".split()
)
_PLACES = _WRITES | set(
    "cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag masked_scatter getitem "
    "index_select gather take take_along_dim masked_select".split()
)
"""Which put what belongs to single samples in places, or take it from there."""


def total(call: Call) -> Place:
    several = len(call.samples) > 1
    if call.name in _PRODUCTS and (several or sum(x is call.samples[0][0] for x in call.read) > 1):
        raise Mixed("it multiplies two sums over the samples")
    if call.name in ("div", "divide", "true_divide") and call.place(call.arg(1, "other")) is not None:
        raise Mixed("it divides by a sum over the samples")
    if call.name not in _LINEAR:
        raise Mixed("it is not linear in a sum over the samples")
    return BATCH_SUM


# Element by element


@rule(
    *"dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d type_as contiguous to "
    "float double half bfloat16 int long bool type clone detach requires_grad hardswish softsign tanhshrink "
    "log_sigmoid fix floor_divide negative subtract multiply divide true_divide absolute square "
    "special_expit bernoulli relu6 clip clamp greater less greater_equal less_equal not_equal isclose "
    "cpu cuda and or xor invert lshift rshift "
    "complex polar conj conj_physical resolve_conj resolve_neg real imag angle get:real get:imag "
    "rrelu rsub rdiv rpow pow copy nan_to_num fill masked_fill where maximum minimum".split()
)
def pointwise(call: Call) -> Place:
    place, back = side_by_side(call)
    return place.at(tree.tensors(call.out)[0].ndim + back)


def side_by_side(call: Call) -> tuple[Axis, int]:
    """The sample axis that all operands of an entrywise operation share, and its dimension counted from the end."""
    first, place = call.samples[0]
    assert isinstance(place, Axis) and place.dim is not None
    back = place.dim - first.ndim
    for x, other in call.samples[1:]:
        assert isinstance(other, Axis) and other.dim is not None
        if other.dim - x.ndim != back or not other.like(place):
            shapes = f"of a tensor {list(first.shape)} with samples along {other} of one {list(x.shape)}"
            raise Mixed(f"it combines samples along {place} {shapes}")
    return place, back
