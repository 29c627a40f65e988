"""From a function to its statistics: one run, pullbacks of the columns, and a contraction of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch

from invfunc import thresholds, tree
from invfunc._alike import alike
from invfunc._extras import Ticks
from invfunc._torch.functorch import dispatched, dual_level, hooked, listening, transforming, version, versions
from invfunc._torch.generators import same_state, state_of, torchs_own
from invfunc._ways import known_way, note_way
from invfunc.budget.size import fits
from invfunc.core.columns import Criterion, Hessian, made
from invfunc.core.factors import partners
from invfunc.core.hessian import CallsRun, Diagonal
from invfunc.core.kfra import ChainRun, chain
from invfunc.core.marks import HALF, SUMMED, Final, Mark, Unsupported, know
from invfunc.core.resort import alone, by_rows
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import Use
from invfunc.loss.outputs import marked_for
from invfunc.loss.square_root import Columns, Units
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.plan import Options, Plan, even
from invfunc.recording.problem import Problem
from invfunc.reductions import Found, Reduction, State
from invfunc.reductions.quantity import Quantity
from invfunc.reductions.reduction import Shortcuts
from invfunc.structure.plan import Structure

Way = Callable[[Problem, Run, list[torch.Tensor], slice], tuple[Any, Any]]
"""A way of calling f, given the leaves of a run: the result, whose mark and uses the run knows then, and aux."""
WAYS: tuple[Way, ...] = (Problem.call, alone, by_rows)
"""As it is, then the last resort."""
T = TypeVar("T")
Made = dict[Hashable, list[Columns]]
"""Columns of each kind, by the key that quantities share."""
Reduce = Callable[[str, Any], Any]
PLAIN, TICKS = Options(), Ticks()
_DTYPES = (torch.float32, torch.float64, *HALF)


def plain(problem: Problem) -> bool:
    """Whether the arguments of a call are ordinary tensors, which nothing else watches."""
    if listening() or dispatched() or torch.is_inference_mode_enabled():
        return False
    if dual_level():  # forward mode
        return False
    return all([x.dtype in _DTYPES and x.layout is torch.strided and not x.is_meta for x in problem.leaves])


def evaluated(
    problem: Problem,
    quantities: Sequence[Quantity],
    options: Options = PLAIN,
    way: Way = Problem.call,
    ticks: Ticks = TICKS,
    undo: Callable[[], Any] = bool,
) -> tuple[list[Any], Any]:
    """The results of some quantities of one function, and aux.

    `way` calls f: as it is, with all operations followed, or as the last resort does (`WAYS`); what it drew is undone
    where f has to run again.
    """

    def finished(run: Run, folds: list[Fold], out: Any, aux: Any, outside: bool) -> tuple[list[Any], Any]:
        with torch.set_grad_enabled(run.deep and outside):
            results = [f.finished() for f in folds]
        return _left(run, results, outside) if run.deep else results, None if aux is None else _left(run, aux, outside)

    if ticks is not TICKS:
        ticks.reach(problem.n)
    return _ran_and(finished, problem, quantities, options, None, ticks, way, undo=undo)


@dataclass
class Kept:
    """What some quantities keep of one run."""

    folds: list[Fold]
    count: int
    """How many samples were reduced."""
    aux: Any
    result: Any
    """What f has returned, or the loss of it."""
    apart: Any
    """The outputs of a model that is given apart from its loss."""


def kept(
    problem: Problem,
    quantities: Sequence[Quantity],
    options: Options,
    known: Made | None = None,
    ticks: Ticks = TICKS,
    way: Way = Problem.call,
    part: bool = False,
) -> Kept:
    """What some quantities keep of a run of one function, to be merged with what they keep of others.

    A reduction of several phases is in one of them: only a phase that is of each sample alone comes before it. The
    columns may be `known`; `part` says that these are a part of the samples, whose losses have to add up.
    """

    def left(run: Run, folds: list[Fold], out: Any, aux: Any, outside: bool) -> Kept:
        for fold in folds if run.deep else ():
            fold.states, fold.earlier = _left(run, (fold.states, fold.earlier), outside)
        aux = None if aux is None else _left(run, aux, outside)
        return Kept(folds, run.count, aux, _left(run, out, outside), _left(run, run.outputs, outside))

    return _ran_and(left, problem, quantities, replace(options, reduce=None), known, ticks, way, part, phased=True)


class _Bare(AbstractContextManager):
    """A context in which nothing is watched."""

    adopting = None

    def __exit__(self, *error: Any) -> None:
        pass

    def samples(self, x: torch.Tensor, axis: Any) -> torch.Tensor:
        return x


def returned(problem: Problem, part: slice = slice(None), leaves: list[torch.Tensor] | None = None) -> Any:
    """What f returns for some of the samples, perhaps at other parameters."""
    few = problem
    if part != slice(None):
        few = problem.chunk(part, part.stop - part.start)
    return few.call(_Bare(), problem.leaves if leaves is None else leaves, slice(None))[0]


def loss_of(problem: Problem) -> torch.Tensor:
    """The loss, which is seen to be one of each sample, or their mean or sum; or outputs of a model."""
    run = Run(problem.n, False)
    run.open()
    try:
        out, _ = _ran(problem, [], run, False)
        if not isinstance(out, torch.Tensor) or out.ndim < 2:
            _cotangent(run, out)
        return _left(run, out, False)
    finally:
        run.close()


def columns_of_all(problem: Problem, outputs: torch.Tensor, quantities: Sequence[Quantity]) -> Made:
    """The columns at the outputs of a model, with a loss that is given apart."""
    run = Run(problem.n, transforming() or (torch.is_grad_enabled() and outputs.requires_grad))
    run.open()
    try:
        z = run.alias(outputs)
        know(z, Mark(run.token, (problem.out_dims % z.ndim - z.ndim, 1, 1), True))
        run.criterion = Criterion(run.token)
        with marked_for(run.criterion), TwiceDifferentiable() if run.deep else nullcontext():
            out = _loss(problem, run, z)
        hessian = run.criterion.hessian(run, out)
    finally:
        run.close()
    return {q.columns: made(hessian, q, problem.n) for q in quantities}


def hessian_of(problem: Problem) -> Hessian:
    """The Hessian of the loss in the outputs that are found in f."""
    run = Run(
        problem.n, transforming() or (torch.is_grad_enabled() and any(x.requires_grad for x in problem.tensors()))
    )
    run.open()
    try:
        leaves = [run.leaf(i, p) for i, p in enumerate(problem.leaves)]
        run.criterion, run.part = Criterion(run.token), True
        with marked_for(run.criterion), TwiceDifferentiable() if run.deep else nullcontext():
            out = _called(problem, run, leaves)[0]
        return run.criterion.hessian(run, out)
    finally:
        run.close()


def by_ways(f: Callable, what: Hashable, call: Callable[[Way], T], undo: Callable[[], None]) -> T | None:
    """What a call finds by the first way that follows f, or None; what is asked of f says which way that was before."""
    first = known_way(f, what)
    for k in range(len(WAYS) if first is None else first, len(WAYS)):
        try:
            found = call(WAYS[k])
        except Exception as error:
            undo()
            if isinstance(error, Final):
                break
        else:
            if k != first:
                note_way(f, what, k)
            return found
    note_way(f, what, None)
    return None


def _ran_and(
    finish: Callable[..., T],
    problem: Problem,
    quantities: Sequence[Quantity],
    options: Options,
    known: Made | None,
    ticks: Ticks,
    way: Way,
    part: bool = False,
    phased: bool = False,
    undo: Callable[[], Any] = bool,
) -> T:
    """Run f, reduce the columns, and finish with what is kept while the run is open."""
    outside = torch.is_grad_enabled()
    constants = [x for q in quantities for x in q.reduction.constants]
    deep = transforming() or (outside and any([x.requires_grad for x in (*problem.tensors(), *constants)]))
    chosen = problem.samples
    chosen = None if chosen is None else torch.tensor(chosen, device=problem.leaves[0].device)
    kind = quantities[0].kind
    new = ChainRun if kind.averaged else CallsRun if kind.second_order else Run
    if new is not Run and way is not Problem.call:
        raise Final("second derivatives of a function whose operations are not followed")
    while True:
        run = new(problem.n, deep, chosen)
        run.part, run.way = part, way
        run.open(way is Problem.call or transforming())
        try:
            return finish(run, *_evaluated(problem, quantities, run, outside, options, known, ticks, phased), outside)
        except Again:
            deep = True
            undo()
        finally:
            run.close()


class Again(Exception):
    """Raised where the result has a derivative in what f closes over."""


def _ran(problem: Problem, quantities: Sequence[Quantity], run: Run, outside: bool) -> tuple[Any, Any]:
    """What f returns, and aux; the run knows then what f reads of the parameters."""
    device, given = problem.leaves[0].device.type, problem.tensors()
    before = versions(given)
    leaves = [run.leaf(i, p) for i, p in enumerate(problem.leaves)]
    if any([q.kind.convex for q in quantities]):
        run.criterion = Criterion(run.token)
    if run.criterion is not None and not all([q.drawing for q in quantities]):
        run.states = [(g, state_of(g)) for g in torchs_own()]
    drawn = [q.drawing.count if q.drawing is not None else 0 for q in quantities]
    run.alone = all([q.kind.first_order or count == 1 for q, count in zip(quantities, drawn, strict=True)])
    marks = marked_for(run.criterion)
    with (
        _autocast(device, True),
        marks,
        TwiceDifferentiable() if run.deep or isinstance(run, CallsRun) else nullcontext(),
    ):
        out, aux = _called(problem, run, leaves)
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
    problem: Problem,
    quantities: Sequence[Quantity],
    run: Run,
    outside: bool,
    options: Options,
    known: Made | None,
    ticks: Ticks,
    phased: bool,
) -> tuple[list[Fold], Any, Any]:
    """What is kept of a run, what f has returned, and aux."""
    device = problem.leaves[0].device.type
    out, aux = _ran(problem, quantities, run, outside)
    of_model = {q.kind.of_model for q in quantities}
    several = isinstance(out, torch.Tensor) and out.ndim > 1
    rows = of_model == {"yes"} or (of_model == {"unless it returns a loss"} and several)
    cotangent = None if rows else _cotangent(run, out)
    n, dtype = run.count, reduce(torch.promote_types, [p.dtype for p in problem.leaves])
    found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
    folds = [Fold(q.reduction, problem, found, options.reduce, phased) for q in quantities]
    if any([getattr(phase, "joined", False) for f in folds for phase in f.reduction.phases]):
        run.partners = partners(_owners(run, run.uses)[0], run.leaves)
    with torch.set_grad_enabled(run.deep and outside), _autocast(device, False):
        way = Pullback(run, problem, folds, options.plan, ticks, run.uses)
        if isinstance(run, ChainRun):
            with _undrawn():
                chain(run, problem.name, quantities[0], folds, out, _owners(run, run.uses)[0])
        elif run.criterion is not None:
            _columns(way, quantities, out, options.dense, known)
        elif isinstance(run, CallsRun):
            shortcuts = not options.dense and all([f.reduction.shortcuts != "no" for f in folds])
            with _undrawn():
                Diagonal(run, problem.name, folds, *_owners(run, run.uses)).reduce(out, cotangent, shortcuts)
        elif rows:
            _rows(way, out)
        elif not way.streams or options.plan.asked("params"):
            way.pull(out, cotangent)
        else:
            way.stream(out, cotangent)
    return folds, out, aux


@contextmanager
def _undrawn() -> Iterator[None]:
    """A context in which operations run again, and none that draws random numbers, which would be others."""
    before = [(g, state_of(g)) for g in torchs_own()]
    yield
    if not all([same_state(state, state_of(g)) for g, state in before]):
        raise Final("second derivatives of an operation that draws random numbers")


def _autocast(device: str, enabled: bool) -> AbstractContextManager:
    """A context without autocast, or without its cache, which would keep the casts of all aliases; if there is any."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled, cache_enabled=False)


