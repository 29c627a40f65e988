"""One run of a model part: what is to be pulled back from, and through what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc.operations.axis import Axis
from invfunc.recording import Trace

WHOLE = slice(None)


@dataclass
class Run:
    """A run of the model part on the samples `part`: parameter uses, and the outputs to pull back from."""

    trace: Trace
    params: list[torch.Tensor]
    part: Any
    """A slice, or the indices of samples."""
    outputs: dict[int, tuple[torch.Tensor, Axis]]
    start: int = 0
    """The place of its first sample in the batch."""
    result: Any = None
    aux: Any = None
