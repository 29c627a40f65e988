"""What a function may return, and whether parts of a batch give what the whole does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from invfunc._torch.functorch import innermost
from invfunc._torch.values import apart, check, size_of
from invfunc.errors import ArgumentError, RandomnessError, SampleAxisError, samples_lost
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM
from invfunc.operations.batch_axis.orders import Order
from invfunc.recording import Trace
from invfunc.recording.seen import not_shared
from invfunc.recording.tags import Derived, Sampled


def check_loss(trace: Trace, result: Any, name: str = "f") -> Sampled:
    """Check that a result is a loss, a scalar or one for each sample; returns how it depends on the parameters."""
    if not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        raise ArgumentError(f"{name} returned an object of type {kind}, but a loss is a tensor: a scalar or [N].")
    tag = trace.tag(result)
    if isinstance(tag, Sampled) and tag.lost:
        raise samples_lost(tag.lost, trace.unknown)
    if result.ndim:
        _check_each(trace, result, name)
    if not result.is_floating_point():
        raise ArgumentError(f"{name} returned dtype {result.dtype}, but a loss is a floating-point tensor.")
    if isinstance(tag, Derived):
        check_shared(trace, tag, name)
        return Sampled(None, around="the parameters alone")
    return tag if tag is not None else Sampled(None)


def _check_each(trace: Trace, result: torch.Tensor, name: str) -> None:
    """Check that a result with dimensions has the loss of each sample, in their order."""
    n, tag = trace.n, trace.tag(result)
    place = tag.place if isinstance(tag, Sampled) else None
    if tuple(result.shape) != (n,):
        kind = "a model function" if isinstance(place, Axis) else "no loss function"
        raise ArgumentError(
            f"{name} returned shape {tuple(result.shape)} for N = {n}, so it looks like {kind}; wanted is a loss "
            f"function, which returns a scalar or shape ({n},). Compute the loss in it, or sum over its other axes."
        )
    if isinstance(tag, Derived) and tag.untraced_at:
        raise samples_lost(f"the result of {name}, which no sample reaches that can be seen", unknown=True)
    if n > 1 and (place is BATCH_SUM or isinstance(tag, Derived)):
        raise ArgumentError(
            f"{name} returned shape ({n},), but its entries are not those of the {n} samples, which it sums over; "
            "wanted is a scalar or the [N] losses of the samples."
        )
    if isinstance(place, Axis) and place.rows is not None:
        raise ArgumentError(
            f"{name} returned shape ({n},), but its entries are not those of the {n} samples, one for each and "
            "in their order: some were selected, or moved. Put them back, or return their sum."
        )


def one_order(orders: Iterable[Order]) -> bool:
    """Whether the samples meet the parameters in one order at most, in which each of them is once."""
    found = list(orders)
    return len(found) <= 1 and all(bool(o) and sorted(o) == list(range(len(o))) for o in found)


def order_of(trace: Trace, result: torch.Tensor) -> list[int] | None:
    """The place of each sample of a scalar loss, in which they have to meet the parameters in one order."""
    orders = trace.orders
    if set(orders) <= {None} or not trace.apart or result.ndim:
        return None
    order, name = next((o, name) for o, name in orders.items() if o is not None)
    if not one_order(orders):
        raise SampleAxisError(
            f"at `{name}` the samples are in another order than in the batch, but not everywhere: their gradients "
            "are not defined. Put all batch arguments in that order before they are passed."
        )
    return sorted(range(trace.n), key=order.__getitem__)


def check_shared(trace: Trace, tag: Derived, name: str) -> None:
    """Check that a loss is that of some samples, if it matters how they share it."""
    if not trace.apart:
        return
    why = not_shared(tag, trace.left)
    if why:
        raise samples_lost(why, unknown=False)
    raise SampleAxisError(
        f"no sample reaches the result of {name}: it is computed from the parameters alone, as an L2 term is, and no "
        "sample has a gradient of its own. Return its sum with the loss of the data; then each sample has 1/N of it."
    )


def no_outputs(result: Any) -> ArgumentError:
    """The error for a function that returned no outputs."""
    kind = type(result).__name__
    return ArgumentError(f"f returned no tensors but an object of {kind}; outputs are floating-point tensors.")


def output_axis(trace: Trace, z: torch.Tensor, dim: int, path: str = "") -> Axis:
    """Check one output of a model function, at a place in what it returned; returns where its samples are."""
    among = f" at {path}" if path else ""
    pick = " Pick the outputs that the loss reads, as in `lambda params, x: f(params, x).logits`." if path else ""
    if not z.is_floating_point():
        raise ArgumentError(f"f returned a tensor of {z.dtype}{among}, but outputs are floating-point tensors.{pick}")
    if z.ndim == 0 or not -z.ndim <= dim < z.ndim or z.shape[dim] != trace.n:
        alone = "looks like a loss function; call the transform on it alone"
        kind = alone if z.ndim == 0 and not path else "has other outputs"
        raise ArgumentError(
            f"f returned shape {tuple(z.shape)}{among} for N = {trace.n}, so it {kind}; wanted is a model function, "
            f"which returns outputs with the samples along axis {dim}.{pick}"
        )
    tag = trace.tag(z)
    if isinstance(tag, Sampled) and tag.lost:
        raise samples_lost(tag.lost, trace.unknown)
    if isinstance(tag, Sampled) and trace.n > 1 and tag.place != Axis(dim % z.ndim):
        raise ArgumentError(
            f"f returned outputs with their samples along {tag.place}, not axis {dim % z.ndim}; pass out_dims."
        )
    return Axis(None) if trace.n == 1 else Axis(dim % z.ndim)


def cannot_draw() -> RandomnessError:
    return RandomnessError(
        "f draws random numbers (dropout?), and it takes several sweeps over chunks of samples, which would draw "
        "others. Chunk over outputs or params, use eval mode, or give the model and the loss apart."
    )


def check_in_part(
    z: torch.Tensor,
    axis: Axis,
    n: int,
    whole: torch.Tensor,
    place: Axis,
    total: int,
    part: slice | torch.Tensor,
    error: Callable[[], Exception],
) -> None:
    """Check that a tensor of some samples has the entries of these in that of all of them."""
    wanted = place.expose(whole, total)[part]
    if place.rows is None:
        if z.numel() != wanted.numel():
            raise error()
        return check_same(axis.expose(z, n), wanted, error)
    count = int(innermost(place.expose(torch.ones_like(whole), total)[part].sum()))
    room = axis.rows is not None or axis.expose(z, n).shape == wanted.shape
    if not room or z.numel() != count:
        raise error()
    check_same(z, axis.restore(wanted, n), error)


def check_same(a: torch.Tensor, b: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Check that values agree, at the end of a call where its checks are there."""
    if a.shape != b.shape:
        raise error()
    check(apart(a, b, size_of(b)), error)
