"""The calls of a function: the first one of each key is written down as a plan, and the others repeat it.

A plan is the graph of a call, with what it holds, what has to be as it was, and what runs it.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import fx
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, dual, memories, saving_hooks, transforming, under
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.budget import settings
from invfunc.core.ways import straight
from invfunc.errors import InvFuncWarning
from invfunc.pairs.value import reached
from invfunc.plans.recorder import Missed, Reads, Recorder, caller, same_shape

BACKENDS = ("replay", "inductor", "cudagraphs")
_PLAIN = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...)}
_VALUES = {*_PLAIN, float, complex}


def signature(x: torch.Tensor) -> Hashable:
    """All that operations know of a tensor without its numbers."""
    own = type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad
    return *own, x.is_inference(), x.is_conj(), x.is_neg()


def numbers(read: list[torch.Tensor]) -> list[int]:
    """Numbers that were read, as bytes, in which NaN is equal to itself, and -0 is not 0."""
    parts = [x.contiguous().reshape(-1).view(torch.uint8) for x in read if x.numel()]
    return torch.cat(parts).tolist() if parts else []


@dataclass
class RecordedPlan:
    """The operations of a call, which run again with other numbers."""

    module: fx.GraphModule
    form: tree.Form
    """The form of the result."""
    sources: list[Callable[[], Any]]
    """The sources of its inputs behind the arguments."""
    closed: list[tuple[ref[torch.Tensor], Hashable]]
    """The tensors that it reads beside the arguments, with what was known of them."""
    guards: list[tuple[torch.Tensor, str]]
    """The numbers that were read, and where."""
    modules: list[torch.nn.Module]
    """The modules that run, whose modes are compared."""
    drew: list[torch.Generator]
    """The generators from which it draws, beside those that are given."""
    draws: bool
    inference: bool
    """True if its results are tensors of inference mode."""
    call: Callable[..., Any] = field(init=False)
    """The function that runs the graph."""

    def __post_init__(self) -> None:
        self.call, self.training = direct(self.module), [m.training for m in self.modules]
        self.expected = numbers([x for x, _ in self.guards])

    def run(self, tensors: list[torch.Tensor], generators: list[torch.Generator]) -> Any:
        """The result for other arguments of the same key. An error, as `Missed` if something is not as it was, leaves
        the generators as they were."""
        before = [(g, state_of(g)) for g in (*self.drew, *generators)]
        try:
            given = [*tensors, *generators, *[source() for source in self.sources]]
            for known, own in self.closed:
                if (x := known()) is None or signature(x) != own:
                    raise Missed("a tensor that it closes over")
            if [m.training for m in self.modules] != self.training:
                raise Missed("the mode of a module")
            with computed(self.inference):
                results, read = self.call(*given)
                if read and numbers(read) != self.expected:
                    raise Missed(f"numbers that are read (at {', '.join(dict.fromkeys(at for _, at in self.guards))})")
        except Exception:
            set_states(before)
            raise
        return self.form.join(results)

    @property
    def operations(self) -> int:
        """The number of its operations."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes) - self.sized

    @property
    def sized(self) -> int:
        """The number of shapes in it that depend on numbers."""
        return len(self.module.graph.find_nodes(op="call_function", target=same_shape))

    def told(self) -> str:
        """A description in words."""
        sites = ", ".join(dict.fromkeys(at for _, at in self.guards))
        said = f"a plan of {self.operations} operations"
        said += f" that compares {len(self.guards)} numbers, read at {sites}" if self.guards else ""
        return said + (f"; {self.sized} shapes depend on numbers" if self.sized else "")


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """The function of a graph, which calls operations as C has them: less than what they do in Python, in half the
    time."""
    code = module.graph.python_code("self")
    world = dict(code.globals)

    def known(found: re.Match) -> str:
        name = found[1].replace(".", "_")
        world[name] = attrgetter(found[1])(torch.ops)._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.([\w.]+)\(", known, code.src), world)
    return partial(world["forward"], module)


def computed(inference: bool) -> AbstractContextManager:
    """A context in which operations run as they were written down: below autograd and autocast."""
    casts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not casts and torch.is_inference_mode_enabled() == inference:
        return torch.no_grad()
    stack = ExitStack()
    for mode in (torch.inference_mode(inference), torch.no_grad(), *(torch.autocast(k, enabled=False) for k in casts)):
        stack.enter_context(mode)
    return stack


def by_compiler(module: fx.GraphModule, backend: str, say: Callable[[str], None]) -> Callable[..., Any]:
    """The function of a graph as torch.compile runs it, or where that fails, as it is."""
    call, works = torch.compile(module, fullgraph=True, dynamic=False, backend=backend), False

    def run(*given: Any) -> Any:
        nonlocal call, works
        try:
            found = call(*given)
            works = True
        except Exception as error:
            if works:
                raise
            call = module.forward
            say(f"it runs by `replay`: `{backend}` fails ({str(error).strip().splitlines()[0]}).")
            found = call(*given)
        return tree.map_tensors(torch.clone, found) if backend == "cudagraphs" else found  # which the next overwrites

    return run


# Calls


class PlannedCall(NamedTuple):
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


def _unfit(tensors: list[torch.Tensor], called: str) -> str:
    """The reason why tensors cannot go into a plan or come out of it; empty if they can."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "the result is differentiable; call it on detached parameters, or under torch.no_grad()"
    kind = next((type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)), None)
    return "" if kind is None else f"{called} has a {kind.__name__} in it, not a plain tensor"


def _kept(structure: Any) -> str:
    """The reason why a tree cannot be kept; empty if it can."""
    return "a tree has mappings or dataclasses that torch does not know as nodes" if tree.templates(structure) else ""


def _shared(tensors: list[torch.Tensor]) -> Hashable:
    """The tensors that are the same, or in the same memory, and where there."""
    places = memories(tensors)
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
    lock: Any = field(default_factory=threading.RLock)
    number: int = field(default_factory=count().__next__)
    """By which graphs of torch.compile know them."""

    def __post_init__(self) -> None:
        CALLS[self.number] = self

    def __reduce__(self) -> tuple:
        return Calls, (self.t, self.called, self.backend)  # there are other objects where it is read

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
        with self.lock:
            entry = self.entries.get(call.key) or self.entries.setdefault(call.key, KnownCalls())
            self.entries.move_to_end(call.key)
            while len(self.entries) > thresholds.PLANS:
                self.entries.popitem(last=False)
        return call, entry

    def say(self, text: str) -> None:
        """Warn once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f"{self.called}: {text}", InvFuncWarning, stacklevel=caller()[0])

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
        entry.why = _unfit(call.tensors, "an argument") or _kept(tree.flatten((args, kwargs))[1])
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
        if why := _unfit(tensors, "the result") or _odd(form) or _kept(form.structure):
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
        if self.backend != "replay" and plan.draws:
            self.say(f"it runs by `replay`: random numbers of `{self.backend}` are others than those of torch.")
        elif self.backend != "replay" and plan.sized:
            self.say(f"it runs by `replay`: `{self.backend}` takes no shapes that depend on numbers.")
        elif self.backend != "replay":
            plan.call = by_compiler(module, self.backend, self.say)
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


def _odd(form: tree.Form) -> str:
    """The reason why a result cannot be made again from its tensors; empty if it can."""
    odd = [x for i, x in enumerate(form.others) if i not in form.places and not isinstance(x, tuple(_VALUES))]
    return f"the result has an object of type {type(odd[0]).__name__} in it" if odd else ""
