"""The plain loops of a call: f is run once more, and torch.autograd pulls one vector back at a time.

There are no rules of operations, no structure and no batches of vectors here: a Jacobian times a vector is the
derivative of `u -> J^T u`, a Hessian times a vector a second backward pass.
"""

from __future__ import annotations

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
from invfunc.certificates.loop import Loop, Tensors, Vector, wide
from invfunc.core.columns import Finder, marked_for
from invfunc.errors import CertificateError, RandomnessError, SplitError
from invfunc.operations.forms import TwiceDifferentiable
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

States = list[tuple[torch.Generator, torch.Tensor]]


UNITS = {torch.float64: 2**26, torch.float32: 2**5, torch.float16: 2**2, torch.bfloat16: 2**2}
"""Units in the last place that rounding may take: of half precision, which has few of them, less."""


def unit(dtype: torch.dtype) -> float:
    """The relative error of a number."""
    return torch.finfo(dtype).eps * UNITS[dtype]


def largest(x: torch.Tensor) -> float:
    """The size of the largest number that is finite."""
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0


@dataclass
class CheckedCall:
    """A call of f, which is run anew for each way to look at it, with the same random numbers."""

    problem: BoundProblem
    before: States
    """The states of generators before the result was computed."""

    def __post_init__(self) -> None:
        self.mode: Any = nullcontext()
        """Replaces operations by forms that have a second derivative."""
        self.leaves: Tensors = []

    def _run(self, watch: AbstractContextManager | None = None) -> Any:
        self.leaves = [p.detach().clone().requires_grad_() for p in self.problem.leaves]
        self.mode = TwiceDifferentiable()
        set_states(self.before)
        return self.of(self.problem.args, watch)

    def of(self, args: Sequence[Any], watch: AbstractContextManager | None = None) -> Any:
        """The result of f for other data, without aux."""
        p, trees = self.problem, tree.unflatten(self.leaves, self.problem.structure)
        given = [trees[p.argnums.index(i)] if i in p.argnums else args[i] for i in p.inputs]
        with sdpa_kernel(SDPBackend.MATH), self.mode, watch or nullcontext():
            result = p.f(*given, **p.kwargs)
        return with_aux(result)[0] if p.has_aux else result

    def _loop(self, z: Tensors, loss: torch.Tensor | None, n: int, dim: int = 0) -> Loop:
        return Loop(self.leaves, z, loss, n, dim, self.mode.back)

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
            return self._loop(tree.tensors(z), self._lost(z), p.n, p.out_dims)
        finder = Finder()
        with marked_for(finder):
            found = self._run(finder)
        return self._loop([r.value for r in finder.found(found, self.leaves)], found.sum(), p.n)

    @cached_property
    def model(self) -> Loop:
        """The outputs of a model function, which has no loss."""
        return self._loop(tree.tensors(self._run()), None, self.problem.n, self.problem.out_dims)

    @cached_property
    def whole(self) -> Loop:
        """The loss as one number."""
        z = self._run()
        return self._loop([(z.sum() if self.problem.loss is None else self._lost(z)).reshape(1)], None, 1)

    @cached_property
    def losses(self) -> Loop:
        """The losses of the samples: `[N]`, or those of outputs, or those of a scalar f of single samples."""
        if self.problem.loss is not None:
            return self.outputs
        z = self._run()
        if z.ndim:
            return self._loop([z], None, self.problem.n)
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
                return self._loop([z], None, p.n)
        raise SplitError(
            "the loss is neither the sum nor the mean of its values for single samples, and the outputs of the model "
            "are not known. Return the [N] losses, mark the outputs (`outputs(z)`), or give the model and loss apart."
        )


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


def whole(path: str, leaf: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: float = 0.0) -> Look:
    """A look at all numbers of a leaf."""
    return Look(path, leaf, torch.arange(leaf.numel()), wide(expected).flatten(), dtype, size)


class Draw(NamedTuple):
    """A number of entries that are drawn evenly, a seed, and states of generators before the result was computed."""

    k: int
    seed: int
    before: States


