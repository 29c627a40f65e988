"""What is made anew where it is to have copies of what it was made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Remade(ABC):
    """Of which a copy of a tree of modules has one of its own."""

    @abstractmethod
    def remade(self, of: Callable[[Any], Any]) -> Any:
        """The same, made of `of(part)` in place of each part."""
