"""What is known of the result of a call on samples: where they are in it, and how it depends on parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invfunc.operations.batch_axis.orders import Order
from invfunc.recording.seen import Seen

Path = tuple[str | None, frozenset[int], bool, bool]
"""`around, crossed, affine, logarithm` of `Sampled`."""
_OUTPUTS: frozenset[int] = frozenset()
NO_PATH: Path = (None, _OUTPUTS, False, False)
"""Of what depends on no parameter."""


@dataclass(slots=True)
class Result:
    """Where the samples are in what a call gave and in which order, or why that is lost."""

    found: Any
    """A place, or a list of one for each tensor."""
    lost: str | None
    order: Order

    @property
    def first(self) -> Any:
        """Where they are in the first of the tensors."""
        return self.found[0] if isinstance(self.found, list) else self.found


def path(seen: Seen, met: bool) -> Path:
    """Find how the result depends on parameters; `met` says that some meet samples in this call."""
    around, around_outputs, crossed = seen.name if met else None, None, _OUTPUTS
    for tag in seen.sampled:
        if tag.around:
            around = seen.name
        if tag.crossed:
            crossed = crossed | tag.crossed
            around_outputs = around_outputs or tag.around
    if not crossed:
        return (around, *NO_PATH[1:])
    around = around_outputs or around
    return (around, crossed, False, False) if around else (None, crossed, *seen.affine())