def _called(problem: Problem, run: Run, leaves: list[torch.Tensor]) -> tuple[Any, Any]:
    """What f returns, or its loss of that; and aux."""
    out, aux = (run.way or Problem.call)(problem, run, leaves, slice(None))
    if problem.loss is None:
        return out, aux
    if isinstance(run, CallsRun) and run.criterion is None:  # no columns are made at the outputs
        target = problem.target(run)
        with run:
            return problem.loss(out, target), aux
    known = getattr(out, "_known", None)
    if not isinstance(out, torch.Tensor) or not 0 <= problem.out_dims % max(1, out.ndim) < 1 or known is None:
        raise Unsupported("outputs that are no tensor with the samples in front")
    if run.n > 1 and known.axis != (-out.ndim, 1, 1):
        raise Unsupported("outputs without the samples in front")
    run.outputs = out
    if out.ndim < 1 or out.shape[0] != run.n or not out.is_floating_point():
        raise Unsupported("outputs of another shape")
    return _loss(problem, run, out), aux


def _loss(problem: Problem, run: Run, outputs: torch.Tensor) -> Any:
    """The loss of the outputs of a model that is given apart from it."""
    assert problem.loss is not None
    if run.criterion is not None:
        if run.criterion.output is not None:
            raise Unsupported("outputs are marked in a model that is given apart from its loss")
        run.criterion.output, run.criterion.version = outputs, version(outputs)
    target = problem.target(run)
    with run:
        return problem.loss(outputs, target)


