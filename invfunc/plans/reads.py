"""Calls of torch that hand out numbers where no operation is seen: such a number may decide what is done next."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.functorch import unwrapped
from invfunc._torch.opened import opened
from invfunc.plans.recorder import Recorder

_LITERALS = {"tensor", "as_tensor", "asarray", "new_tensor", "new", "__getitem__", "__setitem__"}
"""Those that make tensors of numbers, of indices that are lists among others."""
_PLACES = frozenset({int, slice, type(None), type(...)})
_LEAVE_TORCH = {
    *("numpy", "__array__", "__dlpack__", "to_dlpack", "__repr__", "__str__", "__deepcopy__", "__reduce_ex__"),
    *("storage", "_typed_storage", "tobytes"),
}
_SIZES = {
    "tensor_split": slice(1, None),
    "_pad_packed_sequence": slice(1, 2),
    "ctc_loss": slice(2, None),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), slice(1, 2)),
}
"""Which arguments of an operation are sizes that its kernel reads by itself, where they are tensors."""


class Reads(TorchFunctionMode):
    """Tells a recorder of them: what it can compare is a guard, and there is no plan of what it cannot."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, known = kwargs or {}, _kind(func)
        if known is None:
            return func(*args, **kwargs)
        name, body = known
        if name == "tolist":
            self.recorder.read(_plain(args[0]))
        elif name in _LEAVE_TORCH and self._depends(args):
            self.recorder.refuse(f"`{name}` hands out numbers that are not seen any more")
        elif name in _SIZES and self._depends((args[_SIZES[name]], kwargs)):
            self.recorder.refuse(f"`{name}` reads sizes from a tensor")
        elif name in _LITERALS and not (name == "__getitem__" and _plainly(args[1])):
            return self._literal(func, name, args, kwargs)
        if body is None:
            return func(*args, **kwargs)
        with self:  # of a function in Python all that it calls
            return body(*args, **kwargs)

    def _literal(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A tensor that is made of numbers; they must not be those of tensors, which it reads unseen."""
        of = args
        if name.startswith(("new", "__")):  # methods of a tensor
            of = tuple(x for x in _parts(args[1]) if not name.startswith("__") or isinstance(x, (list, tuple)))
        if self._depends((of, kwargs)):
            self.recorder.refuse(f"`{name}` reads the numbers of a tensor")
        before, self.recorder.literal = self.recorder.literal, not _arrays((of, kwargs))
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.literal = before

    def _depends(self, given: Any) -> bool:
        return any(self.recorder.depends(_plain(x)) for x in tree.tensors((given,)))


@cache
def _kind(func: Callable) -> tuple[str, Callable | None] | None:
    """The name of a function, and the body of one that is in Python; None of one in which nothing is to be seen."""
    name = getattr(func, "__name__", "")
    method = getattr(func, "__module__", "") == "torch._tensor" and name != "backward"
    body = None if method else opened(func)  # a method in Python may call what has the same name in C
    special = name == "tolist" or name in _LEAVE_TORCH or name in _SIZES or name in _LITERALS
    return (name, body) if special or body is not None else None


def _plainly(index: Any) -> bool:
    """Whether no tensor is made of the numbers in an index."""
    return all(type(x) in _PLACES or isinstance(x, torch.Tensor) for x in _parts(index))


def _parts(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _arrays(given: Any) -> bool:
    return any(type(x).__module__ == "numpy" for x in tree.leaves(given))


def _plain(x: torch.Tensor) -> torch.Tensor:
    while (inner := unwrapped(x)) is not None:
        x = inner
    return x
