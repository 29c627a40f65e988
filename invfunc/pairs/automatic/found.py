"""The pair of a function whose inverse is found in what it does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import unwrapped
from invfunc._torch.generators import set_states
from invfunc.callables import describe
from invfunc.errors import InverseError
from invfunc.pairs.automatic.inverse import Inverse
from invfunc.pairs.automatic.recording import RecordedRun, Ref, autocast_of
from invfunc.pairs.pair import Invertible
from invfunc.pairs.places import ClosedOver
from invfunc.pairs.value import Value

_MOST = 64
"""The number of kinds of calls that are remembered."""
_Like = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]
"""Shape, dtype, device and strides of a tensor."""
_X = tuple[tree.Form, Sequence[_Like]]
"""An x without its numbers."""


class _Memory:
    """Inverses by the kinds of calls; a copy, whose function may close over other things, is empty."""

    def __init__(self) -> None:
        self.closure: ClosedOver | None = None
        self.inverses: dict[Any, Inverse] = {}
        self.xs: dict[Any, _X] = {}
        """Forms of x, by those of y."""

    def __reduce__(self) -> tuple:
        return _Memory, ()


@dataclass(frozen=True, eq=False)
class FoundPair(Value):
    """Both directions of f, which is recorded in the first call of each kind."""

    f: Callable
    keep: tuple[int, ...] = ()
    """The tensors of x that are known to the inverse."""
    memory: _Memory = field(default_factory=_Memory)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.f(x, *args, **kwargs)
        xs, form = tree.separate(x)
        like = form, [*map(_like, xs)]
        alike = len({*map(id, xs)}) < len(xs)  # a tensor in two places has one name
        if not xs or alike or self._key(like, args, kwargs) in self.memory.inverses:
            return self.f(x, *args, **kwargs)
        return self._record(x, like, args, kwargs, dry=False)[0]

    def inverse(self, y: Any, *args: Any, **kwargs: Any) -> Any:
        """x of y; of the form that x had in a call that gave such a y, or of that of y."""
        ys, form = tree.separate(y)
        like = [*map(_like, ys)]
        x = self.memory.xs.get(self._key((form, [t[:3] for t in like]), args, kwargs), (form, like))
        return self.solve(x, {}, y, *args, **kwargs)

    def solve(self, x: _X, kept: Mapping[int, torch.Tensor], y: Any, *args: Any, **kwargs: Any) -> Any:
        """x of y, of this form; some of its tensors are kept."""
        (form, like), ys, rest = x, tree.tensors(y), tree.tensors((args, kwargs))
        inverse = self.memory.inverses.get(self._key(x, args, kwargs))
        outside = None if inverse is None else inverse.recording.now()
        if inverse is None or outside is None:
            ones = (ys[0].new_empty_strided(t[0], t[3], dtype=t[1], device=t[2]).fill_(1) for t in like)
            some = [t.detach() for t in ys] if [*map(_like, ys)] == like else ones
            _, inverse, outside = self._record(form.join(some), x, args, kwargs, dry=True)
        if inverse.kept != tuple(kept):
            inverse = Inverse(inverse.recording, tuple(kept), inverse.names)
        nodes = inverse.recording
        if [node.shape for node in nodes.ys] != [t.shape for t in ys]:
            raise InverseError("f gives y in another form than it had when f was recorded.")
        given = dict(zip((*nodes.ys, *nodes.rest), (*ys, *rest), strict=True)) | outside
        near = next((t for t in ys if unwrapped(t) is not None), ys[0])
        return form.join(inverse(given | {nodes.xs[i]: t for i, t in kept.items()}, near))

    def _record(
        self, x: Any, like: _X, args: tuple, kwargs: dict[str, Any], dry: bool
    ) -> tuple[Any, Inverse, dict[Ref, torch.Tensor]]:
        """The result of f, its inverse and the tensors that it closes over."""
        recording, memory = RecordedRun(xs := tree.tensors(x), tree.tensors((args, kwargs)), dry), self.memory
        with recording:
            y = self.f(x, *args, **kwargs)
        if dry:
            set_states(recording.start.items())
        memory.closure = ClosedOver(self.f)
        ys, form = tree.separate(y)
        recording.end(ys, memory.closure)
        names = _names("x", like[0].join(recording.xs)) | _names("y", form.join(recording.ys))
        inverse = Inverse(recording, tuple(i for i in self.keep if i < len(xs)), names)
        if len(memory.inverses) >= _MOST:  # of ever new shapes
            memory.inverses.clear()
            memory.xs.clear()
        memory.inverses[self._key(like, args, kwargs)] = inverse
        memory.xs[self._key((form, [_like(t)[:3] for t in ys]), args, kwargs)] = like
        outside, recording.outside = recording.outside, dict.fromkeys(recording.outside)
        return y, inverse, outside

    def _key(self, like: tuple[tree.Form, Sequence[tuple]], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The kind of a call: everything that the calls of f may depend on beside the numbers of tensors."""
        (form, tensors), (rest, rest_form) = like, tree.separate((args, kwargs))
        held = () if self.memory.closure is None else self.memory.closure.others()
        first, others = dict[int, int](), (*form.others, *rest_form.others)
        constants = [(type(x), x if isinstance(x, Hashable) else id(x)) for x in others]
        structures = tree.hashable(form.structure), tree.hashable(rest_form.structure)
        tied = [(t.shape, t.dtype, first.setdefault(id(t), i)) for i, t in enumerate(rest)]
        return *structures, *tensors, *tied, *(autocast_of(t[2].type) for t in tensors), *constants, held


class Automatic(Invertible):
    """A pair whose inverse is found; its repr tells it, once it was called."""

    @property
    def found(self) -> FoundPair:
        return self.forward.__self__  # pyright: ignore[reportFunctionMemberAccess]

    def inverse_of(self, x: tree.Form, like: Sequence[Any], kept: Mapping[int, torch.Tensor]) -> Callable:
        shapes = [(t.shape, t.dtype, t.device, t.stride) for t in like]
        return torch.no_grad()(partial(self.found.solve, (x, shapes), kept))

    def __repr__(self) -> str:
        texts = dict.fromkeys(inverse.text for inverse in self.found.memory.inverses.values())
        return ", or ".join([describe(self.found.f), *texts]).replace(", or ", ", ", 1)


def automatic(f: Callable, keep: tuple[int, ...] = ()) -> Automatic:
    """The pair of f and the inverse that is found in what f does."""
    found = FoundPair(f, keep)
    return Automatic(found.forward, found.inverse)


def _like(tensor: torch.Tensor) -> _Like:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _names(name: str, nodes: Any) -> dict[Ref, str]:
    """The nodes of x or y as one would write them."""
    return {leaf: name + path for path, leaf in tree.named_leaves(nodes) if isinstance(leaf, Ref)}
