"""A product at fixed parameters and data, also one of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import check_params
from invfunc.callables import check_callable
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.rounds import Rounds, parted_beside, whole
from invfunc.products.maps import Kind
from invfunc.products.product import Linearised, Space
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames


def check_product(name: str, product: Any) -> None:
    """Check that a transform of products is given a product."""
    check_callable(name, product)
    if isinstance(getattr(product, "t", product), Statistic):
        raise ArgumentTypeError(
            f"{name}({product!r}): it is a statistic, but has to be a product (params, v, *batch), as `ggnvp(f)` is."
        )


def names_of(product: Callable, count: int) -> Sequence[str]:
    """What the arguments behind a transform of a product are called in an error: all but the vector."""
    known = getattr(product, "names_of_f", None)
    if known is not None:
        return known(count)
    names = ArgumentNames(product, count + 1)
    return [*names[:1], *names[2:]]


def space_of(args: tuple, names: Sequence[str]) -> Space:
    """The space of the parameters, which may be divided among processes."""
    if not args:
        raise ArgumentError("the parameters are missing.")
    check_params(args[0], names, 0, whole=False)
    leaves, structure = tree.flatten(args[0], none_is_leaf=False)
    if not leaves:
        raise ArgumentError(f"{names[0]} has no tensors in it.")
    return Space(names, structure, [Kind.of(p) for p in leaves])


@dataclass(frozen=True)
class OfAll(Space):
    """The space of vectors that several processes give, each the same."""

    processes: Processes = ALONE
    rounds: Rounds | None = None
    """What brings parameters of which each process has a part, and such a vector beside them."""

    def leaves(self, v: Any, name: str, lead: int = 0) -> list[torch.Tensor]:
        def looked() -> tuple[list[torch.Tensor], dict[str, str]]:
            found = super(OfAll, self).leaves(v, name, lead)
            return found, bits(name, self.tree(found))

        found, each = self.processes.told(name, looked)
        same(each)
        if self.rounds is None or lead:
            return tree.tensors((whole(self.processes, name, self.tree(found)),))
        return tree.tensors((parted_beside(self.rounds, name, self.tree(found)),))


def along(
    product: Callable, args: tuple, kwargs: dict[str, Any], space: Space, several: bool = False
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """From the leaves of a vector to those of its product, without aux; linearised once where that can be done. Of
    `several` vectors, which an axis in front counts, to those of all."""
    aux, linearize = getattr(product, "has_aux", False), getattr(product, "linearize", None)
    if linearize is not None:
        made = linearize(*args, **kwargs)
        at = made[0] if aux else made
    else:

        def at(v: Any) -> Any:
            result = product(args[0], v, *args[1:], **kwargs)
            return result[0] if aux else result

    def whole_of(found: Any, lead: int = 0) -> list[torch.Tensor]:
        """The leaves of a product, as a whole."""
        leaves: list[Any] = space.leaves(found, "product", lead)
        return [x.full_tensor() if sharded(x) else x for x in leaves]

    def of_one(v: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return whole_of(at(space.tree([*v])))

    if not several:
        return of_one
    if isinstance(at, Linearised):
        of_all = replace(at, lead=1)
        return lambda v: whole_of(of_all(space.tree(v)), 1)
    return lambda v: [torch.stack(x) for x in zip(*map(of_one, zip(*v, strict=True)), strict=True)]
