"""Checkpointing in plain autograd: hooks in the place of saved tensors, so that the graph is that of f itself.

The graph of `y = f(x)` saves nothing. The first of its nodes that asks for a saved tensor has the block rebuilt: x from
the slot of y by the inverse, and what f saves by evaluating f at it again; what shared functions save is taken from
their evaluation by the inverse. Tensors that f closes over get their
gradients as ever, as it is f's own graph that is run backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from invfunc import tree
from invfunc._functorch import Memory, backward_pass, plainly, unwatched, version
from invfunc.errors import ModifiedError, ReplayError
from invfunc.invertible.call import Call, Tensors
from invfunc.invertible.recall import OUTSIDE, Parts
from invfunc.invertible.slots import Block, Held, fetch, metadata_of, release

Saved = tuple[torch.Size, torch.dtype, int | None]
"""What is known of a saved tensor: its shape and dtype, and which of the further arguments it is, if it is one."""
Key = tuple[int, int]
"""Which saved tensor: of the evaluation of a shared function (-1: of f beside them), and which one there."""


class Tape(Parts):
    """The tensors that autograd saves in one evaluation of f, in order."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def next(self) -> Key:
        """The key of the tensor that is saved now."""
        index = self.counts.get(self.part, 0)
        self.counts[self.part] = index + 1
        return self.part, index


