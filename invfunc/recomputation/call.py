"""One call of an invertible function, on flat lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.functorch import saving_hooks, under, unwatched, version
from invfunc._torch.generators import set_states
from invfunc._torch.parametrized import keeping_own
from invfunc._torch.scripted import Interpreted
from invfunc._torch.uncompiled import Uncompiled
from invfunc.errors import InverseError, ReplayError
from invfunc.pairs.pair import Invertible
from invfunc.recomputation.containers import Containers
from invfunc.recomputation.left import Left
from invfunc.recomputation.like import Like
from invfunc.recomputation.look import Look, looking, paused
from invfunc.recomputation.origins import INVERSE, OUTSIDE, Origins
from invfunc.recomputation.outcome import Outcome, without_graph
from invfunc.recomputation.recall import Exchanged, Other, Recall, Use
from invfunc.recomputation.replay import Replay
from invfunc.recomputation.report import Report
from invfunc.recomputation.shared import Evaluate, Evaluation, Evaluations, Moment, Tensors, naming
from invfunc.recomputation.sight import Sight
from invfunc.recomputation.states import names_of
from invfunc.recomputation.surroundings import Closure
from invfunc.recomputation.watch import Watch
from invfunc.recording.trace import Trace


class Call:
    """`y = forward(x, *args, **kwargs)` and what it takes to do it again, or backwards.

    `xs` are the tensors of x, `rest` those of args and kwargs, `ys` those of y (and of what is hidden); `sources` are
    what the inverse reads, the ys and those of xs that are kept.
    """

    def __init__(
        self,
        pair: Invertible,
        x: tree.Form,
        rest: tree.Form,
        kept: Sequence[int] = (),
        random: bool = True,
        tolerance: float | None = None,
        report: Report | None = None,
        containers: Containers | None = None,
        closure: Closure | None = None,
    ) -> None:
        self.pair, self._containers, self._closure = pair, containers or Containers(), closure
        self.report = report or Report()
        self.report.known.attributes.begins(pair)
        self.left = Left(self.report.known.left)
        self.kept = kept
        self._x = x
        self._rest = rest
        self.tolerance = tolerance
        """The error up to which forward has to give the same another time; None where that is not looked at."""
        self._outcome: Outcome
        self._random = random
        self._generators = [leaf for leaf in (*x.others, *rest.others) if isinstance(leaf, torch.Generator)]
        self._start: Replay
        self.watch: Watch | None = None
        """What looks on while forward is evaluated for the first time."""
        self.beside: list[ref[torch.Tensor]] = []
        """The further arguments as they were given the first time, which f may close over too."""
        self._hooks = saving_hooks()
        self.followed = under(Trace)
        """Whether a statistic looks on, which writes some operations out."""
        self.moments: list[Moment] = []
        """The evaluations of shared functions."""
        self._y: tree.Form
        self._like: list[Like] = []
        self.others: dict[int, list[Other]] = {}
        self._uses: list[Use] = []
        self.look: Look | None = None  # at the next evaluation, where it may tell that others need not be watched

    def _moment(self, tensors: Tensors) -> Replay:
        return Replay(tensors, self._generators, self._random, self.report.known.attributes)

    def first(
        self, xs: Tensors, rest: Tensors, closed: bool, evaluate: Evaluate | None = None, origins: Origins | None = None
    ) -> Any:
        """Evaluate forward for the first time, and note what it reads and writes besides its arguments."""
        self._like, self.beside = [Like.of(x) for x in xs], [ref(t) for t in rest]
        given = (*xs, *rest)
        self._start = self._moment(given)
        beside = {id(t): i for i, t in reversed([*enumerate(rest)])}

        def noted(index: int, evaluation: Evaluation) -> Any:
            places = [beside.get(id(t)) for t in evaluation.own]
            like = [Like.of(t) if i is None else None for i, t in zip(places, evaluation.own, strict=True)]
            before = self._moment(evaluation.tensors)
            with watch.within(index):
                result = _evaluated(evaluate, index, evaluation)
            watch.came(index, result)
            self.moments.append(Moment(evaluation.fn, places, like, before, before.later()))
            return result

        self.watch = watch = Watch(given, closed, self._generators, self.report, self._closure, origins, self.look)
        self.look = None
        with watch:
            y = self._forward(xs, rest, noted, watch)
        y = without_graph(y) if closed else y
        self.left.first(watch.left(tree.tensors(y)))
        self.watch = self._closure = None
        self.report.known.calls += 1
        self.report.known.attributes.ended(self._start.held)
        self.others, self._uses = watch.outside(len(xs), self._hooks if self.tolerance is None else None)
        replays = [self._start, *(r for m in self.moments for r in (m.before, m.after))]
        for generator, state in watch.drawn if self._random else ():
            for replay in replays:
                replay.add(generator, state)
        self._outcome = Outcome(y, self.report, kept=len(self.kept) == len(xs), alone=closed)
        return y

    def closure(self, xs: Tensors, rest: Tensors) -> Closure:
        """What forward closes over. It is evaluated for that, and the random numbers that it draws are taken back."""
        xs, rest, self._containers = [t.detach() for t in xs], [t.detach() for t in rest], Containers()
        self._start = self._moment((*xs, *rest))
        self.watch = watch = Watch((*xs, *rest), False, self._generators, self.report)
        try:
            with torch.enable_grad(), watch:
                self._forward(xs, rest, None, watch)
        finally:
            self._start.rewind()
            set_states(watch.drawn)
        self.left.first(watch.left(()))
        return watch.closure()

    def take_back(self, why: str, way_out: str = "") -> None:
        """Take back the random numbers that were drawn in an attempt that failed."""
        assert self.watch is not None
        if self.watch.wrote():
            raise ReplayError(
                f"the function {why}, so that it has to be evaluated in another way, but has written a state before "
                f"(running statistics?). {way_out}Pass the state as an argument and return its new value, or use eval "
                "mode."
            ) from None
        self._start.rewind()
        set_states(self.watch.drawn)

    def _own(self, rest: Tensors) -> tuple[Tensors, Tensors]:
        """The further arguments, and those at their end that stand for what is closed over."""
        number = len(self._rest.places)
        return rest[:number], rest[number:]

    def _forward(self, xs: Tensors, rest: Tensors, evaluate: Evaluate | None, sight: Sight) -> Any:
        rest, lifts = self._own(rest)
        x, (args, kwargs) = self._x.join(xs), self._rest.join(rest)
        shared = Evaluations(evaluate, sight).of(self.pair.shared)
        filled = self._containers.follow((x, *args, *kwargs.values()))
        with Uncompiled(), Interpreted(), keeping_own(), sight.lifting(lifts), filled:
            y = self.pair.forward(*shared, x, *args, **kwargs)
        self.pair.apart(y)
        return y

    def run(
        self,
        xs: Tensors,
        rest: Tensors,
        evaluate: Evaluate | None,
        known: bool = False,
        compare: bool = True,
        exact: bool = False,
        origins: Origins | None = None,
    ) -> Any:
        """The result of forward, with the hidden part beside it where there is one, another time.

        `known` says that `evaluate` knows the results of shared functions, and does not evaluate them; `compare` that
        the result is held against that of the first time, where that is asked for or x is `exact`.
        """
        y, _ = self._again(xs, rest, evaluate, known, origins)
        if compare:
            self._outcome.compare(y, exact, self.dtypes(), lambda: self.run(xs, rest, None, compare=False))
        return y

    def _recall(self, given: Tensors, rest: Tensors, exchanged: Exchanged, origins: Origins | None) -> Recall:
        given = (*given, *rest, *(t for found in self.beside if (t := found()) is not None))
        return Recall(given, self.others, self.followed, self._uses, exchanged, origins, self.left)

    def _again(
        self, xs: Tensors, rest: Tensors, evaluate: Evaluate | None, known: bool, origins: Origins | None
    ) -> tuple[Any, Recall]:
        recall = self._recall(xs, rest, {}, origins)

        def again(index: int, evaluation: Evaluation) -> Any:
            moment = self.moments[index]
            with unwatched() if known else recall.within(index):
                result = _evaluated(evaluate, index, evaluation)
            if not known:
                recall.check(index)
            recall.came(index, result)
            moment.after.rewind()  # whether it drew its random numbers or its result was known
            return result

        with self._start.again(), self.left.again(recall):
            y = self._forward(xs, rest, again, recall)
        recall.check(OUTSIDE)
        return y, recall

    def flat(self, y: Any) -> list[torch.Tensor]:
        """The tensors of a result; its form is kept for the inverse."""
        ys, self._y = tree.separate(y)
        return ys

    def joined(self, ys: Tensors) -> Any:
        """The result with these tensors in its structure."""
        return self._y.join(ys)

    def inverse(
        self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None = None, origins: Origins | None = None
    ) -> list[torch.Tensor]:
        """The tensors of x, from those of y; what the inverse closes over may have been exchanged since.

        What was there is found out by evaluating forward, if at a wrong x.
        """
        xs, recall = self._inverse(sources, rest, evaluate, {}, origins)
        if not recall.unfamiliar:
            return xs
        _, at_it = self._again(xs, rest, None, known=False, origins=None)
        if any(i in at_it.exchanged for i in recall.unfamiliar):
            xs, recall = self._inverse(sources, rest, evaluate, at_it.exchanged, origins)
        if at_it.exchanged and any(t.requires_grad for t, _ in recall.unfamiliar.values()):
            raise ReplayError(
                "the inverse closes over tensors that forward does not read, and what forward reads has been exchanged "
                "since (functional_call puts parameters into a module only while it is called). Pass them as arguments."
            )
        return xs

    def _inverse(
        self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None, exchanged: Exchanged, origins: Origins | None
    ) -> tuple[list[torch.Tensor], Recall]:
        count = len(self._y.places)
        ys, kept = sources[:count], dict(zip(self.kept, sources[count:], strict=True))
        given = self._y.join(ys)
        own, lifts = self._own(rest)
        args, kwargs = self._rest.join(own)
        number = len(self.moments)
        recall = self._recall(sources, rest, exchanged, origins)

        def backwards(index: int, evaluation: Evaluation) -> Any:
            if index >= number:
                raise InverseError(
                    f"the inverse evaluates its shared functions more often than forward ({number} times)."
                )
            moment = self.moments[number - 1 - index]
            given = moment.given(evaluation, rest)
            if given is None:
                raise InverseError(
                    f"evaluation {index} of the inverse is that of another shared function, or of other shapes, than "
                    f"evaluation {number - 1 - index} of forward. The inverse evaluates them in reverse order."
                )
            evaluation.laid(given)
            with recall.within(number - 1 - index), paused(self.look):  # forward was looked at
                result = moment.again(lambda: _evaluated(evaluate, number - 1 - index, evaluation))
            recall.check(number - 1 - index)
            recall.came(number - 1 - index, result)
            return result

        inverse = self.pair.inverse_of(self._x, self._like, kept)
        evaluations = Evaluations(backwards, recall)
        shared = evaluations.of(self.pair.shared)
        before = [version(t) for t in (*sources, *rest)]
        with self._start.again(), self.left.again(recall), recall.lifting(lifts), recall.within(INVERSE):
            with Uncompiled(), Interpreted(), looking(None if self.pair.derived else self.look):
                x = inverse(*shared, *(given if self.pair.hidden else (given,)), *args, **kwargs)
        if [version(t) for t in (*sources, *rest)] != before:
            raise ReplayError(
                "the inverse writes into y or a further argument in place. Write y = y - z in place of y -= z."
            )
        if evaluations.count != number:
            raise InverseError(
                f"the inverse evaluates its shared functions {evaluations.count} times, forward {number}."
            )
        self.look = self.look and self.look.ends()
        return self._like_x(x, kept), recall

    def _like_x(self, x: Any, kept: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the inverse gave, checked to have the form of x."""
        leaves = self._x.leaves(x)
        if leaves is None:  # a tuple may stand for a list
            came, were = tree.named_leaves(x), tree.named_leaves(self._x.join(range(len(self._like))))
            names, wanted = (", ".join("x" + path for path, _ in named) or "nothing" for named in (came, were))
            if names != wanted:
                raise InverseError(f"the inverse gives another pytree than x: {names}, where x is {wanted}.")
            leaves = [leaf for _, leaf in came]
        came = [leaves[place] for place in self._x.places]
        return [kept[i] if i in kept else self._like[i].checked(leaf, i, self.names) for i, leaf in enumerate(came)]

    def named(self) -> AbstractContextManager:
        """A context in which errors name the call."""
        return naming(self.pair)

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of x, and those that autocast computes in."""
        return [*(like.dtype for like in self._like), *self._start.dtypes()]

    @property
    def reads_outside(self) -> bool:
        """Whether forward reads tensors from outside beside its shared functions, which the inverse may read too."""
        return bool(self.others.get(OUTSIDE))

    def forms(self) -> tuple[tree.Form, tree.Form, tree.Form, list[Like]]:
        """Those of x, of the further arguments and of y; and what the tensors of x are like."""
        return self._x, self._rest, self._y, self._like

    def names(self, of: str = "x") -> list[str]:
        """The tensors of x, or of `y` or `(y, hidden)`, as one would write them."""
        return names_of(of, {"x": self._x, "y": self._y}[of])


def _evaluated(evaluate: Evaluate | None, index: int, evaluation: Evaluation) -> Any:
    return evaluation.at(evaluation.tensors) if evaluate is None else evaluate(index, evaluation)
