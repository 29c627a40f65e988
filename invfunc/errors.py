"""The error family: each error is an `InvFuncError` and also the builtin that people expect."""

from __future__ import annotations


class InvFuncError(Exception):
    """Base of all errors of this library."""

    told = False
    """True if the message opens with the call that failed."""


class ArgumentError(InvFuncError, ValueError):
    """An argument has a value that the transform cannot use."""


class ArgumentTypeError(InvFuncError, TypeError):
    """An argument is of a kind that the transform cannot use."""


class SampleAxisError(InvFuncError, ValueError):
    """The gradient of a single sample is not defined, or cannot be followed: f mixes the samples."""

    unknown = False
    """True if nothing is known about the operation, so that it may keep the samples apart after all."""
    reason = ""
    """The operation at which the samples are lost."""


def written() -> ArgumentError:
    """The error where outputs are not what the loss has read."""
    return ArgumentError("the loss writes in place into the outputs that it reads. Let it write into a copy of them.")


def unreached() -> ArgumentError:
    """The error for a result that depends on no parameter at all."""
    return ArgumentError(
        "no parameter of params reaches the result. Call f(params, x) of `f, params = functional(model)`, not the "
        "module. If that is called, the derivative is lost on the way: by torch.no_grad(), .detach(), .item() or numpy."
    )


class SplitError(InvFuncError, ValueError):
    """The function cannot be split into a model part and a loss part."""


class ConvexityError(InvFuncError, ValueError):
    """The loss is not convex in the outputs, so that it has no generalised Gauss-Newton matrix."""


class RandomnessError(InvFuncError, RuntimeError):
    """The function draws random numbers where they cannot be replayed."""


class BudgetError(InvFuncError, MemoryError):
    """A call takes more memory than it may."""

    least = 0
    """The bytes of which it is known that they are enough."""


class MissingExtraError(InvFuncError, ImportError):
    """A feature needs a package that belongs to an extra."""


class TorchVersionError(InvFuncError, AttributeError):
    """A feature needs a part of torch that the installed version does not have."""


class InverseError(InvFuncError, ValueError):
    """The inverse of a function does not give its input back."""


class ModifiedError(InvFuncError, RuntimeError):
    """A tensor that is needed again was written in place."""


class ReplayError(InvFuncError, RuntimeError):
    """A function that is evaluated again does something else than the first time."""


class RangeError(InvFuncError, ValueError):
    """A number is not on a fixed-point grid, or outside of its range."""


class ProcessError(InvFuncError, RuntimeError):
    """Another process, without which there is no result, has failed."""


class CertificateError(InvFuncError, RuntimeError):
    """A result is not what another path to it gives."""

    path = ""
    """The entry that was looked at."""
    found = expected = float("nan")
    """Entries of the result there, and those of the other path."""
    seed = 0
    """By which the entry is drawn again."""


class InvFuncWarning(UserWarning):
    """Base of all warnings of this library."""


class InexactWarning(InvFuncWarning):
    """An inverse gives back its input with an error that rounding alone does not explain."""
