"""What becomes of objects of this library in the copy of a tree of modules that holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class LeavesNothing:
    """An object that is not changed by what a call leaves on its copy: a block notes there what it has evaluated."""


class Remade(LeavesNothing, ABC):
    """An object that is made anew, and not shared, when a tree of modules that holds it is copied."""

    @abstractmethod
    def remade(self, of: Callable[[Any], Any]) -> Any:
        """The copy: like this object, with `of(part)` in place of each part."""
