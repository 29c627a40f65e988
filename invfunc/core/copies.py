"""Operations that read parameters and have no rule: on expanded parameters, or on a copy for each sample."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import mapped
from invfunc.core.marks import SUMMED, Known, Mark, Node, Run, Unsupported, know, named, replaced, tensors
from invfunc.core.order import Order
from invfunc.core.probe import axes_of
from invfunc.core.tables import MOVES, PLACING
from invfunc.core.uses import Copies, Expanded, Grown, back, front


def expanded(run: Run, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
    """Run a pointwise operation with the parameters expanded."""
    shape = torch.broadcast_shapes(*[x.shape for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    copies = {id(x): run.alias(x.expand(shape)) for x, _ in params}
    out = func(*replaced(args, copies), **{k: replaced(x, copies) for k, x in kwargs.items()})
    out = run.mark(rule, func, args, kwargs, data, out)
    axis = known.axis if (known := getattr(out, "_known", None)) is not None else None
    if isinstance(axis, tuple) and next(iter(tensors(out))).requires_grad:
        for x, node in {id(x): (x, node) for x, node in params}.values():
            run.use(Expanded(node, x, axis), copies[id(x)])
    elif axis is SUMMED:
        raise Unsupported("a sum over the samples meets a parameter")
    return out


def grown(run: Run, out: torch.Tensor, node: Node, value: torch.Tensor, at: int) -> torch.Tensor:
    """A parameter that was expanded or repeated to all samples, of which each has its copy."""
    sizes = out.shape[out.ndim - value.ndim :]
    if any(s not in (1, o) for s, o in zip(value.shape, sizes, strict=True)):
        raise Unsupported("a parameter that is repeated")
    copy = run.alias(out)
    axis = (at, 1, 1)
    run.use(Grown(node, value, axis), copy)
    know(copy, Mark(run.token, axis, True))
    return copy


def copied(run: Run, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
    """Run any operation under vmap, with a copy of the parameters for each sample."""
    check_places(func, args, data, params)
    flat, structure = tree.flatten((args, kwargs))
    axes, nodes = {id(x): a for x, a in data}, {id(x) for x, _ in params}
    copies: dict[int, torch.Tensor] = {}
    given: list[Any] = []
    places: list[int] = []
    for x in flat:
        if id(x) in nodes:
            if id(x) not in copies:
                copies[id(x)] = run.alias(x.expand(run.n, *x.shape))
            x = copies[id(x)]
        elif id(x) in axes:
            at, order, _ = axes[id(x)]
            if run.n > 1 and isinstance(order, Order):
                x = order.front(x, at + x.ndim, 0, fill=False)
                x = x.squeeze(1) if -at > x.ndim - 1 else x
            else:
                x = front(x, axes[id(x)], run.n)
        else:
            given.append(x)
            continue
        places.append(len(given))
        given.append(x)
    with torch.no_grad():
        plain = func(*args, **kwargs)
    if not isinstance(plain, torch.Tensor):
        raise Unsupported("the result is no tensor")
    found = [(-1, 1, 1)] if run.n == 1 else axes_of(run, rule, func, args, kwargs, data, plain)
    axis = found[0] if isinstance(found, list) else found
    if axis is SUMMED:
        raise Unsupported("samples are summed with what is computed without them (does f close over its inputs?)")
    if not isinstance(axis, tuple):
        raise Unsupported("the samples are not in one dim of the result")
    run.ordered = run.ordered or isinstance(axis[1], Order)

    def one(*mapped: torch.Tensor) -> torch.Tensor:
        full = list(given)
        for i, x in zip(places, mapped, strict=True):
            full[i] = x
        own, named = tree.unflatten(full, structure)
        return func(*own, **named)

    out = mapped(one, randomness="different")(*(given[i] for i in places))
    if out[0].numel() * (1 if getattr(axis[1], "ragged", False) else run.n) != plain.numel():
        raise Unsupported("an operation in which parameters have an entry for each sample")
    out = out.squeeze(0) if run.n == 1 else back(out.flatten(1)[None], plain.shape, axis, run.n)[0]
    know(out, Mark(run.token, axis, out.requires_grad))
    for x, node in {id(x): (x, node) for x, node in params}.values():
        run.use(Copies(node, x), copies[id(x)])
    return out


def check_places(func: Any, args: tuple, data: list[Known], params: list[Known]) -> None:
    """Refuse operations that read or write parameters by the places of samples."""
    if named(func).strip("_") + "_" == named(func):
        raise Unsupported("parameters are written among samples")
    if func in MOVES and not any([x is args[0] for x, _ in data]):
        raise Unsupported("samples pick in the rows of parameters")
    if (func in PLACING or "scatter" in named(func)) and not any([x is args[0] for x, _ in params]):
        raise Unsupported("parameters are placed among samples")


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention whose mask is a parameter, as a relative bias."""
    if is_causal or enable_gqa or attn_mask is None:
        raise Unsupported("attention of parameters that is causal or grouped")
    products = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.nn.functional.dropout((products + attn_mask).softmax(-1), dropout_p, dropout_p > 0) @ v
