"""The error family: each error is an `InvFuncError` and also the builtin that people expect."""

from __future__ import annotations


class InvFuncError(Exception):
    """Base of all errors of this library."""

    told = False
    """Whether the message opens with the call that failed."""


class ArgumentError(InvFuncError, ValueError):
    """An argument has a value that the transform cannot use."""


class ArgumentTypeError(InvFuncError, TypeError):
    """An argument is of a kind that the transform cannot use."""


class SampleAxisError(InvFuncError, ValueError):
    """The share of a sample is not defined, or the sample axis cannot be followed: samples are mixed."""


class SplitError(InvFuncError, ValueError):
    """The function cannot be split into a model part and a loss part."""


class ConvexityError(InvFuncError, ValueError):
    """The loss is not convex in the outputs, so that it has no generalised Gauss-Newton matrix."""


class RandomnessError(InvFuncError, RuntimeError):
    """The function draws random numbers where they cannot be replayed."""


class MissingExtraError(InvFuncError, ImportError):
    """A feature needs a package that belongs to an extra."""
