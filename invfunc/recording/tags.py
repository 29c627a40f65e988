"""What is known of a tensor while a function runs: computed from parameters, or of samples and how."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import base_of, storage_of
from invfunc._torch.weak import WeakIdMap, WeakMemories
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BatchSum, Call
from invfunc.operations.batch_axis.orders import MIXED, Order, joined
from invfunc.operations.factors import Recipe
from invfunc.operations.factors.recomputed import Recomputed


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters alone; `selected` if each of its entries is one entry of one parameter."""

    leaves: frozenset[int]
    selected: bool
    of_data: bool = False
    """Whether data summed over the samples went into it."""
    untraced_at: str | None = None
    """The call at which a tensor of which nothing is known went into it."""
    picked: bool = False
    """Whether each of its entries is one entry of one parameter, which may occur several times."""
    repeated: bool = False
    """Whether f may repeat it for the samples, where there is one of them alone, so that it does not show."""


def derived_from(
    tags: Sequence[Derived],
    selected: bool = False,
    of_data: bool = False,
    untraced_at: str | None = None,
    picked: bool = False,
    repeated: bool = False,
) -> Derived:
    """What is known of what is computed from tensors with these tags; the rest is what the computation adds."""
    return Derived(
        frozenset().union(*(t.leaves for t in tags)),
        selected,
        of_data or any(t.of_data for t in tags),
        untraced_at or next((t.untraced_at for t in tags if t.untraced_at), None),
        picked,
        repeated or any(t.repeated for t in tags),
    )


@dataclass(frozen=True)
class Sampled:
    """A tensor that depends on the samples: where they lie, or why that is lost, and how it depends on parameters."""

    place: Axis | BatchSum | None
    lost: str | None = None
    around: str | None = None
    """The call that a path from the parameters without marked outputs on it came to last, or at which it joined a path
    with some; None where there is no such path."""
    crossed: frozenset[int] = frozenset()
    """The marked outputs that it depends on."""
    affine: bool = False
    """Whether it is an affine function of the marked outputs that it depends on."""
    logarithm: bool = False
    """Whether it is an affine function of the log_softmax of the one that it depends on."""
    order: Order = None
    """The order of the samples along their axis."""

    @property
    def active(self) -> bool:
        return self.around is not None or bool(self.crossed)


def in_order(tags: list[Sampled], written: bool = False) -> Order:
    """The order of the samples in what is computed from tensors with these tags."""
    if all(t.order is None for t in tags):
        return None
    placed = [t for t in tags if isinstance(t.place, Axis)]
    return joined((t.order for t in placed if t.active), (t.order for t in placed if not t.active), written)


@dataclass(eq=False)
class ParameterUse:
    """A parameter, perhaps derived, at one of the operations where it meets samples."""

    param: torch.Tensor
    derived: Derived
    recipe: Recipe
    site: int
    call: Call | None
    axis: Axis
    versions: tuple[tuple[torch.Tensor, int], ...]
    recomputed: Sequence[Recomputed] = ()
    """The operands that are not kept, but computed again when they are read."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a reduction of some columns has to know of others."""

    @property
    def kind(self) -> Hashable:
        """A key that uses share if they read one parameter by the same operation on different tensors, as those of a
        module that is called twice do."""
        call = self.call
        if call is None or not self.recipe.joins:
            return id(self)

        def described(x: Any) -> Hashable:
            if not isinstance(x, torch.Tensor):
                return repr(x)
            place = call.place(x)
            return tuple(x.shape), x is self.param, place.kind if isinstance(place, Axis) else place

        leaves, structure = tree.flatten((call.args, call.kwargs))
        arguments = repr(structure), tuple(described(x) for x in leaves)
        return id(self.param), call.func, self.axis.kind, tuple(call.out.shape), arguments, self.recipe.output


class Tags(WeakIdMap[Derived | Sampled]):
    """What is known of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = WeakMemories()
        """What samples were written to, under whatever name it is read."""

    def holds_samples(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether samples were written into the memory of one of these tensors, of which nothing is known."""
        return any(x in self._memory for x in tensors)

    def written(self, x: torch.Tensor, new: Derived | Sampled) -> None:
        """Tag all tensors that share the memory of one that was written to: it is written into them, too."""
        base = base_of(x)
        if base is not None and self.get(base) is None:
            self.set(base, Derived(frozenset(), False) if isinstance(new, Derived) else Sampled(None))
        memory = storage_of(x)
        if isinstance(new, Sampled):
            self._memory.update((x,))
        for y, old in self.items():
            if y is not x and storage_of(y) == memory:
                self.set(y, _overwritten(old, new))


def _overwritten(old: Derived | Sampled, new: Derived | Sampled) -> Derived | Sampled:
    """What is known of a tensor once something of another one is written into it."""
    if isinstance(old, Derived) and isinstance(new, Derived):
        return derived_from([old, new])
    if isinstance(old, Sampled) and isinstance(new, Sampled) and old.place:
        crossed, order = old.crossed | new.crossed, old.order if old.order == new.order else MIXED
        return Sampled(old.place, old.lost or new.lost, old.around or new.around, crossed, order=order)
    around, crossed = getattr(new, "around", "a parameter"), getattr(new, "crossed", frozenset())
    return Sampled(None, "an in-place write through a view", around, crossed)
