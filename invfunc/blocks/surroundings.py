"""Surroundings of a call that have to be the same in the next one: what f closes over, modes, buffers, autocast.

By the contract of f, tensors and modules that it closes over are its only inputs beside its arguments and the random
numbers of torch. They are found by structure, once for a block, and narrowed to those whose memory the first call
reads: a lambda over `self` reaches the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.functorch import TorchDispatchMode, storage_of, untraced
from invfunc._torch.generators import Generator, global_generator, same_state, set_states, state_of
from invfunc.errors import ModifiedError
from invfunc.pairs.value import Place, put, reached, read_all
from invfunc.pairs.value import read as there

_MOST = 64
"""The most keys of calls of one block; with more of them, as where a counter is given, all places are kept."""
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Closed:
    """Tensors and modules that functions close over.

    Args:
        functions: the functions.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self.places: list[Place] = []
        """Places of the tensors that a call reads."""
        self.modules = [fn for fn in functions if isinstance(fn, nn.Module)]
        self.generators: list[torch.Generator] = []
        seen = set[tuple[int, Any]]()
        for _, place, inner in reached(functions):
            if type(inner) in _PLAIN and type(place[0]) is not tuple and (at := (id(place[0]), place[1])) not in seen:
                seen.add(at)
                self.places.append(place)
            elif isinstance(inner, nn.Module) and inner not in self.modules:
                self.modules.append(inner)
            elif isinstance(inner, torch.Generator):
                self.generators.append(inner)
        with_buffers = [m for m in self.modules if any(b is not None for b in m._buffers.values())]
        self.norms = [m for m in with_buffers if type(m) in _BATCH_NORMS and m.track_running_stats]
        """Modules whose buffers do not influence what they compute in train mode."""
        self.stateful = [m for m in with_buffers if m not in self.norms]
        """Modules whose buffers may do so."""
        self.scratch: dict[int, tuple[list, dict[str, torch.Tensor | None]]] = {}
        """Buffers for the norms to write to in another evaluation, with what they are like."""
        self.all = self.places
        """Places of the tensors that some call may read."""
        self._learned = set[Any]()
        """Keys of calls that are known to read nothing else."""
        self.quiet = set[Any]()
        """Keys of calls that drew nothing the last time."""
        self._inner = [(m._modules, [*m._modules.values()]) for m in self.modules if m._modules]
        self.nothing = not (self.places or self.modules)
        """True if there is nothing, as for functions whose weights are arguments."""

    def moved(self) -> bool:
        """Tells whether a tensor stands elsewhere, as where a weight was parametrized or a submodule replaced."""
        if self.nothing:
            return False
        replaced = any([[*now.values()] != then for now, then in self._inner])
        return replaced or any([t is None for t in read_all(self.places)])

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in their places."""
        return read_all(self.places)

    def standing(self) -> list[Place]:
        """Places where a tensor still stands."""
        return [place for place in self.all if there(place) is not None]

    def learned(self, key: Any) -> bool:
        """Tells whether it is known what calls with a key read, or no longer looked at."""
        return key in self._learned or not self.all or len(self._learned) > _MOST

    def learn(self, read: set[int], key: Any) -> None:
        """Keep the places of those tensors whose memory was read by a call with a key, and by those before.

        Args:
            read: the memory.
            key: the training flags and the flags among the arguments, by which f chooses what it reads.
        """
        known = {(id(c), k) for c, k in self.places} if self._learned else set()
        self._learned.add(key)
        self.all = self.standing()
        keep = [(id(p[0]), p[1]) in known or storage_of(there(p)) in read for p in self.all]
        self.places = self.all if len(self._learned) > _MOST else [*compress(self.all, keep)]

    def written_by(self, module: nn.Module) -> dict[str, torch.Tensor | None]:
        """Buffers for a norm to write to."""
        now = [*module._buffers.values()]
        found = self.scratch.get(id(module))
        if found is None or not all(map(is_, found[0], now)):
            copies = {k: None if b is None else b.detach().clone() for k, b in module._buffers.items()}
            found = self.scratch[id(module)] = now, copies
        return found[1]


class Reading(TorchDispatchMode):
    """Notes which memory is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first call, which takes seconds

    @untraced
    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for t in tree.tensors((args, kwargs)):
            self.read.add(storage_of(t))
        return func(*args, **(kwargs or {}))


@contextmanager
def swapped(places: Sequence[Place], tensors: Sequence[Any]) -> Iterator[None]:
    """A context with other tensors in some places."""
    before = read_all(places)
    try:
        for place, t in zip(places, tensors, strict=True):
            put(place, t)
        yield
    finally:
        for place, t in zip(places, before, strict=True):
            put(place, t)


