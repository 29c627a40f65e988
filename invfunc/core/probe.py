"""The batch axis after any operation, by which entries change with which samples.

For each bit of the numbers of the samples, the operation runs with other numbers in the samples that have the bit,
and in those that have not. An entry that changes in exactly one of both depends on one sample, whose number the bits
are. It runs on random numbers, also in place of constants, once for each signature, so that it finds all that does
not hang on values: `ROUNDS` times, as the largest of some numbers may stay the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import dispatched, innermost, plainly, transforming, undispatched, unseen, unwatched
from invfunc._torch.values import wide
from invfunc.core.marks import SUMMED, Known, Run, Unsupported, named, option, replaced, tensors
from invfunc.core.rules import found, single
from invfunc.core.tables import GROUPED, MOVES, MOVING, PLACING, SORTS, SUMS
from invfunc.operations.axis import Order, alone, numbers, read

ROUNDS = 3
_KNOWN: dict[Any, list[Any]] = {}


def probe(n: int, func: Callable, args: tuple, kwargs: dict[str, Any], data: list[Known]) -> list[Any]:
    """The axis of each tensor of the result."""
    if named(func) == "custom_function_call":
        raise Unsupported("a custom autograd.Function, whose backward pass may mix samples")
    key = _signature(func, args, kwargs, data, n)
    if key in _KNOWN:
        return list(_KNOWN[key])
    if transforming() or dispatched():
        args, kwargs, data = _outside(args, kwargs, data, key is None)
    narrow = torch.autocast(data[0][0].device.type, enabled=False)  # two numbers are rarely the same in float32
    with plainly(), unseen(), unwatched(), torch.random.fork_rng(devices=[]), torch.no_grad(), narrow:
        for drawing in ("all", "floats", "none") if key is not None else ("floats", "none"):
            try:
                axes = _probed(n, func, args, kwargs, data, drawing)
                break
            except (RuntimeError, IndexError):  # it does not take all numbers
                pass
        else:
            raise Unsupported("it takes none of the numbers that are tried")
    if drawing == "all" and not any([isinstance(axis[1], Order) for _, axis in data]):
        _KNOWN[key] = axes
    return list(axes)


def _signature(func: Callable, args: tuple, kwargs: dict[str, Any], data: list[Known], n: int) -> Any:
    """All that the axis of the result depends on, if not on values; None where a tensor without samples is an index
    or a mask."""
    axes = {id(x): axis for x, axis in data}
    flat, structure = tree.flatten((args, kwargs))
    key: list[Any] = []
    for x in flat:
        if isinstance(x, torch.Tensor):
            if x.layout is not torch.strided or (id(x) not in axes and not x.is_floating_point()):
                return None
            key.append((x.shape, x.dtype, axes.get(id(x))))
        else:
            key.append((type(x), repr(x) if isinstance(x, slice) else x))  # which has no hash
    whole = (func, n, str(structure), *key)
    try:
        hash(whole)
    except TypeError:
        return None
    return whole


class Unknown(Unsupported):
    """Raised where nothing is known of an operation, as it hangs on values that differ in a transform."""


def _outside(args: tuple, kwargs: dict[str, Any], data: list[Known], valued: bool) -> Any:
    """Tensors of the same shapes that are of no level of torch.func; integers are zeros and ones, or as they are where
    these are `valued`."""
    by: dict[int, torch.Tensor] = {}
    followed = {id(x) for x, _ in data}

    def made(x: torch.Tensor) -> torch.Tensor:
        if valued and id(x) not in followed and not x.is_floating_point():
            by[id(x)] = y = innermost(x)
            if y.shape != x.shape or dispatched():
                raise Unknown("an operation that hangs on values, inside of a transform")
        if id(x) not in by:
            shape, dtype = tuple(x.shape), x.dtype
            with plainly(), unseen():
                y = torch.rand(shape, device=x.device)
                by[id(x)] = y.to(dtype) if dtype.is_floating_point else (y > 0.5).to(dtype)
        return by[id(x)]

    args, kwargs = tree.map_tensors(made, (args, kwargs))
    return args, kwargs, [(made(x), axis) for x, axis in data]


def _probed(n: int, func: Callable, args: tuple, kwargs: dict[str, Any], data: list[Known], drawing: str) -> list[Any]:
    """The axes; where "all" numbers are drawn, they hold for all, and else, with the constants of this call, for it.

    With "none", those of other samples take the place of a sample's.
    """
    axes, device = {id(x): axis for x, axis in data}, data[0][0].device
    generator = torch.Generator(device).manual_seed(0)
    flat, structure = tree.flatten((args, kwargs))
    low = {id(x): wide(x) for x in flat if isinstance(x, torch.Tensor)}
    axes = {id(low[i]): axis for i, axis in axes.items()}
    flat: list[Any] = [low.get(id(x), x) for x in flat]

    def call(chosen: torch.Tensor) -> list[torch.Tensor]:
        mixed: list[Any] = []
        for x, a, b in zip(flat, ones, others, strict=True):
            if isinstance(x, torch.Tensor) and id(x) in axes:
                a = torch.where(chosen[numbers(x.shape, axes[id(x)], n, device)], b, a)
            mixed.append(a.clone() if isinstance(a, torch.Tensor) else a)
        torch.default_generator.manual_seed(0)
        given, options = tree.unflatten(mixed, structure)
        return [t for t in tree.flatten(func(*given, **options))[0] if isinstance(t, torch.Tensor)]

    number = torch.arange(n, device=device)
    there: list[torch.Tensor] = []
    absent: list[torch.Tensor] = []
    for turn in range(ROUNDS if drawing == "all" else 1):
        if drawing != "none":
            ones, others = ([_drawn(x, id(x) in axes, drawing, generator) for x in flat] for _ in range(2))
        else:
            ones = flat
            others = [x.detach().roll(max(1, axes[id(x)][2]), axes[id(x)][0]) if id(x) in axes else x for x in flat]
            if all([torch.equal(x, y) for x, y in zip(ones, others, strict=True) if isinstance(x, torch.Tensor)]):
                raise Unsupported("samples that are all the same, of which an operation does not take others")
        base = call(number < 0)
        if turn == 0:
            there, absent = ([torch.zeros(t.shape, dtype=torch.long, device=device) for t in base] for _ in range(2))
        for bit in range((n - 1).bit_length()):
            has = (number >> bit & 1).bool()
            for i, results in enumerate(zip(base, call(has), call(~has), strict=True)):
                one, zero = (_changed(t, results[0]) for t in results[1:])
                there[i] |= one.long() << bit
                absent[i] |= zero.long() << bit
    return [_axis_of(has, not_, n) for has, not_ in zip(there, absent, strict=True)]


def _drawn(x: Any, followed: bool, drawing: str, generator: torch.Generator) -> Any:
    """An argument with other numbers."""
    if not isinstance(x, torch.Tensor) or (drawing == "floats" and not followed):
        return x
    if x.is_floating_point():
        return torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    if drawing == "floats" and x.dtype == torch.bool:
        return x
    entries = x.detach().reshape(-1)
    if x.dtype != torch.bool and not bool((entries != entries[:1]).any()):  # else nothing would change
        entries = torch.cat([entries, (entries[:1] == 0).to(x.dtype)])
    return entries[torch.randint(entries.numel(), x.shape, generator=generator, device=x.device)]


def _axis_of(there: torch.Tensor, absent: torch.Tensor, n: int) -> Any:
    """The axis of a result, from the bits that the samples have, and have not, with which its entries change."""
    if bool((there & absent).any()):
        raise Unsupported("an entry of the result depends on several samples")
    seen = there | absent != 0
    axis = read(torch.where(seen, there, -1), n)
    if axis is None and bool(seen.any()):
        raise Unsupported("the samples are not along one dim of the result")
    return axis


def _changed(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return (x != before) & ~((x != x) & (before != before))


def moved(n: int, func: Callable, args: tuple, kwargs: dict[str, Any], data: list[Known], out: Any) -> Any:
    """The axes after an operation that moves the entries of its first argument: it runs on the numbers of the samples,
    if that has some."""
    axes = {id(x): axis for x, axis in data}
    given = tensors(args[:1])
    if func is torch.repeat_interleave and len(args) + len(kwargs) == 1:
        return None  # of numbers of repetitions alone
    if not any([id(x) in axes for x in given]):
        return None
    with torch.no_grad(), undispatched(), unwatched():
        by = {
            id(x): numbers(x.shape, axes[id(x)], n, x.device).contiguous()
            if id(x) in axes
            else torch.full(x.shape, -1, device=x.device)
            for x in given
        }
        if func in SORTS:
            dim = option(args, kwargs, 2 if "topk" in named(func) else 1, "dim", -1)
            return [found(by[id(args[0])].gather(dim, out[1]), n), Unsupported("an order that hangs on all samples")]
        return [found(x, n) for x in tensors(func(replaced(args[0], by), *args[1:], **kwargs))]


def axes_of(run: Run, rule: Any, func: Any, args: tuple, kwargs: dict, data: list[Known], out: Any) -> Any:
    """The axis of the result: one for all of its tensors, or a list."""
    placed = func in PLACING and all([x is not args[0] for x, _ in data])  # among rows of others
    if -data[0][1][0] > data[0][0].ndim and not placed and single(data):
        orders, every = {axis[1] for _, axis in data}, [*tensors(out)]
        if len(orders) == 1:
            return [alone(y.ndim, data[0][1][1].rows, run.n) for y in every]
        if func in SUMS and not every[0].ndim:
            return SUMMED
    try:
        axis = rule(run.n, data, args, kwargs, out) if rule and func not in MOVES else None
    except Unsupported:
        if func not in MOVING:
            raise
        axis = None
    if axis is None and func in MOVING:
        axis = moved(run.n, func, args, kwargs, data, out)
    if axis is not None:
        return axis
    try:
        return probe(run.n, func, args, kwargs, data)
    except Unsupported as error:
        if func not in GROUPED or isinstance(error, Unknown):
            raise
        return SUMMED
