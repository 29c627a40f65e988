"""The plain loops of a call: f is run once more, and torch.autograd pulls one vector back at a time.

There are no rules of operations, no structure and no batches of vectors here: a Jacobian times a vector is the
derivative of `u -> J^T u`, a Hessian times a vector a second backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc._torch.generators import set_states, state_of
from invfunc.arguments.problem import BoundProblem, problem, with_aux
from invfunc.core.split import Finder, marked_for
from invfunc.errors import RandomnessError, SplitError
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.products.curvature import of_fisher, of_ggn, of_hessian
from invfunc.products.product import Product
from invfunc.reductions.gradients import CentredSquares, ClippedSum, EachSample, SquaredNorms, SumAndCentredSquares
from invfunc.reductions.squares import (
    InnerProducts,
    JacobianRows,
    ProductsWithOthers,
    SquareRoot,
    SquaresOfEach,
    SumOfSquares,
)
from invfunc.statistic import Statistic

Tensors = list[torch.Tensor]
Vector = Sequence[torch.Tensor | None]
"""A tensor for each leaf; None stands for zeros."""
States = list[tuple[torch.Generator, torch.Tensor]]


UNITS = {torch.float64: 2**26, torch.float32: 2**5, torch.float16: 2**2, torch.bfloat16: 2**2}
"""Units in the last place that rounding may take: of half precision, which has few of them, less."""


def unit(dtype: torch.dtype) -> float:
    """The relative error of a number."""
    return torch.finfo(dtype).eps * UNITS[dtype]


def largest(x: torch.Tensor) -> float:
    """The size of the largest number that is finite."""
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


def wide(x: torch.Tensor) -> torch.Tensor:
    """The numbers on the CPU and in float64, where they are compared."""
    return x.detach().cpu().double()


class Loop:
    """One run of f from parameters to `z`, its outputs or losses, with derivatives of these and of their loss."""

    def __init__(self, call: CheckedCall, z: Tensors, loss: torch.Tensor | None, n: int, dim: int = 0) -> None:
        """`loss` is a function of z; None where z are losses themselves. Samples are along an axis of z."""
        self.leaves, self.mode, self.z, self.dim = call.leaves, call.mode, z, dim
        apart = all(-x.ndim <= dim < x.ndim and x.shape[dim] == n for x in z)
        self.n = n if apart else 1
        """The number of samples that z tells apart."""
        ones = [torch.ones_like(x) for x in z]
        self.slope = ones if loss is None else self.pulled([loss], z, [torch.ones_like(loss)], again=True)
        self.dummies = [x.requires_grad_() for x in map(torch.ones_like, z)]
        self.rows = self.pulled(z, self.leaves, self.dummies, again=True)

    def pulled(self, ys: Sequence[torch.Tensor], xs: Tensors, cotangents: Vector, again: bool = False) -> Tensors:
        """A vector-Jacobian product; with `again`, it is differentiated further."""
        pairs = [(y, c.to(y)) for y, c in zip(ys, cotangents, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in xs]
        y, c = zip(*pairs, strict=True)
        options = {"retain_graph": True, "create_graph": again, "materialize_grads": True}
        with self.mode.back(xs[0].device):
            return list(torch.autograd.grad(y, xs, c, **options))

    def unit(self, leaf: int, place: int) -> Vector:
        """The vector with a one at an entry of a leaf."""
        one = torch.zeros_like(self.leaves[leaf], memory_format=torch.contiguous_format)
        one.view(-1)[place] = 1
        return [one if i == leaf else None for i in range(len(self.leaves))]

    def forth(self, v: Vector) -> Tensors:
        """`J v`"""
        return self.pulled(self.rows, self.dummies, v)

    def back(self, cotangents: Tensors) -> Tensors:
        """`J^T c`"""
        return self.pulled(self.z, self.leaves, cotangents)

    def bent(self, t: Tensors) -> Tensors:
        """`H t`, with the Hessian of the loss in z."""
        return self.pulled(self.slope, self.z, t)

    def paired(self, a: Tensors, b: Tensors) -> torch.Tensor:
        """The inner products of what each sample has at z, `[N]`."""
        pairs = zip(a, b, strict=True)
        return torch.stack([(self._flat(x) * self._flat(y)).sum(1) for x, y in pairs]).sum(0)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        return wide(x if self.n == 1 else x.movedim(self.dim, 0)).reshape(self.n, -1)

    def weighed(self, weights: torch.Tensor) -> Tensors:
        """The gradient of the loss in z, as if it were constant there, times a weight for each sample."""
        own, dim = [c.detach() for c in self.slope], self.dim
        if self.n == 1:
            return [weights.to(c) * c for c in own]
        return [(weights.to(c) * c.movedim(dim, -1)).movedim(-1, dim) for c in own]

    def share(self, v: Vector) -> torch.Tensor:
        """The derivative along v of the loss of each sample."""
        return self.paired(self.forth(v), self.slope)

    def ggn(self, v: Vector, other: Vector | None = None) -> torch.Tensor:
        """`v^T J[n]^T H[n] J[n] v` of each sample, or with another vector at its end."""
        t = self.forth(v)
        return self.paired(t if other is None else self.forth(other), self.bent(t))

    @cached_property
    def _weights(self) -> torch.Tensor:
        return torch.ones(self.n, dtype=torch.float64, requires_grad=True)

    @cached_property
    def _slopes(self) -> Tensors:
        """The gradient of the weighted losses in the parameters, where the loss is as if it were linear in z."""
        return self.pulled(self.z, self.leaves, self.weighed(self._weights), again=True)

    def hessian(self, leaf: int, place: int) -> torch.Tensor:
        """The second derivative along an entry of the loss of each sample: of the loss in z, and of z."""
        slope = self._slopes[leaf].flatten()[place]
        (twice,) = self.pulled([slope], self.leaves[leaf : leaf + 1], [torch.ones_like(slope)], again=True)
        twice = twice.flatten()[place]
        (each,) = self.pulled([twice], [self._weights], [torch.ones_like(twice)])
        return wide(each) + self.ggn(self.unit(leaf, place))


@dataclass
class CheckedCall:
    """A call of f, which is run anew for each way to look at it, with the same random numbers."""

    problem: BoundProblem
    before: States
    """The states of generators before the result was computed."""
    result: Any = None
    """The result of f in the last run."""

    def __post_init__(self) -> None:
        self.mode: Any = nullcontext()
        """Replaces operations by forms that have a second derivative."""
        self.leaves: Tensors = []

    def _run(self, watch: AbstractContextManager | None = None) -> Any:
        self.leaves = [p.detach().clone().requires_grad_() for p in self.problem.leaves]
        self.mode = TwiceDifferentiable()
        set_states(self.before)
        self.result = self.of(self.problem.args, watch)
        return self.result

    def of(self, args: Sequence[Any], watch: AbstractContextManager | None = None) -> Any:
        """The result of f for other data, without aux."""
        p, trees = self.problem, tree.unflatten(self.leaves, self.problem.structure)
        given = [trees[p.argnums.index(i)] if i in p.argnums else args[i] for i in p.inputs]
        with sdpa_kernel(SDPBackend.MATH), self.mode, watch or nullcontext():
            result = p.f(*given, **p.kwargs)
        return with_aux(result)[0] if p.has_aux else result

    def _lost(self, z: Any) -> torch.Tensor:
        """The loss of outputs, summed."""
        loss = self.problem.loss
        assert loss is not None
        with self.mode:
            return loss(z, self.problem.args[-1]).sum()

    @cached_property
    def outputs(self) -> Loop:
        """The outputs of the model, given apart from its loss or found in f."""
        p = self.problem
        if p.loss is not None:
            z = self._run()
            return Loop(self, tree.tensors(z), self._lost(z), p.n, p.out_dims)
        finder = Finder()
        with marked_for(finder):
            found = self._run(finder)
        return Loop(self, [r.value for r in finder.found(found, self.leaves)], found.sum(), p.n)

    @cached_property
    def model(self) -> Loop:
        """The outputs of a model function, which has no loss."""
        return Loop(self, tree.tensors(self._run()), None, self.problem.n, self.problem.out_dims)

    @cached_property
    def whole(self) -> Loop:
        """The loss as one number."""
        z = self._run()
        return Loop(self, [(z.sum() if self.problem.loss is None else self._lost(z)).reshape(1)], None, 1)

    @cached_property
    def losses(self) -> Loop:
        """The losses of the samples: `[N]`, or those of outputs, or those of a scalar f of single samples."""
        if self.problem.loss is not None:
            return self.outputs
        z = self._run()
        if z.ndim:
            return Loop(self, [z], None, self.problem.n)
        try:
            found = self.outputs
        except SplitError:
            return self._alone()
        return found if found.n == self.problem.n else self._alone()

    def _alone(self) -> Loop:
        """The losses of single samples, of which that of the batch is the sum or the mean."""
        p, whole = self.problem, self._run()
        if any(not torch.equal(then, state_of(g)) for g, then in self.before):
            raise RandomnessError(
                "f draws random numbers, and would draw others for single samples. Return the [N] losses, or give the "
                "model and the loss apart."
            )
        each = torch.stack([self.of(p.chunk(slice(n, n + 1), 1).args).reshape(()) for n in range(p.n)])
        scale = float(each.detach().abs().sum()) * torch.finfo(whole.dtype).eps ** 0.5
        for z in (each, each / p.n):
            if not float((z.sum() - whole).detach().abs()) > scale:
                return Loop(self, [z], None, p.n)
        raise SplitError(
            "the loss is neither the sum nor the mean of its values for single samples, and the outputs of the model "
            "are not known. Return the [N] losses, mark the outputs (`outputs(z)`), or give the model and loss apart."
        )


@dataclass
class EntryLook:
    """Numbers of a result, along axis 0 those of an entry each, and the same ones by plain loops."""

    found: torch.Tensor
    expected: torch.Tensor
    called: Callable[..., str]
    """The name of the number at an index."""
    dtype: torch.dtype
    size: float = 0.0
    """The size of what is added up in them, where that may cancel."""
    other: str = "by plain loops"
    allowed: float = 0.0
    """The distance that is allowed."""

    def apart(self) -> torch.Tensor:
        """The numbers that are further apart. Two that are not finite are the same, and so is what is too large."""
        info = torch.finfo(self.dtype)
        beyond = ~self.expected.isfinite() | (self.expected.abs() > unit(self.dtype) * info.max)
        off = (self.found - self.expected).abs().nan_to_num(float("inf")) > self.allowed + info.tiny
        return off & ~(beyond & ~self.found.isfinite())


class Draw(NamedTuple):
    """A number of entries that are drawn evenly, a seed, and states of generators before the result was computed."""

    k: int
    seed: int
    before: States


def entry(name: str, shape: Sequence[int], place: int) -> str:
    """The name of an entry of a tensor of this name."""
    at = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), tuple(shape)))
    return name + (f"[{at}]" if at else "")


def drawn(sizes: Sequence[torch.Tensor], k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Places in each of some tensors: k of all evenly, and k by the sizes of the entries; all where there are few."""
    counts = [x.numel() for x in sizes]
    if sum(counts) <= k:
        return [torch.arange(n) for n in counts]
    flat = torch.cat([wide(x).abs().nan_to_num(0, 0, 0).flatten() for x in sizes])
    places = torch.randint(len(flat), (k,), generator=generator)
    ends = flat.cumsum(0)
    if ends[-1] > 0:
        at = torch.rand(k, generator=generator, dtype=torch.float64) * ends[-1]
        places = torch.cat([places, torch.searchsorted(ends, at, right=True).clamp(max=len(flat) - 1)])
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[places] = True
    return [part.nonzero().squeeze(1) for part in chosen.split(counts)]


