"""Recurrent layers and cells, written out in operations that can be followed.

Each takes the arguments of torch's own function, returns the same values and draws the same random numbers.

All time steps of a layer can also be a few operations, whose first derivatives are right. A step is `s_t = cell(a_t,
s_(t-1))` with gates `a_t = x_t W^T + h_(t-1) U^T`. The states are computed beforehand, as numbers (`states_before`).
Given them, the gates of all steps are two products, and the outputs have a derivative in those which goes on to earlier
steps (`states_after`): that of each step alone, for all of them at once, and a linear recursion back. So what arrives
at the two products is what arrives there where one step follows the other; and there W and U have read the inputs, and
the states as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from invfunc import tree
from invfunc.operations.operation import define

Tensors = tuple[torch.Tensor, ...]
"""A state: the hidden state, which is also the output, then what else the cell remembers."""


@dataclass
class CellWeights:
    """The weights of a recurrent layer in one direction; `w_hr` projects the hidden state of an LSTM."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    w_hr: torch.Tensor | None = None


@dataclass(frozen=True)
class Cell:
    """The computation of a cell from `x W_ih^T + b_ih` and `h W_hh^T + b_hh`, at one time step or at several at
    once.
    """

    gates: Callable[[Tensors, torch.Tensor], Tensors]
    """From the parts of the first and the second to the gates, each of some numbers for each unit."""
    update: Callable[[Tensors, Tensors], Tensors]
    """From the gates and the state to the next state; each unit is by itself."""
    slopes: Callable[[Tensors, Tensors], Tensors]
    """From the same to how each part of the next state depends on the gates, and on what is `besides`:
    `[..., inputs, units]`."""
    parts: int = 1
    """Into how many parts of equal size the first is divided."""
    own: int = 0
    """Number of inputs, the first ones, that are gates of the first alone; the other gates are of the second, too."""
    besides: bool = True
    """True if the last part of the state is an input, the last one, other than by the gates."""

    def of_input(self, x: torch.Tensor, w: CellWeights) -> Tensors:
        """The part of the gates that comes from the input, at all time steps at once."""
        return self.divided(F.linear(x, w.w_ih, w.b_ih))

    def divided(self, x: torch.Tensor) -> Tensors:
        return x.chunk(self.parts, -1) if self.parts > 1 else (x,)

    def step(self, x: Tensors, state: Tensors, w: CellWeights) -> Tensors:
        """The next state."""
        h, *others = self.update(self.gates(x, F.linear(state[0], w.w_hh, w.b_hh)), state)
        return (h if w.w_hr is None else F.linear(h, w.w_hr), *others)


def like(gates: Tensors, state: Tensors) -> Tensors:
    """The state in the precision that autocast gives to the gates."""
    return tuple(h if h.dtype == gates[0].dtype else h.to(gates[0].dtype) for h in state)


def resized(state: Tensors, first: Tensors, many: int) -> Tensors:
    """The state of so many samples, the first ones: others have ended, or begin."""
    if many == len(state[0]):
        return state
    pairs = zip(state, first, strict=True)
    return tuple(h[:many] if many < len(h) else torch.cat([h, a[len(h) : many]]) for h, a in pairs)


def _sum(x: Tensors, h: torch.Tensor) -> Tensors:
    return (x[0] + h,)


def _lstm(gates: Tensors, state: Tensors) -> Tensors:
    i, f, g, o = gates[0].chunk(4, -1)
    c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _slopes_of_lstm(gates: Tensors, state: Tensors) -> Tensors:
    open_ = gates[0].sigmoid()
    i, f, _, o = open_.chunk(4, -1)
    di, df, _, do = (open_ * (1 - open_)).chunk(4, -1)
    g, c = gates[0].chunk(4, -1)[2].tanh(), state[1]
    shown = torch.addcmul(f * c, i, g).tanh()
    of_c = torch.stack([g * di, c * df, i * (1 - g * g), torch.zeros_like(c), f], -2)
    of_h = of_c * (o * (1 - shown * shown)).unsqueeze(-2)
    of_h[..., 3, :] = shown * do
    return of_h, of_c


def _of_gru(x: Tensors, h: torch.Tensor) -> Tensors:
    h_r, h_z, h_n = h.chunk(3, -1)
    return x[2], x[0] + h_r, x[1] + h_z, h_n


def _gru(gates: Tensors, state: Tensors) -> Tensors:
    x_n, r, z, h_n = gates
    n = torch.addcmul(x_n, r.sigmoid(), h_n).tanh()  # the reset gate scales the hidden bias too
    return (torch.lerp(n, state[0], z.sigmoid()),)