def drawn(sizes: Sequence[torch.Tensor], k: int, generator: torch.Generator) -> list[torch.Tensor]:
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
BY_SAMPLE = SquaredNorms, ClippedSum, InnerProducts, ProductsWithOthers
LOOKS = {*ENTRYWISE, *BY_SAMPLE}
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
        self.chosen = (
            torch.arange(self.problem.n) if self.problem.samples is None else torch.tensor(self.problem.samples)
        )
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

    # At entries of the parameters

    def at_entry(self) -> Callable[[int, int], Tensors]:
        """A function of a leaf and a place in it: what each sample has there, `[N]`, or each output, `[N, *out]`."""
        kind, call, reduction = self.t.kind, self.call, self.reduction
        if type(reduction) is JacobianRows:
            loop = call.model
            return lambda i, k: [wide(t.movedim(loop.dim, 0))[self.chosen] for t in loop.forth(loop.unit(i, k))]
        if kind.first_order:
            loop, factor = call.losses, 1.0
            if type(reduction) is ClippedSum:
                norms = wide([*self.leaves.values()][-1])
                bound = torch.as_tensor(reduction.max_norm, dtype=torch.float64)
                factor = (norms / wide(bound)).clamp(min=1).reciprocal()
            power = 2 if type(reduction) is SumOfSquares else 1
            return lambda i, k: [(self.samples(loop.share(loop.unit(i, k))) * factor) ** power]
        together = type(reduction) is SumOfSquares and self.problem.samples is None  # need not be told apart
        own = (lambda x: x) if together else self.samples
        if kind.second_order:
            loop = call.whole if together else call.losses
            return lambda i, k: [own(loop.hessian(i, k))]
        loop = call.outputs
        return lambda i, k: [own(loop.ggn(loop.unit(i, k)))]

    def entries(self, results: dict[str, torch.Tensor]) -> Iterator[Look]:
        """Leaves `[*lead, *p]` of one or several trees at drawn entries."""
        count, at_entry, of = len(self.params), self.at_entry(), ENTRYWISE[type(self.reduction)]
        paths, found = list(results), list(results.values())
        sizes = []
        for i, p in enumerate(self.params):
            rows = [wide(x).abs().reshape(x.shape[: x.ndim - p.ndim].numel(), p.numel()) for x in found[i::count]]
            sizes.append(torch.cat(rows).sum(0))
        for i, places in enumerate(drawn(sizes, self.k, self.generator)):
            if not len(places):
                continue
            outputs = zip(*(at_entry(i, k) for k in places.tolist()), strict=True)
            numbers = [n for g in outputs for n in of(torch.stack(g, -1), self.reduction, unit(self.dtype))]
            p = self.params[i]
            for path, x, (expected, size) in zip(paths[i::count], found[i::count], numbers, strict=True):
                lead = expected.shape[:-1]
                self.check_shape(path, x, (*lead, *p.shape))
                at = torch.arange(lead.numel()).reshape(*lead, 1) * p.numel() + places
                yield Look(path, x, at, expected, self.dtype, size)

    def check_shape(self, path: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
        if x.shape != shape:
            raise CertificateError(f"{path} has shape {tuple(x.shape)}, but by plain loops it is {shape}.")

    # At samples

    def of_sample(self, loop: Loop, n: int) -> Tensors:
        """The gradient of one of the chosen samples."""
        self.samples(torch.zeros(loop.n))
        return loop.back(loop.weighed(torch.nn.functional.one_hot(self.chosen[n], self.problem.n)))

    def norms(self, results: dict[str, torch.Tensor]) -> Iterator[Look]:
        """Norms of shares `[n]`, each beside a backward pass of its sample alone; one is that of all parameters."""
        whole_norm = type(self.reduction) is ClippedSum
        (at,) = drawn([torch.stack([wide(x) for x in results.values()]).sum(0)], self.k, self.generator)
        each = [self.of_sample(self.call.losses, n) for n in at.tolist()]
        squares = torch.stack([torch.stack([wide(g).square().sum() for g in one]) for one in each], 1)
        expected = [squares.sum(0).sqrt()] if whole_norm else squares
        for path, y in zip(results, expected, strict=True):
            self.check_shape(path, results[path], (len(self.chosen),))
            yield Look(path, results[path], at, wide(y), self.dtype)

    def products(self) -> Iterator[Look]:
        """Rows of Gram matrices: what is pulled back of one sample, or of one output of it, sent along all."""
        reduction = self.reduction
        assert isinstance(reduction, InnerProducts)
        flat = [wide(x).flatten(0, x.ndim // 2 - 1).flatten(1) for x in self.leaves.values()]
        outputs = next(iter(self.leaves.values())).shape
        outputs = outputs[1 : len(outputs) // 2]
        sizes = torch.stack([x.square().sum(1) if reduction.others else x.diagonal() for x in flat]).sum(0)
        (at,) = drawn([sizes], self.k, self.generator)
        rows = zip(*(self.row(int(k), outputs, reduction.whole) for k in at), strict=True)
        for path, x, expected in zip(self.leaves, flat, rows, strict=True):
            width = x.shape[1]
            places = at[:, None] * width + torch.arange(width)
            yield Look(path, self.leaves[path], places, wide(torch.stack(expected)[:, -width:]), self.dtype)

    def row(self, k: int, outputs: torch.Size, whole: bool) -> Tensors:
        """The products of row k with all, in all parameters, or in each."""
        if outputs:
            loop, (z,) = self.call.model, self.call.model.z
            c = torch.zeros_like(z.movedim(loop.dim, 0), memory_format=torch.contiguous_format)
            c[self.chosen[k // outputs.numel()]].view(-1)[k % outputs.numel()] = 1
            found = loop.back([c.movedim(0, loop.dim)])
        else:
            loop = self.call.losses
            found = self.of_sample(loop, k)

        def along(v: Vector) -> torch.Tensor:
            each = wide(loop.forth(v)[0].movedim(loop.dim, 0)) if outputs else loop.share(v)
            return each[self.chosen].flatten()

        alone = [[x if i == j else None for j, x in enumerate(found)] for i in range(len(found))]
        return [along(v) for v in ([found] if whole else alone)]


PRODUCTS = (of_hessian, of_ggn, of_fisher)
"""The matrices of which products have loops."""


def looks_at(t: Any, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> list[Look]:
    """The numbers of a result of t that are looked at, beside those of loops."""
    given = result, args, kwargs, names, draw
    return _of_product(t, *given) if isinstance(t, Product) else _of_statistic(t, *given)


def _named(result: Any) -> dict[str, torch.Tensor]:
    return {f"result{path}": x for path, x in tree.named_leaves(result, none_is_leaf=False)}


def _of_statistic(t: Statistic, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> list[Look]:
    call, generator = CheckedCall(t.problem(args, kwargs, names), draw.before), torch.Generator().manual_seed(draw.seed)
    if t.has_aux:
        result = result[:-1] if t.several else result[0]
    looks, left = [], _named(result)
    for m, x in zip(t.members, result, strict=True) if t.members else [(t, result)]:
        own = {path: left.pop(path) for path in list(left)[: len(tree.flatten(x, none_is_leaf=False)[0])]}
        looks += Certificate(m, call, own, draw.k, generator).looks()
    return looks


def _of_product(t: Product, result: Any, args: tuple, kwargs: dict[str, Any], names: Any, draw: Draw) -> list[Look]:
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
    v = [by_path[path] for path, _ in tree.named_leaves(params, none_is_leaf=False)]
    if t.lead:
        alone = [[[x if i == j else None for j in range(len(v))] for x in each] for i, each in enumerate(v)]
        expected = [torch.stack([times(one)[i] for one in several]) for i, several in enumerate(alone)]
    else:
        expected = times(v)
    found = _named(result[0] if t.has_aux else result).items()
    return [whole(path, x, y, p.dtype) for (path, x), y, p in zip(found, expected, given.leaves, strict=True)]
