"""A result that is checked in the same call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, levels, plainly
from invfunc.callables import describe
from invfunc.certificates.draws import States, needed, rewound, states
from invfunc.certificates.held import held_by
from invfunc.certificates.looks import unknown
from invfunc.certificates.of_products import KINDS, OfProduct
from invfunc.certificates.of_statistics import OfStatistic
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.products.product import Product
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform

SEEDS = range(2**63)
"""Those that a generator takes."""


def certified(
    t: Statistic | Product, *, generator: torch.Generator | int, confidence: float = 0.99, share: float = 0.05
) -> Certified:
    """Check a result in the same call, at drawn entries, by another code path.

        result = t(params, *batch)
        for e in drawn_entries:                                       # k of them evenly, k by their size
            J = jvp(lambda p: f(p, *inputs), (params,), (unit(e),))[1]       # of `diag_ggn`, say
            assert close(result[e], J^T H J)
        return result

    The other path has no rules of operations and no shortcuts by structure: derivatives of the whole function along
    single entries, backward passes of single samples, the loss's own Hessian. Whole results are compared where that
    costs no more: `batch_grad` and `grad_and_variance` with the gradient, `ggn_trace` with the sum of the diagonal, the
    matrix of `gram` with its transpose, `hvp` with two plain backward passes. Products with the GGN and Fisher matrices
    are compared with `(J e) . H (J v)`. Where operations of f are replaced by forms that can be differentiated twice,
    what f gives with them is compared with what it gives without.

    What it promises: a fault in a `share` of the entries that is larger than the tolerance is found with at least this
    `confidence`, in each call, by `k = log(1 - confidence) / log(1 - share)` entries that are drawn evenly (90). An
    entry is that of a parameter, with what each sample has there; of `batch_l2_grad`, the norms of `clipped_grad` and
    `gram` it is a sample, and of the kernel of a model an output of a sample.

    What it does not: that f is the function that was meant, that what both ways share is right (where its outputs are
    found, what `mc_samples` draws), or anything about faults below the tolerance. That is, beside the largest number of
    a parameter, or the root of the sum of squares of what is added up in it, 1e-8 in float64, 4e-6 in float32, 0.004 in
    float16 and 0.03 in bfloat16, and beside the largest of all parameters 4e-15. Numbers that are further apart are
    looked at again before an error is raised: t is called again at the same arguments, which has to give the same, and
    both ways six times at arguments that are moved by 1e-4 (integers up to 8 stay: they are codes), the other one in
    float64, too. The tolerance of each number is 8 times (in bfloat16 12 times) what its distance to the other way
    changes by (or half of those of its parameter do, if that is more), and what the other way is off. So nothing is
    found at a number that jumps there, in f or in a rule. Numbers that are not finite in both ways count as equal, and
    where a result has some, or an argument an infinite one, one that is not finite in the other way alone. In float16,
    numbers below 6e-5 are lost in rounding. Where f is saturated, so that nothing is left of a parameter's result but
    rounding (a softmax that is sure), or overflows for some of its outputs, an error may be about that.

    Args:
        t: a statistic of this library, also `chunked` or of several `together`; not K-factors, and not `reduced`. Or a
            product `(params, v, *batch)`; not `hvp` with `modify`.
        generator: draws which entries. An int, at least 0, is the seed of all calls, as an error tells it. Generators
            that f draws from end where t leaves them, where they are found: torch's own, and what f holds.
        confidence, share: as above, both between 0 and 1.

    Returns:
        A function with the signature of t, which returns its result; that of a product has `linearize`.

    Raises:
        CertificateError: numbers are further apart than rounding explains, or t gives others when it is called again
            at the same arguments. It has the `path` of the entry, with the sample whose number it is, the two numbers
            `found` and `expected`, and the `seed`.
        SplitError: f is a scalar loss whose outputs are not known, and neither the sum nor the mean of its values for
            single samples; RandomnessError: it would be, but draws random numbers.
        ArgumentError: K-factors, `reduced`, a share or a confidence that is not between 0 and 1; within
            `torch.func.vmap`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> safe = invfunc.certified(invfunc.variance(f), generator=torch.Generator().manual_seed(0))
        >>> safe(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([9.])

    Composes with: `chunked`, `together` inside; `explain` around it, which tells the cost; `torch.func.grad`, `jvp`
    around it, which differentiate t. What is certified is the result, not its derivative.

    Cost: f twice more, or four times where operations of it have another form, and a product `J e` for each of up to
    2 k entries, batched: two backward passes; for `gram` and norms that of a sample, for Hessians a second derivative.
    It does not depend on what t costs. A smaller confidence (or a larger share) makes it cheaper:
    `confidence=0.5, share=0.1` takes 7 entries in place of 90. Where numbers are further apart than the tolerance, all
    of it eight times more.

    Source: this library; `python -m tests.mutants --certified` plants faults and looks which of them it finds, and
    `python -m tests.alarms` certifies what is right.
    """
    if not isinstance(t, (Statistic, Product)):
        raise ArgumentTypeError(
            f"certified({describe(t)}): it is of type {type(t).__name__}, but has to be a statistic or a product, as "
            "in certified(diag_ggn(f, loss), generator=g)."
        )
    for name, value in (("confidence", confidence), ("share", share)):
        if not (isinstance(value, (int, float)) and 0 < value < 1):
            raise ArgumentError(f"certified({t!r}, {name}={value!r}): {name} has to be a number between 0 and 1.")
    if not isinstance(generator, (torch.Generator, int)) or isinstance(generator, bool):
        raise ArgumentTypeError(
            f"certified({t!r}, generator=...): generator is of type {type(generator).__name__}, but entries are drawn "
            "from a torch.Generator: pass generator=torch.Generator().manual_seed(0), or a seed."
        )
    if isinstance(generator, int) and generator not in SEEDS:
        raise ArgumentError(f"certified({t!r}, generator={generator}): a seed has to be at least 0 and below 2**63.")
    if why := _nothing_to_compare(t):
        raise ArgumentError(f"certified({t!r}): {why}")
    if isinstance(t, Product):
        return CertifiedProduct(t, generator, confidence, share)
    return Certified(t, generator, confidence, share)


def _nothing_to_compare(t: Statistic | Product) -> str:
    """Why there is no other path to a result; empty if there is."""
    if isinstance(t, Product):
        if t.record in KINDS:
            return ""
        return (
            "its matrix is made of parts that no derivative of f is. Certify `ggnvp(blocks=True)` of the same function."
        )
    if t.options.reduce is not None:
        return (
            "what a function makes of the quantities cannot be compared with anything. Certify the statistic without "
            "`reduced`, and apply the function to its result."
        )
    return next(filter(None, map(unknown, t.members or (t,))), "")


@dataclass(frozen=True, repr=False)
class Certified(Transform):
    """A statistic or a product whose result is checked."""

    t: Statistic | Product
    generator: torch.Generator | int
    confidence: float
    share: float
    owned = False  # it gives what t gives
    outermost = True
    of_one_batch = "what it checks is one call, of one batch. Check that of a batch, and leave it away here"

    def __repr__(self) -> str:
        return f"certified({self.t!r})"

    def names(self, count: int) -> Any:
        return self.t.names(count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        before = states(*self._generators())
        return self._checked(self.t(*args, **kwargs), before, args, kwargs, names), None

    def _checked(self, result: Any, before: States, args: tuple, kwargs: dict[str, Any], names: Any) -> Any:
        """The result, which is computed anew from states of generators; these end where they are now."""
        if any(kind == "vmap" for kind, _ in levels()):
            raise ArgumentError(
                "within torch.func.vmap there are several results at once, whose numbers cannot be looked at. Use a "
                "loop, as in [certified(t, generator=g)(params, *batch) for params in several]."
            )
        seed, after = self._seed(), states(*(g for g, _ in before))
        kind = OfStatistic if isinstance(self.t, Statistic) else OfProduct
        try:
            with torch.no_grad(), plainly():
                args, kwargs = tree.map_tensors(innermost, (args, kwargs))
                kind(self.t, self.k, seed, before, args, kwargs, names).run(tree.map_tensors(innermost, result))
        finally:
            rewound(after)
        return result

    @property
    def k(self) -> int:
        """How many entries are drawn evenly, and as many by size."""
        return needed(self.confidence, self.share)

    def _generators(self) -> set[torch.Generator]:
        """Those that t draws from, and those that its functions hold."""
        if isinstance(self.t, Product):
            drawings = [self.t.drawing]
        else:
            drawings = self.t.drawings
        held = [g for f in (self.t.f, self.t.loss) if f is not None for g in held_by(f, torch.Generator)]
        return {*(d.generator for d in drawings if d is not None), *held}

    def _seed(self) -> int:
        if isinstance(self.generator, int):
            return self.generator
        g = self.generator
        return int(torch.randint(2**53, (1,), generator=g, device=g.device))

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How t is computed, and what is checked."""
        if isinstance(self.t, Product):
            raise ArgumentTypeError("explain is of statistics, and a product is computed in one way only.")
        found = self.t.explanation(args, kwargs, names)
        entries = sum(p.numel() for p in self.t.problem(args, kwargs, names).leaves)
        count = f"all {entries}" if entries <= self.k else f"{self.k} evenly and {self.k} by size of {entries}"
        told = f"certified: {count} entries, each with a derivative of f along it"
        return replace(found, name=repr(self), checked=told)


@dataclass(frozen=True, repr=False)
class CertifiedProduct(Certified):
    """A product whose result is checked."""

    t: Product

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, *batch) -> (v -> product)`; each check runs f again."""
        before, made = states(*self._generators()), self.t.linearize(*args, **kwargs)
        linear, aux = made if self.t.has_aux else (made, None)

        def product(v: Any) -> Any:
            def compute(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, None]:
                found = linear(v)
                self._checked((found, aux) if self.t.has_aux else found, before, args, kwargs, names)
                return found, None

            return self.run(compute, self.names, (args[0], v, *args[1:]), kwargs)

        return (product, aux) if self.t.has_aux else product
