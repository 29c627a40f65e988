"""A result that is checked in the same call, beside the plain loops of `testing` at drawn entries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc._torch.functorch import innermost, levels, plainly
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.callables import describe
from invfunc.core.columns import Finder, marked_for
from invfunc.errors import ArgumentError, ArgumentTypeError, CertificateError, RandomnessError, SplitError
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.pairs.value import reached
from invfunc.plan import Explanation
from invfunc.problem import BoundProblem, problem, with_aux
from invfunc.products.curvature import of_fisher, of_ggn, of_hessian
from invfunc.products.product import Product
from invfunc.reductions.columns import (
    InnerProducts,
    JacobianRows,
    ProductsWithOthers,
    SquareRoot,
    SquaresOfEach,
    SumOfSquares,
)
from invfunc.reductions.gradients import CentredSquares, ClippedSum, EachSample, SquaredNorms, SumAndCentredSquares
from invfunc.statistic import Statistic
from invfunc.transform import Transform

SEEDS = range(2**63)
"""The seeds that a generator takes."""
ROUNDINGS = 8
"""The factor between the rounding of a result and that of its loops: its terms come in another order."""
LOST = 2.0**-48
"""The part of the largest number that is lost in rounding even in float64."""
UNITS = {torch.float64: 2**26, torch.float32: 2**5, torch.float16: 2**2, torch.bfloat16: 2**2}
"""Units in the last place that rounding may take: of half precision, which has few of them, less."""


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

    Cost: f once more for each statistic, and for each of up to 2 k entries one or two backward passes of the batch; for
    `gram` and norms one or two for each of up to 2 k samples, for Hessians four for each entry. A scalar f without
    known outputs runs for each sample alone. It does not depend on what t costs. A smaller confidence (or a larger
    share) makes it cheaper: `confidence=0.5, share=0.1` takes 7 entries in place of 90. Where numbers are further apart
    than the tolerance, all of it twice.

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
                now, args, kwargs = tree.map_tensors(innermost, (result, args, kwargs))
                self._check(now, args, kwargs, names, seed, before)
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

    def _check(self, result: Any, args: tuple, kwargs: dict, names: Any, seed: int, before: States) -> None:
        """Raises where numbers are apart."""

        def looks_at(args: tuple, kwargs: dict[str, Any]) -> list[Look]:
            if isinstance(self.t, Product):
                return looks_at_product(self.t, result, args, kwargs, names, before)
            call = CheckedCall(self.t.problem(args, kwargs, names), before)
            return looks_at_statistic(self.t, result, call, self.k, torch.Generator().manual_seed(seed))

        looks = looks_at(args, kwargs)
        infinite = any(bool(x.isinf().any()) for x in tree.tensors((args, kwargs)))
        infinite = infinite or not all(bool(x.isfinite().all()) for x in tree.tensors(result))
        most = max((largest(look.expected) for look in looks), default=0.0)
        for look in looks:
            if infinite:  # loops may multiply by 0
                look.expected = look.expected.where(~look.expected.isnan(), look.found)
            look.allowed = max(unit(look.dtype) * max(largest(look.expected), look.size), LOST * most)
        if not any(bool(look.apart().any()) for look in looks):
            return
        try:  # the same numbers by loops in float64
            wide = tree.map_tensors(lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
            noise = max(largest(x.expected - y.expected) for x, y in zip(looks_at(*wide), looks, strict=False))
        except Exception:  # of an f that has a dtype of its own
            noise = 0.0
        for look in looks:
            look.allowed = max(look.allowed, ROUNDINGS * noise)
            apart = look.apart()
            if not bool(apart.any()):
                continue
            off = torch.where(apart, (look.found - look.expected).abs().nan_to_num(float("inf")), -1)
            worst = int(off.argmax())
            found, expected = (float(x.flatten()[worst]) for x in (look.found, look.expected))
            told = f"is {found:.9g}, but by plain loops it is {expected:.9g}; rounding explains {look.allowed:.1g}"
            raise _error(look.called(worst), told, seed, found, expected)

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


# What is looked at, beside loops of f, which is run once more

Tensors = list[torch.Tensor]
States = list[tuple[torch.Generator, torch.Tensor]]


def unit(dtype: torch.dtype) -> float:
    """The relative error of a number."""
    return torch.finfo(dtype).eps * UNITS[dtype]


def largest(x: torch.Tensor) -> float:
    """The size of the largest number that is finite."""
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


def wide(x: torch.Tensor) -> torch.Tensor:
    """The numbers on the CPU and in float64, where they are compared."""
    return x.detach().cpu().double()


@dataclass
class Look:
    """Numbers of a leaf of a result, and the same ones by plain loops."""

    path: str
    leaf: torch.Tensor
    at: torch.Tensor
    """Places in the flattened leaf."""
    expected: torch.Tensor
    """The numbers there, in float64."""
    dtype: torch.dtype
    """Whose rounding is allowed."""
    size: float = 0.0
    """The size of what is added up in them, where that may cancel."""
    allowed: float = 0.0
    """The distance that is allowed."""

    @property
    def found(self) -> torch.Tensor:
        """The numbers of the result."""
        return wide(self.leaf.flatten()[self.at.to(self.leaf.device)])

    def apart(self) -> torch.Tensor:
        """The numbers that are further apart. Two that are not finite are the same, and so is what is too large."""
        info = torch.finfo(self.dtype)
        beyond = ~self.expected.isfinite() | (self.expected.abs() > unit(self.dtype) * info.max)
        off = (self.found - self.expected).abs().nan_to_num(float("inf")) > self.allowed + info.tiny
        return off & ~(beyond & ~self.found.isfinite())

    def called(self, worst: int) -> str:
        """The name of one of the numbers."""
        place = torch.unravel_index(self.at.flatten()[worst], self.leaf.shape)
        return self.path + (f"[{', '.join(str(int(i)) for i in place)}]" if place else "")


OUTPUTS, LOSSES, MODEL, WHOLE = "outputs", "losses", "a model", "a loss"
"""Results for which f is run: its outputs, given apart from their loss or found in f; the losses of the samples; the
outputs of a model function, which has no loss; the loss as one number."""


@dataclass
class CheckedCall:
    """A call of f, which is run anew for each way to look at it, with the same random numbers."""

    problem: BoundProblem
    before: States
    """The states of generators before the result was computed."""

    def loop(self, of: str, places: Tensors | None = None) -> Any:
        """The loop of what f is run for, in all parameters, or at some entries of each."""
        from invfunc.testing.oracles import Loop, at_entries  # which comes with all laws

        p, mode = self.problem, TwiceDifferentiable()
        leaves = [x.detach().clone().requires_grad_() for x in p.leaves] if places is None else p.leaves
        leaves, params = (leaves, leaves) if places is None else at_entries(leaves, places)
        trees = tree.unflatten(params, p.structure)

        def call(args: Sequence[Any], watch: AbstractContextManager | None = None) -> Any:
            set_states(self.before)
            given = [trees[p.argnums.index(i)] if i in p.argnums else args[i] for i in p.inputs]
            with sdpa_kernel(SDPBackend.MATH), mode, watch or nullcontext():
                result = p.f(*given, **p.kwargs)
            return with_aux(result)[0] if p.has_aux else result

        def loop(z: Tensors, loss: torch.Tensor | None = None, n: int = p.n, dim: int = 0) -> Loop:
            return Loop(leaves, z, loss, n, dim, by_columns=True, back=mode.back)

        if p.loss is not None:
            z, form = tree.separate(call(p.args))
            z = [x.view_as(x) for x in z]  # one output may have been computed from another
            with mode:
                value = p.loss(form.join(z), p.args[-1]).sum()
            return loop([value.reshape(1)], n=1) if of == WHOLE else loop(z, value, dim=p.out_dims)
        if of == OUTPUTS:
            finder = Finder()
            with marked_for(finder):
                found = call(p.args, finder)
            return loop([r.value for r in finder.found(found, params)], found.sum())
        found = call(p.args)
        if of == MODEL:
            return loop(tree.tensors(found), dim=p.out_dims)
        if of == WHOLE or found.ndim:
            return loop([found.sum().reshape(1)], n=1) if of == WHOLE else loop([found])
        drew = any(not torch.equal(then, state_of(g)) for g, then in self.before)
        try:
            outputs = self.loop(OUTPUTS, places)
        except SplitError:
            outputs = None
        if outputs is not None and outputs.n == p.n:
            return outputs
        if drew:
            raise RandomnessError(
                "f draws random numbers, and would draw others for single samples. Return the [N] losses, or give the "
                "model and the loss apart."
            )
        each = torch.stack([call(p.chunk(slice(n, n + 1), 1).args).reshape(()) for n in range(p.n)])
        scale = float(each.detach().abs().sum()) * torch.finfo(found.dtype).eps ** 0.5
        for z in (each, each / p.n):  # the loss of the batch is their sum, or their mean
            if not float((z.sum() - found).detach().abs()) > scale:
                return loop([z])
        raise SplitError(
            "the loss is neither the sum nor the mean of its values for single samples, and the outputs of the model "
            "are not known. Return the [N] losses, mark the outputs (`outputs(z)`), or give the model and loss apart."
        )


def drawn(sizes: Sequence[torch.Tensor], k: int, generator: torch.Generator) -> Tensors:
    """Places in each of some tensors: k of all evenly, and k by the sizes of the entries; all where there are few."""
    counts = [x.numel() for x in sizes]
    if sum(counts) <= k:
        return [torch.arange(n) for n in counts]
    flat = torch.cat([wide(x).abs().nan_to_num(0, 0, 0).flatten() for x in sizes])
    places = torch.randint(len(flat), (k,), generator=generator)
    if flat.any():
        at = torch.rand(k, generator=generator, dtype=torch.float64) * flat.sum()
        places = torch.cat([places, torch.searchsorted(flat.cumsum(0), at, right=True).clamp(max=len(flat) - 1)])
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[places] = True
    return [part.nonzero().squeeze(1) for part in chosen.split(counts)]


Sized = tuple[torch.Tensor, float]
"""Numbers, with the size of what is added up in them."""


def each(g: torch.Tensor, reduction: Any, error: float) -> list[Sized]:
    """The numbers of each sample."""
    return [(g, 0.0)]


def summed(g: torch.Tensor, reduction: Any, error: float) -> list[Sized]:
    """The sum over the samples; errors of its terms are independent."""
    return [(g.sum(0), largest(g.square().sum(0)) ** 0.5)]


def variance(g: torch.Tensor, reduction: Any, error: float) -> list[Sized]:
    """The variance, in which squares of numbers with an error cancel."""
    centred = g - g.mean(0)
    return [(centred.square().sum(0) / (len(g) - reduction.correction), largest(g) ** 2 * error)]


ENTRYWISE: dict[type, Callable[[torch.Tensor, Any, float], list[Sized]]] = {
    **dict.fromkeys((EachSample, SquaresOfEach, SquareRoot, JacobianRows), each),
    **dict.fromkeys((SumOfSquares, ClippedSum), summed),
    CentredSquares: variance,
    SumAndCentredSquares: lambda *given: summed(*given) + variance(*given),
}
"""The numbers of each result at some entries, of what each sample has there, `[N, k]`."""
LOOKS = {*ENTRYWISE, SquaredNorms, ClippedSum, InnerProducts, ProductsWithOthers}
"""The reductions that have loops."""


@dataclass
class Certificate:
    """One statistic with its result, and what is looked at of it."""

    t: Statistic
    call: CheckedCall
    leaves: dict[str, torch.Tensor]
    """The leaves of the result by their names."""
    k: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.problem, self.reduction = self.call.problem, self.t.reduction
        self.params = self.problem.leaves
        self.chosen = torch.arange(self.problem.n)
        if self.problem.samples is not None:
            self.chosen = torch.tensor(self.problem.samples)
        self.dtype = max((x.dtype for x in self.params), key=lambda d: torch.finfo(d).eps)

    def looks(self) -> Iterator[Look]:
        """Looks at the numbers that its reduction has."""
        kind, leaves = type(self.reduction), self.leaves
        if kind is SquareRoot:  # the columns are those of any root
            leaves = {f"({path} ** 2).sum(0)": wide(x).square().sum(0) for path, x in leaves.items()}
        if kind is ClippedSum:
            *sums, norms = leaves
            yield from self.norms({norms: leaves[norms]})
            leaves = {path: leaves[path] for path in sums}
        if kind in ENTRYWISE:
            yield from self.entries(leaves)
        elif issubclass(kind, InnerProducts):
            yield from self.products()
        else:
            yield from self.norms(leaves)

    def samples(self, x: torch.Tensor) -> torch.Tensor:
        """The samples that were chosen, of what each of the batch has."""
        if len(x) < self.problem.n:
            raise SplitError(
                "the outputs that are found in f have no sample each along axis 0, so that no loop of single samples "
                "is known. Give the model and the loss apart."
            )
        return x[self.chosen]

    def at(self, places: Tensors) -> Tensors:
        """The numbers of each sample at some entries, `[N, entries]`, or those of each output, `[N, *out, entries]`."""
        kind, reduction, loop_of = self.t.kind, self.reduction, self.call.loop
        if type(reduction) is JacobianRows:
            loop = loop_of(MODEL, places)
            outputs = zip(*loop.columns(), strict=True)
            return [torch.stack([wide(t.movedim(loop.dim, 0))[self.chosen] for t in each], -1) for each in outputs]
        if kind.first_order:
            found = self.samples(loop_of(LOSSES, places).shares())
            if type(reduction) is ClippedSum:
                norms = wide([*self.leaves.values()][-1])
                bound = torch.as_tensor(reduction.max_norm, dtype=torch.float64)
                found = found / (norms / wide(bound)).clamp(min=1)[:, None]
            return [found.square() if type(reduction) is SumOfSquares else found]
        together = type(reduction) is SumOfSquares and self.problem.samples is None  # need not be told apart
        if kind.second_order:
            found = loop_of(WHOLE if together else LOSSES, places).hessian()
        else:
            found = loop_of(OUTPUTS, places).ggn()
        return [found if together else self.samples(found)]

    def entries(self, results: dict[str, torch.Tensor]) -> Iterator[Look]:
        """Leaves `[*lead, *p]` of one or several trees at drawn entries."""
        count, of = len(self.params), ENTRYWISE[type(self.reduction)]
        paths, found = list(results), list(results.values())
        sizes = []
        for i, p in enumerate(self.params):
            rows = [wide(x).abs().reshape(x.shape[: x.ndim - p.ndim].numel(), p.numel()) for x in found[i::count]]
            sizes.append(torch.cat(rows).sum(0))
        places = drawn(sizes, self.k, self.generator)
        outputs = zip(*(g.split([*map(len, places)], -1) for g in self.at(places)), strict=True)
        for i, (p, at, parts) in enumerate(zip(self.params, places, outputs, strict=True)):
            numbers = [n for g in parts for n in of(g.detach(), self.reduction, unit(self.dtype))] if len(at) else []
            for path, x, (expected, size) in zip(paths[i::count], found[i::count], numbers, strict=False):
                lead = expected.shape[:-1]
                self.check_shape(path, x, (*lead, *p.shape))
                where = torch.arange(lead.numel()).reshape(*lead, 1) * p.numel() + at
                yield Look(path, x, where, expected, self.dtype, size)

    def check_shape(self, path: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
        if x.shape != shape:
            raise CertificateError(f"{path} has shape {tuple(x.shape)}, but by plain loops it is {shape}.")

    def share(self, loop: Any, n: int) -> Tensors:
        """The gradient of one of the chosen samples."""
        self.samples(torch.zeros(loop.n))
        return loop.share(int(self.chosen[n]))

    def norms(self, results: dict[str, torch.Tensor]) -> Iterator[Look]:
        """Norms of shares `[n]`, each beside a backward pass of its sample alone; one is that of all parameters."""
        (at,), loop = (
            drawn([torch.stack([*map(wide, results.values())]).sum(0)], self.k, self.generator),
            self.call.loop(LOSSES),
        )
        squares = [torch.stack([wide(g).square().sum() for g in self.share(loop, n)]) for n in at.tolist()]
        expected = torch.stack(squares, 1)
        expected = expected.sum(0, keepdim=True).sqrt() if type(self.reduction) is ClippedSum else expected
        for path, y in zip(results, expected, strict=True):
            self.check_shape(path, results[path], (len(self.chosen),))
            yield Look(path, results[path], at, y, self.dtype)

    def products(self) -> Iterator[Look]:
        """Rows of Gram matrices: what is pulled back of one sample, or of one output of it, sent along all."""
        reduction = self.reduction
        assert isinstance(reduction, InnerProducts)
        flat = [wide(x).flatten(0, x.ndim // 2 - 1).flatten(1) for x in self.leaves.values()]
        outputs = next(iter(self.leaves.values())).shape
        outputs = outputs[1 : len(outputs) // 2]
        sizes = torch.stack([x.square().sum(1) if reduction.others else x.diagonal() for x in flat]).sum(0)
        (at,), loop = drawn([sizes], self.k, self.generator), self.call.loop(MODEL if outputs else LOSSES)

        def row(k: int) -> Tensors:
            """The products of row k with all, in all parameters, or in each."""
            if outputs:
                c = torch.zeros_like(loop.z[0].movedim(loop.dim, 0), memory_format=torch.contiguous_format)
                c[self.chosen[k // outputs.numel()]].view(-1)[k % outputs.numel()] = 1
                found = loop.back([c.movedim(0, loop.dim)])
            else:
                found = self.share(loop, k)
            alone = [[x if i == j else None for j, x in enumerate(found)] for i in range(len(found))]
            along = [loop.forth(v) for v in ([found] if reduction.whole else alone)]
            each = [t[0].movedim(loop.dim, 0) if outputs else loop.paired(t, loop.slope) for t in along]
            return [wide(x)[self.chosen].flatten() for x in each]

        for path, x, expected in zip(self.leaves, flat, zip(*map(row, at.tolist()), strict=True), strict=True):
            width = x.shape[1]
            places = at[:, None] * width + torch.arange(width)
            yield Look(path, self.leaves[path], places, torch.stack(expected)[:, -width:], self.dtype)


def _named(result: Any) -> dict[str, torch.Tensor]:
    return {f"result{path}": x for path, x in tree.named_leaves(result, none_is_leaf=False)}


def looks_at_statistic(t: Statistic, result: Any, call: CheckedCall, k: int, generator: torch.Generator) -> list[Look]:
    """Looks at the results of a statistic, or of several."""
    if t.has_aux:
        result = result[:-1] if t.several else result[0]
    looks, left = [], _named(result)
    for m, x in zip(t.members, result, strict=True) if t.members else [(t, result)]:
        own = {path: left.pop(path) for path in list(left)[: len(tree.flatten(x, none_is_leaf=False)[0])]}
        looks += Certificate(m, call, own, k, generator).looks()
    return looks


PRODUCTS: dict[Callable, str] = {of_hessian: WHOLE, of_ggn: OUTPUTS, of_fisher: LOSSES}
"""The matrices of which products have loops, and what f is run for."""


def looks_at_product(t: Product, result: Any, args: tuple, kwargs: dict, names: Any, before: States) -> list[Look]:
    """All entries of a product with a Hessian, a GGN or an empirical Fisher matrix, or with blocks of these."""
    kind = t.record
    params, batch = args[0], (args[0], *args[2:])
    if kind is of_fisher:
        given = problem(t.f, t.loss, batch, kwargs, 0, t.in_dims, t.out_dims, t.has_aux, names.without_vector)
    else:
        leaves, structure = tree.flatten([params], none_is_leaf=False)
        given = BoundProblem(t.f, t.loss, batch, kwargs, (0,), False, t.has_aux, t.out_dims, leaves, structure, {}, 1)
    loop = CheckedCall(given, before).loop(PRODUCTS[kind])

    def times(v: Sequence[torch.Tensor | None]) -> Tensors:
        if kind is of_hessian:
            return loop.pulled(loop.rows, loop.leaves, v)
        u = loop.forth(v)
        return loop.back(loop.weighed(loop.paired(u, loop.slope)) if kind is of_fisher else loop.bent(u))

    by_path = dict(tree.named_leaves(args[1], none_is_leaf=False))  # a dict may have its keys in another order
    v = [by_path[path] for path, _ in tree.named_leaves(params, none_is_leaf=False)]
    if t.lead:
        alone = [[[x if i == j else None for j in range(len(v))] for x in each] for i, each in enumerate(v)]
        expected = [torch.stack([times(one)[i] for one in several]) for i, several in enumerate(alone)]
    else:
        expected = times(v)
    found = _named(result[0] if t.has_aux else result).items()
    whole = zip(found, expected, given.leaves, strict=True)
    return [Look(path, x, torch.arange(x.numel()), wide(y).flatten(), p.dtype) for (path, x), y, p in whole]
