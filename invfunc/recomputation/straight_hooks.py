"""Checkpointing in plain autograd of calls that need not be watched (`straight`): the hooks of `hooks`, and no more.

What is still compared: the versions of the further arguments, the forms of what the inverse gives and of what autograd
saves, in both evaluations, that what the functions close over is what it was, and x itself (`Probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import compress
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import plainly
from invfunc._torch.levels import graphless, saving, versions, without_autocast, written_since
from invfunc.errors import ModifiedError, ReplayError
from invfunc.recomputation.block import Block
from invfunc.recomputation.noted import metadata_of
from invfunc.recomputation.origins import OUTSIDE
from invfunc.recomputation.recording import Enough, never
from invfunc.recomputation.released import release
from invfunc.recomputation.report import CHANGES
from invfunc.recomputation.shared import naming
from invfunc.recomputation.slots import fetch
from invfunc.recomputation.states import getting, names_of
from invfunc.recomputation.straight import Flat
from invfunc.recomputation.straight_found import Found

Saves = list[torch.Tensor]


class StraightBlock(Block):
    """A call of f that is not watched."""

    gathers = True

    def __init__(self, found: Found) -> None:
        super().__init__((), found.report)
        self._template, self._closed = found.template, found.closed
        self._rest = [t.detach() for t in found.rest]
        self._versions = versions(found.rest)
        self._packed: list[tuple[torch.Size, torch.dtype]] = []

    def pack(self, tensor: torch.Tensor) -> int:
        """What autograd saves in place of a tensor: which one it is of the block."""
        self._packed.append((tensor.shape, tensor.dtype))
        return len(self._packed) - 1

    def saves_the_same(self) -> bool:
        """Whether autograd has saved what it saved in the watched call."""
        packed, self._packed = self._packed, []
        return packed == self._template.saved

    def saved(self, n: int) -> torch.Tensor:
        """A saved tensor; it is handed out once, and computed again for whoever asks again."""
        found = self._found.pop(n, None)
        if found is None:
            made = self._rebuild()  # of this thread alone, until it is done
            found = made.pop(n)
            self._found = made
        tensor, written = found
        if written_since(tensor, written):
            with self._named():
                raise ModifiedError(
                    f"a tensor of shape {list(tensor.shape)} that is needed for the gradient of the function has been "
                    "modified by an inplace operation since. Write y = y + z in place of y += z."
                )
        return tensor

    def _named(self) -> AbstractContextManager:
        return naming(self.report.block.pair)

    def invert(self) -> None:
        with plainly(), graphless(), self._named(), without_autocast(), self._as_it_was():
            xs = self._inverse(self._template.shared, self._given())
            self.give_back_and_tell(xs)

    def names(self, of: str = "x") -> list[str]:
        return names_of(of, {"x": self._template.x.form, "y": self._template.y}[of])

    def dtypes(self) -> list[torch.dtype]:
        return self._template.dtypes

    def once_more(self, sources: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[Saves, Saves]:
        with without_autocast(), self._as_it_was():
            given = self._given()
            return self._inverse(self._template.shared, given, sources), tree.tensors(self._forward(xs, given))

    def _given(self) -> tuple[tuple, dict[str, Any]]:
        """The further arguments, as leaves that need the gradients that they need."""
        rest = self._template.rest
        for t in compress(self._rest, rest.forms.needs):
            t.requires_grad_()
        return rest.form.join(self._rest)

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
        return self._template.forward(*self._template.shared, self._template.x.form.join(xs), *args, **kwargs)

    def _inverse(
        self,
        shared: tuple[Callable, ...],
        given: tuple[tuple, dict[str, Any]],
        sources: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        (args, kwargs), template = given, self._template
        y = template.y.join(fetch(self.sources) if sources is None else sources)
        came = tree.tensors(template.inverse(*shared, y, *args, **kwargs))
        if len(came) != len(template.like):
            raise ReplayError(f"the inverse gives {len(came)} tensors, where x has {len(template.like)}. {CHANGES}")
        return [like.checked(t, i, self.names) for i, (like, t) in enumerate(zip(template.like, came, strict=True))]

    def _rebuild(self) -> dict[int, tuple[torch.Tensor, int]]:
        if not self._ys:
            raise ReplayError("the function differentiates within itself by torch.autograd; let it use torch.func.")
        for block in self.behind():
            block.forget()  # autograd is done with it
        with plainly(), self._named(), without_autocast(), self._as_it_was():
            given, tell = self._given(), None
            xs, found = self.xs(), None
            if xs is None:
                with graphless():
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
        xs, found = self._entered(xs), list[torch.Tensor]()
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
        template, saved = self._template, list[torch.Tensor]()
        at = len(template.evaluations)
        parts: dict[int, Saves] = {}
        outputs: dict[int, Any] = {}

        def again(fn: Callable, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal at
            at -= 1
            like, needs = template.evaluations[at]
            state = like.given_to(state).detach().requires_grad_(needs)
            with saving(saved.append, never):
                output = outputs[at] = fn(state, *args, **kwargs)
            parts[at] = [*saved]
            saved.clear()
            return output.detach() if type(output) is torch.Tensor else tree.map_tensors(torch.Tensor.detach, output)

        try:
            xs = self._inverse(tuple([partial(again, fn) for fn in template.shared]), given)
            if at:
                raise ReplayError(f"the inverse evaluates other shared functions than forward. {CHANGES}")
            if template.saves_outside:
                self._beside(xs, given, outputs, saved)
                parts[OUTSIDE] = [*saved]
            whole = all(n < len(parts[part]) for part, n in template.keys)
            return [parts[part][n] for part, n in template.keys] if whole else None, xs
        finally:
            saved.clear()  # the graph holds its hooks, and would hold itself by them

    def _beside(self, xs: Saves, given: tuple[tuple, dict[str, Any]], outputs: dict[int, Any], found: Saves) -> None:
        """Collect what autograd saves beside the shared functions, of which the results are known."""
        number = iter(range(len(outputs)))

        def known(*args: Any, **kwargs: Any) -> Any:
            output = outputs[next(number)]
            return tree.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), output)

        args, kwargs = given
        x = self._template.x.form.join(self._entered(xs))
        with saving(found.append, never):
            self._template.forward(*[known] * len(self._template.shared), x, *args, **kwargs)

    def _entered(self, xs: Sequence[torch.Tensor]) -> Saves:
        """x as leaves that need the gradients that they needed."""
        needs = self._template.x.forms.needs
        return [t.detach().requires_grad_(need) for t, need in zip(xs, needs, strict=True)]


class Series:
    """Calls one after the other, of which each takes over what the one before it gives.

    Args:
        x: the state before them.
    """

    def __init__(self, x: Any) -> None:
        self.state = x
        self.flat = tree.flatten(x)
        """The leaves of the state, and its structure."""
        self.count = 0
        """How many calls there were."""
        self._last: StraightBlock | None = None

    def goes_on(self, found: Found, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Evaluate one more, if it does what the watched one did."""
        block, template = StraightBlock(found), found.template
        with saving(block.pack, block.saved):
            y = template.forward(*template.shared, self.state, *args, **kwargs)
        flat = tree.flatten(y)
        ys = _tensors(flat)
        if not block.saves_the_same() or len(ys) != len(template.y.places):
            return False
        if self._last is None:
            getting(block, found.xs)
            block.take_over(found.xs, ys)
        else:
            self._last.hand_on(found.xs, ys, block)
        self.state, self.flat, self._last, self.count = y, flat, block, self.count + 1
        return True

    def ends(self) -> tuple[Any, int]:
        """The state behind them, and how many they are."""
        if self._last is not None:
            ys = _tensors(self.flat)
            self._last.give_out(ys, [metadata_of(t) for t in ys], held=True)
        return self.state, self.count


def _tensors(flat: Flat) -> list[torch.Tensor]:
    return [leaf for leaf in flat[0] if isinstance(leaf, torch.Tensor)]
