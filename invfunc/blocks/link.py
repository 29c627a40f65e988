"""Blocks of a run, and the states between runs: in memory, or to be had from the later run that took them over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.functorch import alive, function_of, is_wrapped, recorded, storage, storage_of, version
from invfunc._torch.sharded import gathered_again, gathers
from invfunc._torch.weak import WeakIdMap
from invfunc.blocks.looks import TensorLook
from invfunc.blocks.surroundings import States, Surroundings, without_graphs
from invfunc.callables import describe
from invfunc.errors import InverseError, ModifiedError, ReplayError

_KEY = "invfunc"
_WITHOUT_GRAPH: WeakIdMap[Callable[[], Slot | None]] = WeakIdMap()
"""The slots of tensors of which there is no graph."""
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Slot:
    """A tensor that a call gave out, until the next call takes it over.

    Hooks on saved tensors that are around the call (a block or a checkpoint that it is a part of) take it as they take
    what autograd saves.
    """

    __slots__ = ("_value", "_packed", "version", "shape", "later", "owner", "depth", "lock", "__weakref__")

    def __init__(self, tensor: torch.Tensor, depth: int = 0, hooks: Hooks | None = None, lock: Any = None) -> None:
        value = tensor.detach()
        self._value, self._packed = (value, None) if hooks is None else (None, (hooks[1], hooks[0](value)))
        self.version, self.shape = version(tensor), tensor.shape
        self.later: Holder | None = None
        self.owner: weakref.ref[Holder] | None = None
        self.depth = depth
        """Number of blocks in its series up to this one."""
        self.lock = lock
        """One for all calls of a series, of which threads may need the states at the same time."""

    @property
    def empty(self) -> bool:
        """Tells whether a later call has to give the tensor back."""
        return self._value is None and self._packed is None

    def get(self) -> torch.Tensor:
        """The tensor, which must not have been written since."""
        if self._packed is not None:
            unpack, packed = self._packed
            return unpack(packed).detach()
        value = self._value
        if value is None:
            raise ReplayError("the backward pass has freed the states: a second one needs retain_graph=True.")
        if version(value) != self.version:
            raise ModifiedError(
                f"its output, of shape {list(self.shape)}, has been modified by an inplace operation, and is needed to "
                "compute the gradient. Write y = y + z in place of y += z."
            )
        return alive(value) if is_wrapped(value) else value

    def of_memory(self, tensor: torch.Tensor) -> bool:
        """Tells whether it is that tensor, which somebody handed on."""
        value = self._value
        if value is None or storage_of(value) != storage_of(tensor):
            return False
        return (value.storage_offset(), value.stride()) == (tensor.storage_offset(), tensor.stride())

    def fill(self, value: torch.Tensor) -> None:
        """Put the tensor back that the later call has computed again."""
        self._value, self.version = value, version(value)

    def drop(self) -> None:
        """Let go of the tensor."""
        self._value = self._packed = None

    def note(self, tensor: torch.Tensor, held: bool) -> None:
        """Let the next call find this slot at the tensor; a copy or a pickle of the tensor knows nothing of it.

        Args:
            tensor: the tensor.
            held: whether the slot lives as long as the graph, also where nobody needs it to go backwards.
        """
        own, of = weakref.ref(self), recorded(tensor)
        node: Any = of.grad_fn
        if node is None:
            _WITHOUT_GRAPH.set(tensor, own)
        else:
            node.metadata[_KEY, of.output_nr] = (lambda: self) if held else own


def slot_of(tensor: torch.Tensor, groups: list[Any]) -> Slot | None:
    """The slot of a tensor that a call gave out, if it was not written and nobody took it over.

    Functions of autograd may have handed it on, as `fully_shard` does; what gathers parameters there is added to
    `groups`.
    """
    of = recorded(tensor)
    node: Any = of.grad_fn
    number = of.output_nr
    found = _WITHOUT_GRAPH.get(tensor) if node is None else None
    while node is not None and (found := node.metadata.get((_KEY, number))) is None:
        if function_of(node) is None or number >= len(node.next_functions):
            break
        groups += [] if (group := gathers(node)) is None else [group]
        node, number = node.next_functions[number]
    handed = node is not of.grad_fn
    slot = found and found()
    if slot is None or slot.later is not None or slot.empty or slot.shape != tensor.shape:
        return None
    if slot.version != version(tensor) or (handed and not slot.of_memory(tensor)):
        return None
    return slot


class Holder:
    """A call: the slots of its output, those of its input that it took over, and a way back from one to the other."""

    outs: Sequence[Slot] = ()
    ins: Sequence[weakref.ref[Slot] | None] = ()
    gathering: Sequence[Any] = ()
    """Groups of `fully_shard` that gather parameters for this call, if it is the first one in its module."""

    def back(self, ys: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the input, from those of the output."""
        raise NotImplementedError  # of this class alone

    def release(self) -> None:
        """Drop what can be computed again."""

    def take_over(self, slots: Sequence[Slot | None]) -> None:
        """Let go of the input, whose slots are filled again by `fill`."""
        self.ins = ins = list[weakref.ref[Slot] | None]()
        for slot in slots:
            ins.append(None if slot is None else weakref.ref(slot))
            if slot is not None:
                slot.later = self
                slot.drop()

    def output(self) -> list[torch.Tensor]:
        """The tensors of the output; later calls compute those that they took over, one after the other."""
        missing = [slot.later for slot in self.outs if slot.later is not None and slot.empty]
        waiting, groups = list[Holder]([self] if missing else []), [self.gathering]
        while waiting:
            missing = [slot.later for slot in waiting[-1].outs if slot.later is not None and slot.empty]
            if missing:
                waiting.append(missing[0])
                groups.append(missing[0].gathering or groups[-1])
                continue
            done, group = waiting.pop(), groups.pop()
            if waiting:
                with gathered_again(group):
                    done.fill(done.back([slot.get() for slot in done.outs]))
        found = [slot.get() for slot in self.outs]
        for slot in self.outs:
            if slot.later is not None:
                slot.later.release()
                slot.drop()
        return found

    def fill(self, xs: Sequence[torch.Tensor]) -> None:
        """Give the input back to the calls that it came from."""
        for x, found in zip(xs, self.ins, strict=False):
            slot = found() if found is not None else None
            if slot is not None and slot.later is self:
                slot.fill(x)
                if slot.owner is not None and (owner := slot.owner()) is not None:
                    owner.release()  # what it holds is of an earlier backward pass