class HookedBlock(Block):
    """A call of f in plain autograd."""

    def __init__(self, call: Call, xs: Tensors, rest: Tensors) -> None:
        super().__init__(call.kept)
        self._call = call
        self._rest = [Held(t) for t in rest]
        self._needs = [t.requires_grad for t in (*xs, *rest)]
        self._shared_needs: dict[int, list[bool]] = {}
        self._tape = Tape()
        self._like: dict[Key, Saved] = {}
        inputs = {x.data_ptr() for x in xs}
        self._apart = [i for i, t in enumerate(rest) if t.numel() and t.data_ptr() not in inputs]
        self._places = _places(rest, self._apart)
        self._saved: dict[Key, torch.Tensor] = {}
        self._pass = -1
        """The backward pass in which they were computed."""
        self._memory: dict[Key, tuple[Memory, Geometry]] | None = {} if call.followed else None

    def pack(self, tensor: torch.Tensor) -> tuple[HookedBlock, Key]:
        """Instead of a tensor autograd saves where to get it."""
        key = self._tape.next()
        self._like[key] = tensor.shape, tensor.dtype, self._places.get(tensor.data_ptr())
        if self._memory is not None:
            self._memory[key] = Memory(tensor), _geometry(tensor)
        return self, key

    def given_back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """For a statistic that watches f: how to have a tensor again, if it is one that was saved."""
        for key, (memory, geometry) in reversed((self._memory or {}).items()):
            if memory.holds(tensor) and (geometry == _geometry(tensor) or _all_of(tensor, geometry)):
                shape = tensor.shape
                return lambda: self.looked_up(key).reshape(shape)
        return None

    def looked_up(self, key: Key) -> torch.Tensor:
        """A saved tensor, which autograd may ask for as well."""
        if key not in self._saved:
            self._saved = self._rebuild()
        return self._saved[key]

    def evaluate(self, index: int, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A shared function, for the first time."""
        with unwatched():
            self._shared_needs[index] = [t.requires_grad for t in tree.tensors((args, kwargs))]
        with self._tape.within(index):
            return fn(*args, **kwargs)

    def invert(self) -> None:
        with plainly(), torch.no_grad(), self._call.named():
            xs = self._call.inverse(fetch(self.sources), self._detached())
            if self._call.reads_outside:
                self._call.run(xs, self._detached(), None)  # which says if it reads something else by now
            self.give_back(xs)

    def _detached(self) -> list[torch.Tensor]:
        return [held.get().detach() for held in self._rest]

    def saved(self, key: Key) -> torch.Tensor:
        """A saved tensor; it is handed out once, and computed again for whoever asks again."""
        if self._saved and self._pass != backward_pass():
            self._detached()  # what an earlier pass left is as good as the arguments it may be a part of
        tensor = self._saved.pop(key, None)
        if tensor is None:
            found = self._rebuild()
            tensor = found.pop(key)
            self._saved = found
        return tensor

    def forget(self) -> None:
        """Let go of what was computed again."""
        self._saved = {}

    def _rebuild(self) -> dict[Key, torch.Tensor]:
        if not self._ys:
            raise ReplayError("the function differentiates within itself by torch.autograd; let it use torch.func.")
        for block in self.behind():
            if isinstance(block, HookedBlock):
                block.forget()  # autograd is done with it
        self._pass = backward_pass()
        rest = self._detached()
        recorded = _Recording(self._like, _places(rest, self._apart), to_the_end=self._call.tolerance is not None)
        with plainly(), self._call.named():
            xs = self.xs()
            outputs = None
            if xs is None:
                xs, outputs = self._invert_recording(recorded)
            if outputs is None or outputs or recorded.misses() or self._call.reads_outside:
                self._run_recording(recorded, xs, outputs)
        recorded.check()
        for held in self._rest:
            held.let_go()
        release(self._ys)
        return recorded.found

    def _invert_recording(self, recorded: _Recording) -> tuple[list[torch.Tensor], dict[int, Any]]:
        """Invert; what the shared functions save meanwhile is what they saved in forward."""
        outputs: dict[int, Any] = {}

        def evaluate(index: int, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
            tensors, form = tree.separate((args, kwargs))
            args, kwargs = form.join(_as_then(tensors, self._shared_needs[index]))
            with torch.enable_grad(), recorded.part(index):
                output = fn(*args, **kwargs)
            if OUTSIDE in self._tape.counts or self._call.tolerance is not None or self._call.reads_outside:
                outputs[index] = output
            return tree.map_tensors(torch.Tensor.detach, output)

        with torch.no_grad():
            xs = self._call.inverse(fetch(self.sources), self._detached(), evaluate)
        self.give_back(xs)
        return xs, outputs

    def _run_recording(self, recorded: _Recording, xs: Tensors, outputs: dict[int, Any] | None) -> None:
        """Evaluate f again, with the known outputs of shared functions, as long as something saved is missing."""

        def evaluate(index: int, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
            if outputs:
                return tree.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), outputs[index])
            if outputs is not None:
                raise self._differs(recorded)
            with recorded.part(index):
                return fn(*args, **kwargs)

        given = _as_then((*xs, *self._detached()), self._needs)
        try:
            with torch.enable_grad(), recorded.part(OUTSIDE):
                self._call.run(given[: len(xs)], given[len(xs) :], evaluate, known=bool(outputs))
        except _Enough:
            pass
        if recorded.misses():
            raise self._differs(recorded)

    def _differs(self, recorded: _Recording) -> ReplayError:
        return ReplayError(
            f"autograd saved {len(self._like)} tensors when the function was evaluated, and {len(recorded.found)} "
            "when it was evaluated again: it does not do the same thing twice."
        )


Geometry = tuple[torch.Size, tuple[int, ...], int, bool]


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_contiguous()


def _all_of(tensor: torch.Tensor, geometry: Geometry) -> bool:
    """Whether a tensor has the same entries in the same order, in another shape."""
    shape, _, offset, contiguous = geometry
    same = tensor.numel() == shape.numel() and tensor.storage_offset() == offset
    return same and contiguous and tensor.is_contiguous()


def _places(rest: Tensors, indices: Sequence[int]) -> dict[int, int]:
    """Which of some further arguments are where in memory."""
    return {rest[i].data_ptr(): i for i in reversed(indices)}


def _as_then(tensors: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor]:
    return [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]


class _Enough(Exception):
    """All that was saved is there."""


class _Recording:
    """Saved tensors of an evaluation that is done again."""

    def __init__(self, like: dict[Key, Saved], places: dict[int, int], to_the_end: bool) -> None:
        self._like = like
        self._places = places
        self._to_the_end = to_the_end
        self._tape = Tape()
        self.found: dict[Key, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def check(self) -> None:
        """What was saved was not written afterwards."""
        for tensor, then in self._versions:
            if version(tensor) != then:
                raise ModifiedError(
                    f"a tensor of shape {list(tensor.shape)} that is needed for the gradient of the function has been "
                    "modified within it by an inplace operation."
                )

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing: a statistic looked on the first time."""

    def misses(self) -> bool:
        return len(self.found) < len(self._like)

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        with self._tape.within(index), saved_tensors_hooks(self._pack, _never):
            yield

    def _pack(self, tensor: torch.Tensor) -> None:
        key = self._tape.next()
        like = self._like.get(key)
        if like != (tensor.shape, tensor.dtype, self._places.get(tensor.data_ptr())):
            then = "nothing" if like is None else f"{list(like[0])} {like[1]}"
            raise ReplayError(
                f"autograd saves a tensor {list(tensor.shape)} {tensor.dtype} where it saved {then} the first time: "
                "the function does not do the same thing twice."
            )
        self.found[key] = tensor.detach()
        self._versions.append((self.found[key], version(tensor)))
        if key[0] == OUTSIDE and not self._to_the_end and not self.misses():
            raise _Enough


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("this graph is never run backwards")


def _unpack(packed: tuple[HookedBlock, Key]) -> torch.Tensor:
    block, key = packed
    return block.saved(key)


def hooked(call: Call, xs: Tensors, rest: Tensors) -> tuple[Any, list[torch.Tensor]]:
    """The result of a call whose graph saves nothing, and its tensors."""
    block = HookedBlock(call, xs, rest)
    with saved_tensors_hooks(block.pack, _unpack):
        y = call.first(xs, rest, closed=False, evaluate=block.evaluate)
    ys = call.flat(y)
    if any(t.requires_grad for t in ys):
        block.connect(xs, ys, [metadata_of(t) for t in ys])
    return y, ys
