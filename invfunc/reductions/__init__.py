"""What a statistic keeps of per-sample gradients, and how it folds over samples, columns and parameters."""

from invfunc.reductions.reduction import Found, Reduction, State, States

__all__ = ["Found", "Reduction", "State", "States"]
