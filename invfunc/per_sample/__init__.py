"""Per-sample gradients of a parameter, as products of small factors."""

from invfunc.per_sample.gradients import Shares
from invfunc.per_sample.sketches import Projection

__all__ = ["Projection", "Shares"]
