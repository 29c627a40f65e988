"""The shares of samples in a parameter, as products of small factors."""

from invfunc.jacobian.shares.shares import Shares

__all__ = ["Shares"]