def _columns(way: Pullback, quantities: Sequence[Quantity], out: Any, dense: bool, known: Made | None) -> None:
    """Reduce the columns of each kind, one kind after the other; some are known."""
    run, folds = way.run, way.folds
    criterion = run.criterion
    assert criterion is not None
    groups: dict[Any, list[int]] = {}
    for k, q in enumerate(quantities):
        groups.setdefault(q.columns, []).append(k)
    for key, same in groups.items():
        quantity = quantities[same[0]]
        with torch.enable_grad():
            columns = made(criterion.hessian(run, out), quantity, run.n) if known is None else known[key]
        count = sum(c.count for c in columns)
        x, own = criterion.input, [folds[k] for k in same]
        shortcuts = quantity.drawing is None and not dense and all([f.reduction.shortcuts != "no" for f in own])
        if count == 0:
            raise Unsupported("a loss without columns")
        assert x is not None
        few = run.deep or run.chosen is not None or count < thresholds.FEW
        if shortcuts and not few:
            if known is not None or way.plan.splits:
                raise Final("many columns in chunks, of which some may be left out by structure")
            if _structured(replace(way, folds=own), columns[0]):
                continue
        replace(way, folds=own).columns(x, columns[0], 0)


def _structured(way: Pullback, columns: Columns) -> bool:
    """Reduce columns by the structure of f, if it has one that saves time."""
    folds, run = way.folds, way.run
    allowed: set[Shortcuts] = {f.reduction.shortcuts for f in folds}
    if way.apart:
        return False
    shortcuts: Shortcuts = allowed.pop() if len(allowed) == 1 else "narrow"
    structure = Structure(way.problem, run, columns, _owners(run, run.uses)[0], shortcuts)
    found = structure.way()
    if found is None:
        return False

    def reduce(place: int, shares: Shares) -> None:
        for fold in folds:
            fold.keep(place, fold.reduction.step(shares), last=False)

    for fold in folds:
        fold.found = replace(fold.found, columns=columns.count)
    return structure.taken(found, reduce)


