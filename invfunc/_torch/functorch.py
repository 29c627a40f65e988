"""Private torch calls: levels of torch.func, hooks, memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # torch has no public name for it

from invfunc._torch.doors import door, entry, holder, or_told

_C = door("torch._C._functorch")
_core = door("torch._C")
_autograd = door("torch._C._autograd")
_eval_frame = door("torch._C._dynamo.eval_frame")
_pyfunctorch = door("torch._functorch.pyfunctorch")
fake_tensors = door("torch._subclasses.fake_tensor")
_overrides = door("torch.overrides")
_engine = door("torch.autograd.Variable._execution_engine")
_vmap_internals = door("torch._vmap_internals")

_AS_IT_IS = nullcontext()


def transforming() -> bool:
    """Tells whether a torch.func transform (grad, vmap, jvp, ...) is running around us."""
    return _C.peek_interpreter_stack() is not None


def levels() -> list[tuple[str, int]]:
    """The transforms of torch.func around us, outermost first: their kinds ("grad", "vmap", "jvp", ...) and levels."""
    return [(layer.key().name.lower(), layer.level()) for layer in _C.get_interpreter_stack() or ()]


def dual_level() -> bool:
    """Tells whether a level of torch.autograd.forward_ad is around us, as it is within a jvp too."""
    return holder("torch.autograd.forward_ad", "_current_level")._current_level >= 0


def forward_mode() -> bool:
    """Tells whether a jvp, or what is made of it, is among the transforms of torch.func around us."""
    return dual_level() and any(kind == "jvp" for kind, _ in levels())


def level_of(x: torch.Tensor) -> int | None:
    """The level of torch.func at which a tensor is wrapped; None for a plain tensor and after the transform ended."""
    return level if (level := _C.maybe_get_level(x)) > 0 else None


def ended(x: torch.Tensor) -> bool:
    """Tells whether a tensor is of a vmap or of another transform of torch.func that is no more around us."""
    if not _C.is_functorch_wrapped_tensor(x):
        return False
    kinds = {level: kind for kind, level in levels()}
    while _C.is_functorch_wrapped_tensor(x):
        level = _C.maybe_get_level(x)
        if level not in kinds or _C.is_batchedtensor(x) != (kinds[level] == "vmap"):
            return True
        x = _C.get_unwrapped(x)
    return False


def unwrapped(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a wrapper of torch.func holds; None for a plain tensor."""
    return _C.get_unwrapped(x) if _C.is_functorch_wrapped_tensor(x) else None


def alive(x: torch.Tensor) -> torch.Tensor:
    """The tensor without the wrappers of transforms that have ended."""
    while _C.is_functorch_wrapped_tensor(x) and level_of(x) is None:
        x = _C.get_unwrapped(x)
    return x


def plainly() -> AbstractContextManager:
    """Without transforms of torch.func or inference mode around us: what is made here is the same for all of a vmap."""
    around = _core._vmapmode_increment_nesting() > 1 or transforming() or torch.is_inference_mode_enabled()
    _core._vmapmode_decrement_nesting()
    return _without_transforms() if around else _AS_IT_IS


@contextmanager
def _without_transforms() -> Iterator[None]:
    older = _core._vmapmode_increment_nesting() - 1  # the vmap of `torch.autograd.grad(..., is_grads_batched=True)`
    for _ in range(older + 1):
        _core._vmapmode_decrement_nesting()
    graph = torch.is_grad_enabled()  # which the end of inference mode turns on
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(graph), _below(0):
            yield  # and not in torch._C._DisableFuncTorch, within which a jvp that f uses itself is wrong
    finally:
        for _ in range(older):
            _core._vmapmode_increment_nesting()


def mapped(function: Callable, in_dims: Any = 0, randomness: str = "error") -> Callable:
    """`torch.func.vmap` that does not warn of operations without a batching rule, as the caller did not ask for it."""

    def run(*args: Any) -> Any:
        _C._set_vmap_fallback_warning_enabled(False)
        try:
            return torch.func.vmap(function, in_dims, randomness=randomness)(*args)
        finally:
            _C._set_vmap_fallback_warning_enabled(True)

    return run


