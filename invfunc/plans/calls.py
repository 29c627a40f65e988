"""Which calls run by a plan, and which do not."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._alike import written
from invfunc._torch.functorch import dispatched, dual, saving_hooks, transforming, under
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.values import same_values
from invfunc._ways import straight
from invfunc.errors import InvFuncWarning, ReplayError
from invfunc.plans.backends import Backend, Choice
from invfunc.plans.draws import default_generators
from invfunc.plans.finish import plan_of
from invfunc.plans.key import Call, call_of
from invfunc.plans.plan import Plan
from invfunc.plans.reads import Reads
from invfunc.plans.recorder import Missed, Recorder, outside
from invfunc.plans.watch import Watch


@dataclass
class Entry:
    """What is known of the calls of one key."""

    why: str = ""
    """Why they run eagerly."""
    plan: Plan | None = None
    watch: Watch | None = None
    halves: Any = None
    """Its two parts, or why it has none, if that is asked."""
    choice: Choice | None = None
    """Which is faster, if that is asked."""
    hits: int = 0
    misses: int = 0

    def missed(self, what: str) -> None:
        """Forget the plan; for good if this happens too often."""
        self.plan = self.watch = self.halves = None
        self.misses += 1
        if self.misses >= thresholds.MISSES and self.hits < thresholds.MISSES * self.misses:
            self.why = f"{what} changes from call to call"


@dataclass(eq=False)
class Calls:
    """The calls of a function: the first one of each key is written down, and the others repeat it.

    That call itself runs as it is, with all checks: nothing but its result is returned, whatever becomes of the plan.
    """

    t: Callable[..., Any]
    called: str
    backend: str
    recheck: int
    entries: OrderedDict[Hashable, Entry] = field(default_factory=OrderedDict)
    warned: set[str] = field(default_factory=set)
    made: int = 0
    lock: Any = field(default_factory=threading.RLock)
    number: int = field(default_factory=count().__next__)
    """By which graphs of torch.compile know them."""

    def __post_init__(self) -> None:
        CALLS[self.number] = self

    def __reduce__(self) -> tuple:
        return Calls, (self.t, self.called, self.backend, self.recheck)  # there are other objects where it is read

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls(deepcopy(self.t, memo), self.called, self.backend, self.recheck)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if aside(args, kwargs):
            return self.t(*args, **kwargs)
        call, entry = self.known(args, kwargs)
        if entry.why:
            return self.eagerly(entry.why, args, kwargs)
        if entry.plan is not None and entry.watch is not None:
            if entry.choice is not None and not entry.choice.by_plan:
                return entry.choice.timed(lambda: self.t(*args, **kwargs), call.tensors)
            try:
                return self.repeated(entry, entry.plan, entry.watch, call, args, kwargs)
            except Missed as miss:
                entry.missed(str(miss))
            except ReplayError:
                raise
            except Exception as error:
                result = self.t(*args, **kwargs)  # whose own error it is, if it has one
                entry.plan, entry.why = None, f"the plan alone fails ({type(error).__name__}: {error})"
                return result
            if entry.why:
                return self.eagerly(entry.why, args, kwargs)
        return self.written(call, entry, args, kwargs)

    def explained(self, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """What is said of the plan of such a call, and its operations; generators are as they were afterwards."""
        if aside(args, kwargs):
            return "no plan within transforms and modes", ""
        call, entry = self.prepared(args, kwargs)
        if entry.plan is None:
            return f"no plan: {entry.why or 'what it reads has changed meanwhile'}", ""
        if entry.choice is not None and not entry.choice.by_plan:
            return "no plan: calls themselves are faster", ""
        return entry.plan.told(call.tensors), entry.plan.code

    def prepared(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, Entry]:
        """A call that is not aside, and what is known of those like it: a plan, if there can be one. Generators are as
        they were afterwards."""
        call, entry = self.known(args, kwargs)
        what = "" if entry.watch is None else entry.watch.changed()
        if what:
            entry.missed(what)
        if entry.plan is None and not entry.why:
            watch = Watch([self.t, *call.watched])
            with rewound(watch):
                self.written(call, entry, args, kwargs)
        return call, entry

    def known(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, Entry]:
        """A call, and what is known of those like it."""
        call = call_of(args, kwargs)
        if call.why:
            return call, Entry(call.why)
        with self.lock:
            entry = self.entries.setdefault(call.key, Entry())
            self.entries.move_to_end(call.key)
            while len(self.entries) > thresholds.PLANS:
                self.entries.popitem(last=False)
        return call, entry

    def eagerly(self, why: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result without a plan; a warning says why, once."""
        self.without(why)
        return self.t(*args, **kwargs)

    def without(self, why: str) -> None:
        """Warn once that calls are made as without a plan."""
        self.say(f"it runs eagerly, as without `compiled`: {why}.")

    def say(self, text: str) -> None:
        """Warn once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(f"{self.called}: {text}", InvFuncWarning, stacklevel=outside())

    @property
    def said(self) -> Callable[[str], None]:
        """What warns as `say` does, as long as they are there: plans have it, and are theirs."""
        own = ref(self)
        return lambda text: None if (calls := own()) is None else calls.say(text)

    def repeated(self, entry: Entry, plan: Plan, watch: Watch, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result by the plan, which is compared with the call itself every so often."""

        def run() -> Any:
            if what := watch.changed():
                raise Missed(what)
            return plan.run(call.tensors)

        check = self.recheck and (entry.hits + 1) % self.recheck == 0
        before = [(g, state_of(g)) for g in plan.drew] if check else []
        result = run() if entry.choice is None else entry.choice.timed(run, call.tensors)
        entry.hits += 1
        if check:
            set_states(before)
            compare(result, self.t(*args, **kwargs))
        return result

    def written(self, call: Call, entry: Entry, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of the call itself, which is written down meanwhile."""
        watch = Watch([self.t, *call.watched])
        if watch.unseen:
            entry.why = f"it reads what cannot be compared from call to call: {watch.unseen}"
            return self.eagerly(entry.why, args, kwargs)
        before, others = [(g, state_of(g)) for g in _generators(watch)], _other_states()
        recorder = Recorder(call.tensors, watch)

        def recorded() -> Any:
            nonlocal recorder
            set_states(before)
            recorder = Recorder(call.tensors, watch)
            with torch.autograd.set_multithreading_enabled(False), Reads(recorder), recorder, written(recorder.tape):
                return self.t(*args, **kwargs)

        try:
            result = straight(recorded)
        except Exception as error:
            set_states(before)
            result = self.t(*args, **kwargs)  # whose own error it is, or else that of being seen
            entry.why = f"it fails where it is written down ({type(error).__name__}: {error})"
            return result
        if others != _other_states():
            recorder.refuse("it draws from the random numbers of Python or numpy")
        plan = plan_of(recorder, call.tensors, result)
        if plan is None:
            entry.why = recorder.why
            self.without(entry.why)
        elif what := watch.changed():
            entry.missed(what)  # at first that is what is kept for later calls
        else:
            self.keep(entry, plan, watch)
        return result

    def keep(self, entry: Entry, plan: Plan, watch: Watch) -> None:
        """Keep a plan for the next calls."""
        backend = Backend(self.backend)
        if why := backend.refuses(plan):
            self.say(f"it runs by `replay`: {why}.")
        else:
            backend.prepare(plan, self.said)
        entry.watch, entry.choice = watch, Choice() if self.backend == "auto" else None
        entry.plan = plan
        self.made += 1
        if len(self.entries) > thresholds.SHAPES:
            self.say(
                f"it has plans for more than {thresholds.SHAPES} shapes or options, each of which is made by a call "
                "that is slower than without. Give batches of few sizes, as DataLoader(drop_last=True) does, or pad."
            )


CALLS: WeakValueDictionary[int, Calls] = WeakValueDictionary()
"""All of them by their numbers."""


@contextmanager
def rewound(watch: Watch) -> Iterator[None]:
    """The generators that are known are as they were afterwards."""
    before = [(g, state_of(g)) for g in _generators(watch)]
    try:
        yield
    finally:
        set_states(before)


def _generators(watch: Watch) -> list[torch.Generator]:
    held = [g for known in watch.generators.values() if (g := known()) is not None]
    return [*default_generators(), *held]


def aside(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether somebody sees what a call does, so that it has to be done."""
    modes = (
        dispatched()
        or torch.is_anomaly_enabled()
        or under(TorchFunctionMode, lambda mode: type(mode).__name__ != "DeviceContext")
    )
    return modes or transforming() or saving_hooks() is not None or dual(*tree.tensors((args, kwargs)))


def _other_states() -> tuple:
    """The states of random numbers that are not torch's."""
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])


def compare(found: Any, wanted: Any) -> None:
    """Compare a result with what the call itself gives."""
    pairs = zip(tree.named_leaves(found), tree.named_leaves(wanted), strict=True)
    for (path, x), (_, y) in pairs:
        if not (same_values(x, y) if isinstance(x, torch.Tensor) else x == y):
            raise ReplayError(
                f"the plan gives another result{path} than the call itself. f depends on something that is not seen "
                "to change (a file, the time, state in another library): make it an argument, or leave `compiled` away."
            )
