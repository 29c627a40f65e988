"""Nodes of a tree: how one becomes again what it was, and a placeholder for what is no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from invfunc.errors import ArgumentTypeError


@dataclass(frozen=True)
class NodeWay:
    """The way a node becomes again what it was."""

    kind: type
    keys: tuple
    template: Any = field(compare=False, repr=False)

    def rebuilt(self, values: Iterable[Any]) -> Any:
        if not self.keys and not issubclass(self.kind, MutableMapping):
            return self.template
        given = dict(zip(self.keys, values, strict=True))
        if issubclass(self.kind, Mapping):
            return self._mapping(given)
        found = copy(self.template)
        for name, value in given.items():
            object.__setattr__(found, name, value)
        return found

    def _mapping(self, given: dict) -> Any:
        kind, before = self.kind, dict(self.template)
        found: Any = None
        try:
            found = _shallow(self.template) if issubclass(kind, MutableMapping) else kind(*[given])
            if issubclass(kind, MutableMapping):
                for key in [key for key in found if key not in given]:  # which came into the template since
                    del found[key]
                for key in given:
                    found[key] = given[key]
        except TypeError:
            pass
        if any(self.template[key] is not before[key] for key in before):  # the copy was none
            self.template.update(before)
        elif found is not None and all(found[key] is given[key] for key in given):
            return found
        raise ArgumentTypeError(
            f"a mapping of type {kind.__name__} cannot be copied with other values; pass dict(...) of it."
        )


def _shallow(mapping: Any) -> Any:
    """A copy that has containers of its own, if the mapping keeps its values in some."""
    found = copy(mapping)
    for name, part in list(getattr(found, "__dict__", {}).items()):
        if isinstance(part, (dict, list)):
            vars(found)[name] = copy(part)
    return found


NODES: dict[type, tuple[Callable[[Any], tuple[list, tuple]], Callable[[list, tuple], Any]]] = {}
"""How a node is taken apart into its children and the rest of it, and how it is made of them."""
NOTHING = (type(None), None, ())


def built(structure: tuple, leaves: Iterator[Any]) -> Any:
    """The tree of a structure `(kind, keys, parts)`, or None for a leaf."""
    kind, keys, parts = structure
    if any(parts):
        made = [next(leaves) if part is None else built(part, leaves) for part in parts]
    else:
        made = [*islice(leaves, len(parts))]
    if kind is dict:
        return dict(zip(keys, made, strict=True))
    if kind in NODES:
        return NODES[kind][1](made, keys)
    return made if kind is list else tuple(made) if kind is tuple else None


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
