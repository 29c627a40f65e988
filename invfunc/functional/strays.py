"""Whether calls of a module at other parameters read its own all the same, by what is not known to lead there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import checkpointing
from invfunc._torch.weak import WeakIdSet
from invfunc.functional.module_copy import STANDARD
from invfunc.operations.calls import read_by
from invfunc.operations.heard import Function, Listener
from invfunc.recording.random import Draws


class StrayError(Exception):
    """A tensor is read that should have been replaced; the error names it."""


class StaleError(Exception):
    """A tensor is read that was computed from parameters by an earlier call; the error says where it is."""


class RecomputedError(Exception):
    """A part of the run is going to be evaluated again when the run is over."""


class Strays(Listener):
    """Stops a run that reads a tensor which was replaced."""

    def __init__(
        self,
        replaced: Mapping[int, str],
        in_place: bool = False,
        given: Iterable[Any] = (),
        kept: Mapping[int, str] | None = None,
    ) -> None:
        """`replaced` has the names of tensors, by their ids; `in_place` says that they come back after the run. `given`
        are the tensors in their places, `kept` has the names of what was computed from such ones by an earlier run."""
        super().__init__()
        self.computed = WeakIdSet(x for x in given if isinstance(x, torch.Tensor))
        """What the run has computed from these, and these."""
        self._kept = kept or {}
        self.recomputing = not in_place or checkpointing()
        self.replaced, self.met, self._draws = replaced, "", Draws(stop=False)

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        func, name = function.func, function.name
        self._draws.before(function, args, kwargs)
        if not self.recomputing and checkpointing():
            raise RecomputedError
        if name != "get:grad":
            read = read_by(name, args, kwargs)
            for x in read:
                if id(x) in self.replaced:
                    self.met = self.replaced[id(x)]
                    raise StrayError(self.met)
                if id(x) in self._kept:
                    raise StaleError(self._kept[id(x)])
            if not function.entry.constant and any(x in self.computed for x in read):
                result = func(*args, **kwargs)
                self.computed.update(tree.tensors(result))
                return result
        return func(*args, **kwargs)

    def run(self, call: Callable[[], Any]) -> Any:
        with self:
            result = call()
        if self.met:  # where the function has caught the error
            raise StrayError(self.met)
        return result

    def rewind(self) -> None:
        """Let the next run draw the random numbers of this one."""
        self._draws.rewind()


def kept(parts: Iterable[nn.Module], computed: WeakIdSet | None) -> dict[int, str]:
    """The names, by their ids, of tensors that attributes of modules keep and that were computed from parameters:
    in a run, or by the modules themselves with a graph."""
    parts, found = list(parts), dict[int, str]()
    own = {id(p) for m in parts for p in m._parameters.values() if p is not None}
    for module in parts:
        for name, value in vars(module).items():
            if name in STANDARD:
                continue
            for x in tree.tensors(value):
                if (computed is not None and x in computed) or _reaches(x, own):
                    found[id(x)] = f"the attribute {name!r} of {type(module).__name__}"
    return found


def _reaches(x: torch.Tensor, leaves: set[int]) -> bool:
    """Whether the graph of a tensor leads to one of these."""
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
