"""Transposed convolutions, whose weights are read as those of convolutions of an input with zeros in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from invfunc.core import uses as known
from invfunc.core.marks import Axis, Node, Run, option
from invfunc.core.tables import called
from invfunc.core.uses import WHOLE, Block, Convolution, Expanded, Nodes, ProductUse, Use, each, patches


class Transposed(ProductUse):
    """A transposed convolution: that of an input with zeros between its entries, with the mirrored kernel."""

    def __init__(
        self, node: Node, value: torch.Tensor, a: torch.Tensor, a_axis: Axis, axis: Axis, window: tuple, groups: int
    ) -> None:
        """`window` are its strides, paddings, paddings of the result and dilations."""
        super().__init__(node, value, a, a_axis, axis, None, None, ((), (1,), (0, *range(2, value.ndim))))
        self.window, self.groups, self.stacked, self.layer = window, groups, 1, True

    sends = Convolution.sends  # pyright: ignore[reportAssignmentType]: it needs `groups` alone

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        x = self.inputs(run, block)  # [n, 1 or more, c, *space]
        n, more = x.shape[:2]
        stride, padding, extra, dilation = self.window
        kernel, x = self.shape[2:], x.flatten(0, 1)
        edges = [gap * (k - 1) - p for gap, k, p in zip(dilation, kernel, padding, strict=True)]
        sizes = [(i - 1) * s + 1 for i, s in zip(x.shape[2:], stride, strict=True)]
        apart = x.new_zeros(*x.shape[:2], *sizes)
        apart[(..., *(slice(None, None, s) for s in stride))] = x
        ends = [(e, e + m) for e, m in zip(edges, extra, strict=True)]
        apart = F.pad(apart, [end for pair in ends[::-1] for end in pair])  # also by less than nothing
        x = patches(apart, kernel, (1,) * len(kernel), (0,) * len(kernel), dilation)
        x = x.unflatten(-1, (self.groups, -1, kernel.numel())).flip(-1).flatten(-2).transpose(1, 2)
        return x if more == 1 else x.unflatten(0, (n, more)).transpose(1, 2).flatten(2, 3)

    def shaped(self, w: torch.Tensor) -> torch.Tensor:
        w = w.unflatten(-1, (-1, *self.shape[2:]))  # [..., g, o, c, *kernel]
        lead = w.ndim - len(self.shape) - 1
        return w.transpose(lead + 1, lead + 2).flatten(lead, lead + 1)

    def parted(self, w: torch.Tensor) -> torch.Tensor:
        w = w.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return w.flatten(2, len(self.shape))

    def sizes(self, run: Run) -> tuple[int, int, int]:
        places = self.d[0].shape[2 - len(self.shape) :].numel() * max(1, self.a.shape[0] // run.n)
        return places, self.shape[1], self.shape[0] // self.groups * self.shape[2:].numel()

    def size(self, run: Run) -> int:
        p, o, k = self.sizes(run)
        return super().size(run) + p * self.groups * (k + o * run.columns)

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        d = self.sent(run)
        d = d[0] if len(d) == 1 else d.sum(0)
        d = d if weights is None else d * weights.to(d.dtype).view(-1, *[1] * (d.ndim - 1))
        stride, padding, extra, dilation = self.window
        weight = run.strip(self.value.new_zeros(())).expand(self.shape)
        rest = (weight, None, stride, padding, dilation, True, extra, self.groups, (False, True, False))
        return torch.ops.aten.convolution_backward(d.flatten(0, 1), self.inputs(run, WHOLE).flatten(0, 1), *rest)[1]


def of_transposed(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)` and its like."""
    x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    rest = w.ndim - 2
    if x.ndim != w.ndim or id(x) not in axes:
        return None
    names = (3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1)
    window = tuple(each(option(args, kwargs, *name), rest) for name in names)
    uses: list[Use] = []
    if id(w) in nodes:
        groups = option(args, kwargs, 6, "groups", 1)
        uses.append(Transposed(nodes[id(w)], w, x, axes[id(x)], axis, window, groups))
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis, view=(b.numel(), *[1] * rest)))
    return uses


FACTORS = known.FACTORS | dict.fromkeys(called("conv_transpose1d conv_transpose2d conv_transpose3d"), of_transposed)
"""The rules of all operations that read parameters."""
