"""Memory for the matrices of a result: what they take is told, or refused where so much is not free."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.budget.size import bytes_of, fits, free_on, told
from invfunc.errors import ArgumentError
from invfunc.passes.run import Run
from invfunc.per_sample.biases import roles
from invfunc.per_sample.cotangents import Columns, Cotangents, Samples
from invfunc.per_sample.gradients import Shares
from invfunc.recording.scope import Scope
from invfunc.reductions import Reduction


def matrices(run: Run, reduction: Reduction, scope: Scope, budget: int) -> dict[int, list[list[int]]]:
    """The shapes of the matrices that a reduction keeps of each parameter, from cotangents of one sample without
    numbers of interest."""
    trace, known, found = run.trace, roles(run.params, run.trace.uses), dict[int, list[list[int]]]()
    for i, leaf in enumerate(run.params):
        uses = [use for use in trace.uses if i in use.derived.leaves]
        left: Cotangents = [None] * len(trace.edges)
        for use in uses:
            out = leaf if use.call is None else use.call.out  # perhaps without numbers
            left[use.site] = trace.axes[use.site].expose(leaf.detach().new_zeros(()).expand(out.shape), trace.n)[None]
        if uses:
            options = {"scope": scope, "budget": budget, "place": i, "name": str, "role": known.get(i)}
            found[i] = reduction.matrices(Shares(leaf, uses, Columns(left), Samples(trace.n), **options))
    return {i: shapes for i, shapes in found.items() if shapes}


def check_room(run: Run, reduction: Reduction, scope: Scope, budget: int, name: Callable[[int], str]) -> None:
    """Refuse matrices that take more than what is free."""
    if fits(reduction, run.params):
        return
    there = free_on(run.params[0].device)
    shapes = matrices(run, reduction, scope, budget)
    each = {i: bytes_of(x, run.params[i]) for i, x in shapes.items()}
    if sum(each.values()) > there:
        i = max(each, key=each.__getitem__)
        raise ArgumentError(
            f"its matrices take {told(sum(each.values()))}, but {told(int(there))} are free. The largest are those of "
            f"{name(i)}: {told(each[i])}, of shapes {shapes[i]}. Pass a smaller max_factor_dim=, above which factors "
            "are kept as their diagonals, or keep parameters in another argument."
        )