def innermost(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor below all the wrappers of torch.func, batch dimensions of an outer vmap included."""
    return _plain(x.detach())


def _plain(x: torch.Tensor) -> torch.Tensor:
    while _C.is_functorch_wrapped_tensor(x):
        x = _C.get_unwrapped(x)
    return x


def batch_first(x: torch.Tensor) -> torch.Tensor:
    """x without its wrappers; the batch dimensions of vmaps come in front, that of the innermost last."""
    axes = list(range(x.dim()))
    while _C.is_functorch_wrapped_tensor(x):
        if _C.is_batchedtensor(x):
            axes.insert(_C.maybe_get_bdim(x), min([0, *axes]) - 1)
        x = _C.get_unwrapped(x)
    x = x.detach()
    return x if axes == sorted(axes) else x.permute(sorted(range(x.dim()), key=axes.__getitem__))


def checkpointing() -> bool:
    """Tells whether hooks take the place of saved tensors that know nothing of statistics, as
    torch.utils.checkpoint's.
    """
    hooks = saving_hooks()
    return hooks is not None and not hasattr(getattr(hooks[0], "__self__", None), "given_back")


def saving_hooks() -> tuple[Callable, Callable] | None:
    """The hooks `(pack, unpack)` that take the place of saved tensors now."""
    return _autograd._top_saved_tensors_default_hooks(True)


def given_back(x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The way to get a tensor again that autograd has just saved, if the hooks that took it have one."""
    hooks = saving_hooks()
    find = getattr(getattr(hooks[0], "__self__", None), "given_back", None) if hooks is not None else None
    return None if find is None or unwrapped(x) is not None else find(x)


def function_of(node: Any) -> type | None:
    """The custom autograd.Function that made a node of a graph."""
    return getattr(node, "_forward_cls", None) if isinstance(node, torch.autograd.function.BackwardCFunction) else None


def dual(*tensors: torch.Tensor) -> bool:
    """Tells whether one of some tensors, or of what they wrap, carries a tangent of torch.autograd.forward_ad."""
    waiting = list(tensors) if dual_level() else []
    for x in waiting:  # which grows by what each wraps
        with _below(level_of(x) or 0):
            if not _C.is_batchedtensor(x) and forward_ad.unpack_dual(x).tangent is not None:
                return True
            waiting += [] if (inner := unwrapped(x)) is None else [inner]
    return False


def under(kind: type | tuple[type, ...], holds: Callable[[Any], bool] = lambda mode: True) -> bool:
    """Tells whether a torch function mode of some kind is active, of which something holds."""
    around = _overrides._get_current_function_mode_stack() if _core._len_torch_function_stack() > 0 else ()
    return any(isinstance(mode, kind) and holds(mode) for mode in around)


def homes() -> list[Any]:
    """The places of torch that there are, beside the public ones, whose functions a function mode sees."""
    found = [_core._nn] if hasattr(_core, "_nn") else []
    return [*found, _core._VariableFunctions] if hasattr(_core, "_VariableFunctions") else found


gradient_edge = torch.autograd.graph.get_gradient_edge


def graph_of(x: torch.Tensor) -> Iterator[Any]:
    """The nodes of the graph of a tensor."""
    todo, seen = [x.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            todo += [up for up, _ in node.next_functions]


def backward_pass() -> int:
    """The number of the backward pass of autograd that is running."""
    return _core._current_graph_task_id()


same_generator: Callable[[torch.Generator], int] = attrgetter("_cdata")
"""A number that all objects of one generator have: operations are given another one than the caller's."""

listening: Callable[[], bool] = entry("torch._C", "_is_torch_function_mode_enabled")
"""True if a torch function mode sees the calls that are made."""
unwatched, watched = entry("torch._C", "DisableTorchFunction"), entry("torch._C", "_EnableTorchFunction")
"""Contexts without torch function modes, for what a function does not do itself, and with them again within those."""


def dispatched() -> bool:
    """Tells whether a dispatch mode sees all operations, as those of FakeTensor and of tracing do."""
    return _core._len_torch_dispatch_stack() > 0


def after_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward pass that is running ends."""
    _engine.queue_callback(callback)


@contextmanager
def undispatched() -> Iterator[None]:
    """A context without dispatch modes, but for one that only `watches`."""
    with unseen() as modes, cast(Any, next((m for m in modes if hasattr(m, "watches")), nullcontext())):
        yield


unseen: Callable[[], AbstractContextManager] = entry("torch.utils._python_dispatch", "_disable_current_modes")
"""A context without any dispatch mode."""


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A leaf of the same memory that needs a gradient; of a plain tensor a plain one, whatever is around."""
    with plainly() if level_of(x) is None else nullcontext():
        return _requiring_grad(x.detach())


def _requiring_grad(x: torch.Tensor) -> torch.Tensor:
    allowed = _C.get_inplace_requires_grad_allowed()
    _C.set_inplace_requires_grad_allowed(True)
    try:
        return x.requires_grad_()
    finally:
        _C.set_inplace_requires_grad_allowed(allowed)


@contextmanager
def grad_level() -> Iterator[tuple[Callable, Callable]]:
    """A torch.func level of our own: yields `enter` (a tensor becomes differentiable there) and `leave`."""
    level = _C._grad_increment_nesting()
    try:
        yield lambda x: _requiring_grad(_C._wrap_for_grad(x, level)), lambda x: _C._unwrap_for_grad(x, level)
    finally:
        _C._grad_decrement_nesting()


@contextmanager
def graph_level() -> Iterator[tuple[Callable, Callable]]:
    """A level of torch.func in which `requires_grad_` and torch.autograd.grad work as outside of it."""
    allowed = _C.get_inplace_requires_grad_allowed()
    with grad_level() as enter_and_leave:
        _C.set_inplace_requires_grad_allowed(True)
        try:
            yield enter_and_leave
        finally:
            _C.set_inplace_requires_grad_allowed(allowed)


@contextmanager
def _below(level: int) -> Iterator[None]:
    """Without the transforms above a level."""
    if not (above := levels()) or above[-1][1] <= level:
        yield
        return
    with _pyfunctorch.temporarily_pop_interpreter_stack(), _below(level):
        yield


counted: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Count of writes in place into a tensor that was not made in inference mode."""


def version(x: torch.Tensor) -> int:
    """The number of times that the tensor was written in place."""
    return 0 if x.is_inference() else x._version


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of times that each of some tensors was written in place."""
    try:
        return [*map(counted, tensors)]
    except RuntimeError:  # one of them was made in inference mode
        return [version(x) for x in tensors]


def unseen_versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The same without a function mode that sees it."""
    if not listening():
        return versions(tensors)
    with unwatched():
        return versions(tensors)


def storage_of(x: torch.Tensor) -> int:
    """The memory of a tensor."""
    plain = x.layout is torch.strided and not has_torch_function_unary(x) and not _C.is_functorch_wrapped_tensor(x)
    return (x.untyped_storage() if plain else memory_of(x))._cdata


def memories(leaves: Sequence[Any]) -> list[int | None]:
    """The memory of each of some tensors; None of what is no tensor."""
    plain = _PLAIN.issuperset(map(type, leaves)) and not listening()
    plain = plain and not any(map(_C.is_functorch_wrapped_tensor, leaves))
    if plain and _STRIDED.issuperset(map(_LAYOUT, leaves)):  # without a call of ours for each of them
        return [*map(_CDATA, map(torch.Tensor.untyped_storage, leaves))]
    return [storage_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]


_PLAIN, _STRIDED = {torch.Tensor, torch.nn.Parameter}, {torch.strided}
_LAYOUT, _CDATA = attrgetter("layout"), attrgetter("_cdata")


def memory_of(x: torch.Tensor) -> Any:
    """The memory itself, or that which a function mode puts in its place: an object that keeps it, with `nbytes()`."""
    return handle_torch_function(memory_of, (x,), x) if has_torch_function_unary(x) else storage(_plain(x))


def storage(x: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a plain tensor, of a sparse one that of its values."""
    values = torch.Tensor._values if x.layout is torch.sparse_coo else torch.Tensor.values
    return (x if x.layout in (torch.strided, torch.jagged) else _plain(values(x))).untyped_storage()


def base_of(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which x is a view."""
    return x._base if x._is_view() else None


def untraced(fn: Any) -> Any:
    """A function that torch.compile runs as it is, with what it calls, where it is a hook of what was compiled."""

    def marked() -> Any:
        skip = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
        _eval_frame.set_code_exec_strategy(fn.__code__, skip)
        return fn

    return or_told(marked)


def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> str | None:
    """Let hooks take the place of saved tensors, inside of torch.func too, which refuses them by a message."""
    refused = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if refused is not None:
        _autograd._saved_tensors_hooks_enable()
    _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return refused


def pop_hooks(refused: str | None) -> None:
    """Undo `push_hooks`, which gave the message."""
    _autograd._pop_saved_tensors_default_hooks()
    if refused is not None:
        _autograd._saved_tensors_hooks_disable(refused)


autocasting: Callable[[], bool] = entry("torch._C", "_is_any_autocast_enabled")
"""True if autocast is on for any kind of device."""
uncounted = entry("torch.autograd", "_unsafe_preserve_version_counter")
"""A context in which writing into a tensor does not count as such."""


def gradients_of(
    outputs: Sequence[torch.Tensor],
    of_outputs: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    graph: bool,
    retain: bool = False,
) -> Sequence[torch.Tensor | None]:
    """`torch.autograd.grad` of gradients that have the shapes of the outputs: to look at those, torch imports sympy,
    and takes half of the time of a small backward pass."""
    options = {"allow_unreachable": True, "accumulate_grad": False}
    return _engine.run_backward(tuple(outputs), tuple(of_outputs), retain or graph, graph, tuple(inputs), **options)


def rows_of(
    outputs: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], inputs: Sequence[Any], graph: bool
) -> Sequence[torch.Tensor | None]:
    """The gradients of several vectors `[V, *output]` at each output, `[V, ...]`, by an older vmap than torch.func's,
    which needs less memory: `torch.autograd.grad(is_grads_batched=True)`."""

    def one(*column: torch.Tensor) -> Sequence[torch.Tensor | None]:
        return gradients_of(outputs, column, inputs, graph, retain=True)

    return _vmap_internals._vmap(one, 0, 0, allow_none_pass_through=True)(*columns)


_PASSES: tuple[int, bool] = (-1, False)


def backward_by_torch_func() -> bool:
    """Tells whether the backward pass that is running was begun by a transform of torch.func itself, such as `grad`,
    behind whose end nobody can differentiate at its level."""
    global _PASSES
    number, known = _PASSES
    if number != backward_pass():
        if threading.current_thread().name.startswith("Dummy"):  # autograd's thread of a device
            known = any(map(_in_torch_func, sys._current_frames().values()))
        else:
            known = _in_torch_func(sys._getframe().f_back)
        _PASSES = backward_pass(), known
    return known


def _in_torch_func(frame: Any) -> bool:
    """Tells whether the innermost call of autograd is one of torch.func's."""
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.autograd"):
                frame = frame.f_back
            return frame is not None and frame.f_globals.get("__name__") == "torch._functorch.eager_transforms"
        frame = frame.f_back
    return False


def hooked(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether hooks are registered that see gradients of some tensors."""
    return any([x._backward_hooks for x in tensors])


def leaf_at(x: torch.Tensor, needs: bool) -> torch.Tensor:
    """A tensor without its graph, which is a leaf where a gradient of it is needed."""
    x = x.detach()
    return _within(x, _requiring_grad) if needs else x


class Level:
    """The level of a `grad` of torch.func at which operations are recorded, 0 for plain autograd, and the vmaps of f
    above it."""

    def __init__(self, number: int, around: Sequence[Any] = ()) -> None:
        """Of a number among the transforms around us."""
        self.number, self._mark = number, None
        stack: list[Any] = [_pyfunctorch.coerce_cinterpreter(layer) for layer in around]
        self._above = [(each.batch_size(), each.randomness()) for each in stack if each.level() > number]
        if number:
            with _below(number):
                self._mark = torch.zeros(())  # which is of the level, and ends with it

    @property
    def running(self) -> bool:
        """Tells whether it is one of torch.func that has not ended."""
        return self._mark is not None and not _C.is_dead_tensor_wrapper(self._mark)

    def again(self) -> AbstractContextManager[tuple[Callable, Callable, Callable]]:
        """A context in which operations are recorded as they were at the level, whatever vmap of gradients is around,
        with `enter(x, needs)`, a leaf there, `leave(x)`, the tensor that it is, and `kept(x)`, what autograd is given.

        Where the transform of the level has ended, another takes its place; so does a vmap, of the same number.
        """
        return _PLAINLY if self is PLAIN and plainly() is _AS_IT_IS else self._again()

    @contextmanager
    def _again(self) -> Iterator[tuple[Callable, Callable, Callable]]:
        with ExitStack() as stack:
            if self._mark is None or self.running:
                stack.enter_context(_below(self.number) if self._mark is not None else plainly())
                found = leaf_at, torch.Tensor.detach, as_it_is
            else:
                stack.enter_context(_below(self.number - 1))
                wrap, unwrap = stack.enter_context(grad_level())
                found = _at_new_level(_C.maybe_current_level(), wrap, unwrap)
            for size, randomness in self._above:
                stack.callback(_C._vmap_decrement_nesting)
                _C._vmap_increment_nesting(size, randomness)
            yield found


def _plain_leaf(x: torch.Tensor, needs: bool) -> torch.Tensor:
    return x.detach().requires_grad_() if needs else x.detach()


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


PLAIN = Level(0)
"""Level of plain autograd, without vmaps."""


def level_at(number: int) -> Level:
    """The level of this number, with what is around us now."""
    return Level(number, _C.get_interpreter_stack() or ()) if number or transforming() else PLAIN


_PLAINLY = nullcontext((_plain_leaf, as_it_is, as_it_is))


def _at_new_level(level: int, wrap: Callable, unwrap: Callable) -> tuple[Callable, Callable, Callable]:
    """The functions that `Level.again` yields in a level of our own."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        x = alive(x)
        return unwrap(x) if level_of(x) == level else x

    def leave(x: torch.Tensor) -> torch.Tensor:
        return _within(x, inner, level)

    def enter(x: torch.Tensor, needs: bool) -> torch.Tensor:
        return _within(x, (lambda x: wrap(inner(x))) if needs else inner, level)

    def kept(x: torch.Tensor) -> torch.Tensor:  # autograd takes no bare tensor of a vmap
        return x if level_of(x) == level else _C._wrap_for_grad(x, level)

    return enter, leave, kept


def _within(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], level: int = 0) -> torch.Tensor:
    """A change of the tensor within those vmaps that are innermost, and above a level."""
    if not _C.is_batchedtensor(x) or (own := _C.maybe_get_level(x)) <= level:
        return change(x)
    with _below(own - 1):
        found = _within(_C.get_unwrapped(x), change, level)
    return _C._add_batch_dim(found, _C.maybe_get_bdim(x), own)


def recorded(x: torch.Tensor) -> torch.Tensor:
    """The tensor of which there may be a graph: that of the whole batch, within a vmap."""
    while _C.is_batchedtensor(x):
        x = _C.get_unwrapped(x)
    return x


is_batched: Callable[[torch.Tensor], bool] = entry("torch._C._functorch", "is_batchedtensor")
"""True if a tensor is one for each entry of the innermost vmap."""
is_wrapped: Callable[[torch.Tensor], bool] = entry("torch._C._functorch", "is_functorch_wrapped_tensor")
"""True if a tensor is of a transform of torch.func."""
set_graph: Callable[[bool], None] = entry("torch._C", "_set_grad_enabled")
"""Turn the recording of graphs on or off."""


def needs_grad(x: torch.Tensor) -> bool:
    """Tells whether a tensor needs a gradient, also within a vmap, which does not tell."""
    return x.requires_grad or (_C.is_batchedtensor(x) and recorded(x).requires_grad)


def tracked_below(x: torch.Tensor) -> bool:
    """Tells whether a tensor also has a graph at a level below its own."""
    x = recorded(x)
    while _C.is_functorch_wrapped_tensor(x):
        x = _C.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def batches_of(x: torch.Tensor) -> dict[int, int]:
    """The axes that vmaps around us have in a tensor, by their levels."""
    found = {}
    while _C.is_functorch_wrapped_tensor(x):
        if _C.is_batchedtensor(x):
            found[_C.maybe_get_level(x)] = _C.maybe_get_bdim(x)
        x = _C.get_unwrapped(x)
    return found or _NO_BATCHES


_NO_BATCHES: dict[int, int] = {}


def batched_like(x: torch.Tensor, batches: dict[int, int]) -> torch.Tensor:
    """x with the axes of vmaps where another tensor has them; of one that is for all entries, the first entry."""
    if not _C.is_functorch_wrapped_tensor(x):
        return x
    level, inner = _C.maybe_get_level(x), batched_like(_C.get_unwrapped(x), batches)
    if not _C.is_batchedtensor(x):
        return x if inner is _C.get_unwrapped(x) else _C._wrap_for_grad(inner, level)
    dim, want = _C.maybe_get_bdim(x), batches.get(level)
    with _below(level - 1):
        if want is None:
            return inner.select(dim, 0)
        return _C._add_batch_dim(inner if dim == want else inner.movedim(dim, want), want, level)


def node_of(x: torch.Tensor) -> Any:
    """The node whose gradient is that of x."""
    return gradient_edge(x).node if x.requires_grad else None


def nodes_of(tensors: Iterable[torch.Tensor], stops: Container[Any] = ()) -> list[Any]:
    """The nodes of the graphs of tensors, no further than the stops."""
    waiting = []
    for x in tensors:
        if x.requires_grad:
            waiting.append(gradient_edge(x).node)
    return nodes_below(waiting, stops)


def nodes_below(
    waiting: list[Any], stops: Container[Any] = (), known: Mapping[Any, Sequence[Any]] | None = None
) -> list[Any]:
    """These nodes and all below them; from known nodes it goes on with those stated alone."""
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        seen[node] = None
        if known is not None and node in known:
            waiting += known[node]
        elif node not in stops:
            for parent, _ in node.next_functions:
                waiting.append(parent)
    return [*seen]
