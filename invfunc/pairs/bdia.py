"""Residual blocks as they are, which run backwards to the bit with one more bit for each entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.couplings import Calls, Move, Moves
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import Rounded, as_part


def bdia(f: Callable, grid: Grid | None = None) -> Invertible:
    """The pair `(w, x) -> (x, y)` that trains a plain residual block x + f(x, p), and restores every bit of w.

        y = gamma * (w + odd) + round((1 - gamma) * x + (1 + gamma) * f(x, p))
        w = (y - round((1 - gamma) * x + (1 + gamma) * f(x, p))) / gamma - odd

    w is the state before x. gamma is 1/2 or -1/2, drawn for each sample and block, so that y is x + f(x, p) in the
    mean: what is trained is used as the plain network `x = x + f(x, p)`. All states are on a grid; odd is its unit
    where w is an odd multiple of it: the one bit that half of w loses, which is hidden and kept.

    Args:
        f: any function that keeps the shape of x, such as an attention with its MLP, or a module. It gets x in the
            dtype of its parameters, and what it gives is rounded to the grid; gradients take the rounding for the
            identity. f is pure in torch.func's sense (see the conventions).
        grid: by default `Grid()`.

    Returns:
        An `Invertible`, called as `pair((w, x), (plus, p), *args, **kwargs)`, or with `(plus,)` where f takes no
        parameters: plus is a boolean tensor [N], or one boolean for all samples, whether gamma is 1/2. The state starts
        on the grid, as `grid.enter((x, x + f(x, p)))` with the first block unchanged.

    Raises:
        ArgumentTypeError: f is not a function, or grid is not a Grid.
        ArgumentError: the state is not a pair of one shape, f changes it, or plus is not of N booleans.
        RangeError: the state is not on the grid, or leaves its range.

    Example:
        >>> import torch, invfunc
        >>> pair, grid = invfunc.bdia(torch.tanh), invfunc.Grid()
        >>> w, x = grid.enter((torch.rand(4, 2), torch.rand(4, 2)))
        >>> steps = [(torch.rand(4) < 0.5,) for _ in range(50)]
        >>> invfunc.drift(pair, (w, x), steps)[-1]
        0.0

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, with stacked `(plus, p)` too. There is no `invert` of
    it, as its inverse needs the bits that are hidden.

    Cost: f once in either direction, and once in a backward pass; an eighth of a byte for each entry and block.

    Source: G. Zhang et al., On Exact Bit-level Reversible Transformers Without Changing Architectures, 2025.
    """
    f = as_part("bdia(f)", "f", f)
    call = f"bdia({describe(f)})"
    if not isinstance(grid, (Grid, type(None))):
        raise ArgumentTypeError(f"{call[:-1]}, grid={grid!r}): grid is a Grid.")
    grid = grid or Grid()
    law = _Bidirectional(call, ("f",), "wx", (Move(0, 0), Move(1, 0)), grid)
    return Invertible(law.forward, law.inverse, (Rounded(grid, f),), hidden=True, name=call)


@dataclass(frozen=True, eq=False)
class _Bidirectional(Moves):
    """Both directions: one moves the first part of its state by f of the other, the other its second part."""

    grid: Grid

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "x")
        w, x = self.grid.checked(*parts)
        odd, unit = (w.detach() * 2.0**self.grid.fraction_bits).remainder(2) == 1, 2.0**-self.grid.fraction_bits
        gamma, moved = self._moved(self.moves[0], parts, calls, kwargs)
        y = gamma * (w + odd * unit) + moved
        return self.grid.checked(x.view_as(x), y, entered=True), packed(odd)  # x itself would be given to two blocks

    def inverse(self, f: Any, state: Any = None, bits: Any = None, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read((f, state, *given), "y")
        x, y = parts
        gamma, moved = self._moved(self.moves[1], parts, calls, kwargs)
        return (y - moved) / gamma - unpacked(bits, y) * 2.0**-self.grid.fraction_bits, x

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        own, *more = args or (None,)
        if not isinstance(own, (tuple, list)) or not 1 <= len(own) <= 2:
            raise ArgumentError(
                f"{self.call}: behind the state has to be (plus, p), or (plus,) for an f without parameters, but there "
                f"is {type(own).__name__}. plus says of which samples gamma is 1/2: torch.rand(N) < 0.5."
            )
        plus, params = own if len(own) == 2 else (own[0], None)
        return [(functions[0], (params, *more)), (torch.as_tensor, (plus,))]

    def _moved(self, move: Move, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """gamma, and what is added to the half of w, on the grid."""
        x, (as_tensor, (plus,)) = parts[1 - move.part], calls[1]
        plus = as_tensor(plus, device=x.device)
        if plus.dtype != torch.bool or plus.shape not in ((), x.shape[:1]):
            raise ArgumentError(
                f"{self.call}: plus is of {plus.dtype} and shape {list(plus.shape)}, but has a boolean for each of the "
                f"samples of x of shape {list(x.shape)}, torch.rand(N) < 0.5, or one for all."
            )
        plus = plus.view(-1, *[1] * (x.dim() - 1)) if plus.dim() else plus
        gamma = plus.to(x.dtype) - 0.5
        return gamma, self.grid.round((1 - gamma) * x + (1 + gamma) * self.said(move, parts, calls, kwargs))


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Booleans, eight of them in a byte."""
    flat = bits.flatten()
    rows = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (rows * _powers(bits.device)).sum(1, dtype=torch.uint8)


def unpacked(byte: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The booleans, in the shape of another tensor."""
    rows = byte.unsqueeze(1).bitwise_and(_powers(byte.device)) != 0
    return rows.flatten()[: like.numel()].view(like.shape)


def _powers(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
