"""The last operation with parameters: where its entries are outputs, the Hessian of the loss says all of its columns.

Their squares need the diagonal of the Hessian. Kronecker factors with positions by themselves need its blocks, which
are a diagonal less products `u u^T`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from invfunc.passes.run import Run
from invfunc.recording.tags import ParameterUse
from invfunc.reductions.reduction import Shortcuts
from invfunc.sparsity.cells import Layout
from invfunc.sparsity.colouring import empty
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.pattern import Frame, Pattern, positions_apart


def closed_site(
    run: Run,
    alone: Run,
    pattern: Pattern,
    columns: Sequence[Grouped],
    sites: Mapping[int, frozenset[int]],
    shortcuts: Shortcuts,
) -> int | None:
    """The last site, if what is wanted there follows from the Hessian, else None; `sites` are those of each parameter.

    Squares do if each column that reaches a row of the parameter does so at a single position, factors if the columns
    at a position are of one group.
    """
    top, last, squares = max(s for own in sites.values() for s in own), pattern.last, shortcuts == "all"
    layouts = _layouts(run, pattern, sites, top)
    if last is None or layouts is None:
        return None
    uses = [t for t in run.trace.uses if t.site == top]
    if not squares and not all(_factored(run, t, layout) for t, layout in zip(uses, layouts, strict=True)):
        return None
    entries = [layout.entries for layout in layouts]
    return top if all(_apart(g, last, alone, last.boxes[top].shape[2:], entries, squares) for g in columns) else None


def _layouts(run: Run, pattern: Pattern, sites: Mapping[int, frozenset[int]], top: int) -> list[Layout] | None:
    """How cotangents lie at the parameters of the last site, if these are read there alone, position by position."""
    own = [i for i, found in sites.items() if top in found]
    uses = [t for t in run.trace.uses if t.site == top]
    if any(sites[i] != {top} for i in own) or len(own) < len(uses):
        return None
    found = [layout for layout in pattern.layouts[top] if layout is not None]
    whole = len(found) == len(pattern.layouts[top])
    return found if whole and all(positions_apart(run, pattern, [t]) is not None for t in uses) else None


def _factored(run: Run, use: ParameterUse, layout: Layout) -> bool:
    """Whether a parameter is read as it is, or transposed, as a matrix or a vector that has its factors position by
    position."""
    (leaf,) = (run.params[i] for i in use.derived.leaves)
    labels = [labels for labels, _ in use.recipe.read(slice(0, 1))]
    if use.param is not leaf:
        turned = leaf.ndim == 2 and use.param.shape == leaf.mT.shape and use.param.stride() == leaf.mT.stride()
        if not turned or use.param.data_ptr() != leaf.data_ptr():
            return False
    if not labels:
        return sum(size != 1 for size in leaf.shape) < 2
    sizes = layout.sizes
    both = any(sizes.get(c, 1) > 1 and any(c in some for some in labels) for c in use.recipe.output)
    return not both and all(any(c in some for some in labels) for c in layout.inner)


def _apart(
    columns: Grouped, last: Frame, alone: Run, shape: torch.Size, layouts: Sequence[torch.Tensor], squares: bool
) -> bool:
    """Whether each entry at the last site reaches one output, and those that meet there have the groups that they need
    to have: in a row of the parameter different ones, for factors at a position one, if the loss couples them."""
    if columns.diagonal(slice(0, 1)) is None:
        return False
    group = torch.full((shape.numel(),), -1, device=alone.params[0].device)
    for i, ids in columns.groups.items():
        found = last.labels.of(alone.outputs[i][0])
        if found is None:
            continue
        lo, hi, ids = -found[0].flatten(1), found[1].flatten(1), ids.flatten()
        some = (ids >= 0) & ~empty(found).flatten()
        lo, hi, ids = lo[:, some], hi[:, some], ids[some]
        if not torch.equal(lo, hi):
            return False
        entry = torch.zeros_like(ids)
        for at, size in zip(lo, [s for s in shape if s > 1] or [1], strict=True):
            entry = entry * size + at.long()
        if len(entry.unique()) < len(entry) or bool((group[entry] >= 0).any()):
            return False
        group[entry] = ids
    found = [group[entries] for entries in layouts]  # [outs, positions]
    if squares:
        return all(_different(met) for met in found)
    return columns.coupling(slice(0, 1)) is None or all(bool(((met < 0) | (met == met.amax(0))).all()) for met in found)


def _different(groups: torch.Tensor) -> bool:
    """Whether no row has a group twice, but -1."""
    numbers = torch.arange(groups.shape[1], device=groups.device)
    alone = torch.where(groups < 0, -1 - numbers, groups).sort(1).values
    return not bool((alone[:, 1:] == alone[:, :-1]).any())
