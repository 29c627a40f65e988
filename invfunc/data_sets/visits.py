"""Work of a statistic with the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from invfunc.arguments.problem import batch_dims
from invfunc.data_sets.part import Begun
from invfunc.data_sets.rows import Rows
from invfunc.data_sets.tiled import Meetings
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples, size_of
from invfunc.evaluation.checkpoint import StreamWork, check_loadable
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.joined import Drew
from invfunc.evaluation.rounds import Rounds, through
from invfunc.evaluation.sweep import Sweep, check_number, dealt, one_scale, share
from invfunc.evaluation.weights import BatchWeights
from invfunc.reductions.kept_shares import RowsWithKept
from invfunc.statistic import Statistic
from invfunc.transform import own_memory

Evaluated = Callable[[Statistic, Sweep, tuple, dict[str, Any], Engine], Any]
"""Evaluates a statistic of a batch in a sweep, so that it is kept; aux."""


def _evaluated(t: Statistic, sweep: Sweep, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
    return engine.kept()


class VisitWork(StreamWork):
    """Joins what the batches bring."""

    def __init__(
        self,
        t: Statistic,
        kwargs: dict[str, Any],
        begun: Begun,
        plans: Evaluated | None = None,
        reduction: str | None = None,
        empty: Sequence[tuple] = (),
    ) -> None:
        """`plans` evaluate batches if there are some, `reduction` is the scale of a loss that is one number, and
        `empty` has the arguments of a batch without samples, where there was one."""
        self.t, self.kwargs, self.begun, self.evaluated = t, kwargs, begun, plans or _evaluated
        self.empty, self.has_aux, self.aux, self.loss = empty, t.has_aux, list[Any](), t.loss
        self.sweep = Sweep()
        self.sweep.weights = BatchWeights(reduction)
        self.sweep.expected = begun.counted
        self.keys = dict(zip(dict.fromkeys(t.drawings), begun.course.record.keys, strict=True))
        self.with_others: Statistic | None = None
        """The statistic with the per-sample gradients of its other batch, once they are known."""
        self.looked = False
        """Tells whether f was seen to give samples the same beside fewer ones."""

    @property
    def phase(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sweep.phase

    @property
    def weights(self) -> BatchWeights:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sweep.weights

    def visit(self, args: tuple, n: int) -> int:
        sweep, before = self.sweep, self.sweep.n

        def add(engine: Engine) -> Any:
            engine.joined = several and not self.looked
            aux = sweep.add(engine, partial(self.evaluated, t, sweep, args, self.kwargs))
            self.looked = self.looked or several and not engine.joined
            return aux

        several = size_of(args, self.t.in_dims) > 1
        t = self._with_kept(self.t.keyed(self.keys, self.begun.before + n), args)
        aux = t.evaluating(args, self.kwargs, add)
        self.aux.append(aux if (rounds := self.begun.rounds) is None else rounds.present(aux))
        return sweep.n - before

    def _with_kept(self, t: Statistic, args: tuple) -> Statistic:
        """The statistic of a batch, in which the per-sample gradients of another batch are kept from the first one on.

        Where that cannot be (of an f that draws, of parameters in parts, by plans) both batches are joined each time.
        """
        if t.others is None or self.begun.rounds is not None or self.evaluated is not _evaluated:
            return t
        if self.with_others is None:
            self.with_others = t

            with suppress(Drew):
                t.evaluating(args, self.kwargs, Engine.check_others)
                others, alone = iter(t.others), replace(t, others=None)
                dims = batch_dims(t.in_dims, [*range(1, len(args))])
                given = (args[0], *(args[i] if dim is None else next(others) for i, dim in dims.items()))
                held, _ = Meetings(alone, self.kwargs).held(given)
                self.with_others = replace(alone, reduction=RowsWithKept(not t.reduction.whole, held.shares))
        return self.with_others

    def computed(self, gather: bool) -> None:
        """Go through all batches, once for each phase that is left, and share what they have brought."""
        self.share(gather)
        while self.phase + 1 < self.t.sweeps:
            self.sweep, self.aux = Sweep(self.sweep, partial(dealt, self.begun.processes)), []
            self.share(gather)

    def divide(self, rounds: Rounds) -> None:
        """Keep parts of what is kept of the parameters that `rounds` bring."""
        self.sweep.rounds = rounds
        rounds.reductions = [m.quantity.reduction for m in self.t.members or (self.t,)]

    def share(self, gather: bool) -> None:
        own = 0

        def counted() -> None:
            nonlocal own
            self.begun.through()
            own = self.sweep.n

        if self.begun.processes.size == 1:
            counted()
        else:
            share(self.sweep, counted, self.begun.processes, gather, self.without_samples)
        if self.sweep.rounds is not None:
            self.sweep.take(self.sweep.rounds.kept(own))

    def without_samples(self) -> Engine:
        """The evaluation of no samples."""
        return self.t.keyed(self.keys, 0).without_samples(self.begun.params)

    def results(self) -> tuple[Any, Any]:
        if self.sweep.engine is None and self.empty:  # zeros, or the reason why not
            found, aux = self.t.compute(self.empty[0], self.kwargs, self.t.names(len(self.empty[0])))
            return found, [aux]
        results = through(self.sweep.rounds, self.sweep.results)
        return tuple(results) if self.t.members else results[0], self.aux

    # In a checkpoint

    def kept(self) -> dict[str, Any]:
        kept = self.sweep.state()
        if len(self.aux) == 1:
            check_loadable("the tree of the outputs", kept["outputs"])
        return kept

    def keep(self, kept: dict[str, Any]) -> None:
        weights, self.sweep = self.weights, Sweep.resumed(kept, self.without_samples())
        self.sweep.weights = weights


class RowByRow(VisitWork):
    """Writes the result of each batch, and keeps nothing of it."""

    def __init__(self, rows: Rows, *given: Any) -> None:
        super().__init__(*given)
        self.rows, self.n, self.of_all = rows, 0, 0
        """Numbers of samples of this process, and of all."""

    def visit(self, args: tuple, n: int) -> int:
        weights, self.sweep = self.sweep.weights, Sweep()
        self.sweep.weights = weights
        own = super().visit(args, n)
        assert self.sweep.engine is not None
        found = self.sweep.engine.finished()
        if self.rows.calls:
            if weights.mean:
                raise ArgumentError(
                    "the loss is a mean, whose N is known after the last batch, but out is a function that is called "
                    "after each. Return the [N] losses or their sum, and divide; or pass tensors as out."
                )
            found = own_memory(found, (args, self.kwargs))
        self.rows.put(found, self.n, own)
        self.n += own
        return own

    def share(self, gather: bool) -> None:
        weights, processes = self.sweep.weights, self.begun.processes
        _, each = processes.told("samples", lambda: (self.begun.through(), (self.n, weights.seen)))
        self.of_all = sum(n for n, _ in each)
        one_scale(weights, processes, [mean for _, mean in each])

    def results(self) -> tuple[Any, Any]:
        if not self.of_all:
            raise no_samples()
        check_number(self.of_all, self.begun.counted)
        if self.sweep.weights.mean:
            self.rows.scaled(self.n, 1 / self.of_all)
        return self.rows.result(self.n), self.aux
