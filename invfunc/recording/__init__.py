"""A run of a function: where its parameters are used, where the samples are meanwhile, where every tensor came from."""

from invfunc.recording.trace import Trace

__all__ = ["Trace"]
