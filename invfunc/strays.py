"""Whether calls of a module at other parameters read its own all the same, by what is not known to lead there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from invfunc._functorch import checkpointing
from invfunc.operations.calls import QUERIES, function_name, read_by
from invfunc.recording.random import Draws

_QUERIES = QUERIES | {"get:grad"}


class StrayError(Exception):
    """A tensor is read that should have been replaced; the error names it."""


class RecomputedError(Exception):
    """A part of the run is going to be evaluated again when the run is over."""


class Strays(TorchFunctionMode):
    """Stops a run that reads a tensor which was replaced."""

    def __init__(self, replaced: Mapping[int, str], in_place: bool = False) -> None:
        """`replaced` has the names of tensors, by their ids; `in_place` says that they come back after the run."""
        super().__init__()
        self.recomputing = not in_place or checkpointing()
        self.replaced, self.met, self._draws = replaced, "", Draws(stop=False)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        self._draws.before(name, args, kwargs)
        if not self.recomputing and checkpointing():
            raise RecomputedError
        if name not in _QUERIES:
            for x in read_by(name, args, kwargs):
                if id(x) in self.replaced:
                    self.met = self.replaced[id(x)]
                    raise StrayError(self.met)
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
