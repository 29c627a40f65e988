"""One block in a run: what came in, what it read, and how it is evaluated once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.functorch import storage
from invfunc.blocks.looks import Look
from invfunc.blocks.slots import Slot
from invfunc.blocks.surroundings import States, Surroundings, without_graphs
from invfunc.callables import describe
from invfunc.errors import InverseError, ModifiedError

Step = tuple[Any, tuple, dict[str, Any]]
"""A block with its further arguments."""
Tensors = list[torch.Tensor]
Enter = Callable[[torch.Tensor, bool], torch.Tensor]
"""Gives a tensor as a leaf of the level that is recorded, if a gradient of it is needed."""


class Like:
    """What a tensor was like."""

    __slots__ = ("shape", "dtype", "device", "stride", "needs", "batches")

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.needs, self.batches = (
            x.shape,
            x.dtype,
            x.device,
            x.requires_grad,
            None,
        )
        self.stride = x.stride() if x.layout is torch.strided else None
        if functorch.is_wrapped(x):
            self.needs, self.batches = functorch.needs_grad(x), functorch.batches_of(x)

    def laid_out(self, came: torch.Tensor) -> torch.Tensor:
        """A tensor in the dtype and with the strides that it had: kernels are chosen by them."""
        if came.dtype != self.dtype:
            came = came.to(self.dtype)
        if self.batches is not None or functorch.is_wrapped(came):
            came = functorch.batched_like(came, self.batches or {})
        if self.stride is None or came.stride() == self.stride or came.shape != self.shape or came.numel() < 2:
            return came
        for dim, stride in enumerate(self.stride):
            if stride == 0:  # expanded
                came = came.narrow(dim, 0, 1)
        made = came.new_empty_strided(came.shape, self.stride)
        overlaps = functorch.unwrapped(made) is None and storage(made).nbytes() < made.nbytes
        return (came if overlaps else made.copy_(came)).expand(self.shape)

    def holds(self, came: torch.Tensor) -> bool:
        """Whether another tensor has this shape, and a dtype with all of the digits."""
        if came.dtype == self.dtype or came.shape != self.shape:
            return came.shape == self.shape
        floats = came.dtype.is_floating_point and self.dtype.is_floating_point
        return floats and torch.promote_types(came.dtype, self.dtype) == came.dtype


class Evaluation:
    """An evaluation of a function that f shares with its inverse.

    Args:
        fn: the function.
        start: how many tensors autograd has saved before.
        given: the tensors that it is given beside the arguments of the block.
        states: those of the generators.
    """

    __slots__ = ("fn", "start", "end", "given", "states")

    def __init__(self, fn: Callable, start: int, given: Sequence[torch.Tensor], states: States | None) -> None:
        self.fn, self.start, self.end, self.states = fn, start, start, states
        self.given = [*map(Like, given)]


class Link:
    """A block of a run.

    Args:
        step: the block with its further arguments.
        xs: the tensors of x.
        form: the form of x.
        start: how many tensors autograd has saved before.
        around: what is around the call.
        states: those of the generators, if it may draw.
    """

    own: Sequence[torch.Tensor] = ()
    """The tensors of the arguments, until the call has ended."""
    looks: list[Look | None] | None = None
    hidden: tuple = ()
    merged = False
    """Whether shared functions alone have something saved."""
    _args: tree.Form | None = None

    def __init__(
        self, step: Step, xs: Tensors, form: tree.Form, start: int, around: Surroundings, states: States | None
    ) -> None:
        self.block, args, kwargs = step
        self.pair = self.block.pair
        self.form, self.like, self.start, self.around, self.states = form, [*map(Like, xs)], start, around, states
        self.end = start
        """How many tensors autograd has saved behind it."""
        if args or kwargs:
            self.own, self._args = tree.separate((args, kwargs))
            self._tensors = without_graphs(self.own)
            self._versions = functorch.versions(self._tensors)
        self.kept: dict[int, Slot] = {}
        self.evaluations: list[Evaluation] = []

    @property
    def count(self) -> int:
        """How many tensors autograd has saved of it."""
        return self.end - self.start

    def names(self) -> list[str]:
        """The tensors of x as one would write them."""
        named = tree.named_leaves(self.form.join(range(len(self.form.places))))
        return ["x" + named[place][0] for place in self.form.places]

    def given(self, enter: Enter) -> tuple[tuple, dict[str, Any]]:
        """The further arguments, to be read once more: what had a graph needs a gradient as before."""
        if self._args is None:
            return (), {}
        if functorch.versions(self._tensors) != self._versions:
            raise ModifiedError(WRITTEN)
        return self._args.join([enter(t, functorch.needs_grad(t)) if functorch.ended(t) else t for t in self._tensors])

    def entered(self, xs: Tensors, enter: Enter) -> Any:
        """x, to be read once more."""
        return self.form.join([enter(x, like.needs) for x, like in zip(xs, self.like, strict=True)])

    def called_with(self, shared: Iterable[Callable], x: Any, enter: Enter) -> tuple[tuple, dict[str, Any]]:
        """All arguments of a call of f once more."""
        args, kwargs = self.given(enter)
        return (*shared, x, *args), kwargs

    def inverse(self, shared: Iterable[Callable], y: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the inverse."""
        kept = {i: slot.get() for i, slot in self.kept.items()} if self.kept else {}
        inverse = self.pair.inverse_of(self.form, self.like, kept)
        try:
            return inverse(*shared, y, *self.hidden, *args, **kwargs)
        except TypeError as error:
            more = [type(a).__name__ for a in (y, *self.hidden, *args)]
            more += [f"{name}={type(a).__name__}" for name, a in kwargs.items()]
            error.add_note(
                f"{describe(self.pair.inverse)} was called with ({', '.join(more)}), in the backward pass of "
                f"{self.block!r}: f_inv gets y and then the further arguments of f. Let it take them, as in lambda y, "
                "w: ..."
            )
            raise

    def came(self, x: Any) -> Tensors:
        """The tensors of what the inverse gives, which have to be like those of x."""
        xs: Tensors = []
        for i, (t, like) in enumerate(zip(self._tensors_of(x), self.like, strict=True)):
            if i in self.kept:
                xs.append(self.kept[i].get())
            elif not isinstance(t, torch.Tensor) or not like.holds(t):
                what = f"{list(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
                raise InverseError(
                    f"the inverse gives {self.names()[i]} as {what}, where it was {list(like.shape)} {like.dtype}. To "
                    f"keep it in memory, and not compute it by the inverse, pass keep=({i},)."
                )
            else:
                xs.append(like.laid_out(t.detach()))
        return xs

    def _tensors_of(self, x: Any) -> Tensors:
        found, form = tree.separate(x)
        if form is self.form or form.structure == self.form.structure and form.places == self.form.places:
            return found
        names, came = self.names(), ["x" + path for path, t in tree.named_leaves(x) if isinstance(t, torch.Tensor)]
        if came == names:  # a list in place of a tuple
            return found
        what = "one tensor" if came == ["x"] else f"{type(x).__name__} of {', '.join(came)}" if came else repr(x)
        raise InverseError(
            f"the inverse gives {what}, where x was {'one tensor' if names == ['x'] else ', '.join(names)}. It has to "
            "be of the form of x: f_inv(f(x)) is x."
        )

    def spans(self) -> list[int]:
        """The numbers of what autograd has saved beside the evaluations of shared functions."""
        edges = [self.start, *(n for e in self.evaluations for n in (e.start, e.end)), self.end]
        return [n for first, end in [*pairwise(edges)][::2] for n in range(first, end)]


WRITTEN = (
    "an argument has been modified by an inplace operation, by f or after it, and is needed to compute the gradient. "
    "Write t = t + z in place of t += z."
)
