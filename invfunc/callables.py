"""The functions that transforms are given: what they have to be, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.functional import Functional


def check_callable(name: str, f: Any) -> None:
    """A transform takes a function; a module needs its parameters taken out first."""
    if isinstance(f, nn.Module):
        kind = type(f).__name__
        raise ArgumentTypeError(
            f"{name}(f): f is a module ({kind}), but has to be a function of its parameters: "
            "f, params = functional(model)."
        )
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f): f is the class {f.__name__}, but has to be a function of parameters: "
            f"f, params = functional({f.__name__}(...))."
        )
    if not callable(f):
        raise ArgumentTypeError(f"{name}(f): f is of type {type(f).__name__}, but has to be a function.")


def check_functions(name: str, f: Any, loss: Any = None) -> None:
    """A model function, or a loss function alone, and the loss of a model function."""
    if loss is not None and _is_loss(f):
        raise ArgumentTypeError(
            f"{name}({describe(f)}, {describe(loss)}): f is a loss, but the model comes first: {name}(f, loss)."
        )
    check_callable(name, f)
    if loss is None:
        return
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f, loss): loss is the class {loss.__name__}, but has to be a function: {loss.__name__}()."
        )
    if isinstance(loss, Functional):
        raise ArgumentTypeError(f"{name}(f, loss): loss is a model, {loss!r}. The model comes first, then its loss.")
    if not callable(loss):
        kind = type(loss).__name__
        raise ArgumentTypeError(f"{name}(f, loss): loss is of type {kind}, but has to be a function.")


def _is_loss(f: Any) -> bool:
    """Tells whether f is one of torch's losses, as a module or as a function."""
    if isinstance(f, nn.Module):
        return type(f).__module__ == nn.modules.loss.__name__
    name = getattr(f, "__name__", "")
    ours = getattr(f, "__module__", None) == nn.functional.__name__
    return ours and (name.endswith("_loss") or "cross_entropy" in name)


def describe(f: Any) -> str:
    """A function as its name or as the transform that it is, a module as its class."""
    if isinstance(f, nn.Module):
        return type(f).__name__
    return getattr(f, "__name__", None) or repr(f)


def check_count(call: str, name: str, value: Any, least: int = 1) -> None:
    """A number of something, in a call that begins so."""
    if not isinstance(value, int) or isinstance(value, bool):
        kind = type(value).__name__
        raise ArgumentTypeError(f"{call}{name}={value!r}): {name} is of type {kind}, but has to be an int.")
    if value < least:
        raise ArgumentError(f"{call}{name}={value}): {name} has to be at least {least}.")


def check_choice(call: str, name: str, value: Any, known: Iterable[Any]) -> None:
    """One of some values."""
    if value not in [*known]:
        raise ArgumentError(f"{call}{name}={value!r}): {name} is one of {', '.join(map(repr, known))}.")


def check_generator(call: str, generator: Any, what: str) -> None:
    """A generator, from which something is drawn."""
    if not isinstance(generator, torch.Generator):
        given = "missing" if generator is None else f"of type {type(generator).__name__}"
        raise ArgumentTypeError(
            f"{call}generator=...): generator is {given}, but {what} from an explicit torch.Generator: pass "
            "generator=torch.Generator().manual_seed(0)."
        )


class WithValue:
    """A loss function that returns its value as aux, too: `(loss, loss)`, or `(loss, (loss, aux))`."""

    def __init__(self, f: Callable, has_aux: bool) -> None:
        self.__wrapped__, self.__name__, self.has_aux = f, describe(f), has_aux

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__wrapped__(*args, **kwargs)
        return (found[0] if self.has_aux else found), found


def valued(f: Any, value: bool, has_aux: bool) -> tuple[Any, bool]:
    """A loss function, with its value as aux if that is wanted, and whether it has aux."""
    return (WithValue(f, has_aux), True) if value and callable(f) else (f, has_aux)


def plain(path: str) -> str:
    """The name of a parameter from its key path: `"['0.weight']"` is `"0.weight"`, a deeper one has dots."""
    return ".".join(a or b for a, b in _KEYS.findall(path))


_KEYS = re.compile(r"\['([^']*)'\]|\.?\[?([^\[\].']+)\]?")


def by_name(given: dict[str, Any]) -> Callable[[str], Any]:
    """A function of key paths that gives what a dict has at the path or the plain name of a parameter, or None."""
    return lambda path: given.get(path, given.get(plain(path)))


def grouped(name: str, f: Any, groups: Any) -> Any:
    """A function of key paths that gives the names of groups of parameters, from what a caller has given for it."""
    if isinstance(groups, Mapping):
        return by_name(dict(groups))
    if groups == "layer":
        return lambda path: plain(path).rpartition(".")[0]
    if groups is not None and not callable(groups):
        raise ArgumentTypeError(
            f'{name}({describe(f)}, groups=...): groups is {groups!r}, but has to be "layer", a function from the key '
            "path of a parameter to the name of its group or None, or a dict of these by name."
        )
    return groups
