"""One run of a model part: what is to be pulled back from, and through what."""

from __future__ import annotations

from collections.abc import Iterable
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
    checked: bool = False
    """Whether it is known that its outputs depend on the parameters by their uses alone."""

    def check(self, outputs: Iterable[torch.Tensor] | None = None) -> None:
        """Check that its outputs depend on the parameters by their uses alone, once; or others in their place."""
        if not self.checked:
            self.trace.check([z for z, _ in self.outputs.values()] if outputs is None else [*outputs], self.params)
            self.checked = True


def exposed(run: Run) -> list[torch.Tensor]:
    """The outputs of a run, sample by sample, but for those of which samples have different numbers of entries."""
    return [axis.expose(z, run.trace.n) for z, axis in run.outputs.values() if axis.rows is None]
