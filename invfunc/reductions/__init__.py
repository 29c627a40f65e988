"""States that statistics keep of per-sample gradients, folded over samples, columns and parameters."""

from invfunc.reductions.reduction import Found, Reduction, State, States

__all__ = ["Found", "Reduction", "State", "States"]
