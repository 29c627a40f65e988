"""The check of one result: numbers beside those of another path, and what rounding explains where they are apart."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.certificates.draws import States, Tape, rewound
from invfunc.certificates.look import Look
from invfunc.certificates.rounding import AGAIN, APART, Numbers, beyond, largest, moved, noise, tolerance
from invfunc.certificates.values import Value, Values
from invfunc.errors import CertificateError
from invfunc.products.product import Product
from invfunc.statistic import Statistic

Looked = tuple[list[Look], list[Numbers]]
"""Numbers of a result, and those of the other path."""

Around = torch.Generator | None
"""What draws vectors by way of which others are multiplied, so that rounding differs; None where they are not."""
OWN = "It is a rule of your own (`operation`), or a fault of this library, which we would like to know of."
"""What is wrong where nothing else is known."""


class Check(ABC):
    """The check of what `t(*args, **kwargs)` gave."""

    def __init__(
        self, t: Statistic | Product, k: int, seed: int, before: States, args: tuple, kwargs: dict[str, Any], names: Any
    ) -> None:
        self.t, self.k, self.seed, self.before = t, k, seed, before
        self.args, self.kwargs, self.names = args, kwargs, names
        self.tape = Tape(torch.Generator().manual_seed(seed))

    @abstractmethod
    def looks(self, args: tuple, kwargs: dict[str, Any], result: Any, tape: Tape) -> list[Look]:
        """What is looked at of a result."""

    @abstractmethod
    def expected(self, looks: list[Look], args: tuple, kwargs: dict[str, Any], around: Around = None) -> list[Numbers]:
        """The numbers of the other path."""

    def run(self, result: Any) -> None:
        """Raises where numbers are apart."""
        looks = self._looks(self.args, self.kwargs, result)
        numbers = self._expected(looks, self.args, self.kwargs)
        for look, (x, _) in zip(looks, numbers, strict=True):
            self._same_shape(look, x)
        infinite = any(bool(x.isinf().any()) for x in tree.tensors((self.args, self.kwargs)))
        if infinite or not all(bool(x.isfinite().all()) for x in tree.tensors(result)):  # this path may multiply by 0
            numbers = [(x.where(~x.isnan(), look.found), size) for look, (x, size) in zip(looks, numbers, strict=True)]
        whole, doubts = max((largest(x) for x, _ in numbers), default=0.0), dict[int, float]()
        for i, (look, there) in enumerate(zip(looks, numbers, strict=True)):
            allowed = tolerance(there, whole, look.dtype)
            if bool(beyond(look.found, there[0], allowed, look.dtype).any()):
                doubts[i] = allowed
        if doubts:
            self._same_again(looks, doubts)
            self._beyond_noise(looks, numbers, doubts)

    def _same_shape(self, look: Look, other: torch.Tensor) -> None:
        """Raises where there are more or fewer numbers than there should be."""
        if look.found.shape != other.shape:
            raise self._error(
                look.called(*[0] * other.ndim),
                f"is among {list(look.found.shape)} numbers, but {look.other} among {list(other.shape)}",
            )

    def _looks(self, args: tuple, kwargs: dict[str, Any], result: Any) -> list[Look]:
        """What f gives, which both ways rely on, and what is looked at of the result."""
        values = Values(self.t, self.before)
        return [*values.looks(args, kwargs), *self.looks(args, kwargs, result, self.tape.again())]

    def _expected(self, looks: list[Look], args: tuple, kwargs: dict[str, Any], around: Around = None) -> list[Numbers]:
        entries = [look for look in looks if not isinstance(look, Value)]
        values = Values(self.t, self.before).expected(args, kwargs) if len(entries) < len(looks) else []
        return [*values, *self.expected(entries, args, kwargs, around)]

    def _same_again(self, looks: list[Look], doubts: dict[int, float]) -> None:
        """Raises where the result differs from itself."""
        again = self._again(self.args, self.kwargs)
        for i, allowed in doubts.items():
            self._agree(
                looks[i],
                again[i].found,
                torch.full_like(again[i].found, allowed),
                "when it is computed again, at the same arguments and states of random generators, it is",
                "f or a rule of your own (`operation`) depends on something else, such as a torch.Generator of its own "
                "or what earlier calls have left.",
            )

    def _beyond_noise(self, looks: list[Look], numbers: list[Numbers], doubts: dict[int, float]) -> None:
        """Raises where a distance is larger than rounding makes it."""
        elsewhere = [found for found in map(self._moved, range(AGAIN)) if found is not None]
        wide = self._wide(looks)
        for i, allowed in doubts.items():
            look, there = looks[i], numbers[i][0]
            others = [[found[i].found, x[i][0]] for found, x in elsewhere]
            measured = APART[look.dtype] * noise(look.found, there, others, [x[i][0] for x in wide])
            self._agree(
                look,
                there,
                measured.clamp(min=allowed),
                f"{look.other} it is",
                OWN,
            )

    def _again(self, args: tuple, kwargs: dict[str, Any]) -> list[Look]:
        rewound(self.before)
        return self._looks(args, kwargs, self.t(*args, **kwargs))

    def _moved(self, _: int) -> Looked | None:
        """Both at arguments that are moved by a little; None where one of them is of no use there."""
        args, kwargs = self._changed(lambda x: moved(x, self.tape.generator))
        try:
            looks = self._again(args, kwargs)
            return looks, self._expected(looks, args, kwargs, self.tape.generator)
        except Exception:  # of a target that has to be at most 1
            return None

    def _wide(self, looks: list[Look]) -> list[list[Numbers]]:
        """The other path in float64; none where f has a dtype of its own."""
        try:
            return [self._expected(looks, *self._changed(torch.Tensor.double))]
        except Exception:
            return []

    def _changed(self, of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with other floats."""
        return tree.map_tensors(lambda x: of(x) if x.is_floating_point() else x, (self.args, self.kwargs))

    def _agree(self, look: Look, other: torch.Tensor, allowed: torch.Tensor, but: str, why: str) -> None:
        """Raises where numbers are further apart than that."""
        apart = beyond(look.found, other, allowed, look.dtype)
        if not bool(apart.any()):
            return
        worst = int(torch.where(apart, (look.found - other).abs().nan_to_num(float("inf")), -1).argmax())
        path = look.called(*(int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape)))
        found, wanted, explained = (float(x.flatten()[worst]) for x in (look.found, other, allowed))
        told = f"is {found:.9g}, but {but} {wanted:.9g}; rounding explains {explained:.1g}"
        raise self._error(path, told, why, found, wanted)

    def _error(
        self, path: str, told: str, why: str = OWN, found: float = math.nan, wanted: float = math.nan
    ) -> CertificateError:
        error = CertificateError(f"{path} {told}. The entries were drawn by generator={self.seed}. {why}")
        error.path, error.found, error.expected, error.seed = path, found, wanted, self.seed
        return error
