"""One evaluation of a statistic: the samples in parts, each of which f sees alone, merged in one fold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import Ticks, ticking
from invfunc._torch.functorch import transforming, undispatched, unwatched
from invfunc._torch.generators import same_state, set_states, state_of, torchs_own
from invfunc._torch.values import anywhere, checked_at_the_end, same_values
from invfunc.core.columns import joined, made
from invfunc.core.evaluate import Made, RunStates, columns_of_all, hessian_of, kept, loss_of, returned
from invfunc.core.marks import Final, Unsupported
from invfunc.core.ways import WAYS, Met, Way, by_ways
from invfunc.errors import ArgumentError, InvFuncError, SampleAxisError
from invfunc.evaluation.kinds import FEW, Drew, Kind, LossPart, check_batches, kind_of, neither, not_in_parts
from invfunc.loss.drawn import joined as joined_trees
from invfunc.plan import Options
from invfunc.problem import BoundProblem, whole
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.reduction import Accumulator, Quantity

Part = tuple[int, int]


class Engine:
    """One evaluation of one statistic, or of several of the same function together."""

    def __init__(
        self, problem: BoundProblem, options: Options, quantities: Sequence[Quantity], called: Hashable = None
    ) -> None:
        """`called` says what is asked of f, if that may be."""
        self.problem, self.called = problem, called
        self.fold = JointFold(problem, options, quantities)
        kinds, apart = [q.kind for q in quantities], problem.loss is not None
        self.run = whole(problem) if apart and any(k.first_order or k.second_order for k in kinds) else problem
        """The problem as it is run: where the gradient of the loss is pulled back, f and the loss are one."""
        self.model = self.run.loss is not None or any(kind.of_model == "yes" for kind in kinds)
        """True if f returns outputs."""
        self.way: Way = BoundProblem.call
        """The way in which f is called."""
        self.scalar = False
        """True if f, or the loss, has returned one number for all samples."""
        self.loss: torch.Tensor | None = None
        """Loss of all samples, where it is given apart: parts take its columns from there."""
        self.outputs: Any = None
        """Outputs of a model that is given apart from its loss, where this is such a number."""
        self.loss_part: LossPart | None = None

    def result(self) -> tuple[list[Any], Any]:
        """The results, and aux."""
        with ticking(self.fold.options.progress, self.problem.n * self.fold.sweeps) as self.fold.ticks:
            aux = self._run()
            return self.fold.finished(), aux

    def kept(self) -> Any:
        """Fold one of several batches, so that there are no results yet; aux."""
        with checked_at_the_end(own=True):
            aux = self._run()
        return aux

    def finished(self) -> list[Any]:
        """The results of all batches that the fold has seen."""
        return self.fold.finished()

    def check_joined(self) -> bool:
        """Check that f gives some samples alone what it gives them in the batch, if there are several."""
        return check_joined(self.problem, self.scalar)

    def check_others(self) -> None:
        """Check that f gives two batches that were joined what it gives each of them alone."""
        problem = self.problem
        check_batches(problem, alone(problem, slice(0, problem.n)), partial(alone, problem))

    def _run(self) -> Any:
        """Run f on all samples, and keep what is wanted of them; aux."""
        fold, sources = self.fold, self._generators
        before = [(g, state_of(g)) for g in sources], [t.saved() for t in fold.accumulators]

        def undo() -> None:
            set_states(before[0])
            for t, saved in zip(fold.accumulators, before[1], strict=True):
                t.restore(saved)

        def call(way: Way) -> Any:
            self.way, self.scalar, self.loss, self.outputs = way, False, None, None
            return self._in_parts()

        aux = by_ways(self.problem.f, self.called, call, undo)
        if self.outputs is not None:
            self.loss_part = LossPart.of(self.problem, self.outputs)
        return aux

    @property
    def quantities(self) -> list[Quantity]:
        """The results that are wanted."""
        return [t.quantity for t in self.fold.accumulators]

    @property
    def _generators(self) -> list[torch.Generator]:
        """The generators that are drawn from."""
        return [*torchs_own(), *(q.drawing.generator for q in self.quantities if q.drawing is not None)]

    def _in_parts(self) -> Any:
        """aux, in a list where there are parts."""
        fold, plan = self.fold, self.fold.options.plan
        parts = plan.ranges("samples", self.run.n)
        kind, known = ("each", None) if len(parts) == 1 else self._joining(parts)
        alone = len(parts) > 1 and self.run.loss is None and any(b - a == 1 for a, b in parts)
        before, aux, total = [(g, state_of(g)) for g in self._generators], list[Any](), torch.zeros(())
        for k in range(fold.sweeps) if fold.phase is None else [fold.phase]:
            if k and fold.phase is None:
                fold.tell(k)
                set_states(before)  # each phase sees the same
            aux, total = [], torch.zeros(())
            for part in parts:
                found = self._of_part(part, k, kind, known)
                if found is not None:
                    self._take(fold.of_phase(k), found, part)
                    aux.append(found.aux)
                    if alone and self.scalar:
                        total = total + found.result.detach()
                    del found  # before the next one is made
        if alone and self.scalar:
            self._check_total(total, [part for part in parts if self._chosen(part) == []], kind)
        if not self.scalar:
            self.outputs = None
        elif self.outputs is None and self.problem.loss is not None:
            with undrawn():
                self.outputs = valued(self.problem)
        return aux if plan.asked("samples") else aux[0]

    def _joining(self, parts: list[Part]) -> tuple[Kind, Made | None]:
        """The way several parts make up the results of all samples, and the columns of all."""
        if self.way is WAYS[2]:
            raise Final("parts of the samples, of which nothing says what they are in the whole batch")
        if any(q.kind.averaged for q in self.quantities):
            raise Final("a matrix that is averaged over all samples at each layer, of parts of them")
        kind = self._kind(max(b - a for a, b in parts))
        return kind, self._made(parts, kind)

    def _check_total(self, total: torch.Tensor, unchosen: list[Part], kind: Kind) -> None:
        """Check that the losses of parts, of which some are single samples, add up to that of all: samples that stand
        alone do not show that their data weigh them."""
        for part in unchosen:  # which are in the loss, too
            total = total + valued(self._part(part, kind))
        found = valued(self.run)
        if not same_values(total.to(found), found):
            raise neither()

    def _chosen(self, part: Part) -> list[int] | None:
        chosen = self.run.samples
        return None if chosen is None else sorted(i - part[0] for i in chosen if part[0] <= i < part[1])

    def _of_part(self, part: Part, phase: int, kind: Kind, known: Made | None) -> RunStates | None:
        """States of the samples of a part that are chosen, if there are any."""
        (a, b), chosen, fold = part, self._chosen(part), self.fold
        several = b - a < self.run.n
        problem = replace(self._part(part, kind) if several else self.run, samples=chosen)
        fold.ticks.reach(b - a)
        if chosen is not None and not chosen:
            if problem.has_aux:
                raise Unsupported("aux of a part of which no sample is chosen")
            return None
        options = replace(fold.options, plan=fold.options.plan.without("samples"), reduce=None)
        quantities = [replace(t.quantity, reduction=t.reduction) for t in fold.of_phase(phase)]
        own: Made | None = None
        if known is not None:
            own = {key: [Slice(c, slice(a, b)) for c in each] for key, each in known.items()}
        return kept(problem, quantities, options, self.way, own, fold.ticks, several, phased=True)

    def _part(self, part: Part, kind: Kind) -> BoundProblem:
        """f of some samples alone, with the scale that their loss has among all of them."""
        (a, b), n = part, self.run.n
        return self.run.chunk(slice(a, b), b - a, (b - a) / n if kind == "mean" else 1)

    def _take(self, accumulators: Sequence[Accumulator], found: RunStates, part: Part) -> None:
        """Merge what is kept of a part."""
        fold, whole = self.fold, part == (0, self.run.n)
        room = 0 if whole else fold.found.n
        for t, own in zip(accumulators, found.folds, strict=True):
            t.columns = own.found.columns
            if t.before is not None and t.reduction.apart:
                for i, state in own.earlier.items():
                    t.before.add(i, state)
            for i, state in own.states.items():
                t.add(i, state, n=room)
        first = found.folds[0].found
        fold.found = replace(fold.found, outputs=first.outputs, structure=first.structure)
        for t in accumulators if not whole else ():
            t.end(self.run.leaves, found.count, room=room)
        result = found.result if self.loss is None else self.loss
        self.scalar = isinstance(result, torch.Tensor) and not result.ndim
        if whole:
            self.outputs = found.apart

    def _kind(self, size: int) -> Kind:
        """The way results for parts of at most so many samples make up that for all of them."""
        problem = self.run

        def some(problem: BoundProblem, places: list[int]) -> tuple[list[torch.Tensor], bool]:
            few = _few(problem, places)
            with undrawn() as drew, torch.enable_grad():
                try:
                    plain = _outputs if self.model else returned
                    found = plain(few) if self.model or self.way is not WAYS[0] else loss_of(few)
                except (InvFuncError, Unsupported):
                    raise
                except Exception as error:
                    met = error
                else:
                    met = None
                if met is not None:
                    returned(self.run)  # whose errors are the user's own
                    if isinstance(met, Met) and runs(few):
                        raise Unsupported(str(met))
                    raise not_in_parts(met.error if isinstance(met, Met) else met) from None
                return _by_sample(found, problem.out_dims), drew()

        return kind_of(problem, size, some, self.problem.f, (self.problem.loss, WAYS.index(self.way), self.model))

    def _made(self, parts: list[Part], kind: Kind) -> Made | None:
        """The columns of all samples, where those of a part alone would be others: drawn ones, and those of a loss
        that is given apart."""
        problem = self.run
        drawn = any(q.drawing is not None for q in self.quantities)
        if not any(q.kind.convex for q in self.quantities) or (problem.loss is None and not drawn):
            return None
        graph = torch.is_grad_enabled() and (transforming() or any(x.requires_grad for x in problem.tensors))
        each = list[Any]()
        with undrawn(), torch.set_grad_enabled(graph):  # what f draws, it draws again
            for part in parts:
                one = self._part(part, kind)
                each.append(hessian_of(one) if problem.loss is None else _outputs(one))
        if problem.loss is not None:
            self.outputs = joined_trees(each, problem.out_dims)
            found, self.loss = columns_of_all(problem, self.outputs, self.quantities)
            return found
        return {q.columns: made(joined(each), q, problem.n) for q in self.quantities}


def valued(problem: BoundProblem) -> Any:
    """The result of f, without a graph where f itself takes no derivatives."""
    try:
        with torch.no_grad():
            return returned(problem)
    except RuntimeError:
        with torch.enable_grad():
            return tree.map_tensors(torch.Tensor.detach, returned(problem))


def runs(problem: BoundProblem) -> bool:
    """Tells whether f takes some samples, as it is written."""
    try:
        returned(problem)
    except Exception:
        return False
    return True


@contextmanager
def undrawn() -> Iterator[Any]:
    """A context whose random numbers come again behind it; says whether any were drawn."""
    before = [(g, state_of(g)) for g in torchs_own()]
    try:
        yield lambda: not all(same_state(state, state_of(g)) for g, state in before)
    finally:
        set_states(before)


def check_joined(problem: BoundProblem, scalar: bool) -> bool:
    """Check that f gives some samples alone what it gives them in the batch, as far as they can be followed, if there
    are several; `scalar` says that its loss is one number."""
    if problem.n < 2 or (scalar and problem.loss is None):
        return False
    looked, told = whole(problem) if problem.loss is not None and not scalar else problem, list[bool]()

    def some(problem: BoundProblem, places: list[int]) -> tuple[list[torch.Tensor], bool]:
        with undrawn() as drew, torch.enable_grad():
            found = _by_sample(_outputs(_few(problem, places)), problem.out_dims), drew()
        told.append(not found[0] or any(anywhere(z != 0) for z in found[0]))
        if not any(told):  # zeros tell nothing, as of labels that are ignored, and are not to be kept for other batches
            raise ArgumentError("all are zeros")
        return found

    with undispatched(), unwatched():
        try:
            kind_of(looked, FEW, some, problem.f, (problem.loss, scalar, "beside others"))
        except SampleAxisError:
            raise
        except Exception:  # which f may have for fewer samples only
            return not told or any(told)
    return True


def alone(problem: BoundProblem, part: slice) -> Any:
    """The result of f for some samples alone."""
    with undrawn() as drew, torch.enable_grad():
        found = returned(problem, part)
        if drew():
            raise Drew
        return tree.map_tensors(torch.Tensor.detach, found)


def _outputs(problem: BoundProblem) -> Any:
    """The outputs of a model, which may have lost the axis of a single sample."""
    return tree.map_tensors(lambda z: z if z.ndim else z.unsqueeze(0), returned(problem))


def _few(problem: BoundProblem, places: list[int]) -> BoundProblem:
    """The problem of the samples at some places alone."""
    return problem.chunk(torch.tensor(places, device=problem.leaves[0].device), len(places))


def _by_sample(found: Any, dim: int) -> list[torch.Tensor]:
    """Tensors that f has returned, with the samples along the first axis."""
    values = [z.detach() for z in tree.tensors((found,))]
    return [z if z.ndim < 2 else z.movedim(dim, 0) for z in values]


class Slice:
    """The columns of some of the samples."""

    def __init__(self, columns: Any, part: slice) -> None:
        self.columns, self.part = columns, part

    @property
    def count(self) -> int:
        return self.columns.count

    @property
    def exact(self) -> torch.Tensor | None:
        exact = getattr(self.columns, "exact", None)
        return None if exact is None else exact[self.part]

    def block(self, start: int, stop: int, part: slice) -> Any:
        assert part == slice(None)
        return self.columns.block(start, stop, self.part)


Learn = Callable[[Reduction, States, Found], Any]
"""Something that a reduction has to know of what the phase before has kept."""


class JointFold:
    """States that several quantities keep of some samples of one function."""

    def __init__(self, problem: BoundProblem, options: Options, quantities: Sequence[Quantity]) -> None:
        self.problem, self.options, self.ticks = problem, options, Ticks()
        self.accumulators = [Accumulator(q, q.reduction, options.reduce is None) for q in quantities]
        n = (problem.n if problem.samples is None else len(problem.samples)) - problem.others
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in problem.leaves))
        self.found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
        self.phase: int | None = None
        """The only one, where the batches come again for each."""

    @property
    def sweeps(self) -> int:
        """Number of times that all samples have to be seen."""
        return max(t.reduction.sweeps for t in self.accumulators)

    def of_phase(self, k: int) -> list[Accumulator]:
        """The accumulators that keep something in a phase."""
        return [t.line[k] for t in self.accumulators if k < len(t.line)]

    def tell(self, k: int, learn: Learn | None = None) -> None:
        """Have a phase know what the one before has kept of all samples."""
        for t in self.of_phase(k):
            assert t.before is not None
            t.know((learn or type(t.reduction).learned)(t.reduction, t.before.states, self._found(t.before)))
            if not t.before.reduction.whole:  # else that is a result, too
                t.before.states = {}

    def keeping(self, k: int) -> list[Accumulator]:
        """The accumulators that keep something in a phase, with what has to know of each sample alone."""
        pairs = ((own, own.before if own.reduction.apart else None) for own in self.of_phase(k))
        return [t for pair in pairs for t in pair if t is not None]

    # What it has kept in a phase, as a tree of tensors and numbers

    def state(self, k: int) -> dict[str, Any]:
        """All that its samples have brought in a phase."""
        outputs = [tuple(shape) for shape in self.found.outputs]
        places = tree.unflatten([*range(len(outputs))], self.found.structure)
        kept = [(dict(t.states), t.columns) for t in self.keeping(k)]
        return {"n": self.found.n, "outputs": outputs, "structure": places, "kept": kept}

    def keep(self, k: int, state: dict[str, Any]) -> None:
        """Have it kept, in place of what is kept now."""
        shapes, structure = [*map(torch.Size, state["outputs"])], tree.flatten(state["structure"])[1]
        self.found = replace(self.found, n=state["n"], outputs=shapes, structure=structure)
        for t, (states, columns) in zip(self.keeping(k), state["kept"], strict=True):
            t.states, t.columns = dict(states), columns

    def behind(self, k: int, state: dict[str, Any]) -> None:
        """Put what other samples have brought in front of what is kept."""
        n, own = state["n"], self.found.n
        for t, (states, columns) in zip(self.keeping(k), state["kept"], strict=True):
            t.after(states, columns, self.problem.leaves, n, own)
        self.found = replace(self.found, n=n + own)

    # Results

    def finished(self) -> list[Any]:
        """The results of each quantity."""
        return [*map(self._finished, self.accumulators)]

    def _finished(self, t: Accumulator) -> Any:
        reduction, before, found = t.reduction, t.before, self._found(t)
        if reduction.whole and self.options.reduce is None:
            return reduction.assemble(self._whole(t), found)
        parts = zip(*[self._closed(t, i, found) for i in range(len(self.problem.leaves))], strict=True)
        trees = [tree.unflatten([*part], self.problem.structure) for part in parts]
        trees = [tuple(x) if self.problem.several else x[0] for x in trees]
        if before is not None and before.reduction.whole:
            found = replace(found, before=self._whole(before)[0])
        return reduction.assemble(trees, found)

    def _whole(self, t: Accumulator) -> list[Any]:
        """The results of all parameters together."""
        found, reduction, kept = self._found(t), t.reduction, t.states
        places = enumerate(t.of(self.problem.leaves))
        states = {i: kept.pop(i, None) or reduction.init(leaf, found.n, found.columns) for i, leaf in places}
        return self._delivered(reduction, reduction.finish(reduction.together(states), found), found, found.dtype)

    def _closed(self, t: Accumulator, place: int, found: Found) -> list[Any]:
        """The results of one parameter."""
        leaf, reduction, reduced = self.problem.leaves[place], t.reduction, self.options.reduce
        state = t.states.pop(place, None) or reduction.init(leaf, found.n, found.columns)
        aside = reduction.aside(state, found)
        if aside is not None:
            found.aside[self.problem.paths[place]] = aside
        results = reduction.finish(state, found)
        results = self._delivered(reduction, results, found, leaf.dtype)
        if reduced is not None:  # which may write to them
            own = [tree.map_tensors(torch.clone, x) for x in results]
            results = [x if x is None else reduced(self.problem.paths[place], x) for x in own]
        return results

    def _found(self, t: Accumulator) -> Found:
        return replace(self.found, columns=t.columns, aside=t.aside)

    def _delivered(self, reduction: Reduction, results: list[Any], found: Found, dtype: torch.dtype) -> list[Any]:
        """Results in the precision of the parameters, with the samples in the order in which they were chosen."""
        chosen, order = self.problem.samples, None
        if chosen is not None and chosen != sorted(chosen):
            order = sorted(range(len(chosen)), key=chosen.__getitem__)
            order = torch.tensor(sorted(order, key=order.__getitem__), device=self.problem.leaves[0].device)

        def delivered(x: torch.Tensor) -> torch.Tensor:
            if order is not None:
                for axis in reduction.sample_axes(found):
                    x = x.index_select(axis, order[: x.shape[axis]])  # those of another batch come last, in order
            return x.to(dtype) if reduction.rounded else x

        return [tree.map_tensors(delivered, result) for result in results]


# What the evaluation of a batch brings, apart from the evaluation: a tree of tensors and numbers


def brought(engine: Any, phase: int) -> Any:
    """All that a batch brings to a fold in a phase."""
    aux, part = engine.kept(), engine.loss_part
    return engine.fold.state(phase), engine.scalar, None if part is None else part.outputs, aux


def bring(engine: Any, phase: int, found: Any) -> Any:
    """Have an evaluation that was not made keep what another one of the same batch has brought; aux."""
    state, engine.scalar, outputs, aux = found
    engine.fold.keep(phase, state)
    if outputs is not None:
        engine.loss_part = LossPart.of(engine.problem, outputs)
    return aux
