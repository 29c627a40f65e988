"""What a statistic does with the batches of a loader."""

from __future__ import annotations

from typing import Any

from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples
from invfunc.evaluation.checkpoint import State, loadable, resume, state_of
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.fold import Then
from invfunc.evaluation.rows import Rows
from invfunc.evaluation.sweep import Sweep
from invfunc.loss.drawn import key_of
from invfunc.statistic import Statistic
from invfunc.transform import own_memory


class Work:
    """Joins what the batches bring."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any]) -> None:
        self.t, self.kwargs = t, kwargs
        self.sweep, self.aux = Sweep(), list[Any]()
        self.keys = {d: key_of(d.generator) for d in dict.fromkeys(t.drawings)}

    def visit(self, args: tuple, n: int) -> int:
        t, sweep, before = self.t.keyed(self.keys, n), self.sweep, self.sweep.n

        def add(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[None, Any]:
            return None, sweep.add(t.engine(args, kwargs, names))

        self.aux.append(t.told(add, t.names, args, self.kwargs)[1])
        return sweep.n - before

    def again(self, then: Then | None = None) -> None:
        """Go through all batches once more, for the next phase."""
        self.sweep, self.aux = Sweep(self.sweep, then), []

    def without_samples(self, params: Any) -> Engine:
        """The evaluation of a process that has no samples."""
        return self.t.keyed(self.keys, 0).without_samples(params)

    def results(self) -> tuple[Any, Any]:
        results = self.sweep.results()
        return tuple(results) if self.t.members else results[0], self.aux

    # In a checkpoint

    def state(self) -> State:
        kept, count, keys = state_of(self.sweep), len(self.aux), list(self.keys.values())
        if self.t.has_aux and not loadable(self.aux[-1:]):
            raise ArgumentError("aux is kept in the checkpoint, which takes tensors, numbers, texts and lists of them.")
        return lambda: {**kept, "aux": self.aux[:count], "keys": keys}

    def resumed(self, args: tuple, state: dict[str, Any], last: bool) -> int:
        if state["weighed"] and self.sweep.weights.first is None:
            first = Sweep()
            first.add(self.t.keyed(self.keys, 0).engine(args, self.kwargs, self.t.names(len(args))))
            self.sweep.weights = first.weights
        if not last:
            return 0
        self.aux, self.keys = state["aux"], dict(zip(self.keys, state["keys"], strict=True))
        resume(self.sweep, self.t.engine(args, self.kwargs, self.t.names(len(args))), state)
        return self.sweep.n


class RowByRow(Work):
    """Writes the result of each batch, and keeps nothing of it."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any], out: Any) -> None:
        super().__init__(t, kwargs)
        self.rows, self.n = Rows(out, [m.quantity for m in t.members or (t,)], bool(t.members)), 0

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
        self.rows.put(found, n, own)
        self.n += own
        return own

    def results(self) -> tuple[Any, Any]:
        if not self.n:
            raise no_samples()
        if self.sweep.weights.mean:
            self.rows.scaled(self.n, 1 / self.n)
        return self.rows.result(self.n), self.aux
