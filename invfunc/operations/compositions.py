"""Fused functions of torch written out in operations that can be followed: recurrent layers and cells, bags.

Each takes the arguments of torch's own function, returns the same values and draws the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._functorch import checkpointing, transforming
from invfunc.errors import SampleAxisError, samples_lost

# A step of a cell: from what the input adds to its gates, the state before and the weights to the next state


@dataclass
class Weights:
    """The weights of a recurrent layer in one direction; `w_hr` projects the hidden state of an LSTM."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    w_hr: torch.Tensor | None = None


Tensors = tuple[torch.Tensor, ...]
"""A state: the hidden state, which is also the output, then what else the cell remembers."""
Step = Callable[[Tensors, Tensors, Weights], Tensors]


def _lstm(x: Tensors, state: Tensors, w: Weights) -> Tensors:
    h, c = state
    i, f, g, o = (x[0] + F.linear(h, w.w_hh, w.b_hh)).chunk(4, -1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    h = o.sigmoid() * c.tanh()
    return (h if w.w_hr is None else F.linear(h, w.w_hr)), c


def _gru(x: Tensors, state: Tensors, w: Weights) -> Tensors:
    (h,) = state
    h_r, h_z, h_n = F.linear(h, w.w_hh, w.b_hh).chunk(3, -1)
    r, z = (x[0] + h_r).sigmoid(), (x[1] + h_z).sigmoid()
    n = torch.addcmul(x[2], r, h_n).tanh()  # the reset gate scales the hidden bias too
    return (torch.lerp(n, h, z),)


def _rnn(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    def step(x: Tensors, state: Tensors, w: Weights) -> Tensors:
        return (nonlinearity(x[0] + F.linear(state[0], w.w_hh, w.b_hh)),)

    return step


def _gates(step: Step, x: torch.Tensor, w: Weights) -> Tensors:
    """The part of the gates that comes from the input, at all time steps at once."""
    gates = F.linear(x, w.w_ih, w.b_ih)
    return gates.chunk(3, -1) if step is _gru else (gates,)


def _like(gates: Tensors, state: Sequence[torch.Tensor]) -> Tensors:
    """The state in the precision that autocast gives to the gates."""
    return tuple(h if h.dtype == gates[0].dtype else h.to(gates[0].dtype) for h in state)


# Layers of cells


def _unroll(step: Step, x: torch.Tensor, state: Tensors, w: Weights, backwards: bool) -> tuple[torch.Tensor, Tensors]:
    """The outputs at all time steps, which lie along axis 0, and the last state."""
    added = _gates(step, x, w)
    state = _like(added, state)
    gates: Iterable[Tensors] = zip(*(part.unbind() for part in added), strict=True)
    outputs: list[torch.Tensor] = []
    for now in reversed(list(gates)) if backwards else gates:
        state = step(now, state, w)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _layers(name: str, step: Step) -> Callable[..., Tensors]:
    def run(
        input: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Tensors:
        states = (hx,) if name != "lstm" else hx
        if isinstance(params, torch.Tensor) or isinstance(states, torch.Tensor):  # batch_sizes come second
            raise SampleAxisError(
                f"`{name}`: a packed sequence holds the samples of each step together, where they cannot be followed. "
                "Pad the sequences to the same length and mask the loss."
            )
        x = input.transpose(0, 1) if batch_first else input
        if x.ndim != 3 or any(h.shape[1:2] != x.shape[1:2] for h in states):  # torch does not broadcast either
            shapes = ", ".join(str(tuple(y.shape)) for y in (input, *states))
            raise ValueError(f"{name}: the input has three dimensions and one state for each sample; got {shapes}.")
        directions = 2 if bidirectional else 1
        width = len(params) // (num_layers * directions)
        first = list(zip(*(h.unbind() for h in states), strict=True))
        last: list[Tensors] = []
        for layer in range(num_layers):
            if layer > 0 and train and dropout != 0:
                x = F.dropout(x, dropout)
            outputs = []
            for backwards in (False, True)[:directions]:
                weights = _weights(params[len(last) * width :][:width], has_biases)
                output, state = _unroll(step, x, first[len(last)], weights, backwards)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.stack(h) for h in zip(*last, strict=True)))

    return run


def _weights(params: Sequence[torch.Tensor], has_biases: bool) -> Weights:
    w_ih, w_hh, *others = params
    biases = others[:2] if has_biases else (None, None)
    return Weights(w_ih, w_hh, *biases, *others[2 if has_biases else 0 :])


def _cell(name: str, step: Step) -> Callable[..., Any]:
    def run(
        input: torch.Tensor,
        hx: Any,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> Any:
        weights = Weights(w_ih, w_hh, b_ih, b_hh)
        gates = _gates(step, input, weights)
        state = step(gates, _like(gates, (hx,) if name != "lstm_cell" else hx), weights)
        return state if name == "lstm_cell" else state[0]

    return run


# Bags


def _refuse(name: str, **options: Any) -> None:
    for option, given in options.items():
        if given:
            raise SampleAxisError(f"`{name}`: {option} depends on which indices the whole batch has. Leave it out.")


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    _refuse("embedding", max_norm=max_norm is not None, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None and not -len(weight) <= padding_idx < len(weight):
        raise ValueError(f"embedding: padding_idx is {padding_idx}, but there are {len(weight)} rows.")
    return torch.embedding(weight, input, -1 if padding_idx is None else padding_idx % len(weight))


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    if offsets is not None or input.ndim != 2 or input.is_nested:
        raise SampleAxisError(
            "`embedding_bag`: bags of different lengths lie one behind the other, where they cannot be followed. Give "
            "[N, L] indices, padded with padding_idx."
        )
    _refuse("embedding_bag", max_norm=max_norm is not None, scale_grad_by_freq=scale_grad_by_freq)
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        raise ValueError(f"embedding_bag: mode is {mode!r}; it is one of sum, mean, max, with per_sample_weights sum.")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    entries = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        entries = entries * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return entries.max(1).values if mode == "max" else entries.mean(1) if mode == "mean" else entries.sum(1)
    padding = (input == padding_idx).unsqueeze(-1)
    if mode == "max":
        largest = entries.masked_fill(padding, -math.inf).max(1).values
        return largest.masked_fill(padding.all(1), 0)
    total = entries.masked_fill(padding, 0).sum(1)
    return total if mode == "sum" else total / padding.logical_not().sum(1).clamp(min=1)


def broadcast_tensors(*given: Any) -> Tensors:
    tensors = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Weight normalisation written out, as the second derivative of torch's is wrong (torch 2.13)."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`prelu` written out, as the derivative of torch's is wrong where torch.vmap batches both arguments."""
    if weight.numel() > 1 and input.ndim > 1:
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight * input)


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`multi_margin_loss` written out, as torch's has no second derivative, and none in forward mode."""
    if p not in (1, 2) or size_average is not None or reduce is not None:
        raise ValueError(
            f"multi_margin_loss: p is 1 or 2, not {p}; in place of size_average and reduce give reduction."
        )
    own = target.unsqueeze(-1)
    over = torch.relu(margin - input.gather(-1, own) + input) ** p
    over = over if weight is None else over * weight.expand(input.shape).gather(-1, own)
    losses = over.scatter(-1, own, 0).mean(-1)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None) -> torch.Tensor:
    """`cdist` written out, as torch's has a wrong derivative under vmap, and no second derivative."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


_STEPS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu)}
COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "broadcast_tensors": broadcast_tensors,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "_weight_norm": weight_norm,
    "prelu": prelu,
    "multi_margin_loss": multi_margin_loss,
    "cdist": cdist,
    **{name: _layers(name, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": _cell(f"{name}_cell", step) for name, step in _STEPS.items()},
}
"""The compositions by the names of torch's functions."""


def composition(func: Callable) -> Callable[..., Any] | None:
    """The operations of which a function is composed, where it is better followed in those."""
    name = getattr(func, "__name__", "")
    if name not in COMPOSITIONS or (name == "prelu" and not transforming()):
        return None
    if name.startswith(("embedding", "multi_margin")) and getattr(func, "__module__", None) != "torch.nn.functional":
        return None  # torch's own take the same arguments in another order
    if name not in ("embedding", "broadcast_tensors", "_weight_norm", "prelu", "multi_margin_loss") and checkpointing():
        raise samples_lost(
            f"`{name}` inside of torch.utils.checkpoint (it is followed step by step, but the hooks on saved tensors "
            "have to meet the same operations again; it can be taken out of the checkpoint)",
            unknown=True,
        )
    return COMPOSITIONS[name]


def states(func: Callable, args: tuple) -> list[tuple[torch.Tensor, int]]:
    """The initial states that a recurrent function is called with, each with the dimension of its sample axis."""
    name = getattr(func, "__name__", "")
    if name.removesuffix("_cell") not in _STEPS:
        return []
    hx = args[1] if isinstance(args[1], (tuple, list)) else args[1:2]
    return [(h, 0 if name.endswith("cell") else 1) for h in hx]
