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

    unknown = False
    """Whether nothing is known about the operation, so that it may keep the samples apart after all."""


def samples_lost(reason: str, unknown: bool) -> SampleAxisError:
    """The error that names the operation at which the samples are lost."""
    text = f"the samples are not kept apart at {reason}. Keep them apart up to the loss"
    if unknown:
        text += ", or return the [N] losses of the samples from a function that also works on a batch of one"
    error = SampleAxisError(text + ".")
    error.unknown = unknown
    return error


def part_mixed(name: str) -> SampleAxisError:
    """The error that names the operation at which the samples of a part of the batch meet."""
    return SampleAxisError(
        f"the samples of a part of the batch meet at `{name}`, which gives something else than in the whole batch; it "
        "cannot be chunked over samples."
    )


class SplitError(InvFuncError, ValueError):
    """The function cannot be split into a model part and a loss part."""


class ConvexityError(InvFuncError, ValueError):
    """The loss is not convex in the outputs, so that it has no generalised Gauss-Newton matrix."""


class RandomnessError(InvFuncError, RuntimeError):
    """The function draws random numbers where they cannot be replayed."""


class MissingExtraError(InvFuncError, ImportError):
    """A feature needs a package that belongs to an extra."""


class InverseError(InvFuncError, ValueError):
    """What was given as the inverse of a function does not give its input back."""


class ModifiedError(InvFuncError, RuntimeError):
    """A tensor that is needed again was written in place."""


class ClosedOverError(InvFuncError, ValueError):
    """A function reads a tensor that needs a gradient, and is none of its arguments."""


class ReplayError(InvFuncError, RuntimeError):
    """A function that is evaluated again does something else than the first time."""


class RangeError(InvFuncError, ValueError):
    """A number is not on a fixed-point grid, or outside of its range."""


class InvFuncWarning(UserWarning):
    """Base of all warnings of this library."""
