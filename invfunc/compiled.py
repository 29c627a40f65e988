"""A statistic as one graph, which is made in a first call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc.budgeted import Budgeted
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.plans.backends import BACKENDS
from invfunc.plans.batches import PlansOfBatches, PlansOfProducts
from invfunc.plans.calls import Calls
from invfunc.plans.points import Map, Points
from invfunc.products.product import Linearised, Product
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform


def compiled(
    t: Statistic | Product,
    *,
    backend: Literal["replay", "inductor", "cudagraphs", "auto"] = "replay",
    recheck: int = 0,
) -> Compiled:
    """Repeat calls of a statistic by a plan, the graph of its operations, without the Python around them.

        result = t(params, *batch)           # the first call of each shape, in which the plan is written down
        result = plan(params, *batch)        # later ones

    The first call is that of t itself, with all checks. A plan is used again where nothing differs that t is known to
    depend on: the tree, shapes, strides, dtypes and devices of the arguments, which of them share memory, numbers and
    other constants among them, modes and settings of torch (gradients, inference, autocast, default dtype and device),
    and what t, f and the loss read beside them: closures, defaults, global names, imports, the environment, attributes,
    containers, classes, modules with their modes and hooks, arrays of numpy. Tensors that are closed over are read
    again in each call. A number that is read from a tensor (`if x.sum() > 0`, `.item()`, `.tolist()`, a check of this
    library) is a guard: it is computed by the plan, too, and compared with what it was, and so is a shape that depends
    on numbers (masks). Where something differs, the call is made as without `compiled`, and its plan takes the place of
    the other.

    Args:
        t: a statistic of this library, also `chunked`, `reduced` or of several `together`; or a product, as `hvp(f)`.
        backend: what runs the plan: `"replay"` calls its operations one by one, `"inductor"` gives it to
            `torch.compile(fullgraph=True)`, which takes up to a minute for each shape and rounds otherwise,
            `"cudagraphs"` captures it as a CUDA graph, whose kernels are launched at once: each call copies the
            arguments and what is closed over to where the graph reads them, and its results out of it; `"auto"`
            times the first calls of each shape with and without a plan (by `"replay"`) in turn, on a CPU without what
            other programs take, and goes on with the faster. It is not the default, as which it is may differ from
            process to process on a busy machine, and the calls that are timed without a plan are slow ones.
        recheck: after this many calls by a plan, t is called beside it and the results are compared; 0 is never.

    Returns:
        A function with the signature of t, and its results, with memory of their own. It may be called by several
        threads. That of a product has `.linearize`, where the plan is divided: what no vector changes is computed once,
        and the rest for each vector (by the plan also with "auto"). Random numbers, of t and of f, are those of the
        call itself at the same state of the generators.

    Raises:
        ArgumentTypeError: t is neither statistic nor product.
        ArgumentError: an unknown backend; `"cudagraphs"` where torch sees no CUDA device; within torch.export, a call
            of which there is no program.
        ReplayError: with `recheck`, a result that is not that of the call itself.
        ModifiedError: a vector for a linearisation whose parameters or data were written in place meanwhile.
        What t raises: a call of which the plan finds an error is made as without it.

        A warning (`InvFuncWarning`), once, where calls go on as without `compiled`: it names the reason and the line.
        These are a result that is differentiable (parameters that require grad outside of `torch.no_grad`), matrices
        that `sketched_grad` draws, numbers that leave torch (`.numpy()`, `print`), an f that writes into what it is
        given or closes over, that sets its own seed, or reads numbers that change from call to call. One says, too,
        where a plan runs by `"replay"` as the backend cannot run it: `"cudagraphs"` draws no random numbers, copies
        none to the CPU, takes arguments of one CUDA device, and no operation that waits for it, as `eigh` does.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> fast = invfunc.compiled(invfunc.variance(f))
        >>> for x in torch.tensor([[[1.0], [2.0]], [[1.0], [3.0]]]):
        ...     fast(torch.tensor([1.0]), x, torch.zeros(2))
        tensor([9.])
        tensor([64.])
        >>> print(invfunc.explain(fast)(torch.tensor([1.0]), x, torch.zeros(2)).plan)
        a plan of 33 operations; 0.01MiB at once

    Composes with: `chunked`, `reduced`, `together` inside; `streamed` and `distributed` around it, where what a batch
    brings is repeated, by plans of their own: `streamed(compiled(t))(params, loader)` makes one for each shape of a
    batch (and each sweep), so that the last batch has a second one; `linear_operator`, `estimate_trace`,
    `estimate_diagonal` around products, where each vector repeats its part; `explain` around it, which tells the
    operations and guards, and has them as `code`. Within transforms of torch.func, other statistics,
    `torch.autograd.forward_ad`, hooks on saved tensors and dispatch modes it is t.

    Within `torch.compile(fullgraph=True)` a call is one operation, which looks at all guards when it runs. It is a
    graph break where it is differentiable or gives something else than tensors and `Kronecker` (aux, `reduced`, None
    of `joint=True` and `unsupported="skip"`).
    For new shapes t is run once without numbers, or on ones and zeros.

    Within `torch.export` the operations of its plan become those of the program, which needs this library neither to be
    saved nor to be loaded: call it once with arguments of such shapes before, and make that call and the export both
    under `torch.no_grad()`. What is closed over is a constant. A number that is read is asserted, so that a program
    fails on data of which it would be another one. Errors say what a program cannot do: draw random numbers, have
    derivatives, or shapes that depend on numbers. One that gives `Kronecker` or `NoiseScale` is loaded after `import
    invfunc`; to be without, return their tensors, as `factors` (`strict=True` takes no `Kronecker`).

    Cost: the operations of t, without Python: small models are several times faster, large ones not at all. The first
    call takes as long as two (large models) to six calls of t, most often three to four. What is looked at in each call
    takes 2 to 12 % of the time of t: it grows with the arguments and modules. Of more than eight chunks it is a loop
    over what they have in common, with the tensors and numbers of each, which may have loops in it; chunks that do
    others, as ragged ones may, have their own. `"inductor"` compiles those apart, and what is around them runs one by
    one. A plan of more than 20 000 operations is not kept. It keeps small constants, and no tensor of the caller's;
    objects that f closed over are kept until the next call. The last 32 plans are kept. A CUDA graph keeps copies of
    its inputs, and the memory of all its operations, as long as its plan.

    Not seen, so that a plan goes on with what it was: the time, files, random numbers of Python that f only draws in
    some calls, state of installed packages and of what is written in C, numbers that C reads from memory (`data_ptr`).
    What f does beside its result, as to print or to count, is done by the first call only, except that a function which
    changes what it reads itself has no plan. `recheck` is there to find out.

    Source: this library.
    """
    if not isinstance(t, (Statistic, Product)):
        raise ArgumentTypeError(
            f"compiled({describe(t)}): it is of type {type(t).__name__}, but has to be a statistic or a product, as in "
            f"compiled(variance(f)). {_way(t)}"
        )
    if backend not in BACKENDS:
        raise ArgumentError(f"compiled({t!r}, backend={backend!r}): it is one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "cudagraphs" and not torch.cuda.is_available():
        raise ArgumentError(
            f"compiled({t!r}, backend='cudagraphs'): it needs a CUDA device, and torch sees none here. On a CPU, use "
            "'replay' or 'inductor'."
        )
    if not isinstance(recheck, int) or recheck < 0:
        raise ArgumentError(f"compiled({t!r}, recheck={recheck!r}): recheck is a number of calls, 0 for never.")
    calls = Calls(t, f"compiled({t!r})", backend, recheck)
    return CompiledProduct(t, calls) if isinstance(t, Product) else Compiled(t, calls)


@dataclass(frozen=True, repr=False)
class Compiled(Transform):
    """A statistic or a product whose calls are repeated by a plan."""

    t: Statistic | Product
    calls: Calls = field(compare=False)
    owned = False  # it gives what t gives
    outermost = True

    def __repr__(self) -> str:
        return f"compiled({self.t!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return self._exported(args, kwargs)
        if torch.compiler.is_compiling() and not _seen(args, kwargs):
            if self._trees_of_tensors:
                from invfunc.plans.within import within  # imports the compiler, which takes a second

                return within(self.calls.number, args, kwargs)
        return super().__call__(*args, **kwargs)

    def _exported(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call as operations of a program that torch.export writes."""
        if _seen(args, kwargs):
            raise ArgumentError(
                f"{self!r} within torch.export: a program has no derivatives of it, and no autocast. Export it within "
                "torch.no_grad(), outside of autocast."
            )
        from invfunc.plans.exported import exported  # imports the compiler, which takes a second

        return exported(self.calls, args, kwargs)

    @property
    def _trees_of_tensors(self) -> bool:
        """Whether results have nothing else as leaves, so that a graph of torch.compile can give them."""
        if isinstance(self.t, Product):
            return not self.has_aux
        whole = not any(m.reduction.gaps for m in self.t.members or (self.t,))  # None is no tensor
        return whole and not self.has_aux and self.t.options.reduce is None

    @cached_property
    def of_batches(self) -> PlansOfBatches | PlansOfProducts:
        """Plans of the batches of a data set."""
        return (PlansOfProducts if isinstance(self.t, Product) else PlansOfBatches)(self.t, self.calls)

    def names(self, count: int) -> Any:
        return self.t.names(count)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def several(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.several

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        found = self.calls(args, kwargs)
        if not self.has_aux:
            return found, None
        *results, aux = found
        return results if self.several else results[0], aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How t is computed, and the plan of such a call, which is made if there is none."""
        assert isinstance(self.t, Statistic)
        found = self.t.explanation(args, kwargs, names)
        plan, code = self.calls.explained(args, kwargs)
        return replace(found, name=repr(self), plan=plan, code=code)


@dataclass(frozen=True, repr=False)
class CompiledProduct(Compiled):
    """A product whose calls, and those of its linearisations, are repeated by plans."""

    t: Product

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.vector

    @property
    def lead(self) -> int:
        return self.t.lead

    @cached_property
    def points(self) -> Points:
        """Plans of linearisations."""
        return Points(self.t, self.calls)

    def names_of_f(self, count: int) -> Any:
        """What so many arguments are called that are all but the vector."""
        return self.t.names_of_f(count)

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, *batch) -> (v -> product)`: what no v changes once."""
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        _, space = self.t.given(args, kwargs, names)
        found = Map(self.points, args, kwargs, space)
        shown = f"{self!r}.linearize({', '.join(names)})"
        return Linearised(shown, found, space, space, self.vector, self.lead, (args, kwargs, found.kept)), found.aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """The plan of such a call, which is made if there is none."""
        plan, code = self.calls.explained(args, kwargs)
        return Explanation(repr(self), 0, 0, 0, 0, 1.0, "as it is written", plan=plan, code=code)


def _seen(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether something is done with a call that no operation of a graph says."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return autocast or (torch.is_grad_enabled() and any(x.requires_grad for x in tree.tensors((args, kwargs))))


def _way(t: Any) -> str:
    """What to write instead of `compiled(t)`."""
    if isinstance(t, Compiled):
        return "It is compiled already."
    if isinstance(t, Budgeted):
        return "A call within a budget has no plan; one in a number of chunks has: compiled(chunked(t, n))."
    if isinstance(t, Transform) and t.of_one_batch and not hasattr(t, "t"):
        return "No plan is made of it. Leave `compiled` away."
    if isinstance(t, Transform) and t.outermost:
        outer, _, inner = repr(t).partition("(")
        return f"It comes inside, as {outer}(compiled({inner})."
    if isinstance(t, Linearised) or isinstance(getattr(t, "__self__", None), Product):
        product = repr(getattr(t, "__self__", t)).partition(".linearize")[0]
        return f"Compile the product: compiled({product}).linearize."
    return "Compile what is in it."


def opened(t: Any) -> tuple[Any, Any]:
    """What is compiled, and the plans of its batches; none of anything else."""
    return (t.t, t.of_batches) if isinstance(t, Compiled) else (t, None)
