"""Which shortcuts to take for the exact columns of a GGN, by an estimate of what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

from invfunc import thresholds
from invfunc.passes.run import Run
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.paths import Bottleneck, Paths, paths
from invfunc.sparsity.pattern import ALL, INPUTS, LAST, Frame, Pattern
from invfunc.sparsity.search import Search
from invfunc.sparsity.ways import Chosen, Facts


def pays(columns: int, cost: float, dense: float) -> bool:
    """Whether a way of some cost is to be preferred to that of all columns."""
    return columns >= thresholds.FEW and cost < thresholds.PAYS * dense


class Planner:
    """Looks at a run and at the columns that are sent back through it."""

    def __init__(
        self, run: Run, sources: Sequence[Grouped], look: Callable[[Pattern, Run], Run | None], local: bool
    ) -> None:
        """`look` runs the function on one sample under a pattern; `local` says whether positions may be told apart."""
        self.facts, self.look = Facts(run, sources, local), look
        self.why = ""
        """Why every column is to be pulled back, if so."""

    def chosen(self) -> Chosen | None:
        """The cheapest way, or None if that is to take every column."""
        if any(t.recomputed for t in self.facts.run.trace.uses):
            self.why = "what the operations read is computed again"
            return None
        sizes = self.facts.run.trace.sizes
        look = len(sizes) * thresholds.LOOK + sum(sizes) * thresholds.LOOK_ENTRY
        if not pays(self.facts.total, thresholds.LOOKS * look, self.facts.dense_cost):
            self.why = "there are few columns" if self.facts.total < thresholds.FEW else "all columns are little work"
            return None
        found_paths = paths(self.facts.run)
        bottlenecks = self._candidates(found_paths)
        pattern = self._pattern(found_paths, bottlenecks)
        found = self.look(pattern, self.facts.run)
        if found is None or pattern.labels.lost is not None:
            lost = pattern.labels.lost
            self.why = f"`{lost}` hides the pattern" if lost else "one sample does not run as it does in the batch"
            return None
        pattern.run = found
        if not pattern.complete:
            self.why = "an output has no pattern"
            return None
        self.why = "the structure would save nothing"
        search = Search(self.facts, pattern)
        ways = [some for k in range(len(bottlenecks) + 1) for some in combinations(bottlenecks, k)]
        best = min((made for some in ways if (made := search.chosen(some))), key=lambda c: c.cost)
        return best if pays(self.facts.total, best.cost, self.facts.dense_cost) else None

    def _candidates(self, ways: Paths) -> list[Bottleneck]:
        """The narrowest of those bottlenecks that are narrower than what comes before them."""
        found, width = [], self.facts.total
        for bottleneck in ways.bottlenecks:
            if bottleneck.width < thresholds.NARROWER * width and bottleneck.below:
                found.append(bottleneck)
                width = bottleneck.width
        return sorted(sorted(found, key=lambda c: c.width)[: thresholds.NARROWEST], key=lambda c: -c.width)

    def _pattern(self, ways: Paths, bottlenecks: list[Bottleneck]) -> Pattern:
        """A pattern with a frame for the parameter uses above each bottleneck, one for all parameter uses, and one for
        the last operation by itself."""
        everything, frames, at = self.facts.everything, list[Frame](), {}
        if self.facts.local:
            frames.append(self._frame(ALL, everything, ways, INPUTS))
            top = max(everything)
            frames.append(Frame(LAST, frozenset({top}), frozenset({top}), INPUTS, hulls=False))
        for j, bottleneck in enumerate(bottlenecks):
            at[bottleneck.site] = (3 + 2 * j, bottleneck)
            if self.facts.local and everything - bottleneck.below:
                frames.append(self._frame(4 + 2 * j, everything - bottleneck.below, ways, 3 + 2 * j))
        return Pattern(frames, at)

    @staticmethod
    def _frame(number: int, sites: frozenset[int], ways: Paths, base: int) -> Frame:
        lower = {s: False for s in sites}
        for s in sites:
            for other in ways.above[s]:
                if other in lower:
                    lower[other] = True  # it has a site of the frame below it
        return Frame(number, sites, frozenset(s for s in sites if not lower[s]), base)
