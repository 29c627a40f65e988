"""From a function to its statistics: one run, a pullback of each kind of columns, and a contraction of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, dual_level, hooked, listening, transforming, version
from invfunc.core.columns import Criterion
from invfunc.core.marks import SUMMED, Mark, Unsupported
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import Use
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.recording.problem import Problem
from invfunc.reductions import Found, Reduction, State
from invfunc.reductions.quantity import GGN, Quantity

_DTYPES = (torch.float32, torch.float64)


def plain(problem: Problem) -> bool:
    """Whether the arguments of a call are ordinary tensors, which nothing else watches."""
    if listening() or dispatched() or torch.is_inference_mode_enabled():
        return False
    if not all([x.dtype in _DTYPES and x.layout is torch.strided and not x.is_meta for x in problem.leaves]):
        return False
    return not torch.is_autocast_enabled(problem.leaves[0].device.type) and (transforming() or not dual_level())


def evaluated(problem: Problem, quantities: Sequence[Quantity]) -> tuple[list[Any], Any]:
    """The results of some quantities of one function, and aux."""
    outside = torch.is_grad_enabled()
    constants = [x for q in quantities for x in q.reduction.constants]
    deep = transforming() or (outside and any([x.requires_grad for x in (*problem.tensors(), *constants)]))
    try:
        return _run(problem, quantities, deep, outside)
    except Again:
        return _run(problem, quantities, True, outside)


def _run(problem: Problem, quantities: Sequence[Quantity], deep: bool, outside: bool) -> tuple[list[Any], Any]:
    run = Run(problem.n, deep)
    run.open()
    try:
        return _evaluated(problem, quantities, run, outside)
    finally:
        run.close()


class Again(Exception):
    """Raised where the result has a derivative in what f closes over."""


def _evaluated(problem: Problem, quantities: Sequence[Quantity], run: Run, outside: bool) -> tuple[list[Any], Any]:
    given = problem.tensors()
    versions = [*map(version, given)]
    leaves = [run.leaf(i, p) for i, p in enumerate(problem.leaves)]
    if any([q.kind is GGN for q in quantities]):
        run.criterion = Criterion()
    if run.deep:
        with TwiceDifferentiable():
            out, aux = _called(problem, run, leaves)
    else:
        out, aux = _called(problem, run, leaves)
    if run.closed_over and outside and not run.deep:
        raise Again
    if versions != [*map(version, given)]:
        raise Unsupported("f writes into its arguments in place")
    if any([hooked(x) for x in leaves]):
        raise Unsupported("a hook may change what is sent back")
    cotangent = _cotangent(run, out)
    n, dtype = problem.n, reduce(torch.promote_types, [p.dtype for p in problem.leaves])
    found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
    folds = [Fold(q.reduction, problem, found) for q in quantities]
    with torch.set_grad_enabled(run.deep and outside):
        if run.criterion is not None:
            _columns(run, problem, quantities, folds, out)
        elif run.deep or any([f.reduction.before is not None for f in folds]):
            with torch.enable_grad():
                run.pull(out, cotangent)
            _fold(run, problem, folds, [u for u in run.uses if u.d is not None])
        else:
            _streamed(run, problem, folds, out, cotangent)
        results = [f.finished() for f in folds]
    return (_left(run, results, outside) if run.deep else results), None if aux is None else _left(run, aux, outside)


def _called(problem: Problem, run: Run, leaves: list[torch.Tensor]) -> tuple[Any, Any]:
    """What f returns, or its loss of that; and aux."""
    out, aux = problem.call(run, leaves, slice(None))
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
        run.criterion.output, run.criterion.version = out, version(out)
    target = problem.target(run)
    with run:
        return problem.loss(out, target), aux


def _columns(run: Run, problem: Problem, quantities: Sequence[Quantity], folds: Sequence[Fold], out: Any) -> None:
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
        if count == 0 or (quantity.drawing is None and count >= thresholds.FEW):
            raise Unsupported("many columns, of which some may be left out by structure")
        if count > 1 and run.numbers * count >= thresholds.STREAMED:
            raise Unsupported("columns of large layers, which are pulled back one by one")
        x = criterion.input
        assert x is not None
        block = made[0].block(0, count, slice(None))
        with torch.enable_grad():
            run.pull_columns(x, block.left[0].reshape(count, *x.shape))
        for k in same:
            folds[k].found = replace(folds[k].found, columns=count)
        _fold(run, problem, [folds[k] for k in same], [u for u in run.uses if u.d is not None])


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
    if run.n > 1 and run.blended and not out.ndim:
        raise Unsupported("what is computed of several samples, in a loss that is a number")
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


def _fold(run: Run, problem: Problem, folds: Sequence[Fold], uses: list[Use]) -> None:
    """Reduce all parameters, first what a reduction has to know of all of them."""
    shares = [Shares(run, i, of, problem.name) for i, of in enumerate(_owners(run, uses)[0]) if of]
    if not shares:
        raise Unsupported("no parameter reaches the result")
    for fold in folds:
        fold.before(shares)
        for each in shares:
            fold.states[each.place] = fold.reduction.step(each)


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
        first = self.reduction.before
        if first is not None:
            states = {each.place: first.step(each) for each in shares}
            self.reduction = self.reduction.knowing(self.reduction.learned(states, self.found))
            if first.whole:
                (norms,) = first.finish(first.together(states.values()), self.found)
                self.found = replace(self.found, before=norms.to(self.found.dtype))

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
    return tree.map_tensors(lambda y: y.to(dtype), x)
