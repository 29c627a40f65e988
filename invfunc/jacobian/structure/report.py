"""What is going to be done for an exact GGN, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from invfunc.jacobian.runs import Run
from invfunc.jacobian.structure.plan import Planner
from invfunc.jacobian.structure.stages import columns_at_once
from invfunc.jacobian.structure.ways import Chosen, Stage


@dataclass(frozen=True)
class Part:
    """Some parameters that are handled together."""

    way: str
    """"closed form", "local", "narrow" or "dense"."""
    params: tuple[str, ...]
    columns: int
    """Of each sample, that come in."""
    passes: int
    """Pullbacks of one column each."""

    def __str__(self) -> str:
        of = f"{self.passes} passes for {self.columns} columns" if self.way != "closed form" else "no pullback"
        return f"{self.way}: {of} ({', '.join(self.params)})"


@dataclass(frozen=True)
class Explanation:
    """How columns are pulled back: print it."""

    name: str
    columns: int
    """Of each sample."""
    passes: int
    """Pullbacks of one column each, for all parameters."""
    bytes: int
    """About how much memory the columns take, beyond the forward pass and the result."""
    cost: float
    """The estimated time over that of all columns."""
    why: str
    parts: tuple[Part, ...] = field(default=())

    def __str__(self) -> str:
        head = f"{self.name}: {self.passes} passes for {self.columns} columns of a sample; {self.why}"
        cost = f"about {self.bytes / 2**20:.1f} MiB for the columns, {self.cost:.1%} of the work of all columns"
        return "\n".join([head, *(f"  {part}" for part in self.parts), f"  {cost}"])


def dense(name: str, run: Run, columns: int, budget: int, why: str) -> Explanation:
    """Of the way of all columns."""
    numbers = max(run.trace.sizes, default=1) * run.trace.n
    return Explanation(
        name, columns, columns, 4 * _itemsize(run) * min(columns * numbers, max(budget, numbers)), 1.0, why
    )


def explanation(name: str, planner: Planner, chosen: Chosen, budget: int, called: Callable[[int], str]) -> Explanation:
    """Of a way that was chosen."""
    facts = planner.facts
    run, columns, parts, most = facts.run, facts.total, list[Part](), 0
    for stage, leaves in zip(chosen.stages, chosen.leaves, strict=True):
        if leaves:
            way = "local" if stage.classes is not None else "dense" if columns == facts.total else "narrow"
            parts.append(Part(way, tuple(called(i) for i in sorted(leaves)), columns, stage.passes))
        most = max(most, _numbers(run, stage, budget))
        if stage.cut is not None and stage.blocks is not None:
            columns = min(stage.rows, stage.blocks.width) * len(stage.blocks.places)
    if chosen.closed is not None:
        own = sorted(i for i, sites in facts.sites.items() if sites == {chosen.closed})
        parts.insert(0, Part("closed form", tuple(called(i) for i in own), facts.total, 0))
    if chosen.dense:
        parts.append(Part("dense", tuple(called(i) for i in sorted(chosen.dense)), facts.total, facts.total))
    passes = sum(p.passes for p in parts)
    share = chosen.cost / facts.dense_cost
    why = "by the structure of the function"
    return Explanation(name, facts.total, passes, 4 * _itemsize(run) * most, share, why, tuple(parts))


def _itemsize(run: Run) -> int:
    return max(x.element_size() for x in run.params)


def _numbers(run: Run, stage: Stage, budget: int) -> int:
    """In the columns that are pulled back at once, and in the factors at a narrow layer."""
    n, sizes = run.trace.n, [run.trace.sizes[s] for s in stage.sites]
    found = min(stage.passes, columns_at_once(max(sizes), n, budget)) * max(sizes) * n if sizes else 0
    if stage.cut is not None and stage.blocks is not None:
        found = max(found, (1 if stage.shared else n) * len(stage.blocks.places) * stage.rows * stage.blocks.width)
    return found
