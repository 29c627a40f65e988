"""From a function to its statistics: one run, pullbacks of the columns, and a contraction of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointError

from invfunc import thresholds, tree
from invfunc._extras import Ticks
from invfunc._torch.functorch import graph_of, transforming, versions
from invfunc._torch.generators import same_state, set_states, state_of, states_of, torchs_own
from invfunc.budget import fits
from invfunc.core.columns import Finder, Output, Twice, columns_at, lost, marked_for, single, split
from invfunc.core.factors import partners
from invfunc.core.generic import Replays
from invfunc.core.hessian import CallsRun, ChainRun, HessianDiagonal, chain
from invfunc.core.marks import SUMMED, Final, Mark, Unsupported, know
from invfunc.core.refusals import check_loss, check_outputs, check_room
from invfunc.core.resort import AsWritten, alone, at_once, beside, by_rows, entries
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import Use
from invfunc.core.ways import REPLAYED, Again, How, Met, Way, looked_at
from invfunc.errors import InvFuncError, ProcessError, ReplayError, unreached
from invfunc.loss.square_root import Affine, Columns, Units, Weighted, joined_block
from invfunc.operations.axis import back, exposed
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.plan import Options, Plan, even
from invfunc.problem import BoundProblem, check_numbers, whole
from invfunc.reductions import Found, Reduction, State, States
from invfunc.reductions.estimates import Lot
from invfunc.reductions.reduction import Quantity, Shortcuts
from invfunc.structure.plan import Shortcut, Structure

T = TypeVar("T")
Made = dict[Hashable, list[Columns]]
"""Columns of each kind, by the key that quantities share."""
Reduce = Callable[[str, Any], Any]
PLAIN, TICKS, PLAINLY = Options(), Ticks(), nullcontext()


def of_each_kind(quantities: Sequence[Quantity]) -> list[list[int]]:
    """The numbers of quantities that are reduced in one run: vectors, columns, second derivatives have each its own."""
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(q.kind for q in quantities):
        key = kind.convex, kind.averaged, kind.second_order, kind.of_model == "yes"
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def by_kinds(
    quantities: Sequence[Quantity], way: Way, call: Callable[[list[Quantity], Way], T]
) -> Iterator[tuple[list[int], T]]:
    """The results of each kind of quantities, for which f runs with the same random numbers; the second derivatives of
    a function that is not followed there are those of single samples."""
    before = [(g, state_of(g)) for g in torchs_own()]
    for group in of_each_kind(quantities):
        some = [quantities[i] for i in group]
        set_states(before)
        try:
            found = call(some, way)
        except Unsupported as error:
            kind = some[0].kind
            if way is not BoundProblem.call or not kind.second_order or kind.averaged:
                raise
            set_states(before)
            try:
                found = call(some, alone)
            except Unsupported:
                raise error from None
        yield group, found


@dataclass
class RunStates:
    """The states of some quantities in one run."""

    folds: list[Fold]
    results: list[Any]
    """Results of the folds, where they are not to be merged with others."""
    count: int
    """Number of samples that were reduced."""
    aux: Any
    result: Any
    """Result of f, or the loss of it."""
    apart: Any
    """The outputs of a model that is given apart from its loss."""


def kept(
    problem: BoundProblem,
    quantities: Sequence[Quantity],
    options: Options = PLAIN,
    way: Way = BoundProblem.call,
    known: Made | None = None,
    ticks: Ticks = TICKS,
    part: bool = False,
    phased: bool = False,
    undo: Callable[[], Any] = bool,
    pullback: Callable[..., Pullback] | None = None,
) -> RunStates:
    """The states of some quantities in a run of one function, and their results.

    `way` calls f: as it is, with all operations followed, or as the last resort does (`WAYS`); what it drew is undone
    where f has to run again. States that are `phased` are to be merged with those of others, so that there are no
    results, and of several phases they are of one, with no other before it than one that is of each sample alone. The
    columns may be `known`; `part` says that these are a part of the samples, whose losses have to add up.
    """
    if len(quantities) > 1 and len(of_each_kind(quantities)) > 1:

        def of_kind(some: list[Quantity], way: Way) -> RunStates:
            return kept(problem, some, options, way, known, ticks, part, phased, undo, pullback)

        every = [*by_kinds(quantities, way, of_kind)]
        pairs = dict[int, tuple[Fold, Any]]()
        for group, one in every:
            pairs |= zip(group, zip(one.folds, one.results, strict=True), strict=True)
        folds, results = zip(*[pairs[i] for i in range(len(quantities))], strict=True)
        return replace(every[0][1], folds=[*folds], results=[*results])
    how = _how(problem, quantities, options, way)
    problem = how.problem
    while True:
        run, met = how.run(), None
        run.part, run.given = part, known is not None and problem.loss is not None
        try:
            run.open(how.way is BoundProblem.call or transforming())
            with Replays(how.twice) if how.replays else PLAINLY:
                out, aux = _ran(problem, quantities, run)
                if run.closed_over and run.outside and not run.deep:
                    raise Again
                folds = _folds(problem, quantities, run, options, phased)
                way_back = (pullback or Pullback)(run, problem, folds, options.plan, ticks, run.uses)
                _pulled(way_back, quantities, out, options.dense, known)
            results = [None] * len(folds)
            if not phased and pullback is None:
                with torch.set_grad_enabled(run.deep and run.outside):
                    results = [*map(Fold.finished, folds)]
            for fold in folds if run.deep else ():
                fold.states, fold.earlier = run.left((fold.states, fold.earlier))
            results = run.left(results) if run.deep else results
            return RunStates(folds, results, run.count, run.left(aux), run.left(out), run.left(run.outputs))
        except Met as error:
            met = error
        except (Again, Twice, CheckpointError, ReplayError, Unsupported) as error:
            how.change(run, error)
            undo()
        finally:
            run.close()
        if met is not None:
            raise looked_at(met) from None


def _how(problem: BoundProblem, quantities: Sequence[Quantity], options: Options, way: Way) -> How:
    """The way f is run at first."""
    kind, deep = quantities[0].kind, transforming()
    each, frees = problem.samples is not None or not kind.second_order, not options.plan.splits
    for q in quantities:
        each = each or bool(q.reduction.each)
        frees = frees and _single(q) and comes_apart(q.reduction)
    if not deep and torch.is_grad_enabled():
        constants = [x for q in quantities for x in q.reduction.constants]
        deep = any([x.requires_grad for x in (*problem.tensors, *constants)])
    new = ChainRun if kind.averaged else CallsRun if kind.second_order else Run
    if new is not Run and way is not BoundProblem.call:
        if way is by_rows or kind.averaged:
            raise Final("second derivatives of a function whose operations are not followed")
        problem, new = problem if problem.loss is None else whole(problem), Run
        way = way if each else at_once
    twice = deep or kind.second_order or kind.averaged or (kind.convex and problem.n == 1)  # batch norm of one sample
    frees, replays = frees and new is Run, way is BoundProblem.call and problem.f in REPLAYED
    return How(problem, new, way, each, deep, twice, frees, replays)


def _single(quantity: Quantity) -> bool:
    """Tells whether one vector is pulled back."""
    drawing = quantity.drawing
    return quantity.kind.first_order or (drawing is not None and drawing.count == 1)


def returned(problem: BoundProblem, part: slice = slice(None), leaves: list[torch.Tensor] | None = None) -> Any:
    """The result of f for some of the samples, perhaps at other parameters."""
    few = problem
    if part != slice(None):
        few = problem.chunk(part, part.stop - part.start)
    return few.call(AsWritten(lambda x, _: x, apart=None), problem.leaves if leaves is None else leaves)[0]


@contextmanager
def _opened(problem: BoundProblem, deep: bool) -> Iterator[Run]:
    """A run, until it is closed."""
    run = Run(problem.n, deep)
    run.open()
    try:
        yield run
    finally:
        run.close()


def loss_of(problem: BoundProblem) -> torch.Tensor:
    """The loss, which is seen to be one of each sample, or their mean or sum; or outputs of a model."""
    with _opened(problem, transforming()) as run:
        out, _ = _ran(problem, [], run)
        if not isinstance(out, torch.Tensor) or out.ndim < 2:
            _cotangent(run, out)
        return run.left(out).detach()


def columns_of_all(problem: BoundProblem, outputs: Any, quantities: Sequence[Quantity]) -> tuple[Made, torch.Tensor]:
    """The columns at the outputs of a model, with a loss that is given apart, and the loss."""
    graph = torch.is_grad_enabled() and any(z.requires_grad for z in tree.tensors((outputs,)))
    with _opened(problem, transforming() or graph) as run:
        run.twice = True

        def known(z: torch.Tensor) -> torch.Tensor:
            z = z.clone() if z.is_inference() else z
            know(own := run.alias(z), Mark(run.token, (problem.out_dims % z.ndim - z.ndim, 1, 1), True))
            return own

        out = lost(problem, run, tree.map_tensors(known, outputs))
        found = {q.columns: columns_at(run, out, q) for q in quantities}
        check_kept(run, [part for each in found.values() for part in each])
        return found, run.left(out).detach()


def check_kept(run: Run, columns: list[Columns]) -> list[Columns]:
    """Check that columns can be used when the run is over."""
    inner = [part.inner if isinstance(part, Weighted) else part for part in columns]
    if run.deep and any([isinstance(part, Affine) for part in inner]):
        raise Unsupported("columns that are pulled back when the run is over, where the result is differentiated")
    return columns


def hessian_of(problem: BoundProblem) -> list[Columns]:
    """The Hessian of the loss in the outputs that are found in f."""
    deep = transforming() or (torch.is_grad_enabled() and any(x.requires_grad for x in problem.tensors))
    with _opened(problem, deep) as run:
        run.criterion, run.part, run.twice = Finder(), True, True
        out, _ = _ran(problem, [], run)
        return check_kept(run, split(run, out).hessian())


def comes_apart(reduction: Reduction) -> bool:
    """Tells whether parameters are reduced before others are known: one by one, or in several units."""
    if reduction.units is not None:
        return len({*reduction.units}) > 1
    return reduction.before is None and not reduction.keeps


def _ran(problem: BoundProblem, quantities: Sequence[Quantity], run: Run) -> tuple[Any, Any]:
    """The result of f, or its loss of that, and aux; the run knows then what f reads of the parameters."""
    device, given = problem.leaves[0].device.type, problem.tensors
    check_numbers(given)
    before = versions(given)
    leaves = [*map(run.leaf, range(len(problem.leaves)), problem.leaves)]
    convex = exact = False
    for q in quantities:
        convex, exact, run.alone = convex or q.kind.convex, exact or q.drawing is None, run.alone and _single(q)
    if convex and problem.loss is None:
        run.criterion = Finder()
    if (convex and exact) or isinstance(run, CallsRun):
        run.states = states_of(torchs_own())
    with (
        _autocast(device, True) if torch.is_autocast_enabled(device) else PLAINLY,
        PLAINLY if run.criterion is None else marked_for(run.criterion),
        TwiceDifferentiable() if run.twice else PLAINLY,
    ):
        try:
            out, aux = (run.way or BoundProblem.call)(problem, run, leaves)
        except (Unsupported, ProcessError):
            raise
        except Exception as error:
            raise Met(error, lambda: returned(problem)) from None
        if problem.loss is not None:
            out = _lost(problem, run, out, convex)
    if before != versions(given):
        raise Unsupported("f writes into its arguments in place")
    if not all([fits(q.reduction, problem.leaves) for q in quantities if q.reduction.squares]):
        check_room(problem, quantities, uses_of(run, run.uses)[0])
    return out, aux


def _lost(problem: BoundProblem, run: Run, out: Any, convex: bool) -> Any:
    """The loss of the outputs of a model that is given apart from it; of `convex` ones, in which columns are taken."""
    loss = problem.loss
    assert loss is not None
    if run.n == 1:  # outputs may have lost the axis of the sample
        with run:
            out = tree.map_tensors(lambda z: z if z.ndim else z.reshape(1), out)
    run.outputs = out
    try:
        if convex:
            return lost(problem, run, out, run.given)
        target = problem.target(run)
        with run:
            return loss(out, target)
    except (Unsupported, InvFuncError):
        raise
    except Exception as error:
        raise Met(error, lambda: loss(returned(problem), problem.args[-1])) from None


def _folds(
    problem: BoundProblem, quantities: Sequence[Quantity], run: Run, options: Options, phased: bool
) -> list[Fold]:
    """The folds of some quantities, before anything is reduced."""
    dtype = reduce(torch.promote_types, [p.dtype for p in problem.leaves])
    found = Found(run.count, 1, [torch.Size()], None, dtype)
    paired = [phase for q in quantities if q.reduction.paired for phase in q.reduction.phases]
    if any([getattr(phase, "joined", False) for phase in paired]):
        run.partners = partners(uses_of(run, run.uses)[0], run.leaves)
    return [Fold(q.reduction, problem, found, options.reduce, phased) for q in quantities]


def _pulled(way: Pullback, quantities: Sequence[Quantity], out: Any, dense: bool, known: Made | None) -> None:
    """Pull back what some quantities of one kind are of, from the result of f, and reduce it."""
    run, problem, kind = way.run, way.problem, quantities[0].kind
    of_model = {q.kind.of_model for q in quantities}
    several = isinstance(out, torch.Tensor) and out.ndim > 1
    rows = of_model == {"yes"} or (several and of_model == {"unless it returns a loss"})
    entries = run.apart and kind.second_order
    if not (rows or run.given or entries):
        cotangent = _cotangent(run, out, "f" if problem.loss is None else "the loss")
    device = problem.leaves[0].device.type
    cast = torch.is_autocast_enabled(device)
    with torch.set_grad_enabled(run.deep and run.outside), _autocast(device, False) if cast else PLAINLY:
        if isinstance(run, ChainRun):
            with _undrawn():
                way.chain(quantities[0], out)
        elif run.criterion is not None:
            _columns(way, quantities, out, dense, known)
        elif isinstance(run, CallsRun):
            diagonal = HessianDiagonal(run, problem.name, way.folds, *uses_of(run, run.uses))
            with _undrawn():
                way.hessian(diagonal, out, cotangent)
            if diagonal.rest:
                way.rest(diagonal.rest, cast)
        elif kind.second_order:
            with TwiceDifferentiable():  # a checkpoint runs again as it did
                way.entries(run, out, range(len(run.leaves)))
        elif rows:
            _rows(way, out)
        elif not way.streams or way.plan.asked("params"):
            way.pull(out, cotangent)
        else:
            way.stream(out, cotangent)


@contextmanager
def _undrawn() -> Iterator[None]:
    """A context in which operations run again, and none that draws random numbers, which would be others."""
    before = [(g, state_of(g)) for g in torchs_own()]
    yield
    if not all([same_state(state, state_of(g)) for g, state in before]):
        raise Final("second derivatives of an operation that draws random numbers")


def _autocast(device: str, enabled: bool) -> AbstractContextManager:
    """A context without autocast, or without its cache, which would keep the casts of all aliases."""
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled, cache_enabled=False)


def _columns(way: Pullback, quantities: Sequence[Quantity], out: Any, dense: bool, known: Made | None) -> None:
    """Reduce the columns of each kind, one kind after the other; some are known."""
    run, folds = way.run, way.folds
    groups: dict[Any, list[int]] = {}
    for k, q in enumerate(quantities):
        groups.setdefault(q.columns, []).append(k)
    for key, same in groups.items():
        quantity = quantities[same[0]]
        with torch.enable_grad():
            columns = columns_at(run, out, quantity) if known is None else known[key]
            found = split(run, out)
        count, own = sum([c.count for c in columns]), [folds[k] for k in same]
        shortcuts = quantity.drawing is None and not dense and all([f.reduction.shortcuts != "no" for f in own])
        few = run.deep or run.chosen is not None or count < thresholds.FEW or not single(found, columns)
        if shortcuts and not few and known is None and not way.plan.splits:
            if replace(way, folds=own).structured(columns[0]):
                continue
        replace(way, folds=own).columns(found.roots, columns)


def _rows(way: Pullback, out: Any) -> None:
    """Reduce the rows of the Jacobian of a model function."""
    run, out_dims = way.run, way.problem.out_dims
    named, structure = tree.outputs(out)
    roots, shapes, values = list[Output](), list[torch.Size](), dict[int, torch.Tensor]()
    if not named:
        check_outputs(run, out, out_dims)
    for i, (path, z) in enumerate(named):
        check_outputs(run, z, out_dims, path)
        dim = out_dims % max(1, z.ndim)
        axis = (dim - z.ndim, 1, 1)
        shapes.append(torch.Size([*z.shape[:dim], *z.shape[dim + 1 :]]))
        values[i] = exposed(run.strip(z), axis, run.n)
        roots += [Output(i, z, axis)] * z.requires_grad
    if not roots:
        raise unreached()
    for fold in way.folds:
        kept = {} if structure is None else {"structure": structure}
        fold.found = replace(fold.found, outputs=shapes, **kept)
    way.columns(roots, [Units(values)])


@dataclass
class Pullback:
    """The way vectors are pulled back to the parameters, and reduced there."""

    run: Run
    problem: BoundProblem
    folds: list[Fold]
    plan: Plan
    ticks: Ticks
    uses: list[Use]

    @property
    def apart(self) -> bool:
        """Tells whether a reduction has to know something of all parameters first."""
        return any([f.first is not None for f in self.folds])

    @property
    def streams(self) -> bool:
        """Tells whether a parameter is reduced, and the cotangents of its uses freed, as soon as these have come; or
        all parameters of a unit."""
        if self.run.deep or (self.run.numbers < thresholds.HOOKED and not self.run.freed):
            return False
        units = {f.reduction.units for f in self.folds if f.reduction.units is not None}
        return len(units) < 2 and all([comes_apart(f.reduction) for f in self.folds])

    def pull(self, out: torch.Tensor, cotangent: torch.Tensor) -> None:
        """Reduce one vector at a tensor; all parameters at once, or in the chunks that are asked for."""
        if not self.plan.splits and self.ticks is TICKS:  # in short
            with torch.enable_grad():
                self.run.pull_columns(out, cotangent[None], retain=False)
            return self._fold(range(len(self.run.leaves)))
        chunks = self._chunks()
        self.ticks.expect(len(chunks))
        for leaves, self.run.uses in chunks:
            with torch.enable_grad():
                self.run.pull_columns(out, cotangent[None], retain=len(chunks) > 1)
            self._fold(leaves)
            self.ticks.done()

    def columns(self, roots: Sequence[Output], columns: Sequence[Columns]) -> None:
        """Reduce columns at outputs, in groups that fit the memory; those of each kind after the others."""
        run, folds, count = self.run, self.folds, sum([c.count for c in columns])
        run.lots = _lots(columns)
        for fold in folds:
            fold.found = replace(fold.found, columns=count)
        if not count:  # as of one class
            return None
        if count == 1 and not self.plan.splits and self.streams:
            sources, given = self._at(roots, columns, 0, 1)
            return self.stream(sources, [c[0] for c in given])
        together = self.apart or not all(["outputs" in f.reduction.axes for f in folds])
        most = count if together else max(1, thresholds.GROUPED // max(1, run.numbers))
        if count <= most and not self.plan.splits and self.ticks is TICKS:  # in short
            return self._group(range(len(run.leaves)), roots, columns, 0, count, count)
        groups = self.plan.ranges("outputs", count) if self.plan.asked("outputs") else even(count, most)
        if len(groups) > 1 and self.apart:
            raise Unsupported("something of all columns has to be known of each")
        chunks = self._chunks()
        self.ticks.expect(len(chunks) * len(groups))
        for leaves, run.uses in chunks:
            for start, stop in groups:
                self._group(leaves, roots, columns, start, stop, count)
                self.ticks.done()

    def _group(
        self, leaves: range, roots: Sequence[Output], columns: Sequence[Columns], start: int, stop: int, count: int
    ) -> None:
        """Reduce a range of columns at outputs."""
        sources, given = self._at(roots, columns, start, stop)
        with torch.enable_grad():
            self.run.pull_columns(sources, given)
        self._fold(leaves, start > 0, stop == count)

    def _at(
        self, roots: Sequence[Output], columns: Sequence[Columns], start: int, stop: int
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """The outputs at which there are columns of a range, and these `[V, *output]`."""
        n = self.run.n
        if len(columns) == 1:
            left = columns[0].block(start, stop, slice(None)).left
        else:
            left = joined_block([*columns], start, stop, slice(None), n, everywhere=True).left
        met = [r for r in roots if r.ordinal in left]
        if self.run.given:  # the columns may be those of a view
            left = {r.ordinal: _as_exposed(left[r.ordinal], r, n) for r in met}
        given = [back(left[r.ordinal], r.source.shape, r.axis, n).to(r.source.dtype) for r in met]
        return [r.source for r in met], given

    def _chunks(self) -> Sequence[tuple[range, list[Use]]]:
        """The parameters in the chunks that are asked for, with their uses."""
        count = len(self.run.leaves)
        if not self.plan.asked("params"):
            return [(range(count), self.uses)]
        if self.apart:
            raise Unsupported("something of all parameters has to be known of each")
        owners = uses_of(self.run, self.uses)[1]
        chunks = [range(*part) for part in self.plan.ranges("params", count)]
        uses = [[u for u in self.uses if not leaves.isdisjoint(owners[id(u)])] for leaves in map(set, chunks)]
        return [pair for pair in zip(chunks, uses, strict=True) if pair[1]]

    def _fold(self, leaves: range, again: bool = False, last: bool = True) -> None:
        """Reduce some parameters, first what a reduction has to know of all of them; `again`, of other columns, of
        which the `last` ones."""
        run = self.run
        of = uses_of(run, [u for u in run.uses if u.d is not None])[0]
        shares = [Shares(run, i, of[i], self.problem.name, again) for i in leaves if of[i]]
        if not shares and len(leaves) == len(run.leaves):
            raise unreached()
        for fold in self.folds:
            fold.take(shares, last)

    def structured(self, columns: Columns) -> bool:
        """Reduce columns by the structure of f, if it has one that saves time."""
        run = self.run
        allowed: set[Shortcuts] = {f.reduction.shortcuts for f in self.folds}
        if self.apart:
            return False
        shortcuts: Shortcuts = allowed.pop() if len(allowed) == 1 else "narrow"
        structure = Structure(self.problem, run, columns, uses_of(run, run.uses)[0], shortcuts)
        way = structure.way()
        if way is None:
            return False
        for fold in self.folds:
            fold.found = replace(fold.found, columns=columns.count)
        return self.taken(structure, way)

    def taken(self, structure: Structure, way: Shortcut) -> bool:
        """Reduce columns by a way that the structure of f allows; False if it turns out to be none."""

        def reduce(place: int, shares: Shares) -> None:
            for fold in self.folds:
                fold.keep(place, fold.reduction.step(shares), last=False)

        return structure.taken(way, reduce)

    def hessian(self, diagonal: HessianDiagonal, out: torch.Tensor, cotangent: torch.Tensor) -> None:
        """Reduce the columns of a Hessian: of the loss, and of each nonlinear operation."""
        diagonal.reduce(out, cotangent)

    def rest(self, places: Sequence[int], cast: bool) -> None:
        """Reduce the diagonal of a Hessian of which columns miss some parameters, in one more run of f."""
        problem, run = self.problem if self.problem.loss is None else whole(self.problem), beside(self.run)
        after = [(g, state_of(g)) for g in torchs_own()]
        set_states(self.run.states)
        leaves = [*map(run.leaf, range(len(problem.leaves)), problem.leaves)]
        with TwiceDifferentiable():
            with torch.enable_grad(), _autocast(problem.leaves[0].device.type, cast):
                out, _ = (alone if self.run.each else at_once)(problem, run, leaves)
            self.entries(run, out, places)
        set_states(after)

    def entries(self, run: Run, out: torch.Tensor, places: Sequence[int]) -> None:
        """Reduce the diagonal of a Hessian in some parameters, entry by entry, in a run that does not follow f."""
        if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in graph_of(out)):
            raise Final("second derivatives of a custom autograd.Function, whose backward pass may have none")
        for i in places:
            rows = entries(run, out, i)
            for fold in self.folds:
                one = rows if fold.reduction.each else rows.sum(0, keepdim=True)
                fold.keep(i, fold.reduction.directly(one), last=False)

    def chain(self, quantity: Quantity, out: torch.Tensor) -> None:
        """Reduce one matrix, averaged over the samples at each layer."""
        assert isinstance(self.run, ChainRun)
        chain(self.run, self.problem.name, quantity, self.folds, out, uses_of(self.run, self.run.uses)[0])

    def stream(self, out: Any, cotangent: Any) -> None:
        """Reduce each parameter as soon as the cotangents of all its uses have come, and free these."""
        run, folds = self.run, self.folds
        of, owners = uses_of(run, run.uses)
        units = next((f.reduction.units for f in folds if f.reduction.units is not None), range(len(of)))
        waiting, members = dict[Any, int](), dict[Any, list[int]]()
        for i, unit in enumerate(units):
            waiting[unit] = waiting.get(unit, 0) + len(of[i])
            members.setdefault(unit, []).append(i)
        reached = False

        def arrived(use: Use) -> None:
            nonlocal reached
            reached = True
            for i in owners.pop(id(use)):
                waiting[units[i]] -= 1
                if not waiting[units[i]]:
                    reduced(units[i])

        def reduced(unit: Any) -> None:
            came = {i: [u for u in of[i] if u.d is not None] for i in members[unit]}
            shares = [Shares(run, i, uses, self.problem.name) for i, uses in came.items() if uses]
            for fold in folds:
                fold.take(shares)
            for use in {u for uses in came.values() for u in uses}:
                if use.node.leaf is not None:  # else it is of other leaves, too
                    use.free()

        self.ticks.expect(1)
        run.stream(out, cotangent, arrived)
        if not reached:
            raise unreached()
        for unit, left in waiting.items():
            if left:
                reduced(unit)
        self.ticks.done()


def _as_exposed(columns: torch.Tensor, root: Output, n: int) -> torch.Tensor:
    """Columns `[V, n, entries]` in the form of those at an output."""
    return columns.reshape(len(columns), n, *exposed(root.source.detach(), root.axis, n).shape[1:])


def _lots(columns: Sequence[Columns]) -> list[Lot]:
    """The columns that are drawn."""
    found, start = list[Lot](), 0
    for each in columns:
        found.append(Lot(start, start + each.count, getattr(each, "exact", None)))
        start += each.count
    return found


def _cotangent(run: Run, out: Any, name: str = "f") -> torch.Tensor:
    """The vector to pull back from a loss, a number or one of each sample; its samples have to be where they belong."""
    known = getattr(out, "_known", None)
    if type(known) is not Mark or known.axis != ((-1, 1, 1) if out.ndim else SUMMED) or not known.graph or out.ndim > 1:
        check_loss(run, out, name)
    return torch.ones_like(out)


def uses_of(run: Run, uses: Sequence[Use]) -> tuple[list[list[Use]], dict[int, Sequence[int]]]:
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
    """The states of one reduction, of all parameters."""

    def __init__(
        self,
        reduction: Reduction,
        problem: BoundProblem,
        found: Found,
        reduce: Reduce | None = None,
        phased: bool = False,
    ) -> None:
        """`reduce` is what becomes of the result of a parameter; `phased` says that phases see all samples first."""
        self.reduction, self.problem, self.found, self.reduce = reduction, problem, found, reduce
        self.first = reduction.before if reduction.apart or not phased else None
        """Reduction of all parameters that has to be known before."""
        self.states: dict[int, State] = {}
        self.earlier: dict[int, State] = {}
        """States of the phase before."""
        self.results: dict[int, list[Any]] = {}
        """Results of the parameters that are done."""

    def take(self, shares: Sequence[Shares], last: bool = True) -> None:
        """Reduce some parameters, all of a unit at once."""
        if (units := self.reduction.units) is not None:
            together: dict[str, list[Shares]] = {}
            for each in shares:
                together.setdefault(units[each.place], []).append(each)
            for unit in together.values():
                for place, first, state in self.reduction.jointly(unit):
                    self.earlier[place] = first
                    self.keep(place, state, last)
            return
        if self.first is not None:
            self.before(shares)
        for each in shares:
            self.keep(each.place, self.reduction.step(each), last)

    def before(self, shares: Sequence[Shares]) -> None:
        """Let the reduction know what it has to of all parameters."""
        first, *rest = self.reduction.phases
        for phase in rest:
            self.earlier = {each.place: first.step(each) for each in shares}
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
            for k, x in enumerate(results):
                results[k] = x if isinstance(x, torch.Tensor) and x.dtype is leaf.dtype else _rounded(x, leaf.dtype)
        if self.reduce is None:
            return results
        return [x if x is None else self.reduce(self.problem.paths[i], _own(x)) for x in results]

    def finished(self) -> Any:
        """The result."""
        reduction, problem = self.reduction, self.problem
        if reduction.whole and self.reduce is None:
            return reduction.assemble(self.of_all(reduction, self.states), self.found)
        if self.first is not None and self.first.whole:
            (before,) = self.of_all(self.first, self.earlier)
            self.found = replace(self.found, before=before)
        done = self.results
        each = [done[i] if i in done else self.closed(i) for i in range(len(problem.leaves))]
        trees = [tree.unflatten([*part], problem.structure) for part in zip(*each, strict=True)]
        return reduction.assemble([tuple(t) if problem.several else t[0] for t in trees], self.found)

    def of_all(self, reduction: Reduction, states: States) -> list[Any]:
        """The results of all parameters together."""
        found, leaves = self.found, enumerate(self.problem.leaves)
        every = {i: states.get(i) or reduction.init(leaf, found.n, found.columns) for i, leaf in leaves}
        results = reduction.finish(reduction.together(every), found)
        return [_rounded(x, found.dtype) for x in results] if reduction.rounded else results


def _own(x: Any) -> Any:
    """A result in memory of its own, as the caller may write to it while others are computed."""
    return tree.map_tensors(torch.clone, x)


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    """A result in the precision of the parameter."""
    leaves, structure = tree.flatten(x, none_is_leaf=False)
    return x if {dtype}.issuperset(map(_DTYPE, leaves)) else tree.unflatten([y.to(dtype) for y in leaves], structure)


_DTYPE = attrgetter("dtype")
