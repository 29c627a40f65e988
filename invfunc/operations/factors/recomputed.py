"""Operands that a checkpoint around an operation can give back: the shares read them again, and do not keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from invfunc import tree
from invfunc._torch.functorch import given_back, saving_hooks
from invfunc.operations.batch_axis import Call


@dataclass(eq=False)
class Recomputed:
    """An operand that can be computed again; a tensor without values (`shape`) stands in its place in the call."""

    shape: torch.Tensor
    fetch: Callable[[], torch.Tensor]
    held: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """The operand."""
        return self.fetch() if self.held is None else self.held

    def hold(self) -> None:
        """Compute the operand and keep it, as it is going to be read several times."""
        self.held = self.fetch()

    def drop(self) -> None:
        """Let go of the operand, as it is not read any more."""
        self.held = None


def released(call: Call, params: Collection[int]) -> tuple[Call, list[Recomputed]]:
    """The call without those operands that can be computed again, and these. `params` are the ids of the parameters."""
    found: dict[int, Recomputed] = {}
    if saving_hooks() is None:
        return call, []
    for x in call.read:
        if id(x) not in params and id(x) not in found and call.place(x) is not None:
            fetch = given_back(x)
            if fetch is not None:
                found[id(x)] = Recomputed(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), fetch)
    if not found:
        return call, []

    def shape_of(x: torch.Tensor) -> torch.Tensor:
        return found[id(x)].shape if id(x) in found else x

    args, kwargs = tree.map_tensors(shape_of, (call.args, call.kwargs))
    places = call.places | {id(recomputed.shape): call.places[key] for key, recomputed in found.items()}
    read = [shape_of(x) for x in call.read]
    return replace(call, args=args, kwargs=kwargs, places=places, read=read), list(found.values())


def reader(
    recomputed: list[Recomputed], leave: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that reads the values of operands, and computes those again that were not kept."""
    if not recomputed:
        return leave
    return lambda x: leave(next((a.value() for a in recomputed if a.shape is x), x))


def read_of(recomputed: Sequence[Recomputed], reads: Iterable[torch.Tensor]) -> list[Recomputed]:
    """The recomputed operands that a recipe reads."""
    return [a for a in recomputed if any(a.shape is x for x in reads)]
