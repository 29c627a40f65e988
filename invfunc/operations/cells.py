"""The cells of recurrent layers: what a state becomes in one step, unit by unit, once the gates are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
    """How many inputs, the first ones, are gates of the first alone; the other gates are of the second, too."""
    besides: bool = True
    """Whether the last part of the state is an input, the last one, other than by the gates."""

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
