"""Where the samples are in what an operation returns, and in which order."""

from invfunc.operations.batch_axis.propagation import (
    BATCH_SUM,
    BatchSum,
    Call,
    Mixed,
    Place,
    Unknown,
    propagate,
)

__all__ = ["BATCH_SUM", "BatchSum", "Call", "Mixed", "Place", "Unknown", "propagate"]
