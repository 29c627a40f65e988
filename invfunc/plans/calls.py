"""The calls of a function: the first one of each key is written down, and the others repeat it."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, dual, saving_hooks, storage_of, transforming, under
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.budget import settings
from invfunc.core.ways import straight
from invfunc.errors import InvFuncWarning
from invfunc.pairs.value import reached
from invfunc.plans.plan import RecordedPlan, signature
from invfunc.plans.recorder import Missed, Reads, Recorder, outside

_PLAIN = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...)}
_VALUES = {*_PLAIN, float, complex}
_DIFFERENTIABLE = "the result is differentiable; call it on detached parameters, or under torch.no_grad()"


@dataclass(frozen=True)
class PlannedCall:
    """The arguments of a call: its tensors and generators, what the key knows by its identity, and the key."""

    tensors: list[torch.Tensor]
    generators: list[torch.Generator]
    objects: list[Any]
    key: Hashable
    why: str = ""
    """The reason why no plan can be made for such arguments."""


def call_of(args: tuple, kwargs: dict[str, Any]) -> PlannedCall:
    """Sort the arguments of a call: those with the same key may share a plan."""
    leaves, structure = tree.flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    others = [x for x in leaves if not isinstance(x, torch.Tensor)]
    objects = [x for x in others if type(x) not in _VALUES]
    generators = [x for x in objects if isinstance(x, torch.Generator)]
    if not all([x.layout is torch.strided for x in tensors]):
        return PlannedCall(tensors, generators, objects, None, "an argument is not a dense tensor")
    around = settings(), torch.get_default_device() if under(TorchFunctionMode) else None  # it is a mode
    known = tuple(map(signature, tensors)), _shared(tensors), tuple(map(_token, others))
    return PlannedCall(tensors, generators, objects, (structure, *known, around))


def _unfit(tensors: list[torch.Tensor]) -> str:
    """The reason why tensors cannot be inputs of a plan; empty if they can."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _DIFFERENTIABLE
    kind = next((type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)), None)
    return "" if kind is None else f"an argument is a {kind.__name__}, not a plain tensor"


def _kept(structure: Any) -> str:
    """The reason why a tree cannot be kept; empty if it can."""
    return "a tree has mappings or dataclasses that torch does not know as nodes" if tree.templates(structure) else ""


def _shared(tensors: list[torch.Tensor]) -> Hashable:
    """The tensors that are the same, or in the same memory, and where there."""
    places = [*map(storage_of, tensors)]
    if len(set(places)) == len(places):
        return None
    same, often = [*map(id, tensors)], Counter(places)
    return tuple(
        (places.index(p), same.index(id(x)), x.storage_offset()) if often[p] > 1 else None
        for p, x in zip(places, tensors, strict=True)
    )


def _token(x: Any) -> Hashable:
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    if kind is torch.Generator:
        return kind, x.device
    return (kind, repr(x)) if kind in (float, complex) else (kind, id(x))


@dataclass
class KnownCalls:
    """Knowledge of the calls of one key."""

    why: str = ""
    """The reason why they run eagerly."""
    plan: RecordedPlan | None = None
    hits: int = 0
    misses: int = 0
    objects: list[Any] = field(default_factory=list)
    """Arguments that the key knows by their identity, which nothing else may get meanwhile."""

    def missed(self, what: str) -> None:
        """Forget the plan; for good if this happens too often."""
        self.plan = None
        self.misses += 1
        if self.misses >= thresholds.MISSES and self.hits < thresholds.MISSES * self.misses:
            self.why = f"{what} changes from call to call"


