"""Watching a function run: where its parameters meet the samples, and where the samples are meanwhile."""

from invfunc.jacobian.trace.trace import Trace

__all__ = ["Trace"]
