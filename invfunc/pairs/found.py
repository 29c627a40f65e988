"""The pair of a function whose inverse is found in what it does: a recorded run, walked backwards.

The run is recorded call by call, without its numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, leaf_at, plainly, storage_of, undispatched, unwatched, unwrapped
from invfunc._torch.generators import Generator, global_generator, same_state, set_states, state_of
from invfunc._torch.values import differentiable
from invfunc._torch.weak import WeakIdMap
from invfunc.callables import describe
from invfunc.errors import InverseError
from invfunc.operations.operation import Function, Listener
from invfunc.pairs.pair import Invertible
from invfunc.pairs.value import ClosedOver, Place, Value, read


def refuse(why: str) -> NoReturn:
    """Say that no inverse is found."""
    raise InverseError(f"no inverse is found: {why}. Pass f_inv, or None for a plain checkpoint.")


@dataclass(eq=False)
class Ref:
    """A tensor of the run: its form, and the call that gave it (None of one that f was given or closes over)."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: list[Ref]
    """Tensors that lay in the same memory, until it was written."""
    made: OpCall | None = None
    of_x: bool = False
    written: str = ""
    """The call that has written into its memory since."""
    leaf: bool = False
    """True if it is computed of x, and f has made it a leaf that needs a gradient."""


@dataclass(eq=False)
class OpCall:
    """A call of torch."""

    function: Function
    leaves: list[Any]
    """Its arguments, nodes in the place of tensors."""
    structure: Any
    place: str
    """The line of the user's code."""
    autocast: tuple | None
    """Autocast around it."""
    results: dict[Ref, int] = field(default_factory=dict)
    """Its results, with their places among the tensors that it returns."""
    rewritten: dict[Ref, int] = field(default_factory=dict)
    """The arguments that it writes as they are afterwards, with their places."""
    generators: list[Generator] = field(default_factory=list)
    """Generators that it draws from."""

    def __post_init__(self) -> None:
        nodes = list(dict.fromkeys(leaf for leaf in self.leaves if isinstance(leaf, Ref)))
        self.reads = {"none": [], "first": nodes[:1]}.get(self.function.entry.reads, nodes)
        """Operands whose numbers matter, and not only their shape."""

    @property
    def outputs(self) -> list[Ref]:
        return [*self.results, *self.rewritten]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name."""
        args, kwargs = tree.unflatten(self.leaves, self.structure)
        return self.function.argument(args, kwargs, name, default)

    def again(self, get: Callable[[Ref], torch.Tensor]) -> dict[Ref, torch.Tensor]:
        """The outputs for other numbers; what it writes is written into copies."""
        leaves = [get(leaf) if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        for place in self.rewritten.values():
            leaves[place] = leaves[place].clone()
        args, kwargs = tree.unflatten(leaves, self.structure)
        auto = self.autocast
        with nullcontext() if auto is None or auto == autocast_of(auto[0]) else torch.autocast(*auto):
            came = tree.tensors(self.function.func(*args, **kwargs))
        return {node: came[i] for node, i in self.results.items()} | {n: leaves[i] for n, i in self.rewritten.items()}

    def __str__(self) -> str:
        return f"`{self.function.called}` ({self.place})"


class RecordedRun(Listener):
    """A run of a function of x, its further arguments and what it closes over; recorded while it is entered.

    Args:
        xs, rest: the tensors of x, and of the further arguments.
        dry: whether copies are written in place of what f closes over, such as running statistics.
    """

    def __init__(self, xs: Sequence[torch.Tensor], rest: Sequence[torch.Tensor], dry: bool) -> None:
        super().__init__()
        self._of: WeakIdMap[Ref] = WeakIdMap()
        self._dry = dry
        self.calls: list[OpCall] = []
        self.differentiates = False
        """True if f differentiates what depends on x."""
        self.once = False
        """True where it holds for one call only: numbers left torch, or tensors come from unknown places."""
        self.outside: dict[Ref, Any] = {}
        """The tensors that f reads and was not given, while it runs."""
        self.rest, self.xs = [[self._enter(t, of_x=given is xs) for t in given] for given in (rest, xs)]
        devices = {t.device for t in (*xs, *rest)} - {torch.device("cpu"), torch.device("meta")}
        generators = [torch.default_generator, *map(global_generator, devices)]
        self.start: dict[Generator, torch.Tensor] = {g: state_of(g) for g in generators}
        """The generators, with their states before anything was drawn."""

    def node(self, tensor: torch.Tensor) -> Ref:
        """The node of a tensor."""
        node = self._of.get(tensor)
        if node is None:
            inner = tensor
            while (inner := unwrapped(inner)) is not None:
                if inner in self._of:
                    refuse("f gives tensors to a transform of torch.func, which is not followed")
            self.outside[node := self._enter(tensor)] = tensor
        if node.written:
            refuse(f"f reads a tensor whose memory {node.written} has written in place by another view of it")
        return node

    def _enter(self, t: torch.Tensor, made: OpCall | None = None, of_x: bool = False, near: Iterable = ()) -> Ref:
        """Note a tensor, which lies in the memory of one of those that are near, or in its own."""
        with unwatched():  # these are no calls of f
            plain, own = t.layout is torch.strided and not (t.is_conj() or t.is_neg()), storage_of(t)
            same = (n.memory for n, x in near if plain and len(n.stride) == x.dim() and storage_of(x) == own)
            memory = next(same, [])
            stride, offset = (t.stride(), int(innermost(t).storage_offset())) if plain else ((), 0)
        node = Ref(t.shape, stride, offset, t.dtype, t.device, memory, made, of_x)
        memory.append(node)
        self._of.set(t, node)
        return node

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function.entry.asks == "memory" or function.name in ("is_zerotensor", "memory_of"):  # of hooks that save
            return function.func(*args, **kwargs)
        leaves, structure = tree.flatten((args, kwargs))
        held: list[Any] = [self.node(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        kind = next((node.device.type for node in held if isinstance(node, Ref)), "cpu")
        call = OpCall(function, held, structure, _place(), autocast_of(kind))
        of_x = any(node.of_x for node in call.reads)
        self.differentiates |= of_x and function.entry.differentiates
        written = _written(function, args, kwargs, leaves)
        if self._dry:
            copies = {i: leaves[i].clone() for i in written if held[i].made is None}
            args, kwargs = tree.unflatten([copies.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
        tensors = tree.tensors(result := self._drawing(call, leaves, args, kwargs))
        if not (tensors or written or function.entry.reads == "none" or function.name.startswith("get:")):
            if of_x:
                refuse(f"{call} reads numbers of x, on which what f does may depend")
            self.once |= any(isinstance(node, Ref) for node in held)
        self._note(call, of_x, leaves, written, tensors)
        return result

    def _drawing(self, call: OpCall, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call; the generators that it draws from are noted."""
        self.start |= {g: state_of(g) for g in leaves if isinstance(g, torch.Generator) and g not in self.start}
        before = {g: state_of(g) for g in self.start}
        result = call.function.func(*args, **kwargs)
        call.generators = [g for g, state in before.items() if not same_state(state, state_of(g))]
        return result

    def _note(self, call: OpCall, of_x: bool, leaves: list[Any], written: Iterable[int], tensors: Any) -> None:
        """Note what a call writes and gives, and which of its arguments f has made leaves that need a gradient."""
        near = [(node, leaf) for node, leaf in zip(call.leaves, leaves, strict=True) if isinstance(node, Ref)]
        for node, leaf in near if of_x else ():
            node.leaf |= node.of_x and leaf.requires_grad and leaf.is_leaf
        for i in written:
            before: Any = call.leaves[i]
            for other in before.memory:
                other.written = str(call)
            call.rewritten[self._enter(leaves[i], call, of_x or before.of_x)] = i
        call.results |= {self._enter(t, call, of_x, near): i for i, t in enumerate(tensors) if t not in self._of}
        if call.outputs:
            self.calls.append(call)

    def end(self, ys: Sequence[torch.Tensor], closure: ClosedOver) -> None:
        """Note the tensors of the result, and from where those come that f was not given."""
        self.ys = [self.node(t) for t in ys]
        places = {n: [p for p in closure.tensors.get(id(t), ()) if read(p) is t] for n, t in self.outside.items()}
        self.once |= not all(places.values())
        self._places: dict[Ref, list[Place]] = {} if self.once else places

    def now(self) -> dict[Ref, torch.Tensor] | None:
        """The tensors that f closes over by now; None where the run has to be recorded anew."""
        values = {node: [*map(read, places)] for node, places in self._places.items()}
        if self.once or any(t is not some[0] or t is None for some in values.values() for t in some):
            return None
        return {node: some[0] for node, some in values.items()}


