"""Checkpointing in plain autograd of calls that need not be watched (`straight`): the hooks of `hooks`, and no more.

What is still compared: the versions of the further arguments, the forms of what the inverse gives and of what autograd
saves, in both evaluations, that what the functions close over is what it was, and x itself (`Probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import plainly, version
from invfunc._torch.levels import saving, versions, without_autocast
from invfunc.errors import ModifiedError, ReplayError
from invfunc.pairs.pair import Invertible
from invfunc.recomputation.closed import Closed
from invfunc.recomputation.noted import metadata_of
from invfunc.recomputation.origins import OUTSIDE
from invfunc.recomputation.recording import Enough, never
from invfunc.recomputation.released import release
from invfunc.recomputation.report import CHANGES, Report
from invfunc.recomputation.shared import naming
from invfunc.recomputation.slots import Block, fetch
from invfunc.recomputation.straight import Straightness

Saves = list[torch.Tensor]


class StraightBlock(Block):
    """A call of f that is not watched."""

    gathers = True

    def __init__(self, pair: Invertible, found: Straightness, report: Report, rest: Sequence[torch.Tensor]) -> None:
        super().__init__((), report)
        template = found.template
        self._pair, self._template, self._closed = pair, template, Closed(found)
        self._rest = [t.detach() for t in rest]
        self._versions = versions(rest)
        self.count, self.odd = 0, False
        """How many tensors are saved, and whether one is not what it was in the watched call."""

    def pack(self, tensor: torch.Tensor) -> int:
        """What autograd saves in place of a tensor: which one it is of the block."""
        n = self.count
        self.count = n + 1
        saved = self._template.saved
        if n >= len(saved) or saved[n] != (tensor.shape, tensor.dtype):
            self.odd = True
        return n

    def saved(self, n: int) -> torch.Tensor:
        """A saved tensor; it is handed out once, and computed again for whoever asks again."""
        found = self._found.pop(n, None)
        if found is None:
            made = self._rebuild()  # of this thread alone, until it is done
            found = made.pop(n)
            self._found = made
        tensor, written = found
        if version(tensor) != written:
            with naming(self._pair):
                raise ModifiedError(
                    f"a tensor of shape {list(tensor.shape)} that is needed for the gradient of the function has been "
                    "modified by an inplace operation since. Write y = y + z in place of y += z."
                )
        return tensor

    def invert(self) -> None:
        with plainly(), torch.no_grad(), naming(self._pair), without_autocast(), self._as_it_was():
            xs = self._inverse(self._template.shared, self._given())
            self.give_back_and_tell(xs)

    def names(self) -> list[str]:
        form = self._template.x
        named = tree.named_leaves(form.join(range(len(form.places))))
        return ["x" + named[place][0] for place in form.places]

    def dtypes(self) -> list[torch.dtype]:
        return self._template.dtypes

    def once_more(self, sources: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[Saves, Saves]:
        with without_autocast(), self._as_it_was():
            given = self._given()
            return self._inverse(self._template.shared, given, sources), tree.tensors(self._forward(xs, given))

    def _given(self) -> tuple[tuple, dict[str, Any]]:
        """The further arguments, as leaves that need the gradients that they need."""
        template = self._template
        for t in [t for t, need in zip(self._rest, template.needs, strict=True) if need]:
            t.requires_grad_()
        return template.rest.join(self._rest)

    def _as_it_was(self) -> AbstractContextManager:
        """A context in which all that the call reads is what it was."""
        if versions(self._rest) != self._versions:
            raise ModifiedError(
                "a tensor that is needed for a gradient, a further argument of an invertible block, has been modified "
                "by an inplace operation. Write y = y + z in place of y += z."
            )
        return self._closed.again()

    def _forward(self, xs: Sequence[torch.Tensor], given: tuple[tuple, dict[str, Any]]) -> Any:
        args, kwargs = given
        return self._template.forward(*self._template.shared, self._template.x.join(xs), *args, **kwargs)

    def _inverse(
        self,
        shared: tuple[Callable, ...],
        given: tuple[tuple, dict[str, Any]],
        sources: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        (args, kwargs), template = given, self._template
        y = template.y.join(fetch(self.sources) if sources is None else sources)
        came = tree.tensors(template.inverse(*shared, y, *args, **kwargs))
        if len(came) != template.count:
            raise ReplayError(f"the inverse gives {len(came)} tensors, where x has {template.count}. {CHANGES}")
        return [like.checked(t, i, self.names) for i, (like, t) in enumerate(zip(template.like, came, strict=True))]

    def _rebuild(self) -> dict[int, tuple[torch.Tensor, int]]:
        if not self._ys:
            raise ReplayError("the function differentiates within itself by torch.autograd; let it use torch.func.")
        for block in self.behind():
            block.forget()  # autograd is done with it
        with plainly(), naming(self._pair), without_autocast(), self._as_it_was():
            given, tell = self._given(), None
            xs, found = self.xs(), None
            if xs is None:
                with torch.no_grad():
                    found, xs = self._inverted(given) if self._template.shared else (None, self._inverse((), given))
                tell = self.give_back(xs)
            if found is None:
                found = self._recorded(xs, given)
            forms = [(t.shape, t.dtype) for t in found]
            if forms != self._template.saved:
                raise ReplayError(
                    f"autograd saved {len(self._template.saved)} tensors when the function was evaluated, and other "
                    f"ones ({len(found)}) when it was evaluated again: it does not do the same thing twice. {CHANGES}"
                )
            if tell is not None:
                tell()
        release(self._ys)
        return dict(enumerate(zip(found, versions(found), strict=True)))

    def _recorded(self, xs: Sequence[torch.Tensor], given: tuple[tuple, dict[str, Any]]) -> Saves:
        """What autograd saves where f is evaluated again."""
        forms = self._template.forms
        xs = [t.detach().requires_grad_(form[3]) for t, form in zip(xs, forms, strict=False)]
        found: Saves = []
        most = len(self._template.saved)

        def pack(tensor: torch.Tensor) -> None:
            found.append(tensor)
            if len(found) == most:
                raise Enough  # as the rest of the evaluation is of no use

        try:
            with suppress(Enough), saving(pack, never):
                self._forward(xs, given)
            return [*found]
        finally:
            found.clear()  # the graph holds its hooks, and would hold itself by them

    def _inverted(self, given: tuple[tuple, dict[str, Any]]) -> tuple[Saves | None, Saves]:
        """x, and what autograd saves in the shared functions, as the inverse evaluates them, and beside them."""
        template = self._template
        at = len(template.evaluations)
        parts: dict[int, Saves] = {}
        outputs: dict[int, Any] = {}

        def again(fn: Callable, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal at
            at -= 1
            like, needs = template.evaluations[at]
            state = like.given_to(state).detach().requires_grad_(needs)
            found = parts[at] = []
            with saving(found.append, never):
                output = outputs[at] = fn(state, *args, **kwargs)
            return tree.map_tensors(torch.Tensor.detach, output)

        try:
            xs = self._inverse(tuple([partial(again, fn) for fn in self._template.shared]), given)
            if at:
                raise ReplayError(f"the inverse evaluates other shared functions than forward. {CHANGES}")
            if template.saves_outside:
                parts[OUTSIDE] = []
                self._beside(xs, given, outputs, parts[OUTSIDE])
            whole = all(n < len(parts[part]) for part, n in template.keys)
            return [parts[part][n] for part, n in template.keys] if whole else None, xs
        finally:
            for found in parts.values():
                found.clear()  # the graph holds its hooks, and would hold itself by them

    def _beside(self, xs: Saves, given: tuple[tuple, dict[str, Any]], outputs: dict[int, Any], found: Saves) -> None:
        """Collect what autograd saves beside the shared functions, of which the results are known."""
        number = iter(range(len(outputs)))

        def known(*args: Any, **kwargs: Any) -> Any:
            output = outputs[next(number)]
            return tree.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)

        args, kwargs = given
        xs = [t.detach().requires_grad_(form[3]) for t, form in zip(xs, self._template.forms, strict=False)]
        with saving(found.append, never):
            self._template.forward(*[known] * len(self._template.shared), self._template.x.join(xs), *args, **kwargs)


def straight_hooked(
    pair: Invertible, found: Straightness, report: Report, leaves: list[Any], given: tuple
) -> tuple[Any] | None:
    """The result of a call whose graph saves nothing, in a tuple; None where it has to be watched after all.

    Args:
        pair: the functions.
        found: what is known of the call.
        report: how the block tells of what does not come back.
        leaves: those of the arguments.
        given: `(x, args, kwargs)`.
    """
    (x, args, kwargs), template = given, found.template
    tensors = [leaves[place] for place in template.places]
    xs, rest = tensors[: template.count], tensors[template.count :]
    block = StraightBlock(pair, found, report, rest)
    with saving(block.pack, block.saved):
        y = template.forward(*template.shared, x, *args, **kwargs)
    ys = [y] if type(y) is torch.Tensor else tree.tensors(y)
    if block.odd or block.count != len(template.saved) or len(ys) != len(template.y.places):
        return None
    block.connect(xs, ys, [metadata_of(t) for t in ys])
    return (y,)
