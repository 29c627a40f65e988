"""Plans of batches that are padded to a few sizes, so that few plans serve all of them, and of those of a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.callables import describe
from invfunc.data_sets.visits import VisitWork
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import size_of
from invfunc.evaluation.engine import Engine, bring, brought
from invfunc.evaluation.kinds import LossPart, ratio
from invfunc.loss.drawn import joined
from invfunc.plans.calls import Calls
from invfunc.problem import batch_dims, batch_size
from invfunc.products.product import Product, WithVector
from invfunc.reductions.columns import InnerProducts, MatrixTrace, SquareRoot, SumOfSquares
from invfunc.reductions.gradients import CentredSquares, ClippedSum, EachSample, Sketches, SumAndCentredSquares
from invfunc.reductions.reduction import Drawing, Found, Reduction, State
from invfunc.statistic import Statistic

_SUMS = SumOfSquares, MatrixTrace, ClippedSum, CentredSquares
_EACH = EachSample, SquareRoot, InnerProducts


@dataclass(frozen=True, eq=False)
class Masked:
    """A function of `(params, mask, *batch)` whose samples have a derivative only where the mask is 1."""

    f: Callable
    losses: bool
    """True if it returns the losses of the samples, and no outputs."""
    axis: int
    tells: bool
    """True if the outputs come beside, as aux."""

    @property
    def __name__(self) -> str:
        return describe(self.f)

    @property
    def __signature__(self) -> inspect.Signature:
        """The names of f's arguments, with that of the mask; which of them it takes, f itself says."""
        names = [p.name for p in inspect.signature(self.f).parameters.values() if p.kind < p.VAR_POSITIONAL]
        kind, names = inspect.Parameter, [*names[:1], "mask", *names[1:]]
        named = [kind(name, kind.POSITIONAL_OR_KEYWORD, default=None) for name in names]
        return inspect.Signature([*named, kind("args", kind.VAR_POSITIONAL), kind("kwargs", kind.VAR_KEYWORD)])

    def __call__(self, params: Any, mask: torch.Tensor, *batch: Any, **kwargs: Any) -> Any:
        found = self.f(params, *batch, **kwargs)
        if self.losses:
            if not isinstance(found, torch.Tensor) or found.shape != mask.shape:
                raise ArgumentError(
                    f"with pad=, f has to return the losses [N] of the samples, as with reduction='none', of which the "
                    f"padded ones are left out, but returns {tuple(getattr(found, 'shape', ()))} of {len(mask)}."
                )
            return torch.where(mask, found, 0)
        outputs = tree.map_tensors(lambda z: self._of_outputs(z, mask), found)
        return (outputs, found) if self.tells else outputs

    def _of_outputs(self, z: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        own = mask.reshape([-1 if d == self.axis % z.ndim else 1 for d in range(z.ndim)])
        return torch.where(own, z, z.detach())


class Padding:
    """The calls of a statistic or a product with batches that are padded with copies of a sample, which count nothing.

    A padded sample has no gradient, and so nothing in a sum over the samples; results with a sample axis are cut.
    """

    def __init__(self, t: Statistic | Product, sizes: tuple[int, ...]) -> None:
        self.t, self.sizes = t, tuple(sorted(sizes))
        if why := _why_not(t):
            raise ArgumentError(f"compiled({t!r}, pad={sizes!r}): {why}.")
        self.rows: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        """For numbers of samples, the places that a padded batch takes its samples from, and its mask."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a padded batch, with its mask in front of it."""
        dims = self._dims(len(args) - self.lead)
        return _of_masked(self.t, (0, *dims.values()), args[self.lead])(*args, **kwargs)

    @property
    def lead(self) -> int:
        """The number of arguments before the batch."""
        return 2 if isinstance(self.t, Product) else 1

    def _dims(self, count: int) -> dict[int, int | None]:
        """The sample dimensions of so many arguments behind the parameters, by their places."""
        return batch_dims(self.t.in_dims, [*range(1, count)])

    def padded(self, args: tuple, names: Any) -> tuple[tuple, int, int]:
        """The arguments of a call with a mask in front of the batch, and how many samples there were and are."""
        front, own = args[: self.lead], (args[0], *args[self.lead :])
        dims = self._dims(len(own))
        n, device = batch_size(own, dims, names), next(x.device for x in tree.tensors(own[1:]))
        size = next((size for size in self.sizes if size >= n), None)
        if size is None:
            raise ArgumentError(f"there are {n} samples, more than the largest size of pad={self.sizes!r}.")
        if (n, device) not in self.rows:
            rows = torch.arange(size, device=device)
            self.rows[n, device] = rows * (rows < n), rows < n
        index, mask = self.rows[n, device]
        batch = own[1:] if n == size else [_some(x, dims[i], index) for i, x in enumerate(own[1:], 1)]
        return (*front, mask, *batch), n, size

    def cut(self, found: Any, target: Any, n: int, size: int) -> Any:
        """A result, with the outputs of the model where there is a loss apart, without what padded samples have."""
        t, scale = self.t, 1.0
        if t.loss is not None:
            *results, z = found
            found = tuple(results) if t.several else results[0]
            if isinstance(t, Statistic) and t.options.plan.asked("samples"):
                z = joined(z, t.out_dims)
            scale = 1.0 if n == size else self._scale(z, target, n, size)
        if isinstance(t, Product):
            return found if scale == 1 else tree.map_tensors(lambda x: x * scale**t.degree, found)
        if t.members:
            return tuple(_cut(m, x, n, scale) for m, x in zip(t.members, found, strict=True))
        return _cut(t, found, n, scale)

    def _scale(self, outputs: Any, target: Any, n: int, size: int) -> float:
        """The factor by which the gradient of the loss of n samples is that which they have in the padded batch."""
        t = self.t
        assert t.loss is not None
        dim = t.in_dims[-1] if isinstance(t.in_dims, Sequence) else t.in_dims
        own, others = (
            LossPart(t.loss, _some(outputs, t.out_dims, rows), _some(target, dim, rows), len(rows), t.out_dims, dim)
            for rows in (range(n), range(n, size))
        )
        with torch.no_grad():
            whole = t.loss(outputs, target)
            if whole.ndim:  # one for each sample
                return 1.0
            known = _plain_scale(torch.stack([whole, *(t.loss(x.outputs, x.target) for x in (own, others))]), n, size)
        if known is not None:
            return known
        scale = ratio(others, own)
        return 1.0 if scale is None else 1 / float(scale)


def _plain_scale(losses: torch.Tensor, n: int, size: int) -> float | None:
    """The factor of a mean or a sum, as the losses of a padded batch, of its n samples and of the others show it; None
    if they do not: those of a loss with weights are told from a mean where both parts differ."""
    whole, own, others = losses.tolist()
    sizes, close = (abs(own), abs(others)), 4 * torch.finfo(losses.dtype).eps
    if abs(whole - own - others) <= close * sum(sizes) and own * others > 0 and min(sizes) > 0.1 * max(sizes):
        return 1.0
    mean = own + (others - own) * (1 - n / size)
    return size / n if abs(whole - mean) <= close * sum(sizes) and abs(own - others) > 0.01 * sum(sizes) else None


def _some(argument: Any, dim: int | None, rows: range | torch.Tensor) -> Any:
    """An argument with some of its samples, or with copies behind them."""
    if dim is None:
        return argument
    if isinstance(rows, torch.Tensor):
        return tree.map_tensors(lambda x: x.index_select(dim, rows), argument)
    return tree.map_tensors(lambda x: x.narrow(dim, rows.start, len(rows)), argument)


def _why_not(t: Statistic | Product) -> str:
    """The reason why batches cannot be padded; empty if they can."""
    if t.has_aux:
        return "with aux, which is of all samples, none can be left out. Leave has_aux or pad out"
    if isinstance(t, Product):
        return "what is drawn for a padded batch is another sequence. Leave pad out" if t.drawing is not None else ""
    if t.options.reduce is not None or t.samples is not None or t.others is not None or t.argnums not in (0, (0,)):
        return "with reduced, samples=, others= or argnums= batches are not padded. Leave pad out"
    for m in t.members or (t,):
        if m.drawing is not None or isinstance(m.reduction, Sketches):
            return "what is drawn for a padded batch is another sequence. Leave pad out"
        if not isinstance(m.reduction, (*_SUMS, *_EACH)):
            return f"{m.name} is neither a sum over the samples, nor has it a sample axis. Leave pad out"
    return ""


def _of_masked(t: Any, in_dims: tuple, mask: torch.Tensor) -> Any:
    """A statistic or a product of a masked function."""
    of_outputs = t.loss is not None or (isinstance(t, Statistic) and t.kind.of_model != "no")
    f, tells = Masked(t.f, not of_outputs, t.out_dims, t.loss is not None), t.loss is not None
    changed: dict[str, Any] = {"f": f, "in_dims": in_dims, "has_aux": tells}
    if isinstance(t, Statistic):
        changed["members"] = tuple(_of_masked(m, in_dims, mask) for m in t.members)
        if isinstance(t.reduction, CentredSquares):
            several = isinstance(t.reduction, SumAndCentredSquares)
            changed["reduction"] = (PaddedMoments if several else PaddedSquares)(t.reduction.correction, mask)
    return replace(t, **changed)


class PaddedSquares(CentredSquares):
    """The centred squares of the samples that a mask has, where the others have no gradient: these are taken out by the
    formula of Chan, Golub and LeVeque."""

    def __init__(self, correction: float, mask: torch.Tensor) -> None:
        super().__init__(correction)
        n = mask.sum(dtype=torch.float64)
        by = n.reciprocal()
        self.share, self.by = 1 / len(mask) - by, (n - correction).reciprocal() if correction else by

    def finish(self, state: State, found: Found) -> list[Any]:
        _, total, centred = state
        return [torch.addcmul(centred, total, total * self.share).clamp(min=0) * self.by]


class PaddedMoments(SumAndCentredSquares, PaddedSquares):
    """The gradient, and the centred squares of the samples that a mask has."""


def _cut(t: Statistic, result: Any, n: int, scale: float) -> Any:
    """A result of a statistic without the rows of padded samples."""
    reduction: Reduction = t.reduction
    if isinstance(reduction, CentredSquares) and n <= reduction.correction:
        raise ArgumentError(f"correction={reduction.correction} leaves no divisor above 0 for {n} samples.")
    if isinstance(reduction, ClippedSum):
        return result[0], tree.map_tensors(lambda x: x[:n], result[1])
    if isinstance(reduction, InnerProducts):
        return tree.map_tensors(lambda x: x.narrow(0, 0, n).narrow(x.ndim // 2, 0, n), result)
    if reduction.each:
        result = _some(result, reduction.each[0], range(n))
    if scale == 1:
        return result
    by = t.quantity.factor(scale)
    return tree.map_tensors(lambda x: reduction.scaled((x,), by)[0], result)


# Batches of a data set: what each brings to a statistic, or adds to a product

Each = tuple[torch.Generator, ...]
"""The generators of the samples of a batch."""


def _each(drawings: list[Drawing], n: int) -> list[Each]:
    """For each drawing, the generators of n samples at their places in the data set."""
    return [tuple(d.source(n)) for d in dict.fromkeys(drawings)]  # pyright: ignore[reportArgumentType]: it has a key


def _aside(d: Drawing) -> Drawing:
    """A drawing by a generator that nobody draws from: those of the samples are given, and the caller's may go on."""
    return replace(d, generator=torch.Generator(d.generator.device))


@dataclass(frozen=True, eq=False)
class StatisticOfBatch:
    """The function that gives what a batch brings to a statistic, or to a product with vectors, in a phase, given what
    is known of those before."""

    t: Statistic | WithVector

    def __call__(
        self, phase: int, known: list[list[Any]], each: list[Each], vectors: Any, args: tuple, kwargs: dict
    ) -> Any:
        sources = dict(zip(dict.fromkeys(self.t.drawings), each, strict=True))
        t = self.t.drawn_by(lambda d: replace(d, each=sources[d]))
        t = replace(t, vectors=vectors[0], lead=vectors[1]) if isinstance(t, WithVector) else t
        engine = t.engine(args, kwargs, t.names(len(args)))
        engine.fold.phase = phase
        for of_all, learned in zip(engine.fold.accumulators, known, strict=True) if known else ():
            for part, own in zip(of_all.line, learned, strict=True):
                if own is not None:
                    part.know(own)
        return brought(engine, phase)


class PlansOfBatches:
    """The evaluation of batches of a statistic or a product, each by the plan of those of its shape."""

    def __init__(self, t: Statistic | Product, calls: Calls) -> None:
        """`calls` are those of t alone."""
        added = WithVector(t, [], 0) if isinstance(t, Product) else t
        own = {d: _aside(d) for d in added.drawings}
        self.calls = Calls(StatisticOfBatch(added.drawn_by(own.__getitem__)), calls.called, calls.backend)

    def __repr__(self) -> str:
        return self.calls.called

    def __call__(self, t: Any, work: VisitWork, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
        """Have an evaluation of a batch keep what it brings; aux."""
        vectors = (t.vectors, t.lead) if isinstance(t, WithVector) else None
        found = self.calls((work.phase, work.known, _each(t.drawings, engine.problem.n), vectors, args, kwargs), {})
        return bring(engine, work.phase, found)

    def explained(self, t: Statistic, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """The description of the plan of a batch, and its operations."""
        drawings = t.keyed(dict.fromkeys(t.drawings, 0), 0).drawings
        return self.calls.explained((0, [], _each(drawings, size_of(args, t.in_dims)), None, args, kwargs), {})
