"""A call written down as a graph of torch.fx, operation by operation, while it runs; facts of these operations."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import TorchDispatchMode, same_generator, storage, unwatched, unwrapped
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.weak import WeakIdMap

_ATEN = torch.ops.aten
Operator = type(_ATEN.add.Tensor)
_DROPOUT = "dropout_p"
_SAME = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)
_ITEM, _EQUAL, _LIFTED = _ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.lift_fresh.default
_LEAVE_TORCH = frozenset(
    {"numpy", "__array__", "__dlpack__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__"}
)
_MADE = {"tensor": 0, "as_tensor": 0, "new_tensor": 1}
"""Places of the arguments that tensors are made of."""
_READ = {
    "tolist": slice(1),
    **{name: slice(at, at + 1) for name, at in _MADE.items()},
    "tensor_split": slice(1, None),
    "_pad_packed_sequence": slice(1, 2),
    "ctc_loss": slice(2, None),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), slice(1, 2)),
}
"""The arguments that a function reads by itself, where they are tensors of numbers: of most of these, sizes."""
_BOOLEAN = (torch.bool, torch.uint8)


class Missed(Exception):
    """A call is not as its plan has it."""


def same_shape(x: torch.Tensor, shape: list[int], at: str) -> None:
    """A guard in a plan, of a shape that depends on numbers; all that follows relies on it."""
    if list(x.shape) != shape:
        raise Missed(f"a shape that depends on numbers (at {at})")


def saved(g: torch.Generator) -> torch.Tensor:
    """The state of a generator, in a plan."""
    return state_of(g)


def put_back(g: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator to a state, in a plan."""
    set_states([(g, state)])


class RecordedGenerator:
    """A generator, as a call that is written down uses it.

    All states are known in which a draw has begun or ended. Where it is in another one than the draw before has left,
    somebody has set it: to one that is known, which the plan then does too, or there is no plan.
    """

    def __init__(self, graph: fx.Graph, g: torch.Generator) -> None:
        self.graph, self.g = graph, g
        self.now = _bytes(g)
        self.item: fx.Node | None = None
        self.states: dict[bytes, fx.Node] = {}

    def arrived(self) -> bool:
        """Have the plan put the generator where it is now; whether that can be."""
        now = _bytes(self.g)
        if now == self.now:
            return True
        if now not in self.states:
            return False
        self.graph.call_function(put_back, (self.item, self.states[now]))
        self.now = now
        return True

    def note(self) -> None:
        """Note the state that it has at this place of the plan."""
        self.now = _bytes(self.g)
        if self.now not in self.states:
            self.states[self.now] = self.graph.call_function(saved, (self.item,))


