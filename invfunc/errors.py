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
    """The gradient of a single sample is not defined, or cannot be followed: f mixes the samples."""

    unknown = False
    """Whether nothing is known about the operation, so that it may keep the samples apart after all."""
    reason = ""
    """The operation at which the samples are lost."""


class Unseen(str):
    """A reason for which samples are lost: they went where calls are not seen."""


def samples_lost(reason: str, unknown: bool) -> SampleAxisError:
    """The error that names the operation at which the samples are lost."""
    if isinstance(reason, Unseen):
        return samples_unseen(reason)
    text = f"the samples are not kept apart at {reason}. Keep them apart up to the loss"
    if unknown:
        text += ", or return the [N] losses of the samples from a function that also works on a batch of one"
    else:
        text += "; of a loss that mixes them (a contrastive one) there are the products `hvp(f)` and `ggnvp(f, loss)`"
    error = SampleAxisError(text + ".")
    error.unknown, error.reason = unknown, reason
    return error


def samples_unseen(reason: str) -> SampleAxisError:
    """The error that names the call which reads samples that went where nothing is seen."""
    error = SampleAxisError(
        f"the samples are not kept apart at {reason}. Return the [N] losses of the samples from a function that also "
        "works on a batch of one, or compute that outside of f and pass it as a batch argument; for curvature, give "
        "the model and the loss apart, as in `diag_ggn(f, loss)`."
    )
    error.unknown, error.reason = True, reason
    return error


def to_be_split(error: SampleAxisError) -> SampleAxisError:
    """The error for samples that are lost where the function has to be split into model and loss."""
    return SampleAxisError(
        f"the samples are not kept apart at {error.reason}. Keep them apart up to the loss, or give the model and the "
        "loss apart, as in `diag_ggn(f, loss)`, with a model that also works on a batch of one."
    )


def not_alone(error: SampleAxisError, why: str) -> SampleAxisError:
    """The error for samples that are lost where evaluating them one by one has failed, too (`why`)."""
    if not why:
        return error
    at = f"the samples are not kept apart at {error.reason}" if error.reason else str(error).removesuffix(".")
    return SampleAxisError(f"{at}, and f cannot be evaluated on each of them alone: {why}.")


def part_mixed(name: str) -> SampleAxisError:
    """The error that names the operation at which the samples of a part of the batch meet."""
    return SampleAxisError(
        f"the samples of a part of the batch meet at `{name}`, which gives something else than in the whole batch; it "
        "cannot be chunked over samples. Chunk over outputs or params, or give one function with the loss in it: then "
        "the outputs of a part are compared with those of the whole batch."
    )


def unreached() -> ArgumentError:
    """The error for a result that depends on no parameter at all."""
    return ArgumentError(
        "no parameter of params reaches the result; call f(params, x), not the module (`f, params = "
        "functional(model)`) and not f of other tensors. Or the derivative is lost on the way: by torch.no_grad(), "
        ".detach(), .item() or numpy around f, or by an operation that has none."
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


class InverseError(InvFuncError, ValueError):
    """What was given as the inverse of a function does not give its input back."""


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
    """What the result has there, and what the other path gives."""
    seed = 0
    """By which the entry is drawn again."""


class InvFuncWarning(UserWarning):
    """Base of all warnings of this library."""


class InexactWarning(InvFuncWarning):
    """What an inverse gives back is not what went in, up to an error that rounding alone does not explain."""