def _written(function: Function, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> list[int]:
    """The places of the arguments that a call writes."""
    tensors = [*function.written(args, kwargs), *(args[:1] if function.writes(args, kwargs) else ())]
    return list(dict.fromkeys(next(i for i, leaf in enumerate(leaves) if leaf is t) for t in tensors))


def autocast_of(kind: str) -> tuple[str, torch.dtype, bool] | None:
    """The autocast of a kind of device."""
    if not torch.amp.is_autocast_available(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _place() -> str:
    """The line of the user's code that makes a call."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "invfunc"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_MOST = 128
"""Twice the number of kinds of calls that are remembered."""
_Like = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...]]
"""Shape, dtype, device and strides of a tensor."""
_X = tuple[tree.Form, Sequence[_Like]]
"""An x without its numbers."""


class _Memory:
    """Inverses by the kinds of calls; a copy, whose function may close over other things, is empty."""

    def __init__(self) -> None:
        self.closure: ClosedOver | None = None
        self.inverses: dict[Any, Any] = {}
        """Also forms of x, by those of y."""

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
        x = self.memory.inverses.get(self._key((form, [t[:3] for t in like]), args, kwargs), (form, like))
        return self.solve(x, {}, y, *args, **kwargs)

    def solve(self, x: _X, kept: Mapping[int, torch.Tensor], y: Any, *args: Any, **kwargs: Any) -> Any:
        """x of y, of this form; some of its tensors are kept."""
        (form, like), ys, rest = x, tree.tensors(y), tree.tensors((args, kwargs))
        inverse = self.memory.inverses.get(self._key(x, args, kwargs))
        outside = None if inverse is None else inverse.recording.now()
        if inverse is None or outside is None:
            ones = (ys[0].new_empty_strided(t[0], t[3], dtype=t[1], device=t[2]).fill_(1) for t in like)
            _, inverse, outside = self._record(form.join(ones), x, args, kwargs, dry=True)
        if inverse.kept != tuple(kept):
            inverse = Inverse(inverse.recording, tuple(kept), inverse.names)
        nodes = inverse.recording
        if [node.shape for node in nodes.ys] != [t.shape for t in ys]:
            raise InverseError("f gives y in another form than it had when f was recorded.")
        given = dict(zip((*nodes.ys, *nodes.rest), (*ys, *rest), strict=True)) | outside
        near = next((t for t in ys if unwrapped(t) is not None), ys[0])
        return form.join(inverse(given | {nodes.xs[i]: t for i, t in kept.items()}, near))

    def _record(self, x: Any, like: _X, args: tuple, kwargs: dict[str, Any], dry: bool) -> tuple[Any, Inverse, dict]:
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
        memory.inverses[self._key(like, args, kwargs)] = inverse
        memory.inverses[self._key((form, [_like(t)[:3] for t in ys]), args, kwargs)] = like
        outside, recording.outside = recording.outside, dict.fromkeys(recording.outside)
        return y, inverse, outside

    def _key(self, like: tuple[tree.Form, Sequence[tuple]], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The kind of a call: everything that the calls of f may depend on beside the numbers of tensors."""
        (form, tensors), (rest, rest_form) = like, tree.separate((args, kwargs))
        held = () if self.memory.closure is None else self.memory.closure.others()
        first, others = dict[int, int](), (*form.others, *rest_form.others)
        constants = [(type(x), x if isinstance(x, Hashable) else id(x)) for x in others]
        structures = form.structure, rest_form.structure
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
        texts = dict.fromkeys(found.text for found in self.found.memory.inverses.values() if isinstance(found, Inverse))
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


# The inverse

Get = Callable[[Any], Any]
"""From a node to its numbers, and from any other argument to itself."""


@dataclass(eq=False)
class InverseStep:
    """One tensor, computed from others: as a result of a call, or as an operand of it, or as a whole from its parts."""

    node: Ref
    reads: Sequence[Ref]
    call: OpCall
    undo: Callable[[Get], torch.Tensor] | None = None
    """None where the call is made again."""
    text: str = ""
    """The undoing as a formula of {y} and {0}; empty of a whole."""


class Inverse:
    """The steps from y to x of a recording.

    Args:
        recording: of f.
        kept: the tensors of x that are known.
        names: of tensors of x and y in a formula or an error.
    """

    def __init__(self, recording: RecordedRun, kept: tuple[int, ...], names: Mapping[Ref, str]) -> None:
        self.recording, self.kept, self.names = recording, kept, names
        given = *recording.ys, *(recording.xs[i] for i in kept), *recording.rest, *recording.outside
        known: dict[Ref, InverseStep | None] = dict.fromkeys(given)  # in an order in which they can be computed
        number = -1
        while number < (number := len(known)):
            for call in (*recording.calls, *recording.calls[::-1]):
                known |= {step.node: step for step in _steps(call, known) if step.node not in known}
        if missing := [node for node in recording.xs if node not in known]:
            refuse(_why(recording.calls, missing, known, names))
        self._needed, steps = {*recording.xs}, list[InverseStep]()
        for node, step in reversed(known.items()):
            if node in self._needed and step is not None:
                self._needed.update(step.reads)
                steps.insert(0, step)
        drawing = [call for call in recording.calls if call.generators]
        self._steps, self._drawing = steps, drawing if len(drawing) > 1 else []
        self._last = {node: i for i, step in enumerate(steps) for node in step.reads if node not in recording.xs}
        self.text = _formulas(steps, names)

    def __call__(self, given: Mapping[Ref, torch.Tensor], near: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of x; `near` is one of y, beside which others are made."""
        differentiates, numbers = self.recording.differentiates, dict[Ref, torch.Tensor]()
        for node, t in given.items():
            leaf = differentiates and not t.requires_grad
            numbers[node] = _laid(leaf_at(t, differentiable(t)) if leaf else t, node)

        def blank(node: Ref) -> torch.Tensor:
            return near.new_empty_strided(node.shape, node.stride, dtype=node.dtype, device=node.device).fill_(1)

        def get(node: Any) -> Any:
            return (numbers[node] if node in numbers else blank(node)) if isinstance(node, Ref) else node

        states = {}
        for call in self._drawing:  # which draw in the order of f, whatever is computed first
            states[call] = [(g, state_of(g)) for g in call.generators]
            with torch.no_grad():
                call.again(blank)
        after = [(g, state_of(g)) for call in self._drawing for g in call.generators]
        with torch.enable_grad() if differentiates else nullcontext():
            for i, step in enumerate(self._steps):
                if step.undo is not None:
                    numbers[step.node] = _laid(step.undo(get).to(step.node.dtype), step.node)
                elif step.node not in numbers:
                    set_states(states.get(step.call, ()))
                    came = step.call.again(get)
                    numbers |= {n: leaf_at(t, True) if n.leaf else t for n, t in came.items() if n in self._needed}
                for node in step.reads:
                    if self._last.get(node) == i:
                        numbers.pop(node, None)
        set_states(after)
        return [numbers[node] for node in self.recording.xs]


def _laid(t: torch.Tensor, node: Ref) -> torch.Tensor:
    """The tensor with its axes in the order in memory that they had, in which dropout draws."""
    if len(node.stride) < len(node.shape) or t.stride() == node.stride:  # the former of a sparse one
        return t
    order = sorted(range(t.dim()), key=lambda axis: -node.stride[axis])
    return t.permute(order).contiguous().permute(sorted(range(t.dim()), key=order.__getitem__))


# Steps

_SAME = set("clone contiguous to float double half bfloat16 type_as detach positive alias".split())
_SAME |= set("reshape flatten view unflatten ravel view_as reshape_as".split())
_UNDO: dict[tuple[str, bool], tuple[Callable[..., torch.Tensor], str]] = {
    ("add", True): (lambda y, b, alpha: torch.sub(y, b, alpha=alpha), "{y} - {0}"),
    ("add", False): (lambda y, a, _: y - a, "{y} - {0}"),
    ("sub", True): (lambda y, b, alpha: torch.add(y, b, alpha=alpha), "{y} + {0}"),
    ("sub", False): (lambda y, a, _: a - y, "{0} - {y}"),
    ("rsub", False): (lambda y, a, alpha: torch.add(y, a, alpha=alpha), "{y} + {0}"),
    ("rsub", True): (lambda y, b, _: b - y, "{0} - {y}"),
    ("mul", True): (lambda y, b, _: y / b, "{y} / {0}"),
    ("mul", False): (lambda y, a, _: y / a, "{y} / {0}"),
    ("div", True): (lambda y, b, _: y * b, "{y} * {0}"),
    ("neg", True): (lambda y, *_: -y, "-{y}"),
}
"""The first or the second operand from the result, the other operand and alpha; and as a formula."""
_CALLED = {"truediv": "div", "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub"}
_POSITIVE = {"exp", "exp2", "sigmoid", "softplus", "cosh"}
_KEEP_SIGN = set("chunk split tensor_split getitem unbind narrow select squeeze unsqueeze expand expand_as".split())
_KEEP_SIGN |= _SAME | {"transpose", "permute", "neg", "reciprocal", "sqrt", "rsqrt"}


def _steps(call: OpCall, known: Mapping[Ref, Any]) -> list[InverseStep]:
    """The steps that a call gives where some of its operands and outputs are known."""
    unknown = [node for node in call.reads if node not in known]
    if not unknown:
        return [InverseStep(node, call.reads, call) for node in call.outputs]
    if any(out.memory is unknown[0].memory for out in call.outputs):
        return _whole(call, unknown[0], [node for node in unknown[0].memory if node in known])
    if not all(node in known for node in call.outputs):
        return []
    if call.function.name in ("cat", "concat", "concatenate", "stack"):
        return [_split(call, node) for node in unknown if node.dtype == call.outputs[0].dtype]
    return _undone(call, unknown[0]) if len(unknown) == 1 else []


def _split(call: OpCall, node: Ref) -> InverseStep:
    """A tensor that was joined to others."""
    out, dim, parts = call.outputs[0], call.argument("dim", 0), [x for x in call.leaves if isinstance(x, Ref)]
    sizes = [1 if call.function.name == "stack" else sum(part.shape) and part.shape[dim] for part in parts]
    i, shape = parts.index(node), node.shape  # one of shape [0] may stand among others, and has no other axes
    return InverseStep(node, [out], call, lambda get: get(out).split(sizes, dim)[i].view(shape), f"{{y}}.part[{i}]")


def _undone(call: OpCall, node: Ref) -> list[InverseStep]:
    """An operand from the result of a call and its other operands."""
    (y, *others), name = call.outputs, _called(call)
    floats = y.dtype.is_floating_point and node.dtype.is_floating_point
    all_digits = y.dtype == node.dtype or (floats and torch.promote_types(y.dtype, node.dtype) == y.dtype)
    if others or call.leaves.count(node) != 1 or not all_digits or y.shape.numel() != node.shape.numel():
        return []
    if name in _SAME or (name.endswith("dropout") and not call.generators):
        return [InverseStep(node, [y], call, lambda get: get(y).reshape(node.shape), "{y}")]
    if name == "flip":
        dims = [i for i in call.leaves if isinstance(i, int)]
        return [InverseStep(node, [y], call, lambda get: get(y).flip(dims), "{y}")]
    return _subtracted(call, node, y) if y.shape == node.shape else []


def _subtracted(call: OpCall, node: Ref, y: Ref) -> list[InverseStep]:
    """An operand of a sum or a product."""
    name, first, alpha = _called(call), call.argument("input") is node, call.argument("alpha", 1)
    other, scaled = call.argument("other" if first else "input"), (name == "rsub") == first
    undo, text = _UNDO.get((name, first), (None, ""))
    if undo is None or (scaled and alpha != 1) or call.argument("rounding_mode") is not None:
        return []
    whole = not (node.dtype.is_floating_point or node.dtype.is_complex)
    if name in ("mul", "div") and (whole or not _nonzero(other)):
        return []
    reads = [y, *(n for n in call.reads if n is not node)]
    return [InverseStep(node, reads, call, lambda get: undo(get(y), get(other), alpha), text)]


def _called(call: OpCall) -> str:
    return _CALLED.get(call.function.name, call.function.name)


def _nonzero(value: Any, positive: bool = False) -> bool:
    """True where all numbers of a factor are known to differ from 0, or to be positive, but for underflow."""
    if not isinstance(value, Ref):
        return isinstance(value, (int, float)) and (value > 0 if positive else value != 0)
    call = value.made
    if call is None or call.rewritten or not value.dtype.is_floating_point:
        return False
    name = _called(call)
    operands = [call.argument("input", call.leaves[0]), call.argument("other")]
    if name == "add":  # of positive numbers, or a 0 such as `sum` begins with
        return call.argument("alpha", 1) == 1 and all(x == 0 or _nonzero(x, True) for x in operands)
    if name in ("mul", "div"):
        return call.argument("rounding_mode") is None and all(_nonzero(x, positive) for x in operands)
    keeps = name in _KEEP_SIGN and not (positive and name == "neg")
    return name in _POSITIVE or (keeps and _nonzero(call.leaves[0], positive))


def _whole(call: OpCall, base: Ref, candidates: Sequence[Ref]) -> list[InverseStep]:
    """A tensor from some of its views, each entry from one; none if they lack any."""
    views, span = list[Ref](), _span(base)
    if sum(view.shape.numel() for view in candidates) < base.shape.numel() or 0 in base.stride:
        return []
    if not span:
        return [InverseStep(base, [], call, lambda get: get(base))]  # which has no numbers
    with unwatched(), undispatched(), plainly():  # these are no calls of f
        seen = torch.zeros(span, dtype=torch.bool, device="cpu")
        for view in sorted(candidates, key=lambda n: -n.shape.numel()):
            at = view.offset - base.offset
            if view.dtype == base.dtype and 0 <= at <= at + _span(view) <= span and 0 not in view.stride:
                entries = seen.as_strided(view.shape, view.stride, at)
                if not entries.any():
                    views.append(view)
                    entries.fill_(True)
        whole = int(seen.sum()) == base.shape.numel() and seen.as_strided(base.shape, base.stride).all()
    if not whole:
        return []
    views.sort(key=lambda view: view.offset)
    text = "{y}" if len(views) == 1 else ""
    return [InverseStep(base, views, call, lambda get: _joined(base, views, [get(view) for view in views]), text)]


def _joined(base: Ref, views: Sequence[Ref], numbers: list[torch.Tensor]) -> torch.Tensor:
    """The numbers of a tensor from those of its views."""
    if all(view.stride == base.stride for view in views):
        dims = {i for view in views for i, n in enumerate(view.shape) if n != base.shape[i]}
        if len(dims) <= 1:
            return torch.cat(numbers, *dims) if dims else numbers[0]
    index = torch.arange(base.shape.numel(), device=base.device).view(base.shape)
    laid = index.new_empty(_span(base))
    laid.as_strided(base.shape, base.stride).copy_(index)
    order = torch.cat([laid.as_strided(v.shape, v.stride, v.offset - base.offset).flatten() for v in views])
    flat = torch.cat([t.flatten() for t in numbers])
    return flat.scatter(0, order, flat).view(base.shape)


def _span(node: Ref) -> int:
    """The number of entries of memory that a tensor reaches over."""
    sizes = zip(node.shape, node.stride, strict=True)
    return 1 + sum((n - 1) * step for n, step in sizes) if node.shape.numel() else 0


# Words


def _why(calls: list[OpCall], missing: list[Ref], known: Mapping[Ref, Any], names: Mapping[Ref, str]) -> str:
    """The call whose result y tells, though not all that it reads."""
    name = " and ".join(names.get(node, "x") for node in missing)
    unknown = {call: [node for node in call.reads if node not in known] for call in calls}
    told = [call for call in calls if unknown[call] and all(out in known for out in call.outputs)]
    blocked = [call for call in told if all(out.memory is not unknown[call][0].memory for out in call.outputs)]
    if not blocked:
        return f"y does not depend on {name}, or not on all of it"
    call = min(blocked, key=lambda call: len(unknown[call]))
    return (
        f"y does not tell {name}, as {call} cannot be undone. A part of x may change by x2 + G(y1), or by x2 * "
        "exp(s(y1)), where G and s read the other parts, and parts that have changed by their new values; a scale may "
        "never be 0"
    )


def _formulas(steps: Sequence[InverseStep], names: Mapping[Ref, str]) -> str:
    """The steps as text: `x[1] = y[1] - F1(y[0]), x[0] = y[0] - F2(x[1])`."""
    parts = dict(names)
    for step in reversed(steps):
        if step.undo is not None and not step.text:  # a whole, by whose name its parts are called
            whole = parts.setdefault(step.node, "z")
            parts = {view: f"{whole}.part[{i}]" for i, view in enumerate(step.reads)} | parts
    terms, reads = dict(names), {node: {name} for node, name in names.items()}
    lines, functions = list[str](), count(1)

    def term(node: Ref) -> str:
        if node not in terms:
            named = ", ".join(sorted(reads.get(node, ())))
            terms[node] = f"F{next(functions)}({named})" if named else "c"
        return terms[node]

    for step in steps:
        reads[step.node] = set[str]().union(*(reads.get(node, ()) for node in step.reads))
        if step.text:
            y, *others = map(term, step.reads)
            terms[step.node] = step.text.format(", ".join(others) or "c", y=f"({y})" if " " in y else y)
            if step.node in parts and (" " in step.text or step.text[0] == "-"):  # it is computed, and not only moved
                lines.append(f"{parts[step.node]} = {terms[step.node]}")
                terms[step.node] = parts[step.node]
            if " " not in terms[step.node]:
                reads[step.node] = {terms[step.node]}
    return ", ".join(lines) or "x is in y"
