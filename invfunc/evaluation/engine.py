"""One evaluation of a statistic: the samples in parts, each of which f sees alone, merged in one fold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from invfunc._extras import ticking
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc._torch.values import checked_at_the_end
from invfunc.arguments.problem import BoundProblem
from invfunc.core.marks import Final
from invfunc.core.ways import Way, by_ways
from invfunc.errors import InvFuncError
from invfunc.evaluation.fold import JointFold
from invfunc.evaluation.joined import check_batches
from invfunc.evaluation.parts import EvaluationParts, alone, joins
from invfunc.evaluation.weights import LossPart
from invfunc.plan import Options
from invfunc.reductions.quantity import Quantity


class Engine:
    """One evaluation of one statistic, or of several of the same function together."""

    def __init__(
        self, problem: BoundProblem, options: Options, quantities: Sequence[Quantity], called: Hashable = None
    ) -> None:
        """`called` says what is asked of f, if that may be."""
        self.problem, self.quantities, self.called = problem, quantities, called
        self.fold = JointFold(problem, options, quantities)
        self.scalar = False
        """Whether f, or the loss, has returned one number for all samples."""
        self.joined = False
        """Whether its results are joined with others, and f has not been seen to allow it."""
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
        self.fold.give()
        return aux

    def finished(self) -> list[Any]:
        """The results of all batches that the fold has seen."""
        return self.fold.finished()

    def check_joined(self) -> None:
        """Check that f gives some samples alone what it gives them in the batch, if that has to be seen."""
        if self.joined:
            self.joined = not joins(self.problem)

    def check_others(self) -> None:
        """Check that f gives two batches that were joined what it gives each of them alone."""
        problem = self.problem
        check_batches(problem, alone(problem, slice(0, problem.n)), lambda part: alone(problem, part))

    def _run(self) -> Any:
        """Run f on all samples, and keep what is wanted of them; aux."""
        fold, sources = self.fold, [q.drawing.generator for q in self.quantities if q.drawing is not None]
        before = [(g, state_of(g)) for g in (*torchs_own(), *sources)], [t.saved() for t in fold.accumulators]

        def undo() -> None:
            set_states(before[0])
            for t, kept in zip(fold.accumulators, before[1], strict=True):
                t.restore(kept)

        def call(way: Way) -> tuple[EvaluationParts, Any]:
            parts = EvaluationParts(self.problem, fold, way)
            try:
                return parts, parts.kept(self.joined)
            except Exception as error:
                if parts.gave and not isinstance(error, InvFuncError):
                    raise Final(str(error)) from error
                raise

        parts, aux = by_ways(self.problem.f, self.called, call, undo)
        self.scalar, self.joined = parts.scalar, parts.joined
        if parts.outputs is not None:
            self.loss_part = LossPart.of(self.problem, parts.outputs)
        return aux
