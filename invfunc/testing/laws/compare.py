"""Comparisons of trees up to rounding, and transforms of torch around a function `t(first, *rest)` of trees, beside the
plain loop that it stands for.

The loops take derivatives by `torch.autograd.grad` and go from point to point. Both kinds nest, to the same depth.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.func import grad, vmap

from invfunc import tree
from invfunc._torch.functorch import version
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
    """The effect that rounding may have on a sum of so many terms: 1e-9 in float64, 7e-4 in float32, for one."""
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
    y = y.detach().byte() if y.dtype == torch.bool else y.detach()
    return y.abs().nan_to_num(0, 0, 0).max().item()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generators start at a seed, and are put back behind."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def generators() -> list[torch.Tensor]:
    """The states of torch's global generators."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_devices]


POINTS = (1.0, -0.5)
"""The factors of the first argument, for several of it."""


def total(result: Any, at: float = 0.0) -> torch.Tensor:
    """A fixed linear function of a result."""
    return torch.stack([(x * fixed(x.shape, x, at)).sum() for x in tree.tensors(plain(result))]).sum()


def scaled(first: Any, by: Any) -> Any:
    """A tree times a number."""
    return tree.map_tensors(lambda x: by * x, first)


def _of_tensors(t: Callable, first: Any, rest: tuple) -> tuple[Callable, list[torch.Tensor], Callable]:
    """t as a function of the tensors of its first argument, these, and how to put such tensors together again."""
    leaves, form = tree.separate(first)  # torch.func takes no None
    return lambda own: t(form.join(own), *rest), leaves, form.join


def slopes(t: Callable, at: float = 0.0) -> Callable:
    """The gradient of its total in the first argument, by torch.func."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(t, first, rest)
        return join(grad(lambda own: total(of(own), at))(leaves))

    return call


def loop_slopes(t: Callable, at: float = 0.0, needed: bool = False) -> Callable:
    """The same by torch.autograd; differentiable where an argument requires grad. A constant has none, which is an
    error if they are `needed`."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(t, first, rest)
        deep = any(x.requires_grad for x in tree.tensors((first, rest)))
        own = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in leaves]
        with torch.enable_grad():
            value = total(of(own), at)
        if not value.requires_grad and not needed:
            return join([torch.zeros_like(x) for x in leaves])
        return join(list(torch.autograd.grad(value, own, create_graph=deep, materialize_grads=True)))

    return call


def mapped_over(call: Callable, leaves: list[torch.Tensor], dim: int = 0) -> Any:
    """`vmap` along an axis, also where None is in a result."""
    forms: list[Any] = []

    def tensors(own: list[torch.Tensor]) -> list[torch.Tensor]:
        found, form = tree.separate(plain(call(own)))
        forms.append(form)
        return found

    found = vmap(tensors, in_dims=dim, randomness="same")(leaves)
    return forms[-1].join(found)


def at_points(t: Callable) -> Callable:
    """Its results at several multiples of the first argument at once."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, _ = _of_tensors(t, zipped(torch.stack, [scaled(first, c) for c in POINTS]), rest)
        return mapped_over(of, leaves)

    return call


def loop_at_points(t: Callable) -> Callable:
    """The same point by point."""
    return lambda first, *rest: zipped(torch.stack, [plain(t(scaled(first, c), *rest)) for c in POINTS])


def state(args: Any) -> list[tuple]:
    """The state of arguments, which must not change."""
    found = tree.tensors(args)
    return [(x.detach().clone(), version(x), x.requires_grad, x.grad is None) for x in found]


def written(call: Callable, args: Any) -> Any:
    """The state of arguments after a call."""
    call()
    return state(args)


def alive(call: Callable, tensors: Any) -> list[str]:
    """The tensors, given to a call, that are alive when all the caller's references are gone."""
    own = tree.map_tensors(lambda x: x.detach().clone(), tensors)
    names = [(path, weakref.ref(x)) for path, x in tree.named_leaves(own) if isinstance(x, torch.Tensor)]
    result = call(own)
    leaves = [weakref.ref(x) for x in tree.tensors(result)]
    del own, result
    for _ in range(_TRIES):  # a thread of autograd for a device lets go of what it has computed a little later
        gc.collect()
        left = [x for reference in (*leaves, *(x for _, x in names)) if (x := reference()) is not None]
        if all(x.device.type == "cpu" for x in left):
            break
        del left
        time.sleep(0.01)
    return [path for path, x in names if x() is not None] + [
        f"result {i}" for i, x in enumerate(leaves) if x() is not None
    ]


_TRIES = 20
