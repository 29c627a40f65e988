"""The check of a statistic, or of several together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from invfunc.certificates.check import Around, Check
from invfunc.certificates.draws import Tape, rewound
from invfunc.certificates.look import Look, Member
from invfunc.certificates.looks import looks
from invfunc.certificates.reference import Reference
from invfunc.certificates.rounding import Numbers
from invfunc.reductions.noise import SumAndNoise
from invfunc.reductions.squares import MatrixTrace, SumOfSquares
from invfunc.statistic import Statistic

SUMS = (MatrixTrace, SumAndNoise)
"""Statistics of all parameters that are made of sums of squares."""


class OfStatistic(Check):
    """The check of what a statistic gave."""

    t: Statistic

    @property
    def members(self) -> tuple[Statistic, ...]:
        """The statistics whose results there are."""
        return self.t.members or (self.t,)

    def looks(self, args: tuple, kwargs: dict[str, Any], result: Any, tape: Tape) -> list[Look]:
        given, found = self.t.problem(args, kwargs, self.names), list[Look]()
        for m, x in zip(self.members, self._results(args, kwargs, result), strict=True):
            found += looks(Member(m, given, x, self.k, tape, f" of {m.name}" if len(self.members) > 1 else ""))
        return found

    def _results(self, args: tuple, kwargs: dict[str, Any], result: Any) -> list[Any]:
        """The result of each member; a trace comes with the diagonal that it is the sum of, the noise with its own."""
        results = _each(self.t, result)
        sums = [isinstance(m.reduction, SUMS) for m in self.members]
        if any(sums):
            diagonals = _each(*self._diagonals(args, kwargs))
            results = [(x, d) if summed else x for x, d, summed in zip(results, diagonals, sums, strict=True)]
        return results

    def _diagonals(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Statistic, Any]:
        """The statistic with diagonals in place of what is made of their sums, of the same draws, and its result."""
        each = [replace(m, reduction=SumOfSquares()) if isinstance(m.reduction, SUMS) else m for m in self.members]
        t = replace(self.t, members=tuple(each)) if self.t.members else each[0]
        rewound(self.before)
        return t, t(*args, **kwargs)

    def expected(self, looks: list[Look], args: tuple, kwargs: dict[str, Any], around: Around = None) -> list[Numbers]:
        given = self.t.problem(args, kwargs, self.names)
        with Reference(given, self.names, [m.quantity for m in self.members], self.before, around) as r:
            return [look.expected(r) for look in looks]


def _each(t: Statistic, result: Any) -> list[Any]:
    """The results without aux, one for each member."""
    if t.has_aux:
        result = result[:-1] if t.several else result[0]
    return list(result) if t.members else [result]
