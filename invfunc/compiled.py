"""A statistic or a product as one graph, which is made in a first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.plan import Explanation
from invfunc.plans.batches import Padding, PlansOfBatches
from invfunc.plans.calls import BACKENDS, Calls, aside
from invfunc.products.product import Product
from invfunc.statistic import Statistic
from invfunc.transform import Transform


def compiled(
    t: Statistic | Product,
    *,
    backend: Literal["replay", "inductor", "cudagraphs"] = "replay",
    pad: Sequence[int] | None = None,
) -> Compiled:
    """Run a statistic or a product by a plan, the recorded graph of its operations, without the Python around them.

        result = t(params, *batch)           # the first call of each shape, in which the plan is written down
        result = plan(params, *batch)        # later ones

    The contract is that of `jax.jit`: t, f and the loss are functions of their arguments, of tensors and modules that
    they close over, and of torch's random numbers. A plan is for one structure of the arguments; for the shapes,
    strides, dtypes and devices of their tensors, and shared memory among them; for the numbers and other constants in
    them; and for modes of torch (gradients, inference, autocast, default dtype and device). Tensors that f closes over
    are read again in each call, so steps of an optimiser and `load_state_dict` count, and so do train and eval mode of
    modules. A number read from a tensor (`if x.sum() > 0`, `.item()`, `.tolist()`, a check of this library), and a
    shape that depends on numbers (masks), are compared in each call. If one differs, the call runs as without
    `compiled`, and records a new plan. Other changes are not noticed: globals, other values in closures, attributes,
    hooks, classes, files, the environment, random numbers of Python or numpy. Side effects of f, such as printing or
    counting, happen in the first call only; writes into tensors in place happen in each.

    Args:
        t: a statistic of this library, also `chunked`, `reduced` or of several `together`; or a product, as `hvp(f)`.
        backend: runs the plan. `"replay"` calls its operations one by one. `"inductor"` and `"cudagraphs"` pass it to
            `torch.compile(fullgraph=True)` with that backend: the first compiles for up to a minute for each shape,
            with other rounding errors; the second launches all kernels of a CUDA device at once.
        pad: sizes of batches, as `(8, 16, 32)`. A batch is padded to the next of them with copies of its first sample,
            which have no gradient, so that few plans are needed. This works for sums over the samples, for results with
            a sample axis, and for `variance` (with the rounding errors of sums of squares), with `[N]` losses, or with
            a loss that is passed apart: its scale (a sum, a mean, one with `ignore_index`) is computed in each call. It
            does not work for drawn vectors, K-factors, `noise_scale`, aux, `reduced`, and `[N]` losses with a factor
            that depends on N. An f that draws (dropout) draws for the padded batch.

    Returns:
        A function with the signature and the results of t. Several threads may call it. Random numbers, of t and of f,
        are those of t at the same state of the generators. For a product it has the `.linearize` of the product itself,
        without a plan.

    Raises:
        ArgumentTypeError: t is neither statistic nor product.
        ArgumentError: an unknown backend; `"cudagraphs"` without a CUDA device; `pad` with a statistic that it does not
            work for, a batch larger than all sizes, or an f that returns no `[N]` losses; within torch.export.
        The errors of t: if a plan meets one, the call runs as without `compiled`.

        A warning (`InvFuncWarning`), once, if calls run as without `compiled`: it names the reason and the line.
        Reasons are a differentiable result (arguments that require grad outside of `torch.no_grad`), matrices that
        `sketched_grad` draws, numbers that leave torch (`.numpy()`, `print`), an f that sets its own seed, or reads
        numbers that change from call to call. Another warning says that a plan runs by `"replay"`, as the backend
        cannot run it: it draws random numbers, or has shapes that depend on numbers.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> fast = invfunc.compiled(invfunc.variance(f))
        >>> for x in torch.tensor([[[1.0], [2.0]], [[1.0], [3.0]]]):
        ...     fast(torch.tensor([1.0]), x, torch.zeros(2))
        tensor([9.])
        tensor([64.])
        >>> print(invfunc.explain(fast)(torch.tensor([1.0]), x, torch.zeros(2)).plan)
        a plan of 38 operations

    Composes with: `chunked`, `reduced`, `together` inside; `streamed` and `distributed` around it, where what a batch
    brings is repeated, by plans of their own: `streamed(compiled(t))(params, loader)` makes one for each shape of a
    batch (and each sweep), so that the last batch has a second one; `explain` around it, which tells the operations and
    what is compared, and has them as `code`. Within transforms of torch.func, other statistics,
    `torch.autograd.forward_ad`, hooks on saved tensors and dispatch modes it is t.

    Within `torch.compile(fullgraph=True)` a call is one operation, which compares the numbers when it runs. It is a
    graph break where it is differentiable or gives something else than tensors and `Kronecker` (aux, `reduced`, None
    of `joint=True` and `unsupported="skip"`). For new shapes t is run once without numbers, or on ones and zeros.

    Cost: the operations of t, without Python: small models are several times faster, large ones not at all. The
    comparisons of a call take some tens of microseconds. The first call takes as long as three to six calls of t.
    Chunks are recorded one by one; a plan of more than 20 000 operations is dropped. The last 32 plans are kept, with
    small constants and the modules that have run, but none of your tensors.

    Source: this library; `jax.jit`.
    """
    if not isinstance(t, (Statistic, Product)):
        raise ArgumentTypeError(
            f"compiled({describe(t)}): it is of type {type(t).__name__}, but has to be a statistic or a product, as in "
            "compiled(variance(f)). Compile what is in it, as in streamed(compiled(t)); a plan has a number of chunks, "
            "as in compiled(chunked(t, n))."
        )
    if backend not in BACKENDS:
        raise ArgumentError(f"compiled({t!r}, backend={backend!r}): it is one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "cudagraphs" and not torch.cuda.is_available():
        raise ArgumentError(
            f"compiled({t!r}, backend='cudagraphs'): it needs a CUDA device, and torch sees none here. On a CPU, use "
            "'replay' or 'inductor'."
        )
    if pad is not None and not (isinstance(pad, Sequence) and pad and all(type(n) is int and n > 0 for n in pad)):
        raise ArgumentError(f"compiled({t!r}, pad={pad!r}): pad are the sizes of batches, as (8, 16, 32).")
    padding = None if pad is None else Padding(t, tuple(pad))
    calls = Calls(t if padding is None else padding, f"compiled({t!r})", backend)
    return Compiled(t, calls, padding)


@dataclass(frozen=True, repr=False)
class Compiled(Transform):
    """A statistic or a product whose calls are repeated by a plan."""

    t: Any
    calls: Calls = field(compare=False)
    padding: Padding | None = field(default=None, compare=False)
    owned = False  # it gives what t gives
    outermost = True

    def __repr__(self) -> str:
        return f"compiled({self.t!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        if compiling and self._trees_of_tensors and not _seen(args, kwargs):
            from invfunc.plans.within import within  # imports the compiler, which takes a second

            return within(self.calls.number, args, kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def _trees_of_tensors(self) -> bool:
        """True if results have nothing else as leaves, so that a graph of torch.compile can give them."""
        if self.padding is not None or isinstance(self.t, Product):
            return self.padding is None and not self.has_aux
        whole = not any(m.reduction.gaps for m in self.t.members or (self.t,))  # None is no tensor
        return whole and not self.has_aux and self.t.options.reduce is None

    @cached_property
    def of_batches(self) -> PlansOfBatches:
        """Plans of the batches of a data set."""
        return PlansOfBatches(self.t, self.calls)

    def names(self, count: int) -> Any:
        return self.t.names(count)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def several(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.several

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        padding = self.padding
        if aside(args, kwargs):
            found = self.t(*args, **kwargs)
        elif padding is not None:
            given, n, size = padding.padded(args, names)
            return padding.cut(self.calls.planned(given, kwargs), given[-1], n, size), None
        else:
            found = self.calls.planned(args, kwargs)
        if not self.has_aux:
            return found, None
        *results, aux = found
        return results if self.several else results[0], aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """The way in which t is computed, and the plan of such a call, which is made if there is none."""
        found = Explanation(repr(self), 0, 0, 0, 0, 1.0, "as it is written")
        if isinstance(self.t, Statistic):
            found = self.t.explanation(args, kwargs, names)
        given = args if self.padding is None else self.padding.padded(args, names)[0]
        plan, code = self.calls.explained(given, kwargs)
        return replace(found, name=repr(self), plan=plan, code=code)

    # Of a product

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.vector

    @property
    def lead(self) -> int:
        return self.t.lead

    @property
    def names_of_f(self) -> Callable[[int], Any]:
        """The names of so many arguments, which are all but the vector."""
        return self.t.names_of_f

    @property
    def linearize(self) -> Callable[..., Any]:
        """The product at some parameters and data, `(params, *batch) -> (v -> product)`, as t itself has it."""
        return self.t.linearize


def _seen(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether something is done with a call that no operation of a graph says."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return autocast or (torch.is_grad_enabled() and any(x.requires_grad for x in tree.tensors((args, kwargs))))


def opened(t: Any) -> tuple[Any, Any]:
    """The statistic or product that is compiled, and the plans of its batches; none of anything else."""
    if isinstance(t, Compiled) and t.padding is not None:
        raise ArgumentError(f"{t!r}, pad={t.padding.sizes!r}: the batches of a loader are not padded. Leave pad out.")
    return (t.t, t.of_batches) if isinstance(t, Compiled) else (t, None)
