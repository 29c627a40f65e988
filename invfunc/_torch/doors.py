"""Private names of torch, looked up on their first use, so that one that is missing harms only what needs it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from invfunc.errors import TorchVersionError

SUPPORTED = "torch>=2.13,<2.16"
"""The versions on which the tests were run."""


@cache
def holder(path: str, name: str) -> Any:
    """The module or class of torch at a path, which has this private name, as of a variable that changes."""
    try:
        found = pkgutil.resolve_name(path)
        getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise TorchVersionError(
            f"torch {torch.__version__} has no {path}.{name}, which this call needs. invfunc was tested with "
            f"{SUPPORTED}: install one of these, or the newest invfunc."
        ) from error
    return found


def or_told(made: Callable[[], Any]) -> Any:
    """A function that is made of private names; where one is missing, a function whose call says so."""
    try:
        return made()
    except TorchVersionError as error:
        missing = error

    def told(*args: Any, **kwargs: Any) -> Any:
        raise missing.with_traceback(None)

    return told


def entry(path: str, name: str) -> Any:
    """A function or context of torch itself, for what is called often; where it is missing, its call says so."""
    return or_told(lambda: getattr(holder(path, name), name))


def door(path: str) -> Any:
    """The private names of a module or class of torch. Each is kept at its first use, and costs nothing from then on;
    a variable that changes has a `holder` instead."""

    def look_up(name: str) -> Any:
        names.__dict__[name] = found = getattr(holder(path, name), name)
        return found

    names = ModuleType(path)
    names.__getattr__ = look_up
    return names
