"""From a function to its statistics: one run, pullbacks of the columns, and a contraction of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, dual_level, hooked, listening, transforming, version, versions
from invfunc.core.columns import Criterion
from invfunc.core.factors import partners
from invfunc.core.marks import HALF, SUMMED, Final, Mark, Unsupported
from invfunc.core.resort import alone, by_rows
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import Use
from invfunc.evaluation.room import fits
from invfunc.loss.outputs import marked_for
from invfunc.loss.square_root import Columns, Units
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.recording.problem import Problem
from invfunc.reductions import Found, Reduction, State
from invfunc.reductions.quantity import Quantity

Way = Callable[[Problem, Run, list[torch.Tensor], slice], tuple[Any, Any]]
"""A way of calling f, given the leaves of a run: the result, whose mark and uses the run knows then, and aux."""
WAYS: tuple[Way, ...] = (Problem.call, alone, by_rows)
"""As it is, then the last resort."""
_DTYPES = (torch.float32, torch.float64, *HALF)


def plain(problem: Problem) -> bool:
    """Whether the arguments of a call are ordinary tensors, which nothing else watches."""
    if listening() or dispatched() or torch.is_inference_mode_enabled():
        return False
    if dual_level():  # forward mode
        return False
    return all([x.dtype in _DTYPES and x.layout is torch.strided and not x.is_meta for x in problem.leaves])


def evaluated(
    problem: Problem, quantities: Sequence[Quantity], dense: bool = False, way: Way = Problem.call
) -> tuple[list[Any], Any]:
    """The results of some quantities of one function, and aux; `dense`, of all columns one by one.

    `way` calls f: as it is, with all operations followed, or as the last resort does (`WAYS`).
    """
    outside = torch.is_grad_enabled()
    constants = [x for q in quantities for x in q.reduction.constants]
    deep = transforming() or (outside and any([x.requires_grad for x in (*problem.tensors(), *constants)]))
    try:
        return _run(problem, quantities, deep, outside, dense, way)
    except Again:
        return _run(problem, quantities, True, outside, dense, way)


def _run(
    problem: Problem, quantities: Sequence[Quantity], deep: bool, outside: bool, dense: bool, way: Way
) -> tuple[list[Any], Any]:
    chosen = problem.samples
    chosen = None if chosen is None else torch.tensor(chosen, device=problem.leaves[0].device)
    run = Run(problem.n, deep, chosen)
    run.open(way is Problem.call or transforming())
    try:
        return _evaluated(problem, quantities, run, outside, dense, way)
    finally:
        run.close()


class Again(Exception):
    """Raised where the result has a derivative in what f closes over."""


def _ran(problem: Problem, quantities: Sequence[Quantity], run: Run, outside: bool, way: Way) -> tuple[Any, Any]:
    """What f returns, and aux; the run knows then what f reads of the parameters."""
    device, given = problem.leaves[0].device.type, problem.tensors()
    before = versions(given)
    leaves = [run.leaf(i, p) for i, p in enumerate(problem.leaves)]
    if any([q.kind.convex for q in quantities]):
        run.criterion = Criterion(run.token)
    drawn = [q.drawing.count if q.drawing is not None else 0 for q in quantities]
    run.alone = all([q.kind.first_order or count == 1 for q, count in zip(quantities, drawn, strict=True)])
    marks = marked_for(run.criterion)
    with _autocast(device, True), marks, TwiceDifferentiable() if run.deep else nullcontext():
        out, aux = _called(problem, run, leaves, way)
    if run.closed_over and outside and not run.deep:
        raise Again
    if before != versions(given):
        raise Unsupported("f writes into its arguments in place")
    if any([hooked(x) for x in leaves]):
        raise Unsupported("a hook may change what is sent back")
    if not all([fits(q.reduction, problem.leaves) for q in quantities]):
        raise Final("matrices that may take more than what is free")
    return out, aux


def _evaluated(
    problem: Problem, quantities: Sequence[Quantity], run: Run, outside: bool, dense: bool, way: Way
) -> tuple[list[Any], Any]:
    device = problem.leaves[0].device.type
    out, aux = _ran(problem, quantities, run, outside, way)
    of_model = {q.kind.of_model for q in quantities}
    several = isinstance(out, torch.Tensor) and out.ndim > 1
    rows = of_model == {"yes"} or (of_model == {"unless it returns a loss"} and several)
    cotangent = None if rows else _cotangent(run, out)
    n, dtype = run.count, reduce(torch.promote_types, [p.dtype for p in problem.leaves])
    found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
    folds = [Fold(q.reduction, problem, found) for q in quantities]
    if any([getattr(phase, "joined", False) for f in folds for phase in f.reduction.phases]):
        run.partners = partners(_owners(run, run.uses)[0], run.leaves)
    with torch.set_grad_enabled(run.deep and outside), _autocast(device, False):
        if run.criterion is not None:
            _columns(run, problem, quantities, folds, out, dense)
        elif rows:
            _rows(run, problem, folds, out)
        elif run.deep or run.numbers < thresholds.HOOKED or any([f.reduction.before is not None for f in folds]):
            with torch.enable_grad():
                run.pull(out, cotangent)
            _fold(run, problem, folds)
        else:
            _streamed(run, problem, folds, out, cotangent)
        results = [f.finished() for f in folds]
    return (_left(run, results, outside) if run.deep else results), None if aux is None else _left(run, aux, outside)


def _autocast(device: str, enabled: bool) -> AbstractContextManager:
    """A context without autocast, or without its cache, which would keep the casts of all aliases; if there is any."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled, cache_enabled=False)