def depth_of(slots: Sequence[Any]) -> int:
    """Number of blocks before a state, by its slots."""
    return max((slot.depth for slot in slots if slot is not None), default=0)


_FORM = attrgetter("shape", "dtype", "device", "requires_grad")
Step = tuple[Any, tuple, dict[str, Any]]
"""A block with its further arguments."""
Tensors = list[torch.Tensor]
Enter = Callable[[torch.Tensor, bool], torch.Tensor]
"""Gives a tensor as a leaf of the level that is recorded, if a gradient of it is needed."""


class Like:
    """Shape, dtype, device, strides and need of a gradient of a tensor as it was."""

    __slots__ = ("shape", "dtype", "device", "stride", "needs", "batches")

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.needs = _FORM(x)
        self.batches = None
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
        """Tells whether another tensor has this shape, and a dtype with all of the digits."""
        if came.dtype == self.dtype or came.shape != self.shape:
            return came.shape == self.shape
        floats = came.dtype.is_floating_point and self.dtype.is_floating_point
        return floats and torch.promote_types(came.dtype, self.dtype) == came.dtype


@dataclass(slots=True)
class Evaluation:
    """An evaluation of a function that f shares with its inverse."""

    fn: Callable
    start: int
    """Number of tensors that autograd has saved before."""
    first: bool
    """True if its first argument is a tensor, and all others are constants and further arguments of the block."""
    given: list[Like]
    """The tensors that it is given beside the arguments of the block."""
    states: States | None
    """States of the generators."""
    end: int = 0


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
    ids: frozenset[int] | set[int] = frozenset([id(None)])
    """Their ids, and those of the arguments, of the parts of these, and of None."""
    looks: list[TensorLook | None] | None = None
    hidden: tuple = ()
    kept: dict[int, Slot] = {}
    """The tensors of x that stay in memory, by their places."""
    merged = False
    """True if shared functions alone have something saved."""
    _args: Any = ((), {})
    """The further arguments; without their tensors, if one of these has a graph."""
    _tensors: Sequence[torch.Tensor] = ()
    _versions: Sequence[int] = []

    def __init__(
        self, step: Step, xs: Tensors, form: tree.Form, start: int, around: Surroundings, states: States | None
    ) -> None:
        self.block, args, kwargs = step
        self.pair = self.block.pair
        self.form, self.like, self.start, self.around, self.states = form, [*map(Like, xs)], start, around, states
        self.end = start
        """Number of tensors that autograd has saved at its end."""
        self.quiet = states is None or around.key in around.closed.quiet
        """True if it drew nothing the last time, so that the states within it are not noted."""
        if args or kwargs:
            self.own = list[torch.Tensor]()
            fixed = tree.gather((*args, kwargs) if kwargs else args, self.own)
            self.ids = {*self.ids, *map(id, self.own), *map(id, args)}
            self.ids.update(*[map(id, arg) for arg in args if type(arg) is tuple or type(arg) is list])
            self._tensors = without_graphs(self.own)
            self._args = (args, kwargs) if fixed and self._tensors is self.own else tree.separate((args, kwargs))[1]
            self._versions = functorch.versions(self._tensors)
        self.evaluations: list[Evaluation] = []

    def names(self) -> list[str]:
        """The tensors of x as one would write them."""
        named = tree.named_leaves(self.form.join(range(len(self.form.places))))
        return ["x" + named[place][0] for place in self.form.places]

    def given(self, enter: Enter) -> tuple[tuple, dict[str, Any]]:
        """The further arguments, to be read once more: what had a graph needs a gradient as before."""
        if functorch.versions(self._tensors) != self._versions:
            raise ModifiedError(WRITTEN)
        if not isinstance(self._args, tree.Form):
            return self._args
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
                    f"the inverse gives {self.names()[i]} as {what}, where it was {list(like.shape)} {like.dtype}. "
                    f"Mend f_inv, or keep this tensor in memory by keep=({i},)."
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
