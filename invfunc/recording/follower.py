"""What may accompany a trace: it is told where samples come in and where parameters meet them."""

from __future__ import annotations

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
        """What the run gets in place of an argument."""
        ...

    def before(self, site: int, seen: Seen) -> None:
        """An operation that reads samples is about to run; with parameters, it is at this site."""
        ...

    def used(self, site: int, out: torch.Tensor, recipe: Recipe) -> None:
        """A parameter has met samples."""
        ...