def _slopes_of_gru(gates: Tensors, state: Tensors) -> Tensors:
    x_n, r, z, h_n = gates
    r, z = r.sigmoid(), z.sigmoid()
    n = torch.addcmul(x_n, r, h_n).tanh()
    of_n = (1 - z) * (1 - n * n)
    return (torch.stack([of_n, of_n * h_n * r * (1 - r), (state[0] - n) * z * (1 - z), of_n * r, z], -2),)


def _slopes_of_tanh(gates: Tensors, state: Tensors) -> Tensors:
    return ((1 - gates[0].tanh().square()).unsqueeze(-2),)


def _slopes_of_relu(gates: Tensors, state: Tensors) -> Tensors:
    return (torch.where(gates[0] <= 0, 0, torch.ones_like(gates[0])).unsqueeze(-2),)


LSTM = Cell(_sum, _lstm, _slopes_of_lstm)
GRU = Cell(_of_gru, _gru, _slopes_of_gru, parts=3, own=1)
TANH = Cell(_sum, lambda gates, state: (gates[0].tanh(),), _slopes_of_tanh, besides=False)
RELU = Cell(_sum, lambda gates, state: (gates[0].relu(),), _slopes_of_relu, besides=False)


# One step after the other


def _each(backwards: bool, sizes: list[int] | None, *tensors: torch.Tensor) -> Iterator[Any]:
    """The number of samples that have a step, and had the step before it in this order, and the tensors there."""
    parts = [x.unbind() if sizes is None else x.split(sizes) for x in tensors]
    sizes = [len(parts[0][0])] * len(parts[0]) if sizes is None else sizes
    before = 0
    for many, *now in [*zip(sizes, *parts, strict=True)][:: -1 if backwards else 1]:
        yield many, before, *now
        before = many


def _joined(xs: Sequence[torch.Tensor], backwards: bool, sizes: list[int] | None) -> torch.Tensor:
    """The results of single steps, perhaps from the last one on, as one tensor."""
    xs = xs[::-1] if backwards else xs
    return torch.stack([*xs]) if sizes is None else torch.cat([*xs])


def _stepped(
    cell: Cell, parts: Tensors, first: Tensors, w: CellWeights, backwards: bool, sizes: list[int] | None
) -> tuple[list[Tensors], torch.Tensor, Tensors]:
    """The state before each step, the outputs, and the last state, given what comes from the input.

    `sizes` are how many of the samples, the first ones, have each step of a packed sequence.
    """
    state = first if sizes is None or not backwards else tuple(h[: sizes[-1]] for h in first)
    ended, before, outputs = list[Tensors](), list[Tensors](), list[torch.Tensor]()
    for many, _, *now in _each(backwards, sizes, *parts):
        if many < len(state[0]):
            ended.append(tuple(h[many:] for h in state))
        state = resized(state, first, many)
        before.append(state)
        state = cell.step(tuple(now), state, w)
        outputs.append(state[0])
    last = tuple(torch.cat(h) if ended else h[0] for h in zip(state, *ended[::-1], strict=True))
    return before, _joined(outputs, backwards, sizes), last


def _unrolled(
    cell: Cell, x: torch.Tensor, state: Tensors, w: CellWeights, backwards: bool, sizes: list[int] | None
) -> tuple[torch.Tensor, Tensors]:
    """The outputs and the last state, given the inputs at all steps and the first state."""
    added = cell.of_input(x, w)
    state = state if sizes is None else tuple(_paired(h, x[: sizes[0]]) for h in state)
    _, outputs, last = _stepped(cell, added, like(added, state), w, backwards, sizes)
    return outputs, last


