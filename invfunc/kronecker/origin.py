"""Facts about Kronecker factors that the transform knows which computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc.linear_algebra import blocks


@dataclass(frozen=True)
class Joint:
    """The layout of a weight and its bias in one matrix `[out, in + 1]`: the bias comes last, in each block of the
    weight.
    """

    bias: str
    """What the bias is called."""
    shape: torch.Size
    """Of the weight."""
    out: tuple[int, ...]
    """The dims of the weight that the rows are over."""
    read: tuple[int, ...]
    """The dims of the weight that the columns are over."""
    blocks: tuple[int, ...]
    """Into how many parts each dim of the weight is divided."""

    def matrix(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """`[*lead, out, in + 1]` of a weight and a bias with as many axes more in front."""
        w = blocks.gathered(weight, self.shape, self.blocks)
        lead = w.ndim - len(self.shape)
        order = [*range(lead), *(lead + d for d in (*self.out, *self.read))]
        sizes = blocks.part(self.shape, self.blocks)
        rows, columns = (torch.Size(sizes[d] for d in dims).numel() for dims in (self.out, self.read))
        w = w.permute(order).reshape(*w.shape[:lead], rows, columns)
        b = bias.reshape(*w.shape[1:lead], len(w), rows).movedim(lead - 1, 0)
        x = torch.cat([w, b.unsqueeze(-1)], -1)
        return blocks.scattered(x, *self._of(x.shape[-2:]))

    def parts(self, x: torch.Tensor, bias: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight and the bias, of this shape, that such a matrix is of."""
        sizes, count = blocks.part(self.shape, self.blocks), torch.Size(self.blocks).numel()
        x = blocks.gathered(x, *self._of((x.shape[-2] // count, x.shape[-1])))
        lead, order = x.ndim - 2, (*self.out, *self.read)
        w = x[..., :-1].reshape([*x.shape[:lead], *(sizes[d] for d in order)])
        w = w.permute([*range(lead), *(lead + order.index(d) for d in range(len(order)))])
        return blocks.scattered(w, self.shape, self.blocks), x[..., -1].movedim(0, -2).reshape(bias)

    def _of(self, block: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
        """The shape of the matrix of such blocks, and into how many parts its dims are divided."""
        count = torch.Size(self.blocks).numel()
        return [count * block[0], block[1]], (count, 1)


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of factors. Any other one is equal to it: trees of different parameters and batches have one
    structure.

    `A` is the mean of `inputs` products, and all else a sum over n samples.
    """

    name: str = ""
    """Of the parameter, which errors tell."""
    n: int | None = None
    """How many samples; None where they are not sums and means over samples alone."""
    inputs: float = 0.0
    """How many products `a a^T` the factor of what is read is the mean of."""
    read: int | None = None
    """Which factor that is."""
    degree: int | None = 1
    """The power of the loss's scale that the other one has; None where its scale is not that of n samples."""
    reached: bool = True
    """Whether the parameter influences the result; else all is zero, and the groups are not known."""
    joint: Joint | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """The code by which a graph of torch.compile makes it, and its arguments."""
        return repr(self), {"Origin": Origin, "Joint": Joint, "torch": torch}


def derived(origin: Origin) -> Origin:
    """The origin of an inverse, of a root, or of an average."""
    if torch.compiler.is_compiling():
        from invfunc._torch.eager import eagerly  # the compiler does not look into what a graph holds as a constant

        return eagerly(_derived, (origin,), {})
    return _derived((origin,), {})


def _derived(args: tuple[Origin], options: dict[str, Any]) -> Origin:
    return replace(args[0], n=None)
