"""A result that is checked in the same call."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, levels, plainly
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.callables import describe
from invfunc.certificates.loops import LOOKS, PRODUCTS, Draw, Look, States, largest, looks_at, unit
from invfunc.errors import ArgumentError, ArgumentTypeError, CertificateError
from invfunc.pairs.value import reached
from invfunc.plan import Explanation
from invfunc.products.product import Product
from invfunc.reductions.gradients import ClippedSum
from invfunc.statistic import Statistic
from invfunc.transform import Transform

SEEDS = range(2**63)
"""The seeds that a generator takes."""
ROUNDINGS = 8
"""The factor between the rounding of a result and that of its loops: its terms come in another order."""
LOST = 2.0**-48
"""The part of the largest number that is lost in rounding even in float64."""


def certified(
    t: Statistic | Product, *, generator: torch.Generator | int, confidence: float = 0.99, share: float = 0.05
) -> Certified:
    """Check a result in the same call, at drawn entries, by another code path.

        result = t(params, *batch)
        for e in drawn_entries:                                       # k of them evenly, k by their size
            J = jvp(lambda p: f(p, *inputs), (params,), (unit(e),))[1]       # of `diag_ggn`, say
            assert close(result[e], J^T H J)
        return result

    The other path are the plain loops of `testing`: f runs once more, and torch.autograd pulls back one vector at a
    time, for single entries or single samples, without rules of operations and shortcuts by structure. Products are
    compared in full.

    It promises that a fault in a `share` of the entries, larger than the tolerance, is found with at least this
    `confidence` in each call, by `k = log(1 - confidence) / log(1 - share)` evenly drawn entries (90). An entry is one
    of a parameter, with all samples; for `batch_l2_grad`, the norms of `clipped_grad`, and `gram` it is a sample, and
    for the kernel of a model an output of a sample.

    It does not promise that f is the function you meant, that the outputs that both paths find in f are right, or
    anything about faults below the tolerance. The tolerance is 1e-8 in float64, 4e-6 in float32, 0.004 in float16 and
    0.03 in bfloat16, relative to the largest entry of a parameter, or to the root of the sum of squares of the terms of
    a sum. If numbers are further apart, the loops run again in float64, and 8 times their own error is tolerated, too:
    in lower precision, faults that are so small beside other parameters are not found, nor faults at a kink. If f is
    saturated (a softmax that is sure), so that a result is nothing but rounding error, there may be a false alarm.
    Entries that are not finite on both paths count as equal; so does an entry that is NaN in the loops alone, if other
    entries of the result, or an argument, are not finite.

    Args:
        t: a statistic of this library, also `chunked` or of several `together`; not of drawn columns, `reduced`, nor
            K-factors, `ggn_trace`, `noise_scale`, `sketched_grad`, `predictive_covariance`. Or a product
            `(params, v, *batch)` with a Hessian, a GGN, an empirical Fisher matrix or their blocks.
        generator: draws the entries. An int, at least 0, is the seed of all calls; an error names its seed. Generators
            that f draws from (torch's own, and those that f closes over) end in the state in which t leaves them.
        confidence, share: as above, both between 0 and 1.

    Returns:
        A function with the signature of t, which returns its result; that of a product has `linearize`.

    Raises:
        CertificateError: numbers are further apart than rounding explains, or f gives others when it is called again.
            It has the `path` of the number in the result, as in `result['w'][3, 0]`, both numbers, `found` and
            `expected`, and the `seed`.
        SplitError: f is a scalar loss whose outputs are not known, and neither the sum nor the mean of its values for
            single samples; RandomnessError: it would be, but draws random numbers.
        ArgumentError: a statistic that has no such entries, a share or a confidence that is not between 0 and 1; within
            `torch.func.vmap`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> safe = invfunc.certified(invfunc.variance(f), generator=torch.Generator().manual_seed(0))
        >>> safe(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([9.])

    Composes with: `chunked`, `together` inside; `explain` around it, which tells the cost; `torch.func.grad`, `jvp`
    around it, which differentiate t. What is certified is the result, not its derivative.

    Cost: f once more, and for each of up to 2 k entries two backward
    passes of the batch; for `gram` and norms one or two for each of up to 2 k samples, for Hessians three for each
    entry. A scalar f without known outputs runs for each sample alone. It does not depend on what t costs. A smaller
    confidence (or a larger share) makes it cheaper: `confidence=0.5, share=0.1` takes 7 entries in place of 90. Where
    numbers are further apart than the tolerance, all of it twice.

    Source: this library.
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


def needed(confidence: float, share: float) -> int:
    """The number k of entries that find a fault in a `share` of them: `(1 - share)^k <= 1 - confidence`."""
    k = math.log1p(-confidence) / math.log1p(-share) - 1e-9
    return math.ceil(min(k, sys.maxsize))


def _error(path: str, told: str, seed: int, found: float = math.nan, expected: float = math.nan) -> CertificateError:
    error = CertificateError(
        f"{path} {told}. The entries were drawn by generator={seed}. It is a rule of your own (`operation`), an f that "
        "gives other numbers in each call, or a fault of this library, which we would like to know of."
    )
    error.path, error.found, error.expected, error.seed = path, found, expected, seed
    return error


def _nothing_to_compare(t: Statistic | Product) -> str:
    """Returns why there are no loops for a result; nothing if there are."""
    if isinstance(t, Product):
        if t.drawing is not None:
            return DRAWN
        if t.record in PRODUCTS:
            return ""
        return "its matrix is made of parts that no derivative of f is. Certify the product with the GGN of the same f."
    if t.options.reduce is not None:
        return (
            "there is no loop to compare the function of `reduced` with. Certify the statistic without `reduced`, and "
            "apply the function to its result."
        )
    for m in t.members or (t,):
        if type(m.reduction) not in LOOKS:
            return (
                f"the entries of {m.name} are no derivatives of f along an entry of its parameters. Certify `diag_ggn` "
                "or `batch_grad` of the same function, which go through the same operations."
            )
        if isinstance(m.reduction, ClippedSum) and (m.reduction.groups, m.reduction.weight) != (None, None):
            return "there are no loops of groups and weights. Certify clipped_grad(f, max_norm) of the same f."
        if m.drawing is not None:
            return DRAWN
    return ""


DRAWN = "its columns are drawn, which no loop can do again. Certify the exact one, without `mc_samples`."


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
        before = self._states()
        return self._checked(self.t(*args, **kwargs), before, args, kwargs, names), None

    def _checked(self, result: Any, before: States, args: tuple, kwargs: dict[str, Any], names: Any) -> Any:
        """The result, which is compared with loops from states of generators; these end where they are now."""
        if any(kind == "vmap" for kind, _ in levels()):
            raise ArgumentError(
                "within torch.func.vmap the numbers of a result cannot be read. Use a loop, "
                "as in [certified(t, generator=g)(params, *batch) for params in several]."
            )
        g, after = self.generator, [(g, state_of(g)) for g, _ in before]
        seed = g if isinstance(g, int) else int(torch.randint(2**53, (1,), generator=g, device=g.device))
        try:
            with plainly(), torch.enable_grad():
                result_now, args, kwargs = tree.map_tensors(innermost, (result, args, kwargs))
                self._check(result_now, args, kwargs, names, Draw(self.k, seed, before))
        finally:
            set_states(after)
        return result

    def _states(self) -> States:
        """The states of the generators that f may draw from: torch's own, and those that it closes over."""
        functions = [f for f in (self.t.f, self.t.loss) if f is not None]
        own = {inner for *_, inner in reached(functions) if isinstance(inner, torch.Generator)}
        return [(g, state_of(g)) for g in (*torchs_own(), *own)]

    @property
    def k(self) -> int:
        """The number of entries that are drawn evenly, and as many by size."""
        return needed(self.confidence, self.share)

    def _check(self, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> None:
        """Raises where numbers are apart."""
        looks = looks_at(self.t, result, args, kwargs, names, draw)
        infinite = any(bool(x.isinf().any()) for x in tree.tensors((args, kwargs)))
        infinite = infinite or not all(bool(x.isfinite().all()) for x in tree.tensors(result))
        whole = max((largest(look.expected) for look in looks), default=0.0)
        for look in looks:
            if infinite:  # loops may multiply by 0
                look.expected = look.expected.where(~look.expected.isnan(), look.found)
            look.allowed = max(unit(look.dtype) * max(largest(look.expected), look.size), LOST * whole)
        doubts = [look for look in looks if bool(look.apart().any())]
        exact = self._in_float64(result, args, kwargs, names, draw) if doubts else []
        noise = max((largest(x.expected - y.expected) for x, y in zip(exact, looks, strict=False)), default=0.0)
        for look in doubts:
            look.allowed = max(look.allowed, ROUNDINGS * noise)
            apart = look.apart()
            if not bool(apart.any()):
                continue
            off = torch.where(apart, (look.found - look.expected).abs().nan_to_num(float("inf")), -1)
            worst = int(off.argmax())
            found, expected = (float(x.flatten()[worst]) for x in (look.found, look.expected))
            told = f"is {found:.9g}, but by plain loops it is {expected:.9g}; rounding explains {look.allowed:.1g}"
            raise _error(look.called(worst), told, draw.seed, found, expected)

    def _in_float64(self, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> list[Look]:
        """The same numbers by loops in float64; none where f has a dtype of its own."""
        args, kwargs = tree.map_tensors(lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
        try:
            return looks_at(self.t, result, args, kwargs, names, draw)
        except Exception:
            return []

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """The way in which t is computed, and what is checked."""
        if isinstance(self.t, Product):
            raise ArgumentTypeError("explain takes a statistic; a product is computed in one way only.")
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
        before, made = self._states(), self.t.linearize(*args, **kwargs)
        linear, aux = made if self.t.has_aux else (made, None)

        def product(v: Any) -> Any:
            def compute(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, None]:
                found = linear(v)
                self._checked((found, aux) if self.t.has_aux else found, before, args, kwargs, names)
                return found, None

            return self.run(compute, self.names, (args[0], v, *args[1:]), kwargs)

        return (product, aux) if self.t.has_aux else product