@dataclass(eq=False)
class Calls:
    """The calls of a function, by their plans.

    The first call of each key runs as it is, with all checks: nothing but its result is returned, whatever becomes of
    the plan.
    """

    t: Callable[..., Any]
    called: str
    backend: str
    entries: OrderedDict[Hashable, KnownCalls] = field(default_factory=OrderedDict)
    warned: set[str] = field(default_factory=set)
    made: int = 0
    last: KnownCalls | None = None
    lock: Any = field(default_factory=threading.RLock)
    number: int = field(default_factory=count().__next__)
    """By which graphs of torch.compile know them."""

    def __post_init__(self) -> None:
        CALLS[self.number] = self

    def __reduce__(self) -> tuple:
        return Calls, (self.t, self.called, self.backend)  # there are other objects where it is read

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls(deepcopy(self.t, memo), self.called, self.backend)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if aside(args, kwargs):
            return self.t(*args, **kwargs)
        return self.planned(args, kwargs)

    def planned(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call that nobody else sees."""
        call, entry = self.known(args, kwargs)
        if entry.plan is not None:
            try:
                result = entry.plan.run(call.tensors, call.generators)
                entry.hits += 1
                return result
            except Missed as miss:
                entry.missed(str(miss))
            except Exception as error:
                result = self.t(*args, **kwargs)  # whose own error it is, if it has one
                entry.plan, entry.why = None, f"the plan alone fails ({type(error).__name__}: {error})"
                return result
        if entry.why:
            return self.eagerly(entry.why, args, kwargs)
        return self.written(call, entry, args, kwargs)

    def explained(self, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """The description of the plan of such a call, and its operations; generators are as they were afterwards."""
        if aside(args, kwargs):
            return "no plan within transforms and modes", ""
        call, entry = self.known(args, kwargs)
        if entry.plan is None and not entry.why:
            with self.rewound(call):
                self.written(call, entry, args, kwargs)
        if entry.plan is None:
            return f"no plan: {entry.why}", ""
        return entry.plan.told(), entry.plan.module.code.strip()

    def known(self, args: tuple, kwargs: dict[str, Any]) -> tuple[PlannedCall, KnownCalls]:
        """A call, and what is known of those like it."""
        call = call_of(args, kwargs)
        if call.why:
            return call, KnownCalls(call.why)
        entry = self.entries.get(call.key)
        if entry is None or entry is not self.last:
            with self.lock:
                entry = self.last = self.entries.setdefault(call.key, KnownCalls())
                self.entries.move_to_end(call.key)
                while len(self.entries) > thresholds.PLANS:
                    self.entries.popitem(last=False)
        return call, entry

    def say(self, text: str) -> None:
        """Warn once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f"{self.called}: {text}", InvFuncWarning, stacklevel=outside())

    @property
    def said(self) -> Callable[[str], None]:
        """A function that warns as `say` does, as long as they are there: plans have it, and are theirs."""
        own = ref(self)
        return lambda text: None if (calls := own()) is None else calls.say(text)

    def _held(self, kind: type) -> list[Any]:
        """The objects of a kind that f and the loss hold, as far as closures and attributes show them."""
        functions = [f for m in members_of(self.t) for f in (getattr(m, "f", None), getattr(m, "loss", None)) if f]
        return [x for x in (*functions, *(inner for _, _, inner in reached(functions))) if isinstance(x, kind)]

    def generators(self, call: PlannedCall) -> list[torch.Generator]:
        """The generators that a call may draw from."""
        drawn = [m.drawing.generator for m in members_of(self.t) if getattr(m, "drawing", None) is not None]
        return [*torchs_own(), *call.generators, *drawn, *self._held(torch.Generator)]

    @contextmanager
    def rewound(self, call: PlannedCall) -> Iterator[None]:
        """A context behind which the generators are as they were before it."""
        before = [(g, state_of(g)) for g in self.generators(call)]
        try:
            yield
        finally:
            set_states(before)

    def eagerly(self, why: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result without a plan; a warning says why, once."""
        self.say(f"it runs eagerly, as without `compiled`: {why}.")
        return self.t(*args, **kwargs)

    def written(self, call: PlannedCall, entry: KnownCalls, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the call itself, which is written down meanwhile."""
        entry.why = _unfit(call.tensors) or _kept(tree.flatten((args, kwargs))[1])
        if entry.why:
            return self.eagerly(entry.why, args, kwargs)
        entry.objects, generators = call.objects, self.generators(call)
        before = [(g, state_of(g)) for g in generators]
        modules = {m: None for held in self._held(torch.nn.Module) for m in held.modules()}
        own = {id(x): x.detach() for x in call.tensors}  # others than what f may close over
        given, named = tree.map_tensors(lambda x: own[id(x)], (args, kwargs))
        recorder = Recorder((), (), ())

        def recorded() -> Any:
            nonlocal recorder
            set_states(before)
            recorder = Recorder([own[id(x)] for x in call.tensors], call.generators, generators)
            with torch.autograd.set_multithreading_enabled(False), Reads(recorder), recorder:
                return self.t(*given, **named)

        hook = register_module_forward_pre_hook(lambda module, _: modules.setdefault(module))
        try:
            result = straight(recorded)
        except Exception as error:
            set_states(before)
            result = self.t(*args, **kwargs)  # whose own error it is, or else that of being seen
            entry.why = f"it fails where it is written down ({type(error).__name__}: {error})"
            return result
        finally:
            hook.remove()
        tensors, form = tree.separate(result)
        if why := _not_returned(tensors, form) or _kept(form.structure):
            recorder.refuse(why)
        module = recorder.finished(tensors)
        if module is None:
            entry.why = recorder.why
            self.say(f"it runs eagerly, as without `compiled`: {entry.why}.")
            return result
        closed = [(known, signature(x)) for known in recorder.closed if (x := known()) is not None]
        guards = [(x, at) for _, x, at in recorder.guards]
        given = {*map(id, call.generators)}
        drew = [d.g for d in recorder.generators.values() if d.item is not None and id(d.g) not in given]
        inference = any(x.is_inference() for x in tensors)
        plan = RecordedPlan(module, form, recorder.sources, closed, guards, [*modules], drew, recorder.draws, inference)
        if self.backend != "replay":
            plan.run_by(self.backend, self.said)
        entry.plan, self.made = plan, self.made + 1
        if len(self.entries) > thresholds.SHAPES:
            self.say(
                f"it has plans for more than {thresholds.SHAPES} shapes or options, each of which is made by a call "
                "that is slower than without. Give batches of few sizes, as DataLoader(drop_last=True) does, or pad."
            )
        return result


CALLS: WeakValueDictionary[int, Calls] = WeakValueDictionary()
"""All of them by their numbers."""


def members_of(t: Any) -> list[Any]:
    """The statistics or the product in what is done in a call."""
    own = getattr(t, "t", t)
    return [*(getattr(own, "members", ()) or (own,))]


def aside(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether somebody sees what a call does, so that it has to be done."""
    modes = (
        dispatched()
        or torch.is_anomaly_enabled()
        or under(TorchFunctionMode, lambda mode: type(mode).__name__ != "DeviceContext")
    )
    return modes or transforming() or saving_hooks() is not None or dual(*tree.tensors((args, kwargs)))


def _not_returned(tensors: list[torch.Tensor], form: tree.Form) -> str:
    """The reason why a result cannot be made again; empty if it can."""
    if other := next((type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)), None):
        return f"the result has a {other.__name__} in it"
    if any(x.requires_grad for x in tensors):
        return _DIFFERENTIABLE
    odd = [x for i, x in enumerate(form.others) if i not in form.places and not isinstance(x, tuple(_VALUES))]
    return f"the result has an object of type {type(odd[0]).__name__} in it" if odd else ""
