"""Recurrent layers and cells, written out in operations that can be followed.

Each takes the arguments of torch's own function, returns the same values and draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.operations.cells import GRU, LSTM, RELU, TANH, Cell, CellWeights, Tensors, like, resized
from invfunc.operations.operation import define
from invfunc.operations.recurrences import at_once

# Layers of cells


Unroll = Callable[[Cell, torch.Tensor, Tensors, CellWeights, bool, list[int] | None], tuple[torch.Tensor, Tensors]]
"""From the inputs, over time steps along axis 0 or over those of a packed sequence (`sizes`: how many of the samples,
the first ones, have each step), and the first state to the outputs and the last state."""


def _unrolled(
    cell: Cell, x: torch.Tensor, state: Tensors, w: CellWeights, backwards: bool, sizes: list[int] | None
) -> tuple[torch.Tensor, Tensors]:
    """One step after the other."""
    if sizes is not None:
        return _unrolled_packed(cell, x, state, w, backwards, sizes)
    added = cell.of_input(x, w)
    state = like(added, state)
    gates: Iterable[Tensors] = zip(*(part.unbind() for part in added), strict=True)
    outputs: list[torch.Tensor] = []
    for now in reversed(list(gates)) if backwards else gates:
        state = cell.step(now, state, w)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _unrolled_packed(
    cell: Cell, x: torch.Tensor, state: Tensors, w: CellWeights, backwards: bool, sizes: list[int]
) -> tuple[torch.Tensor, Tensors]:
    added = cell.of_input(x, w)
    parts = [part.split(sizes) for part in added]
    first = like(added, tuple(_paired(h, x[: sizes[0]]) for h in state))
    state, ended, outputs = (
        tuple(h[: sizes[-1 if backwards else 0]] for h in first),
        list[Tensors](),
        list[torch.Tensor](),
    )
    for t in reversed(range(len(sizes))) if backwards else range(len(sizes)):
        if sizes[t] < len(state[0]):
            ended.append(tuple(h[sizes[t] :] for h in state))
        state = cell.step(tuple(part[t] for part in parts), resized(state, first, sizes[t]), w)
        outputs.append(state[0])
    last = tuple(torch.cat(h) if ended else h[0] for h in zip(state, *ended[::-1], strict=True))
    return torch.cat(outputs[::-1] if backwards else outputs), last


def _paired(h: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A state of the samples whose rows these are, which a trace that follows the samples sees here."""
    return torch.where(rows[:, :1] == 0, h, h)


def _layers(name: str, cell: Cell, unroll: Unroll = _unrolled) -> Callable[..., Tensors]:
    """The function with both of torch's signatures."""

    def either(input: torch.Tensor, second: Any, third: Any, *others: Any) -> Tensors:
        """Batch sizes come second if the input is packed, and `batch_first` last if it is not."""
        if not isinstance(others[0], bool):
            return packed(input, second.tolist(), third, *others)
        return padded(input, second, third, *others)

    def packed(data: torch.Tensor, sizes: list[int], hx: Any, *others: Any) -> Tensors:
        states = (hx,) if name != "lstm" else hx
        if any(h.shape[1] != sizes[0] for h in states):  # torch does not broadcast either
            raise ValueError(f"{name}: one state for each of the {sizes[0]} samples is wanted.")
        return _run(cell, unroll, sizes, data, states, *others)

    def padded(input: torch.Tensor, hx: Any, *others: Any) -> Tensors:
        batch_first = others[-1]
        x = input.transpose(0, 1) if batch_first else input
        states = (hx,) if name != "lstm" else hx
        if x.ndim != 3 or any(h.shape[1:2] != x.shape[1:2] for h in states):  # torch does not broadcast either
            shapes = ", ".join(str(tuple(y.shape)) for y in (input, *states))
            raise ValueError(f"{name}: the input has three dimensions and one state for each sample; got {shapes}.")
        x, *last = _run(cell, unroll, None, x, states, *others[:-1])
        return (x.transpose(0, 1) if batch_first else x, *last)

    return either


