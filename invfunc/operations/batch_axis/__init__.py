"""How each torch function moves the sample axis."""

from invfunc.operations.batch_axis import indexing, layers, losses, matrices, views
from invfunc.operations.batch_axis.propagation import (
    BATCH_SUM,
    BatchSum,
    Call,
    Mixed,
    Place,
    Unknown,
    find,
    pointwise,
    propagate,
)

__all__ = [
    "BATCH_SUM",
    "BatchSum",
    "Call",
    "Mixed",
    "Place",
    "Unknown",
    "find",
    "indexing",
    "layers",
    "losses",
    "matrices",
    "pointwise",
    "propagate",
    "views",
]