def _paired(h: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A state of the samples whose rows these are, which a trace that follows the samples sees here."""
    return torch.where(rows[:, :1] == 0, h, h)


# All steps in a few operations


class Steps:
    """The time steps of a layer in one direction; no trace looks in here."""

    before: Tensors
    """The parts of the state before all steps."""
    outputs: torch.Tensor
    last: Tensors

    def __init__(self, cell: Cell, w: CellWeights, backwards: bool, sizes: list[int] | None) -> None:
        """`sizes` are how many of the samples, the first ones, have each step of a packed sequence."""
        self.cell, self.w, self.backwards, self.sizes = cell, w, backwards, sizes

    def run(self, x: torch.Tensor, first: Tensors) -> None:
        """One step after the other, given what comes from the input."""
        parts, way = self.cell.divided(x), (self.backwards, self.sizes)
        before, self.outputs, self.last = _stepped(self.cell, parts, first, self.w, *way)
        self.before = tuple(_joined(h, *way) for h in zip(*before, strict=True))

    def pulled_back(self, slopes: Tensors, sent: torch.Tensor, last: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Cotangents at the gates, one after the other, and at the first state, of those at the outputs
        and to the last state."""
        cell, w, own = self.cell, self.w.w_hh, self.cell.own * slopes[0].shape[-1]
        gates = own + len(w)
        carried, begun, found = tuple(h[:0] for h in last), list[Tensors](), list[torch.Tensor]()
        for many, before, arrived, *slope in _each(not self.backwards, self.sizes, sent, *slopes):
            if many < before:  # the others have begun at the step behind
                begun.append(tuple(h[many:] for h in carried))
            h, *others = carried if many == before else resized(carried, last, many)
            back = slope[0] * (arrived + h).unsqueeze(1)
            for steep, c in zip(slope[1:], others, strict=True):
                back = torch.addcmul(back, steep, c.unsqueeze(1))
            back = back.flatten(1)
            found.append(back[:, :gates] if cell.besides else back)
            carried = ((found[-1][:, own:] if own else found[-1]) @ w,)
            if cell.besides:
                carried = (*carried, back[:, gates:]) if others else (carried[0] + back[:, gates:],)
        first = tuple(torch.cat(h) for h in zip(carried, *begun[::-1], strict=True))
        return _joined(found, not self.backwards, self.sizes), first


class _After(torch.autograd.Function):
    """The outputs and the last state, of whose derivative the recursion back is a part."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *given: torch.Tensor) -> Tensors:
        before, found = steps.before, (steps.outputs, *steps.last)
        del steps.before, steps.outputs, steps.last  # the results hold the graph, which holds the steps
        ctx.steps = steps
        ctx.save_for_backward(*before, *given[: -len(before)])
        return found

    @staticmethod
    def backward(ctx: Any, *sent: torch.Tensor) -> Any:
        steps, count = ctx.steps, len(sent) - 1
        before, gates = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            sent = _Linked.apply(count + 1, *sent, *gates)
        slopes = steps.cell.slopes(tuple(a.detach() for a in gates), before)
        found, first = steps.pulled_back(slopes, sent[0], sent[1:])
        return None, *found.split([a.shape[-1] for a in gates], -1), *first


class _Linked(torch.autograd.Function):
    """The cotangents, as they depend on the gates: there is no derivative in these, but a path in the graph."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: torch.Tensor) -> Tensors:
        ctx.others = len(given) - count
        return tuple(x.view_as(x) for x in given[:count])

    @staticmethod
    def backward(ctx: Any, *sent: torch.Tensor) -> Any:
        return None, *sent, *[None] * ctx.others


# Two operations, as a trace sees them


def states_before(x: torch.Tensor, first: Tensors, steps: Steps) -> torch.Tensor:
    """The hidden states before all steps, as numbers; `steps` has them all then."""
    if has_torch_function((x,)):
        return handle_torch_function(states_before, (x,), x, first, steps)
    with torch.no_grad():
        w, b = steps.w.w_hh.detach().to(x.dtype), steps.w.b_hh
        steps.w = CellWeights(steps.w.w_ih, w, None, None if b is None else b.detach().to(x.dtype))
        steps.run(x, first)
    return steps.before[0]


def states_after(gates: Tensors, first: Tensors, steps: Steps) -> Tensors:
    """The outputs and the last state."""
    if has_torch_function(gates):
        return handle_torch_function(states_after, gates, gates, first, steps)
    return _After.apply(steps, *gates, *first)


def at_once(
    cell: Cell, x: torch.Tensor, state: Tensors, w: CellWeights, backwards: bool, sizes: list[int] | None
) -> tuple[torch.Tensor, Tensors]:
    """The outputs at all time steps and the last state, given the inputs at all steps and the first state."""
    added = F.linear(x, w.w_ih, w.b_ih)
    state, steps = like((added,), state), Steps(cell, w, backwards, sizes)
    read = states_before(added, state, steps)
    gates = cell.gates(cell.divided(added), F.linear(read, w.w_hh, w.b_hh))
    output, *last = states_after(gates, state, steps)
    return output, tuple(last)


# Layers of cells


Unroll = Callable[[Cell, torch.Tensor, Tensors, CellWeights, bool, list[int] | None], tuple[torch.Tensor, Tensors]]
"""From the inputs, over time steps along axis 0 or over those of a packed sequence (`sizes`: how many of the samples,
the first ones, have each step), and the first state to the outputs and the last state."""


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
