"""What is made anew where it is to have copies of what it was made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Remade(ABC):
    """An object that is made anew, and not shared, when a tree of modules that holds it is copied."""

    @abstractmethod
    def remade(self, of: Callable[[Any], Any]) -> Any:
        """The copy: like this object, with `of(part)` in place of each part."""