States = list[torch.Tensor]
Casts = Sequence[tuple[str, bool, torch.dtype]]
_AS_IT_IS = nullcontext()
_FLAGS = (bool, int, str)
_KINDS = [kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind)]
_IS_CPU, _TRAINING, _GRAPH = attrgetter("is_cpu"), attrgetter("training"), attrgetter("grad_fn")


def generators_of(
    tensors: Sequence[torch.Tensor], steps: Sequence[tuple[Any, tuple, dict]], closed: Iterable[Closed]
) -> list[Generator]:
    """The generators that some blocks may draw from: that of the CPU, those of the devices of tensors, and what is
    given to them or closed over."""
    found: list[Generator] = [torch.default_generator]
    if not all(map(_IS_CPU, tensors)):
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        found += [global_generator(device) for device in devices]
    for each in closed:
        found += each.generators
    for _, args, kwargs in steps:
        if args or kwargs:
            found += [other for other in (*args, *kwargs.values()) if type(other) is torch.Generator]
    return found


def _flags_of(step: tuple[Any, tuple, dict]) -> tuple:
    """The arguments by which a function usually chooses what it does."""
    _, args, kwargs = step
    return tuple([a for a in (*args, *kwargs.values()) if type(a) in _FLAGS]) if args or kwargs else ()


def drew(before: States, after: States) -> bool:
    """Tells whether something was drawn between."""
    return not all(map(same_state, before, after))


class Draws:
    """The generators that blocks may draw from, with their states: the same objects if nothing was drawn between."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators

    def states(self) -> States:
        """Their states."""
        return [*map(state_of, self._generators)]

    def put(self, states: States | None) -> None:
        """Set their states, if any are known."""
        if states:
            set_states(zip(self._generators, states, strict=True))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context behind which they go on as if nothing had been drawn in it."""
        before = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            self.put(before)


