"""What may accompany a trace: it is told where samples come in and where parameters meet them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from invfunc.operations.factors import Recipe
from invfunc.recording.seen import Seen


class Follower(Protocol):
    """Follows entries of tensors through a run."""

    @property
    def labels(self) -> AbstractContextManager[Any]:
        """A context around the run."""
        ...

    def samples(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that the run gets in place of an argument."""
        ...

    def before(self, site: int, seen: Seen) -> None:
        """Called before an operation that reads samples; `site` is its place if it reads parameters, too."""
        ...

    def used(self, site: int, out: torch.Tensor, recipe: Recipe, beside: Sequence[torch.Tensor]) -> None:
        """Called when a parameter has met samples, or, with an entry for each of them, is about to meet what is
        `beside` it."""
        ...
