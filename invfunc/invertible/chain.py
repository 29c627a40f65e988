"""Many invertible functions, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError
from invfunc.invertible.checkpoint import Checkpointed, invertible_checkpoint
from invfunc.invertible.pair import Composition, Invertible, invert

Step = tuple[Checkpointed, Any]
"""A block and its parameters."""


def chain(*blocks: Callable, anchor_every: int | None = None) -> Invertible:
    """Apply functions one after the other, keeping in memory the last output alone.

        def chained(x, params, *args, **kwargs):
            for g, p in zip(blocks, params):
                x = g(x, p, *args, **kwargs)
            return x

    In the backward pass block after block is inverted, so that the memory does not grow with their number.

    Args:
        blocks: each an `Invertible`, what `invertible_checkpoint` returned, or any other function: that has no inverse,
            so its input is kept, and it is evaluated again in the backward pass.
        anchor_every: keep the input of every so many blocks as well, so that rounding errors of the inverses add up
            between two anchors only.

    Returns:
        An `Invertible`, called as `chained(x, params, *args, **kwargs)`: `params` has an entry for each block; a block
        whose entry is None is called as `g(x)`. The further arguments go to all the others. Its inverse takes the same
        arguments, and saves memory in the same way.

    Raises:
        ArgumentTypeError: a block is no function.
        ArgumentError: `params` has not one entry for each block; `anchor_every` is less than 1.
        InverseError: it is inverted, but has a block without an inverse.

    Example:
        >>> import torch, invfunc
        >>> scale = invfunc.Invertible(lambda x, c: c * x, lambda y, c: y / c)
        >>> shift = invfunc.Invertible(lambda x, c: x + c, lambda y, c: y - c)
        >>> affine = invfunc.chain(scale, shift)
        >>> affine(torch.ones(2), [3.0, 1.0]), invfunc.invert(affine)(torch.ones(2), [2.0, 1.0])
        (tensor([4., 4.]), tensor([0., 0.]))

    Composes with: all that `invertible_checkpoint` composes with; chains may be blocks of chains.

    Cost: that of its blocks.

    Source: MemCNN and invtorch stack wrapped modules in `nn.Sequential`.
    """
    _check_anchor("chain", anchor_every)
    checkpointed = tuple(_checkpointed(block, f"chain: block {i}") for i, block in enumerate(blocks))
    name = f"chain({', '.join(repr(block.pair) for block in checkpointed)})"

    def steps(params: Any) -> list[Step]:
        if (
            isinstance(params, (str, dict, torch.Tensor))
            or not isinstance(params, Sequence)
            or len(params) != len(blocks)
        ):
            given = f"{len(params)} entries" if isinstance(params, (list, tuple)) else type(params).__name__
            raise ArgumentError(
                f"{name}(x, params): params is {given}, but has to be a list with an entry for each of the "
                f"{len(blocks)} blocks (None for a block without parameters)."
            )
        return _anchored(zip(checkpointed, params, strict=True), anchor_every)

    def changed(change: Callable[[Checkpointed], Checkpointed]) -> Invertible:
        return chain(*map(change, checkpointed), anchor_every=anchor_every)

    return _sequence(steps, changed, any(block.pair.hidden for block in checkpointed), name)


def repeated(block: Callable, *, anchor_every: int | None = None) -> Invertible:
    """Apply one function again and again, with other parameters each time, keeping the last output alone.

        def repeat(x, params, *args, **kwargs):
            for p in params:
                x = block(x, p, *args, **kwargs)
            return x

    Args:
        block: as those of `chain`.
        anchor_every: as in `chain`.

    Returns:
        An `Invertible`, called as `repeat(x, params, *args, **kwargs)`: `params` is a list with an entry for each time,
        or any other pytree whose tensors are stacked along their leading axis.

    Raises:
        ArgumentTypeError: the block is no function.
        ArgumentError: the tensors of stacked parameters differ in their leading size; `anchor_every` is less than 1.
        InverseError: it is inverted, but the block has no inverse.

    Example:
        >>> import torch, invfunc
        >>> shift = invfunc.Invertible(lambda x, c: x + c, lambda y, c: y - c)
        >>> invfunc.repeated(shift)(torch.zeros(2), torch.tensor([1.0, 2.0, 3.0]))
        tensor([6., 6.])

    Composes with: all that `invertible_checkpoint` composes with.

    Cost: that of the blocks.

    Source: `jax.lax.scan`, whose parameters are stacked in this way.
    """
    _check_anchor("repeated", anchor_every)
    checkpointed = _checkpointed(block, "repeated")
    name = f"repeated({checkpointed.pair!r})"

    def steps(params: Any) -> list[Step]:
        each = params if isinstance(params, list) else _unstacked(params, name)
        return _anchored(((checkpointed, p) for p in each), anchor_every)

    def changed(change: Callable[[Checkpointed], Checkpointed]) -> Invertible:
        return repeated(change(checkpointed), anchor_every=anchor_every)

    return _sequence(steps, changed, checkpointed.pair.hidden, name)


def _sequence(steps: Callable[[Any], list[Step]], changed: Callable, hidden: bool, name: str) -> Invertible:
    """The blocks that `steps` makes of parameters, as one."""

    def keeping(keep: bool | tuple[int, ...]) -> Invertible:
        def first_keeps(params: Any) -> list[Step]:
            blocks = steps(params)
            return [(replace(g, keep=g.keep if i else keep), p) for i, (g, p) in enumerate(blocks)]

        return _sequence(first_keeps, changed, hidden, name)

    def forward(x: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        seen = []
        for g, p in steps(params):
            x = g(x) if p is None else g(x, p, *args, **kwargs)
            x, own = x if g.pair.hidden else (x, None)
            seen.append(own)
        return (x, seen) if hidden else x

    def inverse(y: Any, *given: Any, **kwargs: Any) -> Any:
        seen, params, *args = given if hidden else (None, *given)
        blocks = steps(params)
        for (g, p), own in zip(reversed(blocks), reversed(seen or [None] * len(blocks)), strict=True):
            back = _inverse(g, own)
            y = back(y) if p is None else back(y, p, *args, **kwargs)
        return y

    return Invertible(forward, inverse, hidden=hidden, name=name, composition=Composition(steps, changed, keeping))


def _inverse(g: Checkpointed, hidden: Any) -> Callable:
    if not g.has_inverse:
        raise InverseError(f"the block {g.pair!r} has no inverse.")
    if g.pair.hidden:
        return lambda y, *args, **kwargs: g.pair.inverse(*g.pair.shared, y, hidden, *args, **kwargs)
    return replace(g, pair=invert(g.pair), keep=False)


def _checkpointed(block: Callable, where: str) -> Checkpointed:
    if isinstance(block, Checkpointed):
        made = block
    elif isinstance(block, Invertible):
        made = Checkpointed(block)
    elif callable(block):
        made = invertible_checkpoint(block, None)
    else:
        raise ArgumentTypeError(f"{where} is of type {type(block).__name__}, but has to be a function.")
    return replace(made, has_aux=made.pair.hidden)


def _check_anchor(name: str, anchor_every: int | None) -> None:
    if anchor_every is not None and (not isinstance(anchor_every, int) or anchor_every < 1):
        raise ArgumentError(
            f"{name}(..., anchor_every={anchor_every!r}): a whole number of blocks from 1 on is wanted."
        )


def _anchored(steps: Iterable[Step], every: int | None) -> list[Step]:
    return [
        (replace(g, keep=True) if every is not None and i and i % every == 0 else g, p)
        for i, (g, p) in enumerate(steps)
    ]


def _unstacked(params: Any, name: str) -> list[Any]:
    """The parameters of each time, from those that are stacked."""
    tensors, form = tree.separate(params)
    sizes = {t.shape[0] if t.dim() else None for t in tensors}
    if len(sizes) != 1 or None in sizes:
        shapes = ", ".join(str(list(t.shape)) for t in tensors) or "none"
        raise ArgumentError(
            f"{name}(x, params): stacked parameters have one leading size, that of the number of blocks, but the "
            f"tensors have the shapes {shapes}. A list has an entry for each block instead."
        )
    return [form.join(each) for each in zip(*(t.unbind(0) for t in tensors), strict=True)]