def _rows(way: Pullback, out: Any) -> None:
    """Reduce the rows of the Jacobian of a model function."""
    run, problem = way.run, way.problem
    if not isinstance(out, torch.Tensor) or not out.ndim or not out.requires_grad:
        raise Unsupported("outputs that are no tensor, or have no derivative")
    known, dim = getattr(out, "_known", None), problem.out_dims % out.ndim
    if type(known) is not Mark or known.run is not run.token or not known.graph:
        raise Unsupported("samples do not reach the result in a way that was seen")
    if out.shape[dim] != run.n or (run.n > 1 and known.axis != (dim - out.ndim, 1, 1)):
        raise Unsupported("outputs without the samples in the dim that is given")
    values = run.strip(out).movedim(dim, 0)
    for fold in way.folds:
        fold.found = replace(fold.found, outputs=[values.shape[1:]])
    way.columns(out, Units({0: values}), dim)


@dataclass
class Pullback:
    """How vectors are pulled back to the parameters, and reduced there."""

    run: Run
    problem: Problem
    folds: list[Fold]
    plan: Plan
    ticks: Ticks
    uses: list[Use]

    @property
    def apart(self) -> bool:
        """Whether a reduction has to know something of all parameters first."""
        return any([f.first is not None for f in self.folds])

    @property
    def streams(self) -> bool:
        """Whether a parameter is reduced as soon as the cotangents of its uses have come, which are freed then."""
        kept = self.apart or any([f.reduction.keeps for f in self.folds])
        return not (self.run.deep or self.run.numbers < thresholds.HOOKED or kept)

    def pull(self, out: torch.Tensor, cotangent: torch.Tensor | None) -> None:
        """Reduce one vector at a tensor; all parameters at once, or in the chunks that are asked for."""
        if not self.plan.splits and self.ticks is TICKS:  # in short
            with torch.enable_grad():
                self.run.pull(out, cotangent)
            self._fold(range(len(self.run.leaves)))
            return
        chunks = self._chunks()
        self.ticks.expect(len(chunks))
        for leaves, self.run.uses in alike("params", chunks, _numbers):
            with torch.enable_grad():
                self.run.pull(out, cotangent, retain=len(chunks) > 1)
            self._fold(leaves)
            self.ticks.done()

    def columns(self, x: torch.Tensor, columns: Columns, dim: int) -> None:
        """Reduce columns at a tensor, whose samples are in a dim, in groups that fit the memory."""
        run, folds, count = self.run, self.folds, columns.count
        run.exact = getattr(columns, "exact", None)
        for fold in folds:
            fold.found = replace(fold.found, columns=count)
        if count == 1 and not self.plan.splits and self.streams:
            left = columns.block(0, 1, slice(None)).left[0].reshape(x.movedim(dim, 0).shape)
            return self.stream(x, left.movedim(0, dim).to(x.dtype))
        together = self.apart or not all(["outputs" in f.reduction.axes for f in folds])
        most = count if together else max(1, thresholds.GROUPED // max(1, run.numbers))
        if count <= most and not self.plan.splits and self.ticks is TICKS:  # in short
            return self._group(range(len(run.leaves)), x, columns, dim, 0, count)
        groups = self.plan.ranges("outputs", count) if self.plan.asked("outputs") else even(count, most)
        if len(groups) > 1 and self.apart:
            raise Unsupported("something of all columns has to be known of each")
        chunks = self._chunks()
        self.ticks.expect(len(chunks) * len(groups))
        for leaves, run.uses in alike("params", chunks, _numbers):
            for start, stop in alike("outputs", groups, lambda group: group[1] - group[0], last=True):
                self._group(leaves, x, columns, dim, start, stop)
                self.ticks.done()

    def _group(self, leaves: range, x: torch.Tensor, columns: Columns, dim: int, start: int, stop: int) -> None:
        """Reduce a range of columns at a tensor."""
        left = columns.block(start, stop, slice(None)).left[0].reshape(stop - start, *x.movedim(dim, 0).shape)
        with torch.enable_grad():
            self.run.pull_columns(x, left.movedim(1, 1 + dim).to(x.dtype))
        self._fold(leaves, start > 0, stop == columns.count)

    def _chunks(self) -> Sequence[tuple[range, list[Use]]]:
        """The parameters in the chunks that are asked for, with their uses."""
        count = len(self.run.leaves)
        if not self.plan.asked("params"):
            return [(range(count), self.uses)]
        if self.apart:
            raise Unsupported("something of all parameters has to be known of each")
        owners = _owners(self.run, self.uses)[1]
        chunks = [range(*part) for part in self.plan.ranges("params", count)]
        uses = [[u for u in self.uses if not leaves.isdisjoint(owners[id(u)])] for leaves in map(set, chunks)]
        return [pair for pair in zip(chunks, uses, strict=True) if pair[1]]

    def _fold(self, leaves: range, again: bool = False, last: bool = True) -> None:
        """Reduce some parameters, first what a reduction has to know of all of them; `again`, of other columns, of
        which the `last` ones."""
        run = self.run
        of = _owners(run, [u for u in run.uses if u.d is not None])[0]
        shares = [Shares(run, i, of[i], self.problem.name, again) for i in leaves if of[i]]
        if not shares and len(leaves) == len(run.leaves):
            raise Unsupported("no parameter reaches the result")
        for fold in self.folds:
            if fold.first is not None:
                fold.before(shares)
            for each in shares:
                fold.keep(each.place, fold.reduction.step(each), last)

    def stream(self, out: torch.Tensor, cotangent: torch.Tensor | None) -> None:
        """Reduce each parameter as soon as the cotangents of all its uses have come, and free these."""
        run, folds = self.run, self.folds
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
                each = Shares(run, i, uses, self.problem.name)
                for fold in folds:
                    fold.keep(i, fold.reduction.step(each))
            for use in uses:
                if use.node.leaf is not None:  # else it is of other leaves, too
                    use.free()

        self.ticks.expect(1)
        run.stream(out, cotangent, arrived)
        if not reached:
            raise Unsupported("no parameter reaches the result")
        for i, left in enumerate(waiting):
            if left:
                reduced(i)
        self.ticks.done()


def _numbers(chunk: tuple[range, list[Use]]) -> tuple[int, ...]:
    """How many numbers the values have that a chunk of parameters stands for."""
    return tuple(u.value.numel() for u in chunk[1])


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
    one = type(known.axis) is tuple and not out.ndim  # of one sample alone
    if run.n > 1 and not one and known.axis != ((-1, 1, 1) if out.ndim else SUMMED):
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


class Fold:
    """What one reduction keeps of the parameters."""

    def __init__(
        self, reduction: Reduction, problem: Problem, found: Found, reduce: Reduce | None = None, phased: bool = False
    ) -> None:
        """`reduce` is what becomes of the result of a parameter; `phased` says that phases see all samples first."""
        self.reduction, self.problem, self.found, self.reduce = reduction, problem, found, reduce
        self.first = reduction.before if reduction.apart or not phased else None
        """What has to be known of all parameters before."""
        self.states: dict[int, State] = {}
        self.earlier: dict[int, State] = {}
        """What the phase before has kept."""
        self.results: dict[int, list[Any]] = {}
        """Those of the parameters that are done."""

    def before(self, shares: Sequence[Shares]) -> None:
        """Let the reduction know what it has to of all parameters."""
        first, *rest = self.reduction.phases
        for phase in rest:
            self.earlier = {each.place: first.step(each) for each in shares}
            if first.whole:
                (norms,) = first.finish(first.together(self.earlier.values()), self.found)
                self.found = replace(self.found, before=norms.to(self.found.dtype))
            first = phase.knowing(phase.learned(self.earlier, self.found))
        self.reduction = first

    def keep(self, i: int, state: State, last: bool = True) -> None:
        """Keep more of a parameter; its result is made at once where the caller reduces it."""
        self.reduction.add(self.states, i, "columns", state)
        if self.reduce is not None and last:
            self.results[i] = self.closed(i)

    def closed(self, i: int) -> list[Any]:
        """The results of one parameter."""
        reduction, leaf, found = self.reduction, self.problem.leaves[i], self.found
        state = self.states.pop(i, None) or reduction.init(leaf, found.n, found.columns)
        if type(reduction).aside is not Reduction.aside:
            found.aside[self.problem.paths[i]] = reduction.aside(state, found)
        results = reduction.finish(state, found)
        if reduction.rounded:
            results = [_rounded(x, leaf.dtype) for x in results]
        if self.reduce is not None:
            results = [x if x is None else self.reduce(self.problem.paths[i], _own(x)) for x in results]
        return results

    def finished(self) -> Any:
        """The result."""
        reduction, problem, found = self.reduction, self.problem, self.found
        if reduction.whole and self.reduce is None:
            init = partial(reduction.init, n=found.n, columns=found.columns)
            states = [self.states.get(i) or init(p) for i, p in enumerate(problem.leaves)]
            results = reduction.finish(reduction.together(states), found)
            results = [_rounded(x, found.dtype) for x in results] if reduction.rounded else results
            return reduction.assemble(results, found)
        done = self.results
        parts = [*zip(*[done[i] if i in done else self.closed(i) for i in range(len(problem.leaves))], strict=True)]
        trees = [tree.unflatten([*part], problem.structure) for part in parts]
        return reduction.assemble([tuple(t) if problem.several else t[0] for t in trees], found)


def _own(x: Any) -> Any:
    """A result in memory of its own, as the caller may write to it while others are computed."""
    return tree.map_tensors(torch.clone, x)


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    """A result in the precision of the parameter."""
    if isinstance(x, torch.Tensor):
        return x if x.dtype is dtype else x.to(dtype)
    if all([y.dtype is dtype for y in tree.tensors(x)]):
        return x
    return tree.map_tensors(lambda y: y.to(dtype), x)
