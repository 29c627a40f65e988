"""What a statistic keeps of the shares, and how it folds over samples, columns and parameters."""

from invfunc.jacobian.measures.measure import Found, Measure, State

__all__ = ["Found", "Measure", "State"]
