"""How each torch function moves the sample axis."""

from invfunc.jacobian.follow import indexing, layers, matrices, moves
from invfunc.jacobian.follow.call import TOTAL, Call, Mixed, Place, Total, Unknown, find, follow, pointwise

__all__ = [
    "TOTAL",
    "Call",
    "Mixed",
    "Place",
    "Total",
    "Unknown",
    "find",
    "follow",
    "indexing",
    "layers",
    "matrices",
    "moves",
    "pointwise",
]
