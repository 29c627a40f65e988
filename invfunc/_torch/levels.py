"""Private torch calls for what is computed below one level of torch.func, or where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import (
    _autograd,  # pyright: ignore[reportAttributeAccessIssue]: it has no stubs
    _dynamo,  # pyright: ignore[reportAttributeAccessIssue]: it has no stubs
)
from torch._C import _functorch as _C  # pyright: ignore[reportAttributeAccessIssue]: it has no stubs

from invfunc._torch.functorch import dispatched, dual_level, levels, plainly, saving_hooks, transforming

Gradients = Sequence[torch.Tensor | None]


def each_of_batch(fn: Callable[[Gradients], Gradients], tensors: Gradients) -> Gradients:
    """`fn(tensors)` for each entry of what `torch.autograd.grad(..., is_grads_batched=True)` has batched."""
    level = _level_of_batch(tensors)
    if level is None:
        return fn(tensors)
    legacy: Any = torch
    in_front = [None if t is None else legacy._remove_batch_dim(t, level, 1, 0) for t in tensors]
    size = max(len(t) for t in in_front if t is not None)
    in_front = [t if t is None or len(t) == size else t.expand(size, *t.shape[1:]) for t in in_front]
    there: list[bool] = []

    def one(given: list[torch.Tensor]) -> list[torch.Tensor]:
        entries = iter(given)
        found = fn([None if t is None else next(entries) for t in tensors])
        there[:] = [t is not None for t in found]
        return [t for t in found if t is not None]

    each: Any = torch.vmap(one, randomness="same")
    with plainly():
        found = iter(each([t for t in in_front if t is not None]))
    return [legacy._add_batch_dim(next(found), 0, level) if is_there else None for is_there in there]


def in_front(x: torch.Tensor, size: int) -> torch.Tensor:
    """What `torch.autograd.grad(..., is_grads_batched=True)` has for a batch of this size, which comes first."""
    legacy: Any = torch
    level = _level_of_batch([x])
    return x.expand(size, *x.shape) if level is None else legacy._remove_batch_dim(x, level, size, 0)


def _level_of_batch(tensors: Gradients) -> int | None:
    """The innermost level at which some of them are batched; None if none is."""
    legacy: Any = torch
    x = next((t for t in tensors if t is not None and _C.is_legacy_batchedtensor(t)), None)
    if x is None:
        return None
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level:
        return level

    def has(level: int) -> bool:  # what has no batch there gets one of the given size
        return legacy._remove_batch_dim(x, level, 2, 0).shape[0] == legacy._remove_batch_dim(x, level, 3, 0).shape[0]

    return next(level for level in range(_LEVELS, 0, -1) if has(level))  # autograd's threads of devices know of none


_LEVELS = 64
"""How many vmaps torch allows within each other."""


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often some tensors were written in place, none of which was made in inference mode."""
    return [x._version for x in tensors]


def written_since(x: torch.Tensor, before: int) -> bool:
    """Whether a tensor was written in place since, which was not made in inference mode."""
    return x._version != before


