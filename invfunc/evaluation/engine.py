"""One evaluation of a statistic: the samples in parts, each of which f sees alone, merged in one fold."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import ticking
from invfunc._torch.functorch import transforming, undispatched, unwatched
from invfunc._torch.generators import same_state, set_states, state_of, torchs_own
from invfunc._torch.values import anywhere, checked_at_the_end, same_values
from invfunc.arguments.problem import BoundProblem, whole
from invfunc.core.columns import joined, made
from invfunc.core.evaluate import Made, RunStates, columns_of_all, hessian_of, kept, loss_of, returned
from invfunc.core.marks import Final, Unsupported
from invfunc.core.ways import WAYS, Met, Way, by_ways
from invfunc.errors import ArgumentError, InvFuncError, SampleAxisError
from invfunc.evaluation.fold import JointFold
from invfunc.evaluation.kinds import FEW, Drew, Kind, check_batches, kind_of, neither, not_in_parts
from invfunc.evaluation.weights import LossPart
from invfunc.loss.drawn import joined as joined_trees
from invfunc.plan import Options
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
        """Whether f returns outputs."""
        self.way: Way = BoundProblem.call
        """The way in which f is called."""
        self.scalar = False
        """Whether f, or the loss, has returned one number for all samples."""
        self.loss: torch.Tensor | None = None
        """That of all samples, where it is given apart: parts take its columns from there."""
        self.outputs: Any = None
        """Those of a model that is given apart from its loss, where this is such a number."""
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
        several = len(parts) > 1
        single = any(b - a == 1 for a, b in parts)
        if several and self.way is WAYS[2]:
            raise Final("parts of the samples, of which nothing says what they are in the whole batch")
        if several and any(q.kind.averaged for q in self.quantities):
            raise Final("a matrix that is averaged over all samples at each layer, of parts of them")
        options = replace(fold.options, plan=plan.without("samples"), reduce=None)
        kind = self._kind(max(b - a for a, b in parts)) if several else "each"
        known = self._made(parts, kind) if several else None
        before, aux = [(g, state_of(g)) for g in self._generators], list[Any]()
        for k in range(fold.sweeps) if fold.phase is None else [fold.phase]:
            if k and fold.phase is None:
                fold.tell(k)
                set_states(before)  # each phase sees the same
            aux.clear()
            accumulators, total = fold.of_phase(k), torch.zeros(())
            quantities = [replace(t.quantity, reduction=t.reduction) for t in accumulators]
            for part in parts:
                found = self._of_part(part, several, kind, quantities, options, known)
                if found is not None:
                    self._take(accumulators, found, part)
                    aux.append(found.aux)
                    total = total + found.result.detach() if self.scalar and single and self.loss is None else total
                    if not several:
                        self.outputs = found.apart
                    del found  # before the next one is made
        if single and several and self.scalar and self.run.loss is None:
            found = valued(self.run)
            for part in parts:
                if self._chosen(part) == []:  # it is in the loss, too
                    total = total + valued(self._part(part, kind))
            if not same_values(total.to(found), found):
                raise neither()  # samples that stand alone do not show that their data weigh them
        if not self.scalar:
            self.outputs = None
        elif self.outputs is None and self.problem.loss is not None:
            with undrawn():
                self.outputs = valued(self.problem)
        return aux if plan.asked("samples") else aux[0]

    def _chosen(self, part: Part) -> list[int] | None:
        chosen = self.run.samples
        return None if chosen is None else sorted(i - part[0] for i in chosen if part[0] <= i < part[1])

    def _of_part(
        self, part: Part, several: bool, kind: Kind, quantities: list[Quantity], options: Any, known: Made | None
    ) -> RunStates | None:
        (a, b), chosen = part, self._chosen(part)
        problem = replace(self._part(part, kind) if several else self.run, samples=chosen)
        self.fold.ticks.reach(b - a)
        if chosen is not None and not chosen:
            if problem.has_aux:
                raise Unsupported("aux of a part of which no sample is chosen")
            return None
        own: Made | None = None
        if known is not None:
            own = {key: [Slice(c, slice(a, b)) for c in each] for key, each in known.items()}
        return kept(problem, quantities, options, self.way, own, self.fold.ticks, several, phased=True)

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