def _called(problem: Problem, run: Run, leaves: list[torch.Tensor], way: Way) -> tuple[Any, Any]:
    """What f returns, or its loss of that; and aux."""
    out, aux = way(problem, run, leaves, slice(None))
    if problem.loss is None:
        return out, aux
    known = getattr(out, "_known", None)
    if not isinstance(out, torch.Tensor) or not 0 <= problem.out_dims % max(1, out.ndim) < 1 or known is None:
        raise Unsupported("outputs that are no tensor with the samples in front")
    if run.n > 1 and known.axis != (-out.ndim, 1, 1):
        raise Unsupported("outputs without the samples in front")
    if out.ndim < 1 or out.shape[0] != run.n or not out.is_floating_point():
        raise Unsupported("outputs of another shape")
    if run.criterion is not None:
        if run.criterion.output is not None:
            raise Unsupported("outputs are marked in a model that is given apart from its loss")
        run.criterion.output, run.criterion.version = out, version(out)
    target = problem.target(run)
    with run:
        return problem.loss(out, target), aux


def _columns(
    run: Run, problem: Problem, quantities: Sequence[Quantity], folds: Sequence[Fold], out: Any, dense: bool
) -> None:
    """Reduce the columns of each kind, one kind after the other."""
    criterion = run.criterion
    assert criterion is not None
    groups: dict[Any, list[int]] = {}
    for k, q in enumerate(quantities):
        groups.setdefault(q.columns, []).append(k)
    for same in groups.values():
        quantity = quantities[same[0]]
        with torch.enable_grad():
            made = criterion.made(run, out, quantity)
        count = sum(c.count for c in made)
        x, own = criterion.input, [folds[k] for k in same]
        shortcuts = quantity.drawing is None and not dense and all([f.reduction.shortcuts != "no" for f in own])
        if count == 0 or (shortcuts and not run.deep and count >= thresholds.FEW):
            raise Final("many columns, of which some may be left out by structure")
        assert x is not None
        _grouped(run, problem, own, x, made[0], 0)


