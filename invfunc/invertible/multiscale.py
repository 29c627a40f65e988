"""Flows of which a half leaves at each scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.invertible.chain import Chain, Step, checkpointed
from invfunc.pairs.pair import Invertible, Law, as_pair, rewrapped
from invfunc.pairs.part import per_sample
from invfunc.pairs.value import Value


def multiscale(*flows: Callable[..., Any], split_dim: int = 1) -> Invertible:
    """Flows one after the other; before each but the first, half of the state leaves.

        def f(x, params):
            left = []
            for flow, p in zip(flows[:-1], params):
                x, half = flow(x, p).tensor_split(2, split_dim)
                left.append(half)
            return (flows[-1](x, params[-1]), *reversed(left))

    So the numbers that leave early cost less, and each scale sees a state of its own width.

    Args:
        flows: each an `Invertible` on one tensor, such as a `chain` of the steps of a scale, or a block of one, which
            keeps its options. They are pure in torch.func's sense (see the conventions).
        split_dim: the axis along which the state is divided, that of the channels.

    Returns:
        An `Invertible` `(x, params, *args, **kwargs) -> (last, ..., first)`, with an entry of `params` for each flow
        and further arguments for all flows, as in `chain`; its memory does not grow with the depth of a scale.
        `with_log_det` of it carries the log-determinants of all flows; the inverse takes the tuple and gives x. Of a
        single flow the result is a tensor.

    Raises:
        ArgumentTypeError: a flow is not an `Invertible`.
        ArgumentError: there are no flows, a flow hides something, or its result has no two halves along this axis.

    Example:
        >>> import torch, invfunc
        >>> double = invfunc.Invertible(lambda x: 2 * x, lambda y: y / 2)
        >>> scales = invfunc.pairs.multiscale(double, double, double)
        >>> scales(torch.ones(1, 4))
        (tensor([[8.]]), tensor([[4.]]), tensor([[2., 2.]]))
        >>> scales.inverse(scales(torch.ones(1, 4)))
        tensor([[1., 1., 1., 1.]])

    Composes with: `invertible_checkpoint`, `invert`, `with_log_det`, `chain`.

    Cost: that of the flows, and a copy of the state for each.

    Source: Dinh, Sohl-Dickstein and Bengio, Real NVP, ICLR 2017; Kingma and Dhariwal, Glow, NeurIPS 2018.
    """
    if not flows:
        raise ArgumentError("multiscale(*flows): there are no flows. Pass one for each scale.")
    if not isinstance(split_dim, int) or isinstance(split_dim, bool):
        raise ArgumentTypeError(f"multiscale(..., split_dim={split_dim!r}): split_dim is an axis, a whole number.")
    pairs = [as_pair(f"multiscale(*flows): flow {i}", flow) for i, flow in enumerate(flows)]
    for pair in pairs:
        if pair.hidden:
            raise ArgumentError(f"multiscale(*flows): {pair!r} hides something beside its result, which has no scale.")
    halved = _Halved(split_dim).pair(f"halved(split_dim={split_dim})")
    firsts = [rewrapped(flow, _of_first(pair)) for flow, pair in zip(flows, pairs, strict=True)]
    blocks = [block for first in firsts for block in (first, halved)][:-1]
    return _Multiscale(tuple(checkpointed(block, "multiscale") for block in blocks), None).pair()


class _Multiscale(Chain):
    """Flows on the first tensor of a state, and in between what divides that tensor."""

    @property
    def name(self) -> str:
        return f"multiscale({', '.join(repr(block.pair) for block in self.blocks[::2])})"

    def each(self, params: Any) -> Iterable[Step]:
        flows, halved = self.blocks[::2], self.blocks[1::2]
        for i, (flow, entry) in enumerate(zip(flows, self.entries(params, len(flows)), strict=True)):
            yield flow, entry
            if i < len(halved):
                yield halved[i], None


def _of_first(pair: Invertible, summed: bool = False) -> Invertible:
    """A pair on the first tensor of a state; of a composition that of its blocks, each of which frees its own.

    `summed` says that a sum of log-determinants stands beside the state.
    """
    if pair.composition is not None:
        return pair.composition.changed(lambda block: replace(block, pair=_of_first(block.pair), has_aux=False))
    forward, inverse = (_OfFirst(way, len(pair.shared), summed) for way in (pair.forward, pair.inverse))
    log_det = None if pair.log_det is None else _OfFirst(pair.log_det, len(pair.shared), returns=False)
    carried = None if pair.carried is None else _of_first(pair.carried, summed=True)
    return Invertible(forward, inverse, pair.shared, log_det=log_det, name=repr(pair), carried=carried)


@dataclass(frozen=True, eq=False)
class _OfFirst(Value):
    """A function of x as one of a state: of the first tensor in a tuple, or of a tensor alone."""

    fn: Callable
    shared: int
    """How many functions stand in front of x."""
    summed: bool = False
    returns: bool = True
    """Whether it returns a state."""

    def __call__(self, *given: Any, **kwargs: Any) -> Any:
        state, *args = given[self.shared :]
        state, s = state if self.summed else (state, None)
        x, *left = state if isinstance(state, tuple) else (state,)
        y = self.fn(*given[: self.shared], (x, s) if self.summed else x, *args, **kwargs)
        if not self.returns:
            return y
        y, s = y if self.summed else (y, None)
        state = (y, *left) if left else y
        return (state, s) if self.summed else state


@dataclass(frozen=True, eq=False)
class _Halved(Law):
    """Divides the first tensor of a state into two; what the flows get beside it says nothing about that."""

    dim: int

    def forward(self, state: Any, *given: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        y, *left = state if isinstance(state, tuple) else (state,)
        if not isinstance(y, torch.Tensor) or not -y.dim() <= self.dim < y.dim() or y.shape[self.dim] < 2:
            what = f"of shape {list(y.shape)}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
            raise ArgumentError(
                f"multiscale(..., split_dim={self.dim}): what leaves a flow is {what}, which has no two halves there."
            )
        first, second = y.tensor_split(2, self.dim)
        return first.contiguous(), second.contiguous(), *left  # so that one can be freed without the other

    def inverse(self, state: tuple[torch.Tensor, ...], *given: Any, **kwargs: Any) -> Any:
        first, second, *left = state
        x = torch.cat([first, second], self.dim)
        return (x, *left) if left else x

    def log_det(self, state: Any, *given: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.zeros_like(state[0] if isinstance(state, tuple) else state))
