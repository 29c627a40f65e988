"""Per-sample gradients of a parameter, as products of small factors."""

from invfunc.per_sample.gradients import Shares

__all__ = ["Shares"]
