"""The check of one result: numbers beside those of another path, and what rounding explains where they are apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from invfunc import tree
from invfunc.certificates.draws import States, Tape, rewound
from invfunc.certificates.look import Look, Tensors
from invfunc.certificates.rounding import AGAIN, APART, beyond, moved, scales, spread, units
from invfunc.errors import CertificateError

Looked = list[list[Look]]
"""Numbers of one kind beside those of the other path, in a list for each kind."""

Around = torch.Generator | None
"""What draws vectors by way of which others are multiplied, so that rounding differs; None where they are not."""


class Check(ABC):
    """The check of what `t(*args, **kwargs)` gave."""

    def __init__(
        self, t: Callable, k: int, seed: int, before: States, args: tuple, kwargs: dict[str, Any], names: Any
    ) -> None:
        self.t, self.k, self.seed, self.before = t, k, seed, before
        self.args, self.kwargs, self.names = args, kwargs, names
        self.tape = Tape(torch.Generator().manual_seed(seed))

    @abstractmethod
    def looks(self, args: tuple, kwargs: dict[str, Any], result: Any, tape: Tape) -> Looked:
        """What is looked at of a result."""

    @abstractmethod
    def expected(self, every: Looked, args: tuple, kwargs: dict[str, Any], around: Around = None) -> list[Tensors]:
        """The numbers of the other path."""

    def called(self, kind: int) -> str:
        """Of which result numbers are, where there are several."""
        return ""

    def run(self, result: Any) -> None:
        """Raises where numbers are apart."""
        every = self.looks(self.args, self.kwargs, result, self.tape.again())
        expected = self.expected(every, self.args, self.kwargs)
        again: list[tuple[Looked | None, list[Tensors]]] = []
        for i, (looked, numbers) in enumerate(zip(every, expected, strict=True)):
            known = scales(numbers, [look.size() for look in looked])
            errors = [units(look.dtype, look.terms) for look in looked]
            if _apart(looked, numbers, [e * size for e, size in zip(errors, known, strict=True)]):
                again = again or list(self._again(every))
                found = [[look.found for look in others[i]] for others, _ in again if others is not None]
                measured = max(
                    spread(numbers, [others[i] for _, others in again], known),
                    spread([look.found for look in looked], found, known),
                )
                tolerances = [max(e, APART * measured) * size for e, size in zip(errors, known, strict=True)]
                if wrong := _apart(looked, numbers, tolerances):
                    raise self._error(i, *wrong)

    def _again(self, every: Looked) -> Iterator[tuple[Looked | None, list[Tensors]]]:
        """Both, at arguments that are moved in their last place; and the other path in float64, where f is of no dtype
        of its own."""
        for _ in range(AGAIN):
            args, kwargs = self._changed(lambda x: moved(x, self.tape.generator))
            rewound(self.before)
            there = self.looks(args, kwargs, self.t(*args, **kwargs), self.tape.again())
            yield there, self.expected(there, args, kwargs, self.tape.generator)
        try:
            yield None, self.expected(every, *self._changed(torch.Tensor.double))
        except Exception:
            return

    def _changed(self, of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with other floats."""
        return tree.map_tensors(lambda x: of(x) if x.is_floating_point() else x, (self.args, self.kwargs))

    def _error(
        self, kind: int, look: Look, expected: torch.Tensor, apart: torch.Tensor, tolerance: float
    ) -> CertificateError:
        worst = int(((look.found - expected).abs().nan_to_num(float("inf")) * apart).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape)]
        path = look.called(index[0])
        within = f" (its number {index[1:]})" if index[1:] else ""
        found, wanted = float(look.found.flatten()[worst]), float(expected.flatten()[worst])
        error = CertificateError(
            f"{path}{within}{self.called(kind)} is {found:.9g}, but by derivatives along single entries it is "
            f"{wanted:.9g}; rounding explains {tolerance:.1g}. The entries were drawn by generator={self.seed}. It is "
            "a rule of your own (`operation`), an f that gives something else when it is called again, or a fault of "
            "this library, which we would like to know of."
        )
        error.path, error.found, error.expected, error.seed = path, found, wanted, self.seed
        return error


def _apart(
    looked: list[Look], numbers: Tensors, tolerances: list[float]
) -> tuple[Look, torch.Tensor, torch.Tensor, float] | None:
    """The first look with numbers that are further apart, with the other numbers, and which."""
    for look, x, tolerance in zip(looked, numbers, tolerances, strict=True):
        apart = beyond(look.found, x, tolerance, look.dtype)
        if bool(apart.any()):
            return look, x, apart, tolerance
    return None