def _grouped(run: Run, problem: Problem, folds: Sequence[Fold], x: torch.Tensor, columns: Columns, dim: int) -> None:
    """Reduce columns at a tensor, whose samples are in a dim, in groups that fit the memory."""
    count = columns.count
    for fold in folds:
        fold.found = replace(fold.found, columns=count)
    if (
        count == 1
        and not run.deep
        and run.numbers >= thresholds.HOOKED
        and all([not f.reduction.before for f in folds])
    ):
        left = columns.block(0, 1, slice(None)).left[0].reshape(x.movedim(dim, 0).shape)
        return _streamed(run, problem, folds, x, left.movedim(0, dim).to(x.dtype))
    apart = all([f.reduction.before is None and "outputs" in f.reduction.axes for f in folds])
    most = max(1, thresholds.GROUPED // max(1, run.numbers)) if apart else count
    shape = x.movedim(dim, 0).shape
    for start in range(0, count, most):
        stop = min(start + most, count)
        left = columns.block(start, stop, slice(None)).left[0].reshape(stop - start, *shape)
        with torch.enable_grad():
            run.pull_columns(x, left.movedim(1, 1 + dim).to(x.dtype))
        _fold(run, problem, folds, start > 0)


def _rows(run: Run, problem: Problem, folds: Sequence[Fold], out: Any) -> None:
    """Reduce the rows of the Jacobian of a model function."""
    if not isinstance(out, torch.Tensor) or not out.ndim or not out.requires_grad:
        raise Unsupported("outputs that are no tensor, or have no derivative")
    known, dim = getattr(out, "_known", None), problem.out_dims % out.ndim
    if type(known) is not Mark or known.run is not run.token or not known.graph:
        raise Unsupported("samples do not reach the result in a way that was seen")
    if out.shape[dim] != run.n or (run.n > 1 and known.axis != (dim - out.ndim, 1, 1)):
        raise Unsupported("outputs without the samples in the dim that is given")
    values = run.strip(out).movedim(dim, 0)
    for fold in folds:
        fold.found = replace(fold.found, outputs=[values.shape[1:]])
    _grouped(run, problem, folds, out, Units({0: values}), dim)


def _left(run: Run, results: Any, outside: bool) -> Any:
    """The results for use outside of the run."""
    return tree.map_tensors(lambda x: run.strip(x) if outside else run.strip(x).detach(), results)


def _cotangent(run: Run, out: Any) -> torch.Tensor | None:
    """The vector to pull back from a loss, a number or one of each sample; its samples have to be where they belong."""
    if not isinstance(out, torch.Tensor) or out.ndim > 1 or not out.requires_grad:
        raise Unsupported("f returns no loss, or one without a derivative")
    known = getattr(out, "_known", None)
    if type(known) is not Mark or known.run is not run.token or not known.graph:
        raise Unsupported("samples do not reach the result in a way that was seen")
    if out.ndim and out.shape[0] != run.n:
        raise Unsupported("the result is neither a number nor one for each sample")
    if run.n > 1 and known.axis != ((-1, 1, 1) if out.ndim else SUMMED):
        raise Unsupported(f"the result is neither [N] losses nor a sum over the samples: {known.axis}")
    return torch.ones_like(out) if out.ndim else None


def _owners(run: Run, uses: Sequence[Use]) -> tuple[list[list[Use]], dict[int, Sequence[int]]]:
    """The uses of each leaf, also those of what is computed from it; and the leaves of each use, by its id."""
    of: list[list[Use]] = [[] for _ in run.leaves]
    owners: dict[int, Sequence[int]] = {}
    for use in uses:
        leaf = use.node.leaf
        owners[id(use)] = leaves = (leaf,) if leaf is not None else _leaves(run, use)
        for i in leaves:
            of[i].append(use)
    return of, owners


def _leaves(run: Run, use: Use) -> Sequence[int]:
    """The numbers of the leaves that a computed tensor hangs on."""
    with torch.enable_grad():
        ones = torch.ones_like(use.value)
        found = torch.autograd.grad(use.value, run.leaves, ones, retain_graph=True, allow_unused=True)
    return [i for i, g in enumerate(found) if g is not None]


def _fold(run: Run, problem: Problem, folds: Sequence[Fold], again: bool = False) -> None:
    """Reduce all parameters, first what a reduction has to know of all of them; `again`, of other columns."""
    uses = [u for u in run.uses if u.d is not None]
    shares = [Shares(run, i, of, problem.name, again) for i, of in enumerate(_owners(run, uses)[0]) if of]
    if not shares:
        raise Unsupported("no parameter reaches the result")
    for fold in folds:
        if fold.reduction.before is not None:
            fold.before(shares)
        for each in shares:
            fold.reduction.add(fold.states, each.place, "columns", fold.reduction.step(each))


def _streamed(
    run: Run, problem: Problem, folds: Sequence[Fold], out: torch.Tensor, cotangent: torch.Tensor | None
) -> None:
    """Reduce each parameter as soon as the cotangents of all its uses have come, and free these."""
    of, owners = _owners(run, run.uses)
    waiting = [*map(len, of)]
    reached = False

    def arrived(use: Use) -> None:
        nonlocal reached
        reached = True
        for i in owners.pop(id(use)):
            waiting[i] -= 1
            if not waiting[i]:
                reduced(i)

    def reduced(i: int) -> None:
        uses = of[i] if len(of[i]) == 1 else [u for u in of[i] if u.d is not None]
        if uses:
            each = Shares(run, i, uses, problem.name)
            for fold in folds:
                fold.states[i] = fold.reduction.step(each)
        for use in uses:
            if use.node.leaf is not None:  # else it is of other leaves, too
                use.free()

    run.stream(out, cotangent, arrived)
    if not reached:
        raise Unsupported("no parameter reaches the result")
    for i, left in enumerate(waiting):
        if left:
            reduced(i)


class Fold:
    """What one reduction keeps of the parameters."""

    def __init__(self, reduction: Reduction, problem: Problem, found: Found) -> None:
        self.reduction, self.problem, self.found = reduction, problem, found
        self.states: dict[int, State] = {}

    def before(self, shares: Sequence[Shares]) -> None:
        """Let the reduction know what it has to of all parameters."""
        first, *rest = self.reduction.phases
        for phase in rest:
            states = {each.place: first.step(each) for each in shares}
            if first.whole:
                (norms,) = first.finish(first.together(states.values()), self.found)
                self.found = replace(self.found, before=norms.to(self.found.dtype))
            first = phase.knowing(phase.learned(states, self.found))
        self.reduction = first

    def finished(self) -> Any:
        """The result."""
        reduction, problem, found = self.reduction, self.problem, self.found
        own = partial(reduction.init, n=found.n, columns=found.columns)
        if reduction.whole:
            states = [self.states.get(i) or own(p) for i, p in enumerate(problem.leaves)]
            results = reduction.finish(reduction.together(states), found)
            results = [_rounded(x, found.dtype) for x in results] if reduction.rounded else results
            return reduction.assemble(results, found)
        if type(reduction).aside is not Reduction.aside:
            for i, p in enumerate(problem.leaves):
                found.aside[problem.paths[i]] = reduction.aside(self.states.get(i) or own(p), found)
        results = [reduction.finish(self.states.get(i) or own(p), found) for i, p in enumerate(problem.leaves)]
        parts = [*zip(*results, strict=True)]
        if reduction.rounded:
            dtypes = [p.dtype for p in problem.leaves]
            parts = [[*map(_rounded, part, dtypes)] for part in parts]
        trees = [tree.unflatten([*part], problem.structure) for part in parts]
        return reduction.assemble([tuple(t) if problem.several else t[0] for t in trees], found)


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    """A result in the precision of the parameter."""
    if isinstance(x, torch.Tensor):
        return x if x.dtype is dtype else x.to(dtype)
    if all([y.dtype is dtype for y in tree.tensors(x)]):
        return x
    return tree.map_tensors(lambda y: y.to(dtype), x)
