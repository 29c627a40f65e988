"""A way to the result: stages between narrow layers, and what is known of the run that their cost depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from invfunc import thresholds
from invfunc.passes.run import Run
from invfunc.sparsity.bottleneck import Blocks
from invfunc.sparsity.cells import layout_at
from invfunc.sparsity.colouring import Colours
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.paths import Bottleneck
from invfunc.sparsity.pattern import Pattern


@dataclass
class Stage:
    """The sites between where columns come in and a narrow layer, or the end."""

    sites: frozenset[int]
    classes: list[Colours] | None
    """The colouring of each kind of columns that comes in; None if each column has a pass of its own."""
    passes: int
    frame: int
    bottleneck: Bottleneck | None = None
    blocks: Blocks | None = None
    rows: int = 0
    """How many rows the factor of a block has at most."""
    shared: bool = False
    """Whether the columns at the bottleneck may be the same for all samples, as the layers above are affine."""


@dataclass
class Chosen:
    """What is done: the last operation with parameters by itself, stages, and parameters that take every column."""

    pattern: Pattern
    closed: int | None
    """The site whose share needs no columns but the diagonal of the Hessian."""
    stages: list[Stage]
    dense: frozenset[int]
    cost: float
    leaves: list[frozenset[int]] = field(default_factory=list)
    """The parameters of each stage."""


def _sites(run: Run) -> dict[int, frozenset[int]]:
    """The sites of each parameter."""
    found: dict[int, set[int]] = {}
    for use in run.trace.uses:
        for i in use.derived.leaves:
            found.setdefault(i, set()).add(use.site)
    return {i: frozenset(s) for i, s in found.items()}


def _work(run: Run) -> list[float]:
    """The multiplications for a column of a sample at each site: once through the operation, once for its share."""
    work = [0.0] * len(run.trace.edges)
    for use in run.trace.uses:
        sent = run.trace.sizes[use.site]
        known = layout_at(run, use, "meta")
        outs = use.param.shape[0] if use.param.ndim > 1 else min(sent, use.param.numel())
        outs = known.outs if known is not None else outs  # which meet the parameter at each position
        work[use.site] += 2.0 * max(sent, sent // max(1, outs) * use.param.numel())
    return work


class Facts:
    """What is known of a run and of the columns that are sent back through it."""

    def __init__(self, run: Run, sources: Sequence[Grouped], local: bool) -> None:
        """`local` says whether positions may be told apart."""
        self.run, self.sources, self.local = run, sources, local
        self.n, self.work, self.sites = run.trace.n, _work(run), _sites(run)
        self.everything = frozenset(range(len(self.work)))
        self.total = sum(s.rank * max(1, group_count(s)) for s in sources)
        """How many columns a sample has."""

    @property
    def dense_cost(self) -> float:
        """The estimated cost of pulling back every column."""
        return self.total * (self.n * sum(self.work) + thresholds.COLUMN)


def group_count(grouped: Grouped) -> int:
    """How many groups there are."""
    return max(int(ids.max()) for ids in grouped.groups.values()) + 1