def without_graphs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors, with leaves in place of those that were computed: to hold a graph would close a circle."""
    if not any(map(_GRAPH, tensors)) and not any(map(functorch.is_wrapped, tensors)):
        return tensors
    return [t if functorch.recorded(t).grad_fn is None else functorch.leaf_at(t, True) for t in tensors]


class Surroundings:
    """Surroundings of one call, which are put up again where its function is evaluated once more.

    Args:
        closed: what the functions of the block close over.
        first: whether the block was not called yet.
        step: the block with its further arguments.
    """

    training: Sequence[bool] = ()
    """The flags of the modules."""
    places: Sequence[Place] = ()
    tensors: list[torch.Tensor] = []
    versions: Sequence[int] = ()
    norms: Sequence[nn.Module] = ()
    """Batch norms in train mode."""
    buffers: Sequence[tuple[Any, str, torch.Tensor, list[torch.Tensor], int]] = ()
    """Buffers of modules in train mode, with copies of what they held before each evaluation and in the end, and their
    versions before the call: torch.batch_norm writes without counting."""
    learned = True

    def __init__(self, closed: Closed, first: bool, step: tuple[Any, tuple, dict]) -> None:
        self.closed, self.casts = closed, casts_now()
        self.key = _flags_of(step)
        """Flags by which f may choose what it reads."""
        if closed.nothing:
            return
        self.training = [*map(_TRAINING, closed.modules)]
        self.key += (*self.training,)
        self.learned = closed.learned(self.key)
        self.places = closed.places if self.learned else closed.standing()
        self.tensors = without_graphs(read_all(self.places))
        if closed.norms:
            self.norms = [m for m in closed.norms if m.training]
        if closed.stateful or (first and self.norms):
            modules = (m for m in (*closed.stateful, *(self.norms if first else ())) if m.training)
            held = ((m._buffers, k, b) for m in modules for k, b in m._buffers.items() if b is not None)
            self.buffers = [(*of, [], functorch.version(of[2])) for of in held if of[2].layout is torch.strided]
            self.mark()

    def mark(self) -> None:
        """Keep what the buffers hold."""
        with _AS_IT_IS if self.learned else functorch.unseen():  # f itself reads none of these
            for held, key, _, copies, _ in self.buffers:
                copies.append(held[key].detach().clone())

    def called(self) -> None:
        """End of the call: from now on nothing may be written that it has read."""
        if self.closed.nothing:
            return
        if self.places is not self.closed.places:  # it was learned which of them are read
            read = {(id(c), k) for c, k in self.closed.places}
            self.tensors = [*compress(self.tensors, [(id(c), k) in read for c, k in self.places])]
            self.places = self.closed.places
        self.versions = functorch.versions(self.tensors)
        if self.buffers:
            self.mark()
            self.buffers = [
                (held, key, b, copies, then)
                for held, key, b, copies, then in self.buffers
                if held[key] is not b or functorch.version(b) != then or not torch.equal(copies[0], copies[-1])
            ]

    def undo(self) -> None:
        """Take back what the call has written to buffers."""
        for held, key, buffer, copies, _ in self.buffers:
            held[key] = buffer
            with torch.no_grad(), functorch.uncounted(buffer):
                buffer.copy_(copies[0])

    def again(self, at: int = 0, enter: Callable = functorch.leaf_at, restarts: bool = False) -> AbstractContextManager:
        """A context as it was before the evaluation of a number; what is written to buffers in it is dropped.

        Args:
            at: the number.
            enter: gives a tensor that f closes over as a leaf.
            restarts: whether each call of a module begins with the buffers that f began with, as where an inverse
                evaluates a module with spectral norm until it converges.
        """
        return _AS_IT_IS if self._stands() else self._again(at, enter, restarts)

    def _stands(self) -> bool:
        """Tells whether everything is as it was."""
        if self.buffers or self.norms or self.casts or functorch.autocasting():
            return False
        if self.closed.nothing:
            return True
        if [*map(_TRAINING, self.closed.modules)] != self.training or functorch.versions(self.tensors) != self.versions:
            return False
        return all(map(is_, read_all(self.places), self.tensors)) and not any(map(functorch.is_wrapped, self.tensors))

    @contextmanager
    def _again(self, at: int, enter: Callable, restarts: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for module, then in zip(self.closed.modules, self.training, strict=True):
                if module.training != then:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = then
            own = [id(b) for m in self.norms for b in m._buffers.values()]
            self._put_back(stack, {*own, *(id(buffer) for _, _, buffer, _, _ in self.buffers)}, enter)
            for module in self.norms:
                stack.callback(module._buffers.update, dict(module._buffers))
                module._buffers.update(self.closed.written_by(module))
            if self.buffers:
                places = [(held, key) for held, key, *_ in self.buffers]
                stack.enter_context(swapped(places, [copies[at].clone() for _, _, _, copies, _ in self.buffers]))
                if restarts:
                    self._have_restarted(stack)
            with autocast_as(self.casts):
                yield

    def _put_back(self, stack: ExitStack, own: set[int], enter: Callable) -> None:
        """Have what f closes over in its places until the stack is closed; `own` may have been written."""
        for place, t, then, now in zip(
            self.places, self.tensors, self.versions, functorch.versions(self.tensors), strict=True
        ):
            if now != then and id(t) not in own:
                raise ModifiedError(
                    f"a tensor of shape {list(t.shape)} that the function closes over ({place[1]}) has been modified "
                    "by an inplace operation after it was evaluated. Step the optimiser after the backward pass; write "
                    "t = t + z in place of t += z."
                )
        tensors = self.tensors
        if any(map(functorch.is_wrapped, tensors)):
            tensors = [enter(t, functorch.needs_grad(t)) if functorch.ended(t) else t for t in tensors]
        together = zip(self.places, tensors, read_all(self.places), strict=True)
        if others := [(place, t) for place, t, now in together if now is not t]:
            stack.enter_context(swapped(*zip(*others, strict=True)))

    def _have_restarted(self, stack: ExitStack) -> None:
        """Have each call of a module begin with the buffers that f began with, until the stack is closed."""
        for module in self.closed.stateful:
            own = [(key, copies[0]) for held, key, _, copies, _ in self.buffers if held is module._buffers]
            if own:
                stack.callback(module.register_forward_pre_hook(partial(_restart, own), prepend=True).remove)


def _restart(buffers: Sequence[tuple[str, torch.Tensor]], module: nn.Module, args: Any) -> None:
    """Have a module begin with other buffers."""
    module._buffers.update({name: value.clone() for name, value in buffers})


def casts_now() -> Casts:
    """Autocast as it is now, if it is on at all."""
    if not functorch.autocasting():
        return ()
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]


@contextmanager
def autocast_as(casts: Casts) -> Iterator[None]:
    """A context with autocast as it was."""
    with ExitStack() as stack:
        for kind, on, dtype in casts or casts_now():
            if torch.is_autocast_enabled(kind) or (on and casts):
                stack.enter_context(torch.autocast(kind, dtype, enabled=on and bool(casts), cache_enabled=False))
        yield
