"""What a function reads and writes that is none of its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._functorch import level_of, storage_of, unwrapped, version
from invfunc.errors import ClosedOverError, ModifiedError, ReplayError

_RUNNING = {torch.nn.functional.batch_norm: (1, 2, 5), torch.batch_norm: (3, 4, 5)}
"""Which arguments are running statistics, and which says that they are written: their versions do not tell."""


class Watch(TorchFunctionMode):
    """Sees every call of torch while a function runs, and which tensors come from outside.

    Args:
        given: the tensors that the function is given.
        closed: whether no gradient reaches what is not given, so that reading a tensor that needs one is an error.
        generators: grows by the random number generators that the function draws from.
    """

    def __init__(self, given: Sequence[torch.Tensor], closed: bool, generators: list[torch.Generator]) -> None:
        super().__init__()
        self._given = given
        self._closed = closed
        self._generators = generators
        self._inside = {id(tensor): weakref.ref(tensor) for tensor in given}
        self._versions = [version(tensor) for tensor in given]
        self._outside: dict[int, _Outside] = {}
        self.drawn: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators that were not known, with their states before the first draw."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and not any(generator is known for known in self._generators):
            self.drawn.append((generator, generator.get_state()))
            self._generators.append(generator)
        read = tree.tensors((args, kwargs))
        outer = [t for t in read if not self._is_inside(t)]
        written = _running_statistics(func, args, kwargs)
        if written:
            self._note_written(written)
        if not outer:
            result = func(*args, **kwargs)
            self._enter(result)
            return result
        looks = getattr(func, "__name__", "") == "__get__"
        if self._closed and not looks:
            self._refuse(func, outer)
        before = [version(t) for t in outer]
        result = func(*args, **kwargs)
        if looks and not isinstance(result, torch.Tensor):
            return result
        if self._closed and looks:
            self._refuse(func, outer)
        for t, then in zip(outer, before, strict=True):
            known = self._outside.setdefault(id(t), _Outside(t, t, then))
            if version(t) != then:
                known.written = True
            elif not any(t is w for w in written) and not looks:
                known.read = True
        self._enter(result, outer)
        return result

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        known = self._inside.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        inner = unwrapped(tensor)  # what a transform within the function wraps
        return inner is not None and self._is_inside(inner)

    def _enter(self, result: Any, outer: Iterable[torch.Tensor] = ()) -> None:
        for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            source = next((o for o in outer if o is t or storage_of(o) == storage_of(t)), None)
            if source is None:
                self._inside[id(t)] = weakref.ref(t)
            elif id(t) not in self._outside:  # another name of it
                self._outside[id(t)] = _Outside(t, self._outside[id(source)].root, version(t))

    def _note_written(self, written: Iterable[torch.Tensor]) -> None:
        for t in written:
            if any(t is given for given in self._given):
                raise _writes("a further argument", t)
            self._outside.setdefault(id(t), _Outside(t, t, version(t))).written = True

    def _refuse(self, func: Callable, outer: Iterable[torch.Tensor]) -> None:
        name = getattr(func, "__name__", repr(func))
        for t in outer:
            if t.requires_grad or level_of(t) is not None:
                why = "needs a gradient" if t.requires_grad else "belongs to a transform of torch.func"
                raise ClosedOverError(
                    f"`{name}` reads a tensor of shape {list(t.shape)} that {why} and is no argument. Inside of "
                    "torch.func only arguments get gradients: pass it as one (of a module: functional(model)), or "
                    "detach it."
                )

    def wrote(self) -> bool:
        """Whether anything was written that outlives the function."""
        own = any(version(t) != then for t, then in zip(self._given, self._versions, strict=True))
        return own or any(o.written for o in self._outside.values())

    def written(self, number: int) -> list[torch.Tensor]:
        """The tensors from outside that were written. Those that were read too would not be the same the next time,
        nor would the arguments, of which the first `number` are x."""
        for i, (t, then) in enumerate(zip(self._given, self._versions, strict=True)):
            if version(t) != then:
                raise _writes("x" if i < number else "a further argument", t)
        roots = {id(o.root): o.root for o in self._outside.values() if o.written}
        for o in self._outside.values():
            if o.read and id(o.root) in roots:
                raise ReplayError(
                    f"the function reads and writes a tensor of shape {list(o.root.shape)} that is none of its "
                    "arguments, so that it would do something else when it is evaluated again. Pass it as an "
                    "argument and return its new value."
                )
        return list(roots.values())

    def read(self) -> list[Reading]:
        """The tensors from outside that were read; what is only written may go on changing."""
        return [Reading(o.tensor, o.version) for o in self._outside.values() if o.read]


class _Outside:
    """A tensor from outside, its version when it was first seen, and the tensor of which it is another name."""

    def __init__(self, tensor: torch.Tensor, root: torch.Tensor, then: int) -> None:
        self.tensor, self.root, self.version = tensor, root, then
        self.read = self.written = False


class Reading:
    """A tensor that has to stay as it was; it is not kept alive."""

    def __init__(self, tensor: torch.Tensor, then: int) -> None:
        self._tensor = weakref.ref(tensor)
        self._then = then, storage_of(tensor)

    def check(self) -> None:
        """It was not written since."""
        tensor = self._tensor()
        if tensor is not None and (version(tensor), storage_of(tensor)) != self._then:
            raise ModifiedError(
                f"a tensor of shape {list(tensor.shape)} that the function closes over has been modified by an "
                "inplace operation since, but is needed for the gradient."
            )


def _writes(which: str, tensor: torch.Tensor) -> ReplayError:
    return ReplayError(
        f"the function writes into {which} (a tensor of shape {list(tensor.shape)}) in place, so that it cannot be "
        "evaluated again. Write x = x + z in place of x += z."
    )


def _running_statistics(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if func not in _RUNNING:
        return []
    names = {1: "running_mean", 2: "running_var", 3: "running_mean", 4: "running_var", 5: "training"}
    *places, training = [args[i] if i < len(args) else kwargs.get(names[i]) for i in _RUNNING[func]]
    return [t for t in places if isinstance(t, torch.Tensor)] if training else []


class Shield(TorchFunctionMode):
    """Calls that write tensors from outside write copies of them: state is updated by the first evaluation alone."""

    def __init__(self, written: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._copies = [(t, t.detach().clone()) for t in written]

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def shielded(leaf: torch.Tensor) -> torch.Tensor:
            return next((copy for t, copy in self._copies if t is leaf), leaf)

        args, kwargs = tree.map_tensors(shielded, (args, kwargs or {}))
        return func(*args, **kwargs)
