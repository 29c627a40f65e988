"""What is told of a block: parts that are compiled, and an x that does not come back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc._torch.functorch import levels
from invfunc.errors import ArgumentError, InexactWarning, InverseError, InvFuncError, InvFuncWarning, ReplayError
from invfunc.recomputation.attributes import Attributes
from invfunc.recomputation.later import later
from invfunc.recomputation.left import LeftByAll
from invfunc.recomputation.rounding import ROUNDED, Error, near, precision
from invfunc.recomputation.straight import Straight
from invfunc.transform import told


@dataclass
class Known:
    """What is known of a block from its calls."""

    needs_a_node: bool = False
    """Whether f turned out to use torch.func itself, beside which saved tensors have no hooks."""
    closes_over: bool = False
    """Whether f turned out to close over tensors that need a gradient inside of torch.func."""
    as_it_is: bool = False
    """Whether f is taken as it is, as it turned out to give what it closes over to transforms of torch.func."""
    calls: int = 0
    """How often it was called; the first time compiled parts are told of."""
    left: LeftByAll = field(default_factory=LeftByAll)
    """What its calls have left behind."""
    straight: Straight = field(default_factory=Straight)
    """Which calls need not be watched."""
    attributes: Attributes = field(default_factory=Attributes)
    """What f holds and changes."""
    left_told: bool = False
    """Whether it has been told that it leaves tensors behind that have no gradient."""
    inexact: bool = False
    """Whether it has been told that x does not come back."""


@dataclass(frozen=True)
class Evidence:
    """What is found out about an x that did not come back, by evaluating once more."""

    finite: bool = True
    """Whether there was a number everywhere in y."""
    apart: float = 0.0
    """How far what the inverse gives another time is from what it gave."""
    forth: float = 0.0
    """The error of `f(f_inv(y))` against y."""


def way(check: bool | float | str) -> str:
    """What happens where x does not come back."""
    return check if isinstance(check, str) else "off" if check is False else "error"


@dataclass(frozen=True)
class Report:
    """How a block tells of what does not come back.

    Args:
        block: what `repr` names.
        check: "warn", "error" or "off".
        tolerance: the error up to which all is well, where the user has said it.
        known: what its calls share.
    """

    block: Any = None
    check: str = "off"
    tolerance: float | None = None
    known: Known = field(default_factory=lambda: Known(calls=1))

    def compiled(self) -> None:
        """Tell of a compiled part, which runs without its compiler."""
        self.known.calls = 1
        warnings.warn(
            f"{self.block!r}: a function that torch.compile made is evaluated as it was written, as it is a part of an "
            "invertible block: what is computed again in the backward pass has to be the same, operation by "
            "operation. Leave it uncompiled to be without this warning; to have compiled code, compile the function "
            "that calls the blocks, which then keeps all activations.",
            InvFuncWarning,
            stacklevel=2,
        )

    def as_it_is(self, tensor: torch.Tensor) -> None:
        """Tell of a tensor that no block can make an argument of its own: from now on f is taken as it is."""
        self.known.as_it_is = True
        warnings.warn(
            f"{self.block!r}: the function closes over a tensor of shape {list(tensor.shape)} that needs a gradient, "
            "and gives it to a transform of torch.func (grad, vmap) as an argument. The block is right, but saves no "
            "memory. To save it, pass the tensor to the block as an argument.",
            InvFuncWarning,
            stacklevel=2,
        )

    def left(self, tensor: torch.Tensor) -> None:
        """Tell of a tensor that has no gradient outside of the block."""
        if not self.known.left_told:
            self.known.left_told = True
            warnings.warn(
                f"{self.block!r}: the function leaves a tensor of shape {list(tensor.shape)} behind that it has "
                "computed from its arguments, in an attribute or a list. Inside of torch.func it is a constant there, "
                "as only what the block returns has a gradient: return it with y, or detach it.",
                InvFuncWarning,
                stacklevel=2,
            )

    def compared(
        self,
        which: Callable[[], str],
        error: Error,
        before: Error,
        dtypes: Sequence[torch.dtype],
        more: Callable[[], Iterable[torch.dtype]],
        evidence: Callable[[], Evidence | None],
    ) -> Callable[[], None] | None:
        """What is to be told of a comparison, where anything is.

        Args:
            which: the name of the tensor of x.
            error: its error.
            before: the error of the y that it was computed from.
            dtypes: those of x.
            more: those that the function computes in.
            evidence: finds more out.
        """
        if isinstance(error, torch.Tensor):
            known = (*dtypes, *more())
            later(error, before, lambda e, b: self._judge(which, e, b, known, None)())
        elif not error <= self.tolerated(dtypes):
            return self._judge(which, error, float(before), (*dtypes, *more()), evidence)
        return None

    def hidden(self, error: Error, dtypes: Sequence[torch.dtype]) -> Callable[[], None] | None:
        """What is to be told of small entries of x that did not come back beside large ones that did, if anything."""

        def judge(error: float, _: float = 0.0) -> None:
            if error > self.tolerated(dtypes) and not self.known.inexact:
                self.tell(InverseError, f"{text.format(error)} {HELPS}", self.check == "warn")

        text = (
            "the inverse gives the small entries of x back with an error of {:.1e} of their size, beside large ones. "
            "Scale the large ones, or hand them over as a further argument."
        )
        if isinstance(error, torch.Tensor):
            later(error, 0.0, judge)
        elif error > self.tolerated(dtypes):
            return lambda: judge(error)
        return None

    def kink(self, call: str) -> None:
        """Tell of zeros that have come back with a rounding, at a kink of the function."""
        if not self.known.inexact:
            text = (
                f"many entries are exactly 0 at the kink of `{call}` and come back with a rounding error, on either "
                "side of it, so that the gradient is another one than without the block. Let x have no zeros (of a "
                "relu, dropout or padding before it), or take a coupling with exact=True, or keep=True."
            )
            self.tell(InverseError, text, self.check == "warn")

    def tolerated(self, dtypes: Iterable[torch.dtype]) -> float:
        """The error that is taken for rounding."""
        return precision(dtypes) ** 0.5 if self.tolerance is None else self.tolerance

    def _judge(
        self,
        which: Callable[[], str],
        error: float,
        before: float,
        dtypes: Iterable[torch.dtype],
        evidence: Callable[[], Evidence | None] | None,
    ) -> Callable[[], None]:
        most = self.tolerated(dtypes)
        if error <= most or (self.known.inexact and self.is_small(error, most)):
            return _nothing
        found = None if evidence is None else evidence()
        if found is not None and not found.finite and error == math.inf:  # nor is the gradient without the block
            return _nothing
        text = f"the inverse gives {which()} back with an error of {error:.1e}, where up to {most:.1e} is rounding. "
        kind: type[InvFuncError] = InverseError
        if found is not None and found.apart:
            kind = ReplayError
            text += f"It gives something else each time. {CHANGES}"
        elif found is not None and not found.forth <= max(most, error / _GROWTH):
            text += (
                f"f(f_inv(y)) differs from y by {found.forth:.1e}: it is not an inverse of f, or f reads something "
                "that has been changed since (`check_inverse` compares them)."
            )
        elif before * _GROWTH >= error:
            text += (
                f"Its y had an error of {before:.1e} already: rounding errors drift, and grow from block to block "
                f"(`drift` tells how fast). {HELPS}"
            )
        elif found is None:
            text += f"f has no inverse, or another one (`check_inverse` tells), or what f reads has changed. {HELPS}"
        else:
            text += (
                "f takes this x to the same y: f has no inverse there, the rounding of y alone moves x so far "
                f"(`check_inverse` tells the condition), or something that f reads has been changed since, "
                f"such as the mode of a module. {HELPS}"
            )
        changes = found is not None and not found.apart <= most  # then the gradient may be anything
        return lambda: self.tell(kind, text, self.is_small(error, most) and not changes)

    def saved(
        self,
        errors: dict[Any, float],
        exact: bool,
        dtypes: Iterable[torch.dtype],
        moved: Callable[[], dict[Any, float] | None],
    ) -> None:
        """Tell of tensors that autograd saves that are others than the first time.

        Args:
            errors: how far they are from those.
            exact: whether x is exact.
            dtypes: those that the function computes in.
            moved: how far they move where x is rounded in other ways; None if they are others at the same x.
        """
        most, moves = self.tolerated(dtypes), moved()
        apart = {key: e for key, e in errors.items() if moves is None or not near(e, moves[key])}
        if not apart:  # they are nothing but rounding, also without the block
            return
        error = max(apart.values())
        text = (
            f"evaluated again, the function computes other numbers: a tensor that autograd saves has an error of "
            f"{error:.1e}. "
        )
        farthest = 1.0 if exact else max(1.0, most / (ROUNDED * precision(dtypes) or 1.0))
        grows = moves is not None and all(near(e, farthest * moves[key]) for key, e in apart.items())
        text += f"It makes the rounding errors of x large. {HELPS}" if grows else CHANGES
        self.tell(ReplayError, text, grows and self.check == "warn" or exact and self.is_small(error, most))

    def result(self, error: float, dtypes: Sequence[torch.dtype]) -> None:
        """Tell of a y that is another one than the first time, at the same x."""
        most = self.tolerated(dtypes)
        if not error <= most:
            text = f"evaluated again at the same x, the function gives y with an error of {error:.1e}. {CHANGES}"
            self.tell(ReplayError, text, self.is_small(error, most))

    def is_small(self, error: float, most: float) -> bool:
        """Whether an error is only warned of."""
        return self.check == "warn" and error <= max(4 * most, _FEW)

    def tell(self, kind: type[InvFuncError], text: str, small: bool) -> None:
        """A warning, or an error."""
        where = f"{self.block!r}, in the backward pass"
        if not small:
            raise told(kind(text), where)
        self.known.inexact = True
        warnings.warn(f"{where}: {text}", InexactWarning, stacklevel=2)


def _nothing() -> None:
    """The callback where there is nothing to tell."""


def unbatched(error: BaseException) -> ArgumentError | None:
    """What is told in place of an error of torch's where a recurrent layer is under a vmap; None for any other."""
    layer, trace = None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == torch.nn.modules.rnn.__name__:
            layer = type(frame.f_locals.get("self")).__name__ if frame.f_code.co_name == "forward" else None
        trace = trace.tb_next
    if layer is None or "vmap" not in {kind for kind, _ in levels()}:
        return None
    return ArgumentError(
        f"{layer}: torch.func.vmap cannot batch torch's recurrent layers and cells, in a block or not. Give them the "
        "whole batch (`batch_grad` has the gradient of each sample without vmap), or write the steps of the "
        "recurrence as linear operations."
    )


CHANGES = (
    "It reads something that changes: random numbers of Python or numpy, a counter, the mode of a module (train, "
    "eval), what is chosen around the forward pass alone (sdpa_kernel, a default dtype), a parameter that it writes "
    "(clamp_, an initialisation by data), whether a tensor has a gradient or a tangent (requires_grad, forward_ad). "
    "Draw with torch, whose numbers are replayed (preserve_rng_state=True), write parameters before (by one call of "
    "the block under torch.no_grad()), or pass what changes as an argument."
)
HELPS = (
    "Keep some of the states (anchor_every=, keep=True), compute in float64, or take a coupling with exact=True. "
    '(check="error" raises at once, check="off" does not look.)'
)
_GROWTH = 1e3
"""How many times larger an error may become in one block by drift."""
OTHER = 0.5
"""The error above which numbers are others."""
_FEW = 0.05
"""The error above which a gradient is not worth having."""
