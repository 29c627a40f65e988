"""Tools for those who test and measure what they build with this library."""

from invfunc.testing.memory import peak_memory, return_freed_memory

__all__ = ["peak_memory", "return_freed_memory"]