def _summed(terms: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The sum over the samples, with the size of what is added up: errors of it are independent."""
    return terms.sum(0), largest(terms.square().sum(0)) ** 0.5


@dataclass
class Certificate:
    """One statistic with its result, and what is looked at of it."""

    t: Statistic
    call: CheckedCall
    leaves: Tensors
    """The leaves of the result."""
    k: int
    generator: torch.Generator
    of: str = ""
    """Words behind the names of its numbers."""

    def __post_init__(self) -> None:
        p = self.call.problem
        self.problem, self.params, self.reduction = p, p.leaves, self.t.reduction
        self.chosen = torch.arange(p.n) if p.samples is None else torch.tensor(p.samples)
        self.dtype = max((x.dtype for x in p.leaves), key=lambda d: torch.finfo(d).eps)

    def looks(self) -> Iterator[EntryLook]:
        """Looks at the numbers that its reduction has."""
        return LOOKS[type(self.reduction)](self)

    def look(
        self, found: torch.Tensor, expected: torch.Tensor, called: Callable[..., str], size: float = 0.0
    ) -> EntryLook:
        return EntryLook(wide(found), wide(expected), lambda *at: called(*at) + self.of, self.dtype, size)

    def samples(self, x: torch.Tensor) -> torch.Tensor:
        """The samples that were chosen, of what each of the batch has."""
        if len(x) < self.problem.n:
            raise SplitError(
                "the outputs that are found in f have no sample each along axis 0, so that no loop of single samples "
                "is known. Give the model and the loss apart."
            )
        return x[self.chosen]

    def entry(self, leaf: int, place: int) -> str:
        return entry(self.problem.name(leaf), self.params[leaf].shape, place)

    def sample(self, *at: int) -> str:
        """Whose number it is: of a sample, and of which of its outputs."""
        output = f", output {', '.join(map(str, at[1:]))}" if at[1:] else ""
        return f" of sample {int(self.chosen[at[0]])}{output}" if at else ""

    def places(self, trees: Sequence[Tensors]) -> list[torch.Tensor]:
        """Entries of the parameters, drawn evenly and by the size of what the results have there."""
        each = zip(*trees, strict=True)

        def size(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            lead = x.shape[: x.ndim - p.ndim].numel()
            return wide(x).abs().nan_to_num(0, 0, 0).reshape(lead, p.numel()).sum(0)

        sizes = [torch.stack([size(x, p) for x in leaves]).sum(0) for leaves, p in zip(each, self.params, strict=True)]
        return drawn(sizes, self.k, self.generator)

    def at_entries(self, trees: Sequence[Tensors], numbers: Callable[[int, int], list]) -> Iterator[EntryLook]:
        """Leaves `[*lead, *p]` of some trees at drawn entries; `numbers(leaf, place)` are `[*lead]` for each tree, with
        their size where they are sums."""
        for i, (p, at) in enumerate(zip(self.params, self.places(trees), strict=True)):
            if not len(at):
                continue
            each = zip(*(numbers(i, place) for place in at.tolist()), strict=True)
            for leaves, expected in zip(trees, each, strict=True):
                lead = leaves[i].shape[: leaves[i].ndim - p.ndim]
                found = leaves[i].reshape(*lead, p.numel())[..., at.to(p.device)].movedim(-1, 0)
                sizes = [x[1] for x in expected if isinstance(x, tuple)]
                values = torch.stack([x[0] if isinstance(x, tuple) else x for x in expected])
                called = lambda j, *more, i=i, at=at: self.entry(i, int(at[j])) + self.sample(*more)  # noqa: E731
                yield self.look(found, values, called, max(sizes, default=0.0))

    # Numbers at an entry

    def share(self, leaf: int, place: int) -> torch.Tensor:
        """`G[n]`"""
        loop = self.call.losses
        return self.samples(loop.share(loop.unit(leaf, place)))

    def summed_share(self, leaf: int, place: int) -> tuple[torch.Tensor, float]:
        """The gradient."""
        return _summed(self.share(leaf, place))

    def variance(self, leaf: int, place: int) -> tuple[torch.Tensor, float]:
        """The variance, with the size of what cancels in it."""
        g = self.share(leaf, place)
        assert isinstance(self.reduction, CentredSquares)
        found = (g - g.mean(0)).square().sum(0) / (len(g) - self.reduction.correction)
        return found, float(g.abs().nan_to_num(0, 0, 0).max()) ** 2 * unit(self.dtype)

    def square(self, leaf: int, place: int) -> torch.Tensor:
        """The part of each sample in a diagonal."""
        kind = self.t.kind
        if kind.first_order:
            return self.share(leaf, place).square()
        if kind.second_order:
            return self.samples(self.call.losses.hessian(leaf, place))
        loop = self.call.outputs
        return self.samples(loop.ggn(loop.unit(leaf, place)))

    def squares(self, leaf: int, place: int) -> tuple[torch.Tensor, float]:
        """A diagonal; where all samples are added up, they need not be told apart."""
        kind, loop = self.t.kind, self.call
        if kind.first_order or self.problem.samples is not None:
            return _summed(self.square(leaf, place))
        if kind.second_order:
            return _summed(loop.whole.hessian(leaf, place))
        return _summed(loop.outputs.ggn(loop.outputs.unit(leaf, place)))

    # Looks at a reduction

    def each_sample(self) -> Iterator[EntryLook]:
        yield from self.at_entries([self.leaves], lambda *e: [self.share(*e)])
        sizes = [wide(x).square().sum(0) for x in self.leaves]
        yield from self.gradient([x.sum(0) for x in self.leaves], sizes, "the sum over the samples of ")

    def gradient(self, sums: Tensors, squares: Tensors, what: str = "") -> Iterator[EntryLook]:
        """All entries of the gradient, beside one backward pass."""
        loop, counts = self.call.losses, torch.bincount(self.chosen, minlength=self.problem.n)
        for i, (x, expected) in enumerate(zip(sums, loop.back(loop.weighed(counts)), strict=True)):
            called = lambda k, i=i: what + self.entry(i, k)  # noqa: E731
            yield self.look(x.flatten(), expected.flatten(), called, largest(squares[i]) ** 0.5)

    def moments(self) -> Iterator[EntryLook]:
        yield from self.at_entries([self.leaves], lambda *e: [self.variance(*e)])

    def sum_and_moments(self) -> Iterator[EntryLook]:
        half, n = len(self.params), len(self.chosen)
        trees = [self.leaves[:half], self.leaves[half:]]
        yield from self.at_entries(trees, lambda *e: [self.summed_share(*e), self.variance(*e)])
        yield from self.gradient(trees[0], [s.square() / n + n * v for s, v in zip(*trees, strict=True)])

    def diagonal(self) -> Iterator[EntryLook]:
        yield from self.at_entries([self.leaves], lambda *e: [self.squares(*e)])

    def diagonals(self) -> Iterator[EntryLook]:
        yield from self.at_entries([self.leaves], lambda *e: [self.square(*e)])

    def jacobian(self) -> Iterator[EntryLook]:
        loop, count = self.call.model, len(self.params)
        trees = [self.leaves[i : i + count] for i in range(0, len(self.leaves), count)]

        def numbers(leaf: int, place: int) -> Tensors:
            return [wide(t.movedim(loop.dim, 0))[self.chosen] for t in loop.forth(loop.unit(leaf, place))]

        yield from self.at_entries(trees, numbers)

    def root(self) -> Iterator[EntryLook]:
        """Products of the columns at pairs of entries: each with itself, and with the one that is drawn next."""
        places = [(i, place) for i, of in enumerate(self.places([self.leaves])) for place in of.tolist()]
        pairs = [*zip(places, places, strict=True), *zip(places, [*places[1:], *places[:1]], strict=True)]
        rows = {(i, k): self.leaves[i].reshape(*self.leaves[i].shape[:2], -1)[..., k] for i, k in places}
        loop = self.call.outputs
        found = torch.stack([(wide(rows[a]) * wide(rows[b])).sum(0) for a, b in pairs])
        expected = [self.samples(loop.ggn(loop.unit(*a), None if a == b else loop.unit(*b))) for a, b in pairs]

        def called(j: int, n: int) -> str:
            a, b = pairs[j]
            what = "squared and" if a == b else f"times {self.entry(*b)},"
            return f"{self.entry(*a)}, {what} summed over what is pulled back,{self.sample(n)}"

        yield self.look(found, torch.stack(expected), called)

    def norms(self) -> Iterator[EntryLook]:
        yield from self.norms_of(self.leaves, torch.stack([wide(x) for x in self.leaves]).sum(0))

    def norms_of(self, found: Tensors, sizes: torch.Tensor) -> Iterator[EntryLook]:
        """Norms of shares `[n]`, each beside a backward pass of its sample alone; one is that of all parameters."""
        (at,), loop = drawn([sizes], self.k, self.generator), self.call.losses
        self.samples(torch.zeros(loop.n))
        each = [loop.back(loop.weighed(self.one_hot(n))) for n in at.tolist()]
        squares = [torch.stack([wide(x).square().sum() for x in leaf]) for leaf in zip(*each, strict=True)]
        squares = squares if len(found) == len(squares) > 1 else [torch.stack(squares).sum(0)]
        for i, (x, y) in enumerate(zip(found, squares, strict=True)):
            whole = type(self.reduction) is ClippedSum
            name = "the norm" if whole else self.problem.name(i)
            called = lambda k, name=name: name + self.sample(int(at[k]))  # noqa: E731
            yield self.look(x[at], y.sqrt() if whole else y, called)

    def one_hot(self, row: int) -> torch.Tensor:
        """Weights `[N]` that are 1 for one of the chosen samples."""
        return torch.nn.functional.one_hot(self.chosen[row], self.problem.n)

    def clipped(self) -> Iterator[EntryLook]:
        assert isinstance(self.reduction, ClippedSum)
        sums, norms = self.leaves[:-1], wide(self.leaves[-1])
        scales = (
            (norms / torch.as_tensor(self.reduction.max_norm, dtype=torch.float64).detach().cpu())
            .clamp(min=1)
            .reciprocal()
        )
        yield from self.norms_of(self.leaves[-1:], norms.square())
        yield from self.at_entries([sums], lambda *e: [_summed(self.share(*e) * scales)])

    def products(self) -> Iterator[EntryLook]:
        """Rows of Gram matrices: what is pulled back of one sample, or of one output of it, sent along all."""
        assert isinstance(self.reduction, InnerProducts)
        whole, others = self.reduction.whole, self.reduction.others
        flat = [wide(x).flatten(0, x.ndim // 2 - 1).flatten(1) for x in self.leaves]
        outputs = self.leaves[0].shape[1 : self.leaves[0].ndim // 2]
        sizes = torch.stack([x.square().sum(1) if others else x.diagonal() for x in flat]).sum(0)
        (at,) = drawn([sizes], self.k, self.generator)
        expected = [self.row(int(k), outputs, whole) for k in at]

        def place(k: int) -> list[int]:
            return [int(i) for i in torch.unravel_index(torch.tensor(k), (len(self.chosen), *outputs))]

        def called(k: int, other: int, leaf: int) -> str:
            name = "" if whole else self.problem.name(leaf) + ", "
            first = len(self.chosen) * math.prod(outputs) - flat[0].shape[1] if others else 0
            return f"{name}the product{self.sample(*place(k))} and{self.sample(*place(first + other))}"

        for i, x in enumerate(flat):
            rows = torch.stack([row[i][-x.shape[1] :] for row in expected])
            yield self.look(x[at], rows, lambda k, other, i=i: called(int(at[k]), other, i))
            if not others:
                mirror = lambda k, other, i=i: f"{called(k, other, i)}, beside its mirror image,"  # noqa: E731
                yield self.look(x, x.T, mirror)

    def row(self, k: int, outputs: torch.Size, whole: bool) -> Tensors:
        """The products of row k with all, in all parameters, or in each."""
        each = outputs.numel()
        if outputs:
            loop, (z,) = self.call.model, self.call.model.z
            c = torch.zeros_like(z.movedim(loop.dim, 0), memory_format=torch.contiguous_format)
            c[self.chosen[k // each]].view(-1)[k % each] = 1
            found = loop.back([c.movedim(0, loop.dim)])
        else:
            loop = self.call.losses
            self.samples(torch.zeros(loop.n))
            found = loop.back(loop.weighed(self.one_hot(k)))
        alone = [[x if i == j else None for j, x in enumerate(found)] for i in range(len(found))]

        def along(v: Vector) -> torch.Tensor:
            if not outputs:
                return loop.share(v)[self.chosen]
            return wide(loop.forth(v)[0].movedim(loop.dim, 0))[self.chosen].flatten()

        return [along(found)] if whole else [along(v) for v in alone]


LOOKS: dict[type, Callable[[Certificate], Iterator[EntryLook]]] = {
    EachSample: Certificate.each_sample,
    CentredSquares: Certificate.moments,
    SumAndCentredSquares: Certificate.sum_and_moments,
    SquaredNorms: Certificate.norms,
    ClippedSum: Certificate.clipped,
    InnerProducts: Certificate.products,
    ProductsWithOthers: Certificate.products,
    SumOfSquares: Certificate.diagonal,
    SquaresOfEach: Certificate.diagonals,
    SquareRoot: Certificate.root,
    JacobianRows: Certificate.jacobian,
}
"""The looks at a statistic, by what it keeps."""


PRODUCTS = (of_hessian, of_ggn, of_fisher)
"""The matrices of which products have loops."""


def looks_at(t: Any, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> list[EntryLook]:
    """The numbers of a result of t that are looked at, beside those of loops; those of f itself come last."""
    if isinstance(t, Product):
        call, looks = _of_product(t, result, args, kwargs, names, draw)
    else:
        call, looks = _of_statistic(t, result, args, kwargs, names, draw)
    return [*looks, *_values(call)]


def _of_statistic(
    t: Statistic, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw
) -> tuple[CheckedCall, list[EntryLook]]:
    call, generator = CheckedCall(t.problem(args, kwargs, names), draw.before), torch.Generator().manual_seed(draw.seed)
    if t.has_aux:
        result = result[:-1] if t.several else result[0]
    looks = []
    for m, x in zip(t.members, result, strict=True) if t.members else [(t, result)]:
        leaves = tree.flatten(x, none_is_leaf=False)[0]
        looks += Certificate(m, call, leaves, draw.k, generator, f" of {m.name}" if t.members else "").looks()
    return call, looks


def _of_product(
    t: Product, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw
) -> tuple[CheckedCall, list[EntryLook]]:
    """All entries of a product with a Hessian, a GGN or an empirical Fisher matrix, or with blocks of these."""
    kind = t.record
    params, batch = args[0], (args[0], *args[2:])
    if kind is of_fisher:
        given = problem(t.f, t.loss, batch, kwargs, 0, t.in_dims, t.out_dims, t.has_aux, names.without_vector)
    else:
        leaves, structure = tree.flatten([params], none_is_leaf=False)
        given = BoundProblem(t.f, t.loss, batch, kwargs, (0,), False, t.has_aux, t.out_dims, leaves, structure, {}, 1)
    call = CheckedCall(given, draw.before)
    loop = call.whole if kind is of_hessian else call.losses if kind is of_fisher else call.outputs

    def times(v: Vector) -> Tensors:
        if kind is of_hessian:
            return loop.pulled(loop.rows, loop.leaves, v)
        u = loop.forth(v)
        return loop.back(loop.weighed(loop.paired(u, loop.slope)) if kind is of_fisher else loop.bent(u))

    by_path = dict(tree.named_leaves(args[1], none_is_leaf=False))  # a dict may have its keys in another order
    paths = [path for path, _ in tree.named_leaves(params, none_is_leaf=False)]
    v = [by_path[path] for path in paths]
    expected = times(v) if not t.lead else []
    for i, each in enumerate(v if t.lead else ()):
        none = [None] * len(v)
        expected.append(torch.stack([times([*none[:i], x, *none[i + 1 :]])[i] for x in each]))
    found = tree.flatten(result[0] if t.has_aux else result, none_is_leaf=False)[0]
    looks = []
    for path, p, x, y in zip(paths, given.leaves, found, expected, strict=True):
        x, y = (z.reshape(*z.shape[: t.lead], -1).movedim(-1, 0) for z in (x, y))

        def called(k: int, *vector: int, path: str = path, shape: torch.Size = p.shape) -> str:
            return entry(names[0] + path, shape, k) + "".join(f" of vector {j}" for j in vector)

        looks.append(EntryLook(wide(x), wide(y), called, p.dtype))
    return call, looks


def _values(call: CheckedCall) -> Iterator[EntryLook]:
    """The results of f as it is, beside those in the form in which it is differentiated."""
    form, result = call.mode, call.result
    after = [state_of(g) for g, _ in call.before]
    set_states(call.before)
    call.mode = nullcontext()
    plain = call.of(call.problem.args)
    if form.used and any(not torch.equal(then, state_of(g)) for (g, _), then in zip(call.before, after, strict=True)):
        return  # another form draws other numbers
    for (path, x), y in zip(tree.named_leaves(plain), tree.leaves(result), strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            called = lambda *at, path=path: f"f{path}[{', '.join(map(str, at))}]" if at else f"f{path}"  # noqa: E731
            yield EntryLook(wide(x), wide(y), called, x.dtype, other="in the form in which it is differentiated")
