"""The transform: a function whose input is freed, and computed from its output when the gradient needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from invfunc.blocks.series import Known, in_series
from invfunc.callables import check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, InvFuncError, SampleAxisError
from invfunc.pairs.found import automatic
from invfunc.pairs.pair import BlockModule, Invertible
from invfunc.pairs.value import Value
from invfunc.transform import shown, told


def invertible_checkpoint(
    f: Callable | None = None,
    f_inv: Callable | None | EllipsisType = ...,
    *,
    keep: bool | Sequence[int] = False,
    preserve_rng_state: bool = True,
    check: bool | float | str = "warn",
    min_bytes: int = 0,
    has_aux: bool = False,
) -> Any:
    """Make f a function whose input is freed: the backward pass computes it as `f_inv(y)`.

    For `y = f(x, *args)` autograd saves y only, and not even that when the next block takes y. So the memory of stacked
    calls does not grow with their number, unless other code refers to the states between them (`held_states` lists
    those):

        for p in params:
            x = g(x, p)

    Value and gradients of every order are those of f. The tensors that f saves are computed once more, from x.

    Args:
        f: `f(x, *args, **kwargs) -> y`, x and y any pytrees. Tensors among the further arguments get their gradients;
            anything else is a constant. f may be a module, as in `invertible_checkpoint(module, module.inverse)`: its
            own parameters get their gradients, or those that `functional` puts in. Or an `Invertible`, which has its
            inverse. f is pure in torch.func's sense (see the conventions).
        f_inv: `f_inv(y, *args, **kwargs) -> x`. It runs in the backward pass, so tensors that it closes over must not
            change until then. None: a plain checkpoint, which keeps x. Left out: the inverse is found automatically, if
            f is made of couplings.
        keep: the tensors of x that stay in memory, by their positions in the tree; True keeps all.
        preserve_rng_state: replay the random numbers of f, so that dropout draws the same mask again. False avoids the
            copies of the generators' states, for an f that draws nothing. (Threads that draw at the same time need a
            `generator=` each.)
        check: compares the result of the inverse with some 64 entries of x and their sum. "warn" warns, once a block,
            of an error that is more than rounding (the square root of the precision), and raises above a few per cent;
            "error" raises in both cases; "off" does not compare. (On an accelerator at the end of the backward pass.)
            True compares all entries of x with `f_inv(f(x))` in every call, and the results of both evaluations of f; a
            number does so with this tolerance, relative to the largest entry of each tensor. Exact zeros, as of a
            padding or a relu, come back with a rounding error, without a warning: if f has a kink at 0, take
            `exact=True` or keep=True.
        min_bytes: if x is smaller, g is f itself.
        has_aux: of an `Invertible` that hides something: return `(y, hidden)`.

    Returns:
        `g(x, *args, **kwargs) -> y`. Without f, a decorator.

    Raises:
        ArgumentTypeError: f or f_inv is not a function, or an option is of a wrong kind.
        ArgumentError: keep names a tensor that x does not have, or has_aux=True with a pair that hides nothing.
        InverseError: the inverse returns x with an error (`check`), or with another structure, shape, or a narrower
            dtype; or no inverse is found, with the reason.
        ReplayError: the second evaluation of f saves other tensors than the first.
        ModifiedError: f or f_inv writes into its arguments; or y, an argument, or a tensor that f closes over was
            written in place before the backward pass.
        TypeError: f or f_inv does not take its arguments; a note shows the call.

    Example:
        >>> import torch, invfunc
        >>> g = invfunc.invertible_checkpoint(lambda x, w: x + w.tanh(), lambda y, w: y - w.tanh())
        >>> w = torch.zeros(2, requires_grad=True)
        >>> g(g(torch.ones(2), w), w).sum().backward()
        >>> w.grad
        tensor([2., 2.])
        >>> g = invfunc.invertible_checkpoint(lambda x: (x[0] + x[1].sin(), x[1]))
        >>> y = g((torch.ones(2), torch.ones(2)))
        >>> g
        invertible_checkpoint(<lambda>, x[0] = y[0] - F1(y[1]))

    Without f_inv, parts of x have to change one after another, by functions of the other parts: `y1 = x1 + F(x2)`, then
    `y2 = x2 * exp(s(y1)) + t(y1)` (or another scale that is never 0: sigmoid, softplus). The parts are the tensors of
    x, or slices of one (chunk, split, indexing) that f joins again (cat, stack). f has to consist of torch calls, and
    must not branch on numbers of x. Random numbers, also of dropout in F, are replayed.

    Buffers of modules in train mode, such as running statistics or the vectors of `spectral_norm`, are written once; f
    and f_inv run again from their earlier values. `g.module()` is the block as an `nn.Module`, which registers the
    modules of f.

    Under autocast the layers before the first block return half precision. Keep the state in float32, by `x =
    stem(x).float()`, or rounding errors grow from block to block; F and G may compute in half precision.

    Composes with: `.backward()` and every transform of torch.func. First derivatives in reverse mode (grad, vjp,
    jacrev, with vmap in either order) need the memory of one block. f runs without saving memory if several levels have
    a graph (grad in grad, or parameters that also require grad outside of grad), in forward mode, and if f uses
    torch.func itself; a second derivative needs the memory of all blocks. torch.autograd.grad inside of f always works.
    Compiled functions in f stay compiled; a block within torch.compile saves no memory, unless it is in a `chain`, or
    `torch.compiler.disable` excludes it. Statistics of this library compute the inputs of layers in a block again, in
    place of saving them; inside of torch.func, or with a second derivative (`diag_hessian`, `hvp`, results that require
    grad), they run f without saving memory.

    Cost: one evaluation of the inverse and one more of f in the backward pass: 5/3 of the time of f alone, or 4/3 for a
    coupling, whose inverse and f share their evaluations, and some 0.2 ms a block. To find an inverse, f runs once
    more, without numbers, in the first call of each kind (shapes, dtypes, modes): some 0.1 ms an operation. In a series
    of blocks, x of the first and of every eighth one is compared. The reconstructed x has rounding errors, which grow
    with the number of blocks (`drift`, `InexactWarning`).

    Source: A. Gomez et al., The Reversible Residual Network, 2017; the interfaces of MemCNN and invtorch.
    """
    _check_options(keep, check, min_bytes)
    options = {
        "keep": keep if isinstance(keep, bool) else tuple(keep),
        "preserve_rng_state": preserve_rng_state,
        "check": "off" if check is False else check,
        "min_bytes": min_bytes,
        "has_aux": has_aux,
    }
    inner = {name: options[name] for name in ("preserve_rng_state", "check", "min_bytes")}
    if f is None:
        return partial(invertible_checkpoint, f_inv=f_inv, **options)
    if isinstance(f, Checkpointed) and isinstance(f_inv, EllipsisType):  # what is not said stays as it was
        own = {name: getattr(f, name) for name in options}
        options = {name: own[name] if value == _DEFAULTS[name] else value for name, value in options.items()}
        inner = {name: options[name] for name in inner}
        f = f.pair
    if isinstance(f, Invertible):
        if not isinstance(f_inv, EllipsisType):
            raise ArgumentTypeError(f"invertible_checkpoint({f!r}, f_inv): the pair has its inverse; leave f_inv out.")
        return _configured(Checkpointed(f, **options), inner)
    _check_function(f)
    if isinstance(f_inv, EllipsisType):
        return Checkpointed(automatic(f, tuple(keep) if isinstance(keep, Sequence) else ()), **options)
    if f_inv is None:
        pair = Invertible(f, _no_inverse, name=f"{describe(f)}, None")
        return Checkpointed(pair, **{**options, "keep": True})
    _check_function(f_inv)
    return Checkpointed(Invertible(f, f_inv, name=f"{describe(f)}, {describe(f_inv)}"), **options)


_DEFAULTS = {"keep": False, "preserve_rng_state": True, "check": "warn", "min_bytes": 0, "has_aux": False}
_WAYS = "warn", "error", "off"
_CHECKS = '"warn", "error", "off", True (compare all) or the error that is tolerated'


def _check_options(keep: Any, check: Any, min_bytes: Any) -> None:
    whole = isinstance(keep, bool) or (isinstance(keep, (list, tuple, range)) and all(type(i) is int for i in keep))
    options = (
        ("keep", keep, whole, "True, False or the places of tensors of x, as in keep=(0,)"),
        ("check", check, check in _WAYS if isinstance(check, str) else isinstance(check, (bool, int, float)), _CHECKS),
        ("min_bytes", min_bytes, isinstance(min_bytes, int), "a number of bytes"),
    )
    for name, value, good, wanted in options:
        if not good:
            raise ArgumentTypeError(f"invertible_checkpoint(..., {name}={value!r}): {name} is {wanted}.")


def _check_function(f: Any) -> None:
    if not isinstance(f, nn.Module):  # which has parameters of its own
        check_callable("invertible_checkpoint", f)


def _configured(block: Checkpointed, options: dict[str, Any]) -> Checkpointed:
    """The options for all the blocks that it is composed of."""
    composition = block.pair.composition
    pair = block.pair if composition is None else composition.changed(partial(_configured, options=options))
    return replace(block, pair=pair, **options)


def _no_inverse(y: Any, *args: Any, **kwargs: Any) -> Any:
    raise InverseError("there is no inverse: f_inv is None.")


@shown
@dataclass(frozen=True, repr=False)
class Checkpointed(Value):
    """A function that is its pair's forward in every respect but memory."""

    pair: Invertible
    keep: bool | tuple[int, ...] = False
    preserve_rng_state: bool = True
    check: bool | float | str = "warn"
    min_bytes: int = 0
    has_aux: bool = False
    known: Known = field(default_factory=Known, compare=False)

    def __post_init__(self) -> None:
        if self.has_aux and not self.pair.hidden:
            raise ArgumentError(f"{self!r}: has_aux=True returns hidden values, but this pair has none.")

    @property
    def has_inverse(self) -> bool:
        """Tells whether it was made with an inverse."""
        return self.pair.inverse is not _no_inverse

    def __repr__(self) -> str:
        return f"invertible_checkpoint({self.pair!r})"

    def signature(self) -> Any:
        """Signature of a call."""
        return self.pair.signature()

    def module(self) -> nn.Module:
        """The block as an `nn.Module` that registers the modules it is made of, as `Invertible.module` tells."""
        return BlockModule(self, self.pair)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.pair.composition is None:  # which then decides what is kept
            if torch.is_grad_enabled() and not torch.compiler.is_exporting():
                from invfunc._torch.eager import BLOCK, say  # imports the compiler, which takes a second

                say(BLOCK)
            return self._shown(self.pair.forward(*self.pair.shared, x, *args, **kwargs))
        try:
            composition = self.pair.composition
            if composition is not None:
                pair = composition.keeping(self.keep) if self.keep else self.pair
                return self._shown(pair.forward(x, *args, **kwargs))
            y, hidden = in_series([(self, args, kwargs)], x)
            return (y, *hidden[0]) if self.has_aux else y
        except SampleAxisError:  # is told by the statistic that looks on
            raise
        except InvFuncError as error:
            raise told(error, f"{self!r}(x, ...)") from error.__cause__
        except (TypeError, AttributeError) as error:
            if not isinstance(x, torch.Tensor):
                error.add_note(
                    f"{self!r} was called with an x of type {type(x).__name__}, which f got as its first argument. "
                    "Let f take it as one argument (def f(x): a, b = x), or pass tensors beside the state behind it: "
                    "g(x, w)."
                )
            raise

    def _shown(self, y: Any) -> Any:
        return y if self.has_aux else self.pair.apart(y)[0]

    def kept(self, number: int) -> tuple[int, ...]:
        """Places of those among so many tensors of x that are kept."""
        kept = tuple(range(number)) if self.keep is True else self.keep or ()
        if any(not 0 <= i < number for i in kept):
            raise ArgumentError(f"keep={self.keep} names tensors of x by their place, but x has {number} of them.")
        return kept


Step = tuple[Checkpointed, Any]
"""A block and its parameters."""


def opened(steps: Sequence[tuple]) -> Iterable[Step]:
    """The steps, with those of chains in place of these."""
    for g, p in steps:
        composition = g.pair.composition
        if composition is None:
            yield g, p
        else:
            kept: Any = (composition.keeping(g.keep) if g.keep else g.pair).composition
            yield from opened(kept.steps(p))
