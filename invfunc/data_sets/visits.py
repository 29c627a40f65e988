"""Work of a statistic with the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import FakeTensorMode
from invfunc._torch.generators import set_states, state_of
from invfunc.arguments.problem import batch_dims
from invfunc.data_sets.rows import Rows
from invfunc.data_sets.tiled import Meetings
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples, size_of
from invfunc.evaluation.checkpoint import StreamWork, check_loadable
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.joined import Drew
from invfunc.evaluation.processes import ALONE, Processes
from invfunc.evaluation.rounds import Rounds, through
from invfunc.evaluation.sweep import Sweep, bytes_given, check_number, dealt, one_scale, share
from invfunc.evaluation.weights import BatchWeights
from invfunc.loss.drawn import key_of
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
        self, t: Statistic, kwargs: dict[str, Any], evaluated: Evaluated, reduction: str | None = None
    ) -> None:
        self.t, self.kwargs, self.evaluated = t, kwargs, evaluated
        self.params: Any = None
        self.empty: list[tuple] = []
        """The arguments of a batch without samples."""
        self.sweep, self.aux = Sweep(), list[Any]()
        self.sweep.weights = BatchWeights(reduction)
        self.rounds: Rounds | None = None
        """Brings parameters that are not here."""
        drawings = dict.fromkeys(t.drawings)
        self.keys = {d: key_of(d.generator) for d in drawings}
        self.first = 0
        """Number of samples of the processes before this one."""
        self.expected: int | None = None
        """Number of samples of all processes, if they were counted."""
        self.with_others: Statistic | None = None
        """The statistic with the per-sample gradients of its other batch, once they are known."""
        self.looked = False
        """Tells whether f was seen to give samples the same beside fewer ones."""
        self.has_aux = t.has_aux

    def draw_by(self, keys: Sequence[int], first: int = 0, of_all: int | None = None) -> None:
        """Take these keys, and places behind so many samples, of the number that all processes have counted."""
        self.keys, self.first = dict(zip(self.keys, keys, strict=True)), first
        self.expected = self.sweep.expected = of_all

    def check(self, known: int, params: Any) -> None:
        """Look for what is wrong before the first batch, if there will be so many samples."""

    @property
    def phase(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sweep.phase

    @property
    def weights(self) -> BatchWeights:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sweep.weights

    def visit(self, args: tuple, n: int) -> int:
        sweep, before = self.sweep, self.sweep.n

        def add(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[None, Any]:
            engine, several = t.engine(args, kwargs, names), size_of(args, t.in_dims) > 1
            engine.joined = several and not self.looked
            aux = sweep.add(engine, partial(self.evaluated, t, sweep, args, kwargs))
            self.looked = self.looked or several and not engine.joined
            return None, aux

        t = self._with_kept(self.t.keyed(self.keys, self.first + n), args)
        aux = t.told(add, t.names, args, self.kwargs)[1]
        self.aux.append(aux if self.rounds is None else self.rounds.present(aux))
        return sweep.n - before

    def _with_kept(self, t: Statistic, args: tuple) -> Statistic:
        """The statistic of a batch, in which the per-sample gradients of another batch are kept from the first one on.

        Where that cannot be (of an f that draws, of parameters in parts, by plans) both batches are joined each time.
        """
        if t.others is None or self.rounds is not None or self.evaluated is not _evaluated:
            return t
        if self.with_others is None:
            self.with_others = t

            def looked(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[None, None]:
                return t.engine(args, kwargs, names).check_others(), None

            with suppress(Drew):
                t.told(looked, t.names, args, self.kwargs)
                others, alone = iter(t.others), replace(t, others=None)
                dims = batch_dims(t.in_dims, [*range(1, len(args))])
                given = (args[0], *(args[i] if dim is None else next(others) for i, dim in dims.items()))
                held, _ = Meetings(alone, self.kwargs).held(given)
                self.with_others = replace(alone, reduction=RowsWithKept(not t.reduction.whole, held.shares))
        return self.with_others

    def computed(self, through: Callable[[], Any], processes: Processes = ALONE, gather: bool = False) -> None:
        """Go `through` all batches, once for each phase that is left, and share what they have brought."""
        self.share(through, processes, gather)
        while self.phase + 1 < self.t.sweeps:
            self.sweep, self.aux = Sweep(self.sweep, partial(dealt, processes)), []
            self.share(through, processes, gather)

    def at(self, params: Any, rounds: Rounds | None, parts: bool) -> None:
        """Take these parameters, which `rounds` bring where they are divided; keep `parts` of what is kept of them."""
        self.params, self.rounds = params, rounds
        if rounds is None or not parts:
            return
        self.sweep.rounds = rounds
        rounds.reductions = [m.quantity.reduction for m in self.t.members or (self.t,)]

    def share(self, seen: Callable[[], Any], processes: Processes, gather: bool) -> None:
        own = 0

        def counted() -> None:
            nonlocal own
            seen()
            own = self.sweep.n

        if processes.size == 1:
            counted()
        else:
            share(self.sweep, counted, processes, gather, self.without_samples)
        if self.sweep.rounds is not None:
            self.sweep.take(self.sweep.rounds.kept(own))

    def without_samples(self) -> Engine:
        """The evaluation of no samples."""
        return self.t.keyed(self.keys, 0).without_samples(self.params)

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

    def weigh_first(self, args: tuple) -> None:
        first = Sweep()
        first.add(self.t.keyed(self.keys, 0).engine(args, self.kwargs, self.t.names(len(args))))
        self.sweep.weights = first.weights


class RowByRow(VisitWork):
    """Writes the result of each batch, and keeps nothing of it."""

    def __init__(
        self, t: Statistic, kwargs: dict[str, Any], evaluated: Evaluated, reduction: str | None, out: Any
    ) -> None:
        super().__init__(t, kwargs, evaluated, reduction)
        self.rows = Rows(out, [m.quantity for m in t.members or (t,)], bool(t.members))
        self.n = self.of_all = 0
        """Numbers of samples of this process, and of all."""

    def check(self, known: int, params: Any) -> None:
        self.rows.check(params, known)

    def visit(self, args: tuple, n: int) -> int:
        weights, self.sweep = self.sweep.weights, Sweep()
        self.sweep.weights = weights
        own = super().visit(args, n)
        assert self.sweep.engine is not None
        found = self.sweep.engine.finished()
        if self.rows.calls:
            if weights.mean:
                raise ArgumentError(
                    "the loss is a mean, whose 1 / N is known with the last batch, but out is a function that is told "
                    "after each. Give the sum (reduction='sum') and divide, or pass tensors as out."
                )
            found = own_memory(found, (args, self.kwargs))
        self.rows.put(found, self.n, own)
        self.n += own
        return own

    def share(self, through: Callable[[], Any], processes: Processes, gather: bool) -> None:
        weights = self.sweep.weights
        _, each = processes.told("samples", lambda: (through(), (self.n, weights.seen)))
        self.of_all = sum(n for n, _ in each)
        one_scale(weights, processes, [mean for _, mean in each])

    def results(self) -> tuple[Any, Any]:
        if not self.of_all:
            raise no_samples()
        check_number(self.of_all, self.expected)
        if self.sweep.weights.mean:
            self.rows.scaled(self.n, 1 / self.of_all)
        return self.rows.result(self.n), self.aux


def work_of(
    t: Statistic,
    kwargs: dict[str, Any],
    out: Any = None,
    plans: Evaluated | None = None,
    reduction: str | None = None,
) -> VisitWork:
    """Work that joins the batches, or writes their rows to `out` if it is given; `plans` evaluate them if there are
    some, and `reduction` is the scale of a loss that is one number."""
    evaluated = plans or _evaluated
    if out is None:
        return VisitWork(t, kwargs, evaluated, reduction)
    return RowByRow(t, kwargs, evaluated, reduction, out)


def exchanged(t: Statistic, args: tuple, kwargs: dict[str, Any], gather: bool) -> int | None:
    """Number of bytes that a process exchanges for a batch, from a run without numbers; None if it does not run so."""
    mode, sweep, total = FakeTensorMode(allow_non_fake_inputs=True), Sweep(), 0
    t, before = t.keyed(dict.fromkeys(t.drawings, 0), 0), state_of(torch.default_generator)
    try:
        given, named = tree.map_tensors(mode.from_tensor, (args, kwargs))
        with torch.no_grad(), mode:
            for k in range(t.sweeps):
                if k:
                    sweep = Sweep(sweep)
                    told = [one.line[k].known for one in sweep.told if k < len(one.line)]
                    total += sum(x.nbytes for x in tree.tensors(told))
                engine = t.engine(given, named, t.names(len(given)))
                sweep.enter(engine)
                engine.kept()
                sweep.n = engine.problem.n
                total += bytes_given(sweep, gather)
    except Exception:  # of what asks for numbers
        return None
    finally:
        set_states([(torch.default_generator, before)])
    return total