class Recorder(TorchDispatchMode):
    """Writes down all that is done with tensors. What runs is the call itself; nothing is changed in it.

    As soon as there is something that a graph cannot repeat, `why` says it, and no more is written down. It `watches`
    also where other modes are switched off.
    """

    watches = True

    def __init__(
        self, given: Iterable[torch.Tensor], drawn: Iterable[torch.Generator], others: Iterable[torch.Generator]
    ) -> None:
        """`drawn` are the generators among the arguments, `others` those that are known beside them."""
        super().__init__()
        self.graph, self.why, self.count = fx.Graph(), "", 0
        self.sources: list[Callable[[], Any]] = []
        """The sources of the inputs of the graph behind the arguments."""
        self.closed: list[ref[torch.Tensor]] = []
        """The tensors that it reads beside its arguments."""
        self.guards: list[tuple[fx.Node, torch.Tensor, str]] = []
        """Numbers that were read: as what they are computed, what they were, and where."""
        self.fixed: dict[fx.Node, torch.Tensor] = {}
        """Small results that depend on no input."""
        self.turns = False
        """True if something is made another view of its memory."""
        self.generators = {same_generator(g): RecordedGenerator(self.graph, g) for g in others}
        self._nodes: WeakIdMap[fx.Node] = WeakIdMap()
        self._written: WeakIdMap[bool] = WeakIdMap()
        self._last: fx.Node | None = None
        self._inputs = 0
        for x in given:
            self._nodes.set(x, self._input())
        for g in drawn:
            self.generators[same_generator(g)].item = self._input()

    @property
    def draws(self) -> bool:
        """True if random numbers are drawn."""
        return any(own.states for own in self.generators.values())

    def refuse(self, why: str) -> None:
        """Say why there is no plan of this call."""
        self.why = self.why or f"{why} (at {site()})"

    def read(self, x: torch.Tensor) -> None:
        """Note that numbers of a tensor are read, so that what follows may depend on them."""
        node = self.node(x)
        if self.why or self._is_fixed(x):
            return
        if x.numel() > thresholds.COMPARED_NUMBERS:
            self.refuse(f"it reads {x.numel()} numbers")
        copy = self.graph.call_function(_ATEN.clone.default, (node,))
        self.guards.append((copy, x.detach().clone(), site()))

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node of a tensor in the graph; one that no operation has made is closed over."""
        found = self._nodes.get(x)
        if found is None:
            self.closed.append(ref(x))
            self.sources.append(self.closed[-1])
            found = self._input()
            self._nodes.set(x, found)
        return found

    def constant(self, x: torch.Tensor) -> fx.Node:
        """An input that is always this tensor, of which nobody else knows."""
        self.sources.append(lambda: x)
        return self._input()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.why:
            return func(*args, **kwargs)
        with unwatched():  # of what is looked at here
            return self._done(func, args, kwargs)

    def _done(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Do an operation, and write it down."""
        given = tree.tensors((args, kwargs))
        if why := _refused(func, args, given):
            self.refuse(why)
            return func(*args, **kwargs)
        if func is _ITEM:
            self.read(args[0])
            return func(*args, **kwargs)
        if func is _EQUAL:
            self._compare(*args)
            return func(*args, **kwargs)
        if func is _LIFTED and self._nodes.get(args[0]) is None:  # made of numbers of Python's
            made = self.graph.call_function(_ATEN.clone.default, (self.constant(args[0].detach().clone()),))
            self._nodes.set(args[0], made)
            self.fixed[made] = args[0]
        drawn = self._drawn(args, kwargs, given) if draws(func, args, kwargs) else None
        fixed = drawn is None and all([self._is_fixed(x) for x in given])
        taken = self._taken(args), self._taken(kwargs)
        result = func(*args, **kwargs)
        if writes(func):
            for x in written(func, args, kwargs):
                self._written.set(storage(x), True)
        node, self.count = self.graph.call_function(func, *taken), self.count + 1
        self.turns = self.turns or torch.Tag.inplace_view in func.tags
        for x, at in self._made(result, node):
            self._nodes.set(x, at)
            if not fixed and _sized(func, args):
                self.graph.call_function(same_shape, (at, list(x.shape), site()))
            if fixed and storage(x).nbytes() <= 8 * thresholds.FOLDED:
                self.fixed[at] = x
        if drawn is not None:
            drawn.note()
        if self.count > thresholds.OPERATIONS:
            self.refuse(
                f"it has more than {thresholds.OPERATIONS} operations; ask for fewer chunks, or give parts of the "
                "batch as a loader to streamed(compiled(t)), whose plan is of one part"
            )
        return result

    def _compare(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Note that it is asked whether tensors are equal, unless their shapes say it."""
        if a.shape == b.shape:
            same = self.graph.call_function(_ATEN.eq.Tensor, (self.node(a), self.node(b)))
            self.guards.append((self.graph.call_function(_ATEN.all.default, (same,)), a.eq(b).all(), site()))

    def _is_fixed(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor depends on no input."""
        return self._nodes.get(x) in self.fixed and not self._written.get(storage(x))

    def _input(self) -> fx.Node:
        """A new input, behind those that there are."""
        place = self.graph.inserting_before(None) if self._last is None else self.graph.inserting_after(self._last)
        with place:
            self._last, self._inputs = self.graph.placeholder(f"given_{self._inputs}"), self._inputs + 1
        return self._last

    def _taken(self, x: Any) -> Any:
        """Arguments of an operation as they are written down."""
        kind = type(x)
        if kind is tuple or kind is list:
            return kind([self._taken(y) for y in x])
        if kind is dict:
            return {key: self._taken(y) for key, y in x.items()}
        if isinstance(x, torch.Generator):
            return self._source(x).item
        return self.node(x) if isinstance(x, torch.Tensor) else x

    def _drawn(self, args: tuple, kwargs: dict[str, Any], given: list[torch.Tensor]) -> RecordedGenerator | None:
        """The generator of a draw, where the plan has it."""
        g = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
        if g is None:
            device = torch.device(kwargs.get("device") or (given[0].device if given else "cpu"))
            g = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        own = self._source(g)
        if own.arrived():
            if not own.states:
                own.note()
        else:
            self.refuse("it sets the state of a generator itself, and draws from it")
        return own

    def _source(self, g: torch.Generator) -> RecordedGenerator:
        """A generator, as it is in the plan."""
        own = self.generators.get(same_generator(g))
        if own is None:  # whose state before the call is not known
            self.refuse("it draws from a generator that is not an argument, nor held where that can be seen")
            own = self.generators[same_generator(g)] = RecordedGenerator(self.graph, g)
        if own.item is None:
            self.sources.append(lambda: g)
            own.item = self._input()
        return own

    def _made(self, result: Any, node: fx.Node) -> list[tuple[torch.Tensor, fx.Node]]:
        """The tensors among what an operation returns, each with what it is in the graph."""
        if isinstance(result, torch.Tensor):
            return [(result, node)]
        if not isinstance(result, (list, tuple)):
            return []
        found = [(i, x) for i, x in enumerate(result) if isinstance(x, torch.Tensor)]
        return [(x, self.graph.call_function(operator.getitem, (node, i))) for i, x in found]

    def finished(self, results: list[torch.Tensor]) -> fx.GraphModule | None:
        """The graph from the inputs to the results, and the numbers that were read; None if there is none."""
        nodes = [self.node(x) for x in results]
        if not all([own.arrived() for own in self.generators.values() if own.states]):
            self.refuse("it leaves a generator in a state in which it was not before")
        if any(known() is None for known in self.closed):
            self.refuse("it reads a tensor that no operation of torch has made, as one of an array of numpy")
        if self.why:
            return None
        returned = {id(storage(x)) for x in results}
        for node, x in self.fixed.items():
            memory, used = storage(x), any(user not in self.fixed for user in node.users)
            if used and not self._written.get(memory) and id(memory) not in returned:
                node.replace_all_uses_with(self.constant(x.detach()))
        for node in () if self.turns else self.graph.find_nodes(op="call_function", target=_SAME[0]):
            node.replace_all_uses_with(node.args[0])
        self.graph.output((nodes, [node for node, _, _ in self.guards]))
        self.graph.eliminate_dead_code(acts)
        return fx.GraphModule(torch.nn.Module(), self.graph)


class Reads(TorchFunctionMode):
    """Tells a recorder of calls that hand out numbers where no operation is seen."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READ and not (name in _MADE and all(isinstance(x, torch.Tensor) for x in args[_READ[name]])):
            self._read(args[_READ[name]])
        elif name in _LEAVE_TORCH and args and isinstance(args[0], torch.Tensor):
            self.recorder.refuse(f"`{name}` hands out the numbers of a tensor")
        return func(*args, **(kwargs or {}))

    def _read(self, given: tuple) -> None:
        with unwatched():
            for x in tree.tensors(given):
                self.recorder.read(_plain(x))


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation may draw random numbers."""
    at = _draws_at(func)
    if at is None or at < 0:
        return at is None
    return (args[at] if at < len(args) else kwargs.get(_DROPOUT, 0.0)) != 0


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


@cache
def writes(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes in place, by number and name."""
    found = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    return tree.tensors(tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in writes(func)))


def acts(node: fx.Node) -> bool:
    """Returns whether an operation does something beside giving a result."""
    target: Any = node.target
    if node.op != "call_function" or target in (put_back, same_shape):
        return True
    if not isinstance(target, Operator):
        return False
    return target._schema.is_mutable or not target._schema.returns or draws(target, node.args, node.kwargs)


def _sized(func: Any, args: tuple) -> bool:
    """Returns whether the shape of a result depends on numbers."""
    if func.overloadpacket.__name__ in ("index", "_unsafe_index"):
        return any(x.dtype in _BOOLEAN for x in tree.tensors(args[1:]))
    return torch.Tag.dynamic_output_shape in func.tags or func is _ATEN._pack_padded_sequence.default


def _refused(func: Any, args: tuple, given: list[torch.Tensor]) -> str:
    """The reason why an operation cannot be written down; empty if it can."""
    plain = isinstance(func, Operator) and not any([isinstance(x, torch.UntypedStorage) for x in args])
    if not plain or not all([x.layout is torch.strided for x in given]):
        return f"it calls {func}, which is more than an operation on dense tensors"
    decides = torch.Tag.data_dependent_output in func.tags and func not in (_ITEM, _EQUAL)
    return f"what `{func.overloadpacket.__name__}` reads decides what is done" if decides else ""


def _plain(x: torch.Tensor) -> torch.Tensor:
    while (inner := unwrapped(x)) is not None:
        x = inner
    return x


def _bytes(g: torch.Generator) -> bytes:
    with unwatched():  # these are no numbers of the call
        return state_of(g).numpy().tobytes()


_TORCH, _OURS = torch.__path__[0], str(Path(__file__).parents[1])


def caller() -> tuple[int, str]:
    """The innermost call that is neither of torch nor of this library: how many are within it, and its line of code."""
    frame, count, inner = sys._getframe(1), 1, (_TORCH, _OURS, contextlib.__file__, "<")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame, count = frame.f_back, count + 1
    return count, "/".join(frame.f_code.co_filename.split("/")[-2:]) + f":{frame.f_lineno}"


def site() -> str:
    """The line of code of the caller's that runs."""
    return caller()[1]
