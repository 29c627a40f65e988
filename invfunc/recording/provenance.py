"""Tensors that are neither parameters nor samples: constants, or untraced: given by no call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import level_of, levels, version
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import Unseen
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM, Call
from invfunc.operations.calls import produced_by, read_by, spelled
from invfunc.operations.heard import Function, Listener
from invfunc.operations.pointwise import entrywise
from invfunc.recording.hidden import hidden, unseen
from invfunc.recording.seen import Seen
from invfunc.recording.tags import Derived, Sampled, Tags

OF_THEM = "from them where that cannot be seen (in torch.jit, torch.func or numpy, by .item(), in a copy?)"


class Constants:
    """Tensors that depend on no sample, as long as nobody writes to them."""

    def __init__(self) -> None:
        self._versions: WeakIdMap[int] = WeakIdMap()

    def add(self, x: torch.Tensor) -> None:
        self._versions.set(x, version(x))

    def update(self, tensors: Iterable[torch.Tensor]) -> None:
        for x in tensors:
            self.add(x)

    def __contains__(self, x: torch.Tensor) -> bool:
        then = self._versions.get(x)
        return then is not None and then == version(x)


PROVEN = Constants()
"""What earlier calls have proven to be constants."""


class UntracedTensors(Listener):
    """Counts the tensors that come from no call which it saw, in the order in which they are read first."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._known = WeakIdMap[int]()
        self._level = max((level for _, level in levels()), default=0)

    def know(self, x: torch.Tensor, of: int = 0) -> None:
        """Note that a tensor is not untraced, and what it depends on."""
        self._known.set(x, of)

    def knows(self, x: torch.Tensor) -> bool:
        return x in self._known

    def met(self, x: torch.Tensor, ordinal: int, name: str) -> None:
        """Called when an untraced tensor is read for the first time, by the call of this name."""
        raise NotImplementedError  # of those who count them

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        for x in tree.tensors((args, kwargs)):
            if not self.knows(x) and (level_of(x) or 0) <= self._level:  # a transform in f wraps what it reads
                self.know(x)
                self.count += 1
                self.met(x, self.count - 1, function.name)
        out = self.run(function, args, kwargs)
        for x in produced_by(out):
            if not self.knows(x):
                self.know(x)
        return out

    def run(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        return function.func(*args, **kwargs)


class Lost:
    """What stands in place of an axis for a tensor that depends on samples, but has no entry for each of them."""


LOST = Lost()


@dataclass(frozen=True)
class Beforehand:
    """What is known before a run."""

    constants: Sequence[torch.Tensor] = ()
    """Tensors that are no samples, nor computed from such."""
    places: Sequence[Axis | Lost | None] | None = None
    """Where the samples are in each untraced tensor, in their order; None for a constant."""
    trusting: bool = False
    """Whether numbers are the same for other samples."""
    by_rows: bool = False
    """Whether data that were put in another order are followed row by row."""
    entries: bool = False
    """Whether it is kept what each sample adds to sums over them, for parameters that multiply these."""
    repeated: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Where runs of several samples met parameters with an entry for each of them (the call, and which of those that it
    reads), and the size of one entry: a run of one sample, where that does not show, takes them for such, too."""


NOTHING = Beforehand()


@dataclass
class ConstantsMet:
    """The constants in a call that computes on all samples, or on a sum over some."""

    name: str
    total: bool
    numbers: list[float]
    tensors: list[torch.Tensor]


class Provenance:
    """What a run knows of each tensor, and what it may not know."""

    def __init__(self, apart: bool, beforehand: Beforehand) -> None:
        super().__init__()
        self.apart, self.beforehand = apart, beforehand
        self.known = Tags()
        self.tag, self.set = self.known.get, self.known.set
        self.calls: list[str] = []
        self.entered: list[torch.Tensor] = []  # what is differentiated: parameters, outputs of the model
        self.constants = Constants()
        self.constants.update(beforehand.constants)
        self.read = False  # whether values of single samples are numbers of Python
        self.escaped: str | None = None  # how samples went where they are not seen
        self.untraced_at: str | None = None  # where a parameter met a tensor of which nothing is known
        self.constants_met: list[ConstantsMet] = []  # constants that met all samples, once values of some were read
        self.aligned: list[
            tuple[str, torch.Tensor, int]
        ] = []  # what met samples row by row, with an untraced tensor in it

    @property
    def left(self) -> str | None:
        """The call through which samples may have gone into what seems to be constant; None if there is none."""
        return None if self.beforehand.trusting else self.escaped

    @property
    def adopting(self) -> Adopting | None:
        """A mode that tells the run of its untraced tensors, where these are known beforehand."""
        places = self.beforehand.places
        return None if places is None else Adopting(self, places)

    def seen(self, function: Function, args: tuple, kwargs: dict) -> Seen:
        """Return a call with what is known of what it reads."""
        read = read_by(function.name, args, kwargs)
        return Seen(function, args, kwargs, read, {id(x): tag for x in read if (tag := self.tag(x)) is not None})

    def look_at(self, seen: Seen) -> None:
        """Check that nothing which a call reads was hidden, and note whether samples leave by it or have come back."""
        for x in seen.read:
            if x.requires_grad and unseen(x, seen.tags.get(id(x)), self.entered):
                raise hidden(x, self.calls)
        came_back = self.known.holds_samples(x for x in seen.read if id(x) not in seen.tags)
        if came_back or (seen.function.entry.exits and seen.tags):
            self.escaped = self.escaped or seen.name

    def values_left(self, seen: Seen) -> None:
        """Note that samples may have left the tensors: a call that reads them gave something that is not a tensor."""
        if any(tag.lost or isinstance(tag.place, Axis) for tag in seen.sampled):
            self.escaped, self.read = self.escaped or seen.name, True

    def note(self, call: Call, place: Any) -> None:
        """The constants in a call that computes on all samples, of which some were read."""
        if isinstance(place, Axis) and place.rows is not None:  # on some of them
            return
        kinds = {int, float} if entrywise(call.name) else {float}
        leaves = tree.leaves((call.args, call.kwargs))
        numbers = [x for x in leaves if type(x) in kinds]
        tensors = [x.detach() for x in leaves if isinstance(x, torch.Tensor) and self._constant(x)]
        if place is BATCH_SUM:
            numbers += [float(x.real) for x in tensors if x.numel() == 1]
            tensors = [x for x in tensors if x.numel() > 1]
        if numbers or tensors:
            self.constants_met.append(
                ConstantsMet(call.name, place is BATCH_SUM, numbers, [x.clone() for x in tensors])
            )

    def align(self, seen: Seen, x: torch.Tensor, axis: Axis) -> None:
        """A tensor into which samples may have gone meets samples, row by row."""
        tag = self.tag(x)
        if self.apart and axis.dim is not None and isinstance(tag, Derived) and (tag.untraced_at or self.read):
            self.aligned.append((spelled(seen.name), x.detach().clone(), axis.dim))

    def _constant(self, x: torch.Tensor) -> bool:
        tag = self.tag(x)
        return tag is None or (isinstance(tag, Sampled) and tag.place is BATCH_SUM and not tag.active)

    def untraced(self, x: torch.Tensor) -> bool:
        """Whether nothing says that a tensor without a tag is a constant."""
        return x not in self.constants and x not in PROVEN

    def untraced_call(self, seen: Seen) -> str | None:
        """The name of a call in which parameters meet a tensor of which nothing is known; None for other calls."""
        if not any(id(x) not in seen.tags and self.untraced(x) for x in seen.read):
            return None
        self.untraced_at = self.untraced_at or seen.name
        return seen.name

    def adopt(self, x: torch.Tensor, place: Axis | Lost | None, name: str) -> None:
        """What was learned of an untraced tensor that a call reads."""
        if isinstance(place, Lost):
            self.set(x, Sampled(None, Unseen(f"{spelled(name)}, which reads a tensor that was computed {OF_THEM}")))
        elif place is None:
            self.constants.add(x)
        else:
            self.set(x, Sampled(place))


class Adopting(UntracedTensors):
    """Tells a run what its untraced tensors are, where that was learned."""

    def __init__(self, run: Provenance, places: Sequence[Axis | Lost | None]) -> None:
        super().__init__()
        self.provenance, self.places = run, places

    def knows(self, x: torch.Tensor) -> bool:
        """Parameters and samples, of which the run knows before any call, are not untraced."""
        return super().knows(x) or self.provenance.tag(x) is not None

    def met(self, x: torch.Tensor, ordinal: int, name: str) -> None:
        self.provenance.adopt(x, self.places[ordinal] if ordinal < len(self.places) else LOST, name)
