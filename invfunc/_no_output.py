"""A placeholder for what a function returned beside its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from invfunc.errors import ArgumentTypeError


class NoOutput:
    """Stands in the place of what a function returned beside its outputs, and refuses to be used."""

    def __init__(self, path: str, value: Any) -> None:
        self.__dict__["said"] = f"{path} of type {type(value).__name__}"

    def __repr__(self) -> str:
        return f"<no output: {self.__dict__['said']}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        """The error for any use of it."""
        raise ArgumentTypeError(
            f"{self.__dict__['said']}, which f returned, is used; but outputs are floating-point tensors. Let f return "
            "what the loss needs as tensors."
        )

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _first((args, kwargs)).refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = refuse
    __neg__ = __float__ = __int__ = __index__ = refuse
    __hash__ = object.__hash__


def _first(branch: Any) -> Any:
    """The first of them in the arguments of a call."""
    if isinstance(branch, NoOutput):
        return branch
    parts = branch.values() if isinstance(branch, Mapping) else branch if isinstance(branch, list | tuple) else ()
    return next((found for found in map(_first, parts) if found is not None), None)
