"""Pairs as data: states of two parts, which change in turn by what a function says of the other part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch

from invfunc import tree
from invfunc._torch.functorch import unwatched, version
from invfunc.errors import ArgumentTypeError, ModifiedError
from invfunc.pairs.pair import Invertible, Law
from invfunc.pairs.state import combined, fitting, per_sample, two_parts, wide
from invfunc.pairs.value import Value

Calls = list[tuple[Callable, tuple]]
"""Functions, each with the arguments that it gets behind a part of the state."""


@dataclass(frozen=True, eq=False)
class Move(Value):
    """A change of one part, `scale * part + by * said`, where said is what a function says of the other part.

    Args:
        part: which of the two parts changes.
        function: which of the functions is asked; None takes the other part itself.
    """

    part: int
    function: int | None
    scale: float = 1
    by: float = 1

    def forth(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        """The part after the move."""
        part = part if self.scale == 1 else self.scale * part
        return part + said if self.by == 1 else part - said if self.by == -1 else part + self.by * said

    def back(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        """The part before it."""
        part = part - said if self.by == 1 else part + said if self.by == -1 else part - self.by * said
        return part if self.scale == 1 else part / self.scale

    fitting: ClassVar[Callable] = staticmethod(fitting)
    """What was said, if it fits the part."""


@dataclass(frozen=True, eq=False)
class Moves(Law):
    """Moves, one after the other; the inverse undoes them from the last to the first."""

    call: str
    names: tuple[str, ...]
    """The functions."""
    parts: str
    """What the two parts are called, each by a letter."""
    moves: tuple[Move, ...]

    def pair_of(self, *functions: Callable) -> Invertible:
        """The `Invertible` of both directions, which share these functions."""
        return self.pair(self.call, functions)

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "x")
        for move in self.moves:
            parts[move.part] = combined(move.forth, parts[move.part], self.said(move, parts, calls, kwargs))
        return self.joined(parts)

    def inverse(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "y")
        for move in reversed(self.moves):
            parts[move.part] = combined(move.back, parts[move.part], self.said(move, parts, calls, kwargs))
        return self.joined(parts)

    def log_det(self, *given: Any, **kwargs: Any) -> torch.Tensor:
        return self.log_scales(*self.read(given, "x"), kwargs)

    def log_scales(self, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> torch.Tensor:
        """The sum of the log-scales of all moves, for each sample."""
        scale = sum(math.log(move.scale) for move in self.moves)  # of each entry, as both parts are alike
        return reduce(torch.add, [per_sample(torch.full_like(wide(t), scale)) for t in tree.tensors(parts[0])])

    def read(self, given: tuple, name: str) -> tuple[list[Any], Calls]:
        """The parts of the state, and each function with the arguments that it gets behind a part."""
        functions, (state, *args) = given[: len(self.names)], given[len(self.names) :] or (None,)
        if not callable(functions[0]):
            raise ArgumentTypeError(
                f"{self.call}: forward, inverse and log_det of a pair get the functions that they share in front of "
                f"{name}, as in pair.log_det(*pair.shared, x, params). with_log_det(pair) and invert(pair) take x or y "
                "alone."
            )
        return self.apart(state, name), self.calls(functions, args)

    def apart(self, state: Any, name: str) -> list[Any]:
        """The parts of x or y."""
        return [*two_parts(state, self.call, name)]

    def joined(self, parts: list[Any]) -> Any:
        """The state of two parts."""
        return tuple(parts)

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        """Each function that a move may ask, with what it gets behind a part."""
        return [(functions[0], tuple(args))]

    def said(self, move: Move, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> Any:
        """What a function says of the other part, which it may not write: the pair needs it again."""
        part, other, name = parts[move.part], parts[1 - move.part], self.parts[move.part]
        if move.function is None:
            return fitting(other, part, self.call, self.parts[1 - move.part], name)
        (fn, args), which = calls[move.function], self.names[move.function % len(self.names)]
        if torch.compiler.is_compiling():
            said = fn(other, *args, **kwargs)
        elif torch.is_inference_mode_enabled():  # where nobody counts what is written
            said = fn(tree.map_tensors(torch.clone, other), *args, **kwargs)
        else:
            tensors = [other] if isinstance(other, torch.Tensor) else tree.tensors(other)
            with unwatched():  # it is no call of the function
                before = [*map(version, tensors)]
            said = fn(other, *args, **kwargs)
            with unwatched():
                written = [*map(version, tensors)] != before
            if written:
                raise ModifiedError(
                    f"{self.call}: {which} has written into the state that it was given, which the pair needs again, "
                    "and so may you. Take inplace=False in its first layers, or give them a copy: lambda x: "
                    f"{which}(x.clone())."
                )
        return move.fitting(said, part, self.call, f"what {which} returns", name)
