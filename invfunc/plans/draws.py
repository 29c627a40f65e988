"""Random numbers in a plan: drawn again from the same generators, which are put back where the call has put them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import same_generator, unwatched
from invfunc._torch.generators import set_states, state_of
from invfunc.plans.tape import Step, Tape
from invfunc.plans.watch import Watch


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation may draw random numbers."""
    at = _draws_at(func)
    if at is None or at < 0:
        return at is None
    return (args[at] if at < len(args) else kwargs.get(_DROPOUT, 0.0)) != 0


def may_draw(func: Any) -> bool:
    """Whether there are arguments with which it does."""
    return _draws_at(func) != -1


@cache
def _draws_at(func: Any) -> int | None:
    """The place of the probability of attention's dropout, which draws nothing where it is 0; None of what draws in any
    case, and -1 of what never does, as derivatives, which are given what was drawn."""
    arguments = func._schema.arguments
    if any("Generator" in str(a.type) for a in arguments):
        return None
    if torch.Tag.nondeterministic_seeded not in func.tags or func._schema.name.endswith("_backward"):
        return -1
    return next((i for i, a in enumerate(arguments) if a.name == _DROPOUT), None)


_DROPOUT = "dropout_p"


def saved(g: torch.Generator) -> torch.Tensor:
    """The state of a generator, in a plan."""
    return state_of(g)


def put_back(g: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator to a state, in a plan."""
    set_states([(g, state)])


def default_generators() -> list[torch.Generator]:
    """Torch's own generators."""
    on_devices = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_devices]


class Drawn:
    """The draws of a call, as they are written down.

    Of each generator all states are known in which a draw has begun or ended. Where it is in another one than the draw
    before has left, somebody has set it: to one that is known, which the plan then does too, or there is no plan.
    """

    def __init__(self, entered: Callable[[torch.Generator], Step | None], tape: Tape, watch: Watch) -> None:
        self.why = ""
        self._entered, self._tape = entered, tape
        held = [g for known in watch.generators.values() if (g := known()) is not None]
        self._generators = {same_generator(g): g for g in (*default_generators(), *held)}
        self._now = {key: _bytes(g) for key, g in self._generators.items()}
        self._known: dict[int, dict[bytes, Step | None]] = {key: {now: None} for key, now in self._now.items()}
        """Behind which step, if any, a generator was in a state."""
        self._saved: dict[tuple[int, bytes], Step] = {}
        self._items: dict[int, Step] = {}
        self.first: Step | None = None
        self.drew: list[torch.Generator] = []
        """Those that were drawn from."""

    def item(self, g: torch.Generator) -> Step | None:
        """What a generator is as it is written down."""
        if same_generator(g) not in self._items:
            item = self._entered(g) if same_generator(g) in self._generators else None
            if item is None:
                self.why = self.why or "it draws from a generator that is not found in what it closes over"
                return None
            self._items[same_generator(g)] = item
        return self._items[same_generator(g)]

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Generator:
        """Which generator an operation is going to draw from; its state is put back first if the call has done so."""
        g = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None) or _of(args, kwargs)
        if same_generator(g) not in self._generators:
            self.why = self.why or "it draws from a generator that is not found in what it closes over"
        else:
            self._moved(g)
        return g

    def after(self, g: torch.Generator, item: Step) -> None:
        """Note where a draw has left its generator."""
        if same_generator(g) in self._generators:
            now = self._now[same_generator(g)] = _bytes(g)
            self._known[same_generator(g)].setdefault(now, item)
            if not any(same_generator(g) == same_generator(known) for known in self.drew):
                self.drew.append(g)

    def finish(self) -> None:
        """Put the generators where the call has left them."""
        for g in self._generators.values():
            self._moved(g)

    def _moved(self, g: torch.Generator) -> None:
        key, now = same_generator(g), _bytes(g)
        if now == self._now[key]:
            return
        if now not in self._known[key]:
            self.why = self.why or "it sets a random number generator to a state of its own (a seed)"
            return
        item = self.item(g)
        if item is None:
            return
        if (key, now) not in self._saved:
            behind = self._known[key][now] or self._first()
            self._saved[key, now] = self._tape.insert(behind, saved, (item,))
        self._tape.write(put_back, (item, self._saved[key, now]))
        self._now[key] = now

    def _first(self) -> Step:
        """The last input, behind which nothing is done yet."""
        return self._tape.inputs[-1]


def _of(args: tuple, kwargs: dict[str, Any]) -> torch.Generator:
    """The generator of the device on which an operation draws."""
    found = [x.device for x in tree.tensors((args, kwargs))]
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else found[0] if found else None
    if device is None or device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


def _bytes(g: torch.Generator) -> bytes:
    with unwatched():  # these are no numbers of the call
        return state_of(g).numpy().tobytes()
