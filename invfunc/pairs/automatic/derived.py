"""The inverse of calls that do the same operations each time: it is found in the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import unwrapped
from invfunc._torch.levels import without_autocast
from invfunc.errors import InverseError
from invfunc.pairs.automatic.graph import Call, Constant, Node, like_of
from invfunc.pairs.automatic.search import Step, search
from invfunc.pairs.automatic.symbolic import Symbolic
from invfunc.pairs.automatic.values import Order, Values
from invfunc.pairs.pair import Closed


class Derived:
    """The inverse of f for such calls, whose arguments are of one form.

    In the place of all tensors that f reads are such without numbers when the steps are found, so that none is kept.

    Args:
        f: the function.
        x: the form of x.
        like: what its tensors are like.
        closed: gives the tensors that f closes over.
        each: the inverse of a call, found in that alone; taken where steps for all are not found.
    """

    def __init__(self, f: Callable, x: tree.Form, like: Sequence[Any], closed: Closed, each: Callable) -> None:
        self._f, self._x, self._like, self._closed, self._each = f, x, like, closed, each
        self._way: _Way | None = None
        self._tried = False

    def __call__(self, y: Any, *args: Any, **kwargs: Any) -> Any:
        ys, (rest, form), closed = tree.tensors(y), tree.separate((args, kwargs)), self._closed()
        given = [*ys, *rest, *(closed or ())]
        if closed is None or any(unwrapped(t) is not None for t in given):  # of a transform of torch.func
            return self._each(y, *args, **kwargs)
        if not self._tried:
            self._way, self._tried = self._found(ys, rest, form, closed), True
        return self._each(y, *args, **kwargs) if self._way is None else self._x.join(self._way.back(given))

    def _found(self, ys: Sequence[torch.Tensor], rest: Any, form: tree.Form, closed: Any) -> _Way | None:
        if len({*map(id, closed)}) < len(closed):  # of a tensor in two places no stand-in tells in which it is read
            return None
        run = Symbolic(ys[0], set())
        try:
            return self._traced(run, ys, rest, form, closed)
        except InverseError:
            return None
        finally:
            run.let_go()

    def _traced(self, run: Symbolic, ys: Any, rest: Any, form: tree.Form, closed: Any) -> _Way | None:
        xs = [run.stand_in(like, like.device) for like in self._like]
        others = [run.stand_in(like_of(t), t.device).requires_grad_(t.requires_grad) for t in (*rest, *closed)]
        args, kwargs = form.join(others[: len(rest)])
        run.instead = {id(t): other for t, other in zip(closed, others[len(rest) :], strict=True)}
        with torch.enable_grad(), without_autocast(), run:
            found = tree.tensors(self._f(self._x.join(xs), *args, **kwargs))
        if [t.shape for t in found] != [t.shape for t in ys]:
            return None
        given = {node: len(ys) + i for i, node in enumerate(run.inputs[len(xs) :])}
        for i, t in enumerate(found):
            if (node := run.of(t)) is not None:
                given.setdefault(node, i)
        wanted = run.inputs[: len(xs)]
        steps = search(wanted, given, {})
        calls = [step.call for step in steps if step.call is not None]
        return _Way(given, steps, wanted) if all(map(_is_of_tensors, calls)) else None


class _Way:
    """How x is computed.

    Args:
        given: the places of tensors that are given.
        steps, wanted: those of `Values`.
    """

    def __init__(self, given: dict[Node, int], steps: Sequence[Step], wanted: Sequence[Node]) -> None:
        self._given, self._order = given, Order(steps, wanted)

    def back(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of x."""
        with torch.no_grad():
            return Values({node: given[i] for node, i in self._given.items()}, self._order, given[0]).compute()


def _is_of_tensors(call: Call) -> bool:
    """Whether a call does the same to other tensors: it draws nothing, and reads no tensor that f has made of none."""
    return not (call.drawn or call.writes or any(isinstance(leaf, Constant) for leaf in call.leaves))