class Forms:
    """The types, shapes, strides, dtypes and devices of some tensors, what kind of tensors they are, what is around us,
    and whether they need gradients: compared by the guards of torch.compile, ten times as fast as one after the other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], alike: Sequence[int]) -> None:
        own = [x for i, x in enumerate(tensors) if alike[i] == i]
        sizes, strides = [[*x.shape] for x in own], [[*x.stride()] for x in own]
        guards = _dynamo.guards.TensorGuards(*own, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._check, self._again = guards.check, [(i, j) for i, j in enumerate(alike) if i != j]
        self.needs = [x.requires_grad for x in tensors]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Forms:
        """Those of some tensors; others that are alike have the same object."""
        places = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        alike = tuple(places[id(x)] for x in tensors)
        kinds = [(type(x), torch._C._dispatch_keys(x).raw_repr(), x.dtype, x.device, x.requires_grad) for x in tensors]
        key = transforming(), alike, *((kind, x.shape, x.stride()) for kind, x in zip(kinds, tensors, strict=True))
        return _FORMS.get(key) or _FORMS.setdefault(key, cls(tensors, alike))

    def fit(self, tensors: Sequence[Any]) -> bool:
        """Whether as many are given, of which each has the form of the one in its place, and is another one where that
        was another one."""
        if len(tensors) != len(self.needs):
            return False
        if self._again:
            if any(tensors[i] is not tensors[j] for i, j in self._again):
                return False
            again = {i for i, _ in self._again}
            tensors = [x for i, x in enumerate(tensors) if i not in again]
        return self._check(*tensors)


_FORMS: WeakValueDictionary[tuple, Forms] = WeakValueDictionary()


def forward_mode() -> bool:
    """Whether a jvp, or what is made of it, is among the transforms of torch.func around us."""
    return any(kind == "jvp" for kind, _ in levels())


def watching() -> bool:
    """Whether a torch function mode is active, or a transform of torch.func."""
    return torch._C._len_torch_function_stack() > 0 or transforming()


def undisturbed() -> bool:
    """Whether nothing is around us that looks at operations or changes what they do, but for transforms of torch.func,
    and gradients are taken."""
    if torch._C._len_torch_function_stack() or dispatched():
        return False
    if torch._C._is_any_autocast_enabled() or dual_level() or saving_hooks() is not None:
        return False
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def without_autocast() -> AbstractContextManager:
    """A context without autocast."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    found = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.amp.is_autocast_available(kind):
            found.enter_context(torch.autocast(kind, enabled=False))
    return found


class graphless:
    """A context in which no graph is made; torch's takes four times as long."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *args: object) -> None:
        torch._C._set_grad_enabled(self._before)


class saving:
    """A context in which a graph is made, whose saved tensors hooks take; torch's two contexts take twice as long."""

    __slots__ = "_before", "_hooks"

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._hooks = pack, unpack

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        _autograd._push_saved_tensors_default_hooks(*self._hooks)

    def __exit__(self, *args: object) -> None:
        _autograd._pop_saved_tensors_default_hooks()
        torch._C._set_grad_enabled(self._before)


def only_level() -> int | None:
    """The level of the only transform of torch.func around us, if that differentiates backwards; 0 without any."""
    stack = _C.get_interpreter_stack() or ()
    if len(stack) == 0:
        return 0
    return stack[0].level() if len(stack) == 1 and stack[0].key() == _C.TransformType.Grad else None


def has_ended(x: torch.Tensor) -> bool:
    """Whether the transform that a tensor belongs to is no more."""
    return _C.is_dead_tensor_wrapper(x)


class LevelFunction(torch.autograd.function._SingleLevelFunction):
    """An autograd.Function at a level of torch.func alone, which unwraps and wraps its tensors by itself."""

    @classmethod
    def at_level(cls, *args: Any) -> Any:
        """Apply it."""
        before = _C.get_single_level_autograd_function_allowed()
        _C.set_single_level_autograd_function_allowed(True)
        try:
            apply: Any = super().apply  # pyright: ignore[reportAttributeAccessIssue]: it is of C
            return apply(*args)
        finally:
            _C.set_single_level_autograd_function_allowed(before)


def gradients(
    outputs: Sequence[torch.Tensor], of_outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Gradients:
    """`torch.autograd.grad` of plain tensors, whose gradients have their shapes, without a look at all of that."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    options = {"allow_unreachable": True, "accumulate_grad": False}
    return engine.run_backward(tuple(outputs), tuple(of_outputs), False, False, tuple(inputs), **options)


def bare_at(x: torch.Tensor, level: int) -> torch.Tensor | None:
    """The tensor that one of a level wraps, or itself, if it is plain and needs no gradient; None of any other."""
    inner = _C._unwrap_for_grad(x, level)
    return None if _C.is_functorch_wrapped_tensor(inner) or inner.requires_grad else inner


def wrapped_at(x: torch.Tensor, level: int) -> torch.Tensor:
    """A plain tensor as one of a level that differentiates backwards."""
    return _C._wrap_for_grad(x, level)