def _run(
    cell: Cell,
    unroll: Unroll,
    sizes: list[int] | None,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Tensors:
    """All layers in all directions, over time steps along axis 0 or over those of a packed sequence."""
    directions = 2 if bidirectional else 1
    width = len(params) // (num_layers * directions)
    first = list(zip(*(h.unbind() for h in states), strict=True))
    last: list[Tensors] = []
    for layer in range(num_layers):
        if layer > 0 and train and dropout != 0:
            x = F.dropout(x, dropout)
        outputs = []
        for backwards in (False, True)[:directions]:
            weights, begun = _weights(params[len(last) * width :][:width], has_biases), first[len(last)]
            if (
                sizes is None and len(first) == x.shape[1]
            ):  # the axis of the layers may be taken for that of the samples
                begun = tuple(_paired(h, x[0]) for h in begun)
            output, state = unroll(cell, x, begun, weights, backwards, sizes)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (x, *(torch.stack(h) for h in zip(*last, strict=True)))


def _weights(params: Sequence[torch.Tensor], has_biases: bool) -> CellWeights:
    w_ih, w_hh, *others = params
    biases = others[:2] if has_biases else (None, None)
    return CellWeights(w_ih, w_hh, *biases, *others[2 if has_biases else 0 :])


def _cell(name: str, cell: Cell) -> Callable[..., Any]:
    def run(
        input: torch.Tensor,
        hx: Any,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> Any:
        weights = CellWeights(w_ih, w_hh, b_ih, b_hh)
        gates = cell.of_input(input, weights)
        state = cell.step(gates, like(gates, (hx,) if name != "lstm_cell" else hx), weights)
        return state if name == "lstm_cell" else state[0]

    return run


# Packed sequences


def pack_padded_sequence(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Tensors:
    """The rows of all samples that have a first step, then of all that have a second one, and so on."""
    ordered = lengths.sort(descending=True, stable=True).values
    if not lengths.numel() or bool((lengths != ordered).any()) or bool((lengths <= 0).any()):
        raise RuntimeError("pack_padded_sequence: lengths are positive, and in decreasing order if enforce_sorted.")
    x = input.transpose(0, 1) if batch_first else input
    steps = torch.arange(int(lengths.max()), device=lengths.device)
    there = steps[:, None] < lengths
    return x[: len(steps)][there.to(x.device)], there.sum(1).cpu()


def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> Tensors:
    """The rows of each sample one after the other, and how many there are."""
    numbers = torch.arange(int(batch_sizes[0]))
    step, sample = (numbers < batch_sizes[:, None]).nonzero(as_tuple=True)
    padded = data.new_full((total_length, len(numbers), *data.shape[1:]), padding_value)
    padded = padded.index_put((step.to(data.device), sample.to(data.device)), data)
    return padded.transpose(0, 1) if batch_first else padded, sample.bincount()


def _recurrent(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer without cuDNN, whose kernels have no second derivative."""
    with torch.backends.cudnn.flags(enabled=False):
        return func(*args, **kwargs)


_CELLS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}


AT_ONCE: dict[str, Callable[..., Tensors]] = {}
"""The layers with all steps in a few operations, of which first derivatives are right."""


def steps_at_once(name: str, args: tuple, params: Container[int]) -> Callable[..., Tensors] | None:
    """The layer with all steps at once, if none of its first states is a parameter, and there is no projection."""
    hx, weights, has_biases, number, _, _, two = args[1:8] if isinstance(args[3], bool) else args[2:9]
    learned = any(id(h) in params for h in tree.tensors(hx))
    projected = len(weights) > number * (1 + two) * (4 if has_biases else 2)
    return None if learned or projected else AT_ONCE[name]


for _name, _cell_of in _CELLS.items():
    AT_ONCE[_name] = _layers(_name, _cell_of, at_once)
    define(_name, composed=_layers(_name, _cell_of), twice=_recurrent)
    define(f"{_name}_cell", composed=_cell(f"{_name}_cell", _cell_of))
define("_pack_padded_sequence", composed=pack_padded_sequence)
define("_pad_packed_sequence", composed=pad_packed_sequence)
