"""Whether two trees are equal up to rounding, and where they differ most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc.kronecker import Kronecker

FLOOR = 1e-2
"""A leaf that is small beside the others (zero by structure, with what cancels in it) counts as this part of them."""


class Difference(NamedTuple):
    """The largest one of two trees, relative to the largest entry of its leaf."""

    error: float
    where: str
    found: Any
    expected: Any


SAME = Difference(0.0, "", None, None)


def tolerance(dtype: torch.dtype, terms: int = 1) -> float:
    """What rounding may do to a sum of so many terms: 1e-9 in float64, 7e-4 in float32, for one."""
    eps = torch.finfo(dtype).eps
    return min(32 * eps ** (2 / 3), 2 * eps**0.5) * max(1, terms) ** 0.5


def cast(values: Any, dtype: torch.dtype) -> Any:
    """A tree with its floating-point tensors in another precision."""
    return tree.map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def fixed(shape: Any, like: torch.Tensor, at: float = 0.0) -> torch.Tensor:
    """Some numbers, always the same, drawn from no generator."""
    size = torch.Size(shape).numel()
    numbers = torch.arange(size, dtype=torch.float64, device=like.device)
    return (numbers * 1.7 + at + 0.5).cos().reshape(shape).to(like.dtype)


def directions(params: Any, at: float = 0.0) -> Any:
    """A tree like the parameters of such numbers."""
    found, form = tree.separate(params)
    return form.join([fixed(p.shape, p, at + i) for i, p in enumerate(found)])


def zipped(fn: Callable[[list[torch.Tensor]], torch.Tensor], trees: Sequence[Any]) -> Any:
    """A function of the tensors that are at the same place of several trees."""
    tensors = [tree.tensors(one) for one in trees]
    return tree.separate(trees[0])[1].join([fn(list(x)) for x in zip(*tensors, strict=True)])


def plain(result: Any) -> Any:
    """A result as a tree of tensors that do not depend on the choice of a basis: K-factors as a product with them."""

    def one(x: Any) -> Any:
        return x @ fixed(x.shape, x.factors[0]) if isinstance(x, Kronecker) else x

    return tree.map_leaves(one, result, is_leaf=lambda x: isinstance(x, Kronecker))


def difference(found: Any, expected: Any, floor: float = 0.0) -> Difference:
    """The largest difference; infinite where the trees have another structure, or shapes that differ.

    A leaf whose largest entry is below `floor` counts as if it were this: the size of what cancels in it.
    """
    found, expected = plain(found), plain(expected)
    wanted, structure = tree.flatten(expected)
    if tree.flatten(found)[1] != structure:
        return Difference(float("inf"), "its structure", found, expected)
    largest = max((_largest(y) for y in wanted), default=0.0)
    worst = SAME
    for (path, x), y in zip(tree.named_leaves(found), wanted, strict=True):
        one = _of_leaf(path, x, y, max(FLOOR * largest, floor))
        worst = one if one.error > worst.error else worst
    return worst


def _of_leaf(path: str, x: Any, y: Any, floor: float) -> Difference:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return SAME if type(x) is type(y) and x == y else Difference(float("inf"), path, x, y)
    if x.shape != y.shape:
        return Difference(float("inf"), f"{path}.shape", tuple(x.shape), tuple(y.shape))
    if not x.numel():
        return SAME
    a, b = (t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
    same = (a == b) | (a.isnan() & b.isnan())
    errors = (a - b).abs().masked_fill(same, 0).nan_to_num(float("inf"), float("inf"))
    size = max(_largest(y), floor)
    worst = int(errors.argmax())
    error = errors.flatten()[worst].item()
    if not error:
        return SAME
    entry = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(worst), x.shape))
    where = f"{path}[{entry}]" if entry else path
    return Difference(
        error / size if size else float("inf"), where, x.flatten()[worst].item(), y.flatten()[worst].item()
    )


def _largest(y: Any) -> float:
    if not isinstance(y, torch.Tensor) or not y.numel():
        return 0.0
    return y.detach().abs().nan_to_num(0, 0, 0).max().item()
