"""What is looked at of statistics that are made of each sample's share of the gradient, and of Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from invfunc.certificates.draws import drawn
from invfunc.certificates.look import Look, Member, Remembered
from invfunc.certificates.reference import Reference
from invfunc.certificates.rounding import Numbers, Tensors, largest, unit
from invfunc.certificates.run import units, wide
from invfunc.kronecker.matrix import Kronecker
from invfunc.reductions.gradients import CentredSquares, ClippedSum
from invfunc.reductions.predictive import PredictiveCovariance
from invfunc.reductions.sketches import Sketches
from invfunc.reductions.squares import InnerProducts


def shares(m: Member, r: Reference, leaf: int, places: torch.Tensor) -> torch.Tensor:
    """`G[n]` at some entries: `[K, n]` of the samples that were chosen."""
    run = r.loss
    return run.along(run.forth(leaf, units(r.leaves[leaf], places)), run.gradient)[0][:, m.chosen]


def summed(terms: torch.Tensor) -> Numbers:
    """Sums of `[K, n]` over the samples, with the size of what is added up: errors of it are independent."""
    return terms.sum(1), largest(terms.square().sum(1)) ** 0.5


def each_sample(m: Member) -> Iterator[Look]:
    """The shares, and their sum."""
    leaves = m.leaves(m.result)
    yield from m.at_entries([leaves], lambda r, i, at: [(shares(m, r, i, at), 0.0)])
    squares = [wide(x).square().sum(0) for x in leaves]
    yield from gradient(m, [wide(x).sum(0) for x in leaves], squares, "the sum over the samples of ")


def gradient(m: Member, sums: Tensors, squares: Tensors, what: str = "") -> Iterator[Look]:
    """All entries of the gradient, beside a backward pass."""
    counts = torch.bincount(m.chosen, minlength=m.problem.n)[None]
    sizes = [largest(x) ** 0.5 for x in squares]
    for i, x in enumerate(sums):
        if x.numel():
            yield m.look(
                x.flatten(),
                lambda r, i=i: (wide(r.loss.shares(counts)[i]).flatten(), sizes[i]),
                lambda k, i=i: what + m.entry(i, k),
            )


def _centred(m: Member, g: torch.Tensor) -> Numbers:
    """The variance; its rounding error is at least the square of that of the shares, which cancel."""
    reduction = m.t.reduction
    assert isinstance(reduction, CentredSquares)
    found = (g - g.mean(1, keepdim=True)).square().sum(1) / (g.shape[1] - reduction.correction)
    return found, largest(g) ** 2 * unit(m.dtype)


def centred_squares(m: Member) -> Iterator[Look]:
    """The variance."""
    yield from m.at_entries([m.leaves(m.result)], lambda r, i, at: [_centred(m, shares(m, r, i, at))])


def sum_and_centred_squares(m: Member) -> Iterator[Look]:
    """The gradient, all of it, and the variance."""
    trees, n = [m.leaves(x) for x in m.result], len(m.chosen)

    def numbers(r: Reference, leaf: int, places: torch.Tensor) -> list[Numbers]:
        g = shares(m, r, leaf, places)
        return [summed(g), _centred(m, g)]

    yield from m.at_entries(trees, numbers)
    sums, spread = [[wide(x) for x in leaves] for leaves in trees]
    yield from gradient(m, sums, [s.square() / n + n * v for s, v in zip(sums, spread, strict=True)])


def squared_norms(m: Member) -> Iterator[Look]:
    """The norms of the shares in each parameter."""
    leaves = [wide(x) for x in m.leaves(m.result)]
    yield from _norms(m, leaves, torch.stack(leaves).sum(0), lambda each: each)


def _norms(m: Member, found: Tensors, sizes: torch.Tensor, of: Callable[[Tensors], Tensors]) -> Iterator[Look]:
    """Norms of shares `[n]`, each beside a backward pass of its sample alone."""
    at = m.rows(sizes)

    def norms(r: Reference) -> list[Numbers]:
        parts = [list(map(_squares, r.loss.shares(one_hot(m, which)))) for which in r.in_parts(at)]
        return [(x, 0.0) for x in of([torch.cat(x) for x in zip(*parts, strict=True)])]

    computed = Remembered(norms)
    for i, x in enumerate(found):
        name = m.problem.name(i) if len(found) > 1 else "the norm"
        yield m.look(x[at], lambda r, i=i: computed(r)[i], lambda k, name=name: name + m.sample(int(at[k])))


def _squares(g: torch.Tensor) -> torch.Tensor:
    """`|g[s]|^2` of several trees' leaf: `[S]`."""
    return wide(g).square().flatten(1).sum(1) if g.ndim > 1 else wide(g).square()


def one_hot(m: Member, rows: torch.Tensor) -> torch.Tensor:
    """Weights `[S, N]` that are 1 for one of the chosen samples."""
    return torch.nn.functional.one_hot(m.chosen[rows], m.problem.n)


def sketches(m: Member) -> Iterator[Look]:
    """Entries of the sketches, each beside the slope along the matrix that it is the product with."""
    reduction, leaves = m.t.reduction, m.leaves(m.result)
    assert isinstance(reduction, Sketches)
    sizes = [wide(x).abs().nan_to_num(0, 0, 0).sum(0) for x in leaves]
    places = m.tape.draw(lambda generator: drawn(sizes, m.k, generator))

    def along(r: Reference, leaf: int, at: torch.Tensor) -> torch.Tensor:
        p, run = r.leaves[leaf], r.loss
        sides = reduction.sides(leaf, p)
        columns = sides.rest.shape[1]
        v = torch.einsum("ok,ik->koi", sides.first[:, at // columns], sides.rest[:, at % columns])
        return run.along(run.forth(leaf, v.reshape(len(at), *p.shape).to(p)), run.gradient)[0][:, m.chosen]

    for i, at in enumerate(places.of):
        if len(at):
            yield m.look(
                wide(leaves[i])[:, at].T,
                lambda r, i=i, at=at: (torch.cat([along(r, i, part) for part in r.in_parts(at)]), 0.0),
                lambda k, *n, i=i, at=at: f"{m.problem.name(i)}, number {int(at[k])} of the sketch{m.sample(*n)}",
            )


def clipped_sum(m: Member) -> Iterator[Look]:
    """The norms, and what is summed up by them."""
    sums, norms = m.result
    reduction = m.t.reduction
    assert isinstance(reduction, ClippedSum)
    most = torch.as_tensor(reduction.max_norm, dtype=torch.float64).detach().cpu()
    scales = (wide(norms) / most).clamp(min=1).reciprocal()
    yield from _norms(m, [wide(norms)], wide(norms).square(), lambda each: [torch.stack(each).sum(0).sqrt()])
    yield from m.at_entries([m.leaves(sums)], lambda r, i, at: [summed(shares(m, r, i, at) * scales)])


def inner_products(m: Member) -> Iterator[Look]:
    """Rows of the matrices, and their mirror images where both sides are the same samples."""
    assert isinstance(m.t.reduction, InnerProducts)
    whole, others = m.t.reduction.whole, m.t.reduction.others
    grams = [m.result] if whole else m.leaves(m.result)
    flat = [wide(x).flatten(0, x.ndim // 2 - 1).flatten(1) for x in grams]
    outputs = grams[0].shape[1 : grams[0].ndim // 2]
    at = m.rows(torch.stack([x.square().sum(1) if others else x.diagonal() for x in flat]).sum(0))

    def rows(r: Reference) -> list[Numbers]:
        of = _kernel if outputs else _products
        parts = [of(m, r, which, whole) for which in r.in_parts(at)]
        columns = flat[0].shape[1]  # those of the other samples come last
        return [(torch.cat([y[:, -columns:] for y in x]), 0.0) for x in zip(*parts, strict=True)]

    def whose(k: int) -> str:
        return m.sample(*(int(i) for i in torch.unravel_index(torch.tensor(k), (len(m.chosen), *outputs))))

    def product(i: int, row: int, column: int) -> str:
        of_leaf = "" if whole else m.problem.name(i) + ", "
        of_other = whose(column + len(m.chosen[others:]) * math.prod(outputs)) if others else whose(column)
        return f"{of_leaf}the product{whose(row)} and{of_other}"

    computed = Remembered(rows)
    for i, x in enumerate(flat):
        yield m.look(x[at], lambda r, i=i: computed(r)[i], lambda k, other, i=i: product(i, int(at[k]), other))
        if others:
            continue
        yield m.look(x, lambda r, x=x: (x.T, 0.0), lambda *at, i=i: f"{product(i, *at)}, beside its mirror image,")


def _products(m: Member, r: Reference, rows: torch.Tensor, whole: bool) -> Tensors:
    """`G G[n]^T` of some samples n: `[S, n]`."""
    run = r.loss
    each = run.shares(one_hot(m, rows))
    images = [run.there(each)] if whole else [run.forth(i, g) for i, g in enumerate(each)]
    return [run.along(t, run.gradient)[0][:, m.chosen] for t in images]


def _kernel(
    m: Member, r: Reference, rows: torch.Tensor, whole: bool, times: Callable[[Tensors], Tensors] = lambda v: v
) -> Tensors:
    """`J J[n, c]^T` of some outputs c of samples n: `[S, n * C]`; with a matrix in between, given by its products."""
    run, out = r.model, m.problem.out_dims
    (z,) = run.split.values
    first = z.movedim(out, 0)
    each = first[0].numel()
    c = torch.nn.functional.one_hot(m.chosen[rows // each] * each + rows % each, first.numel())
    cotangents = c.to(z).reshape(len(rows), *first.shape).movedim(1, 1 + out % z.ndim)
    found = times(run.back([cotangents]))
    images = [run.there(found)] if whole else [run.forth(i, g) for i, g in enumerate(found)]
    return [wide(samples_first(x, out))[:, m.chosen].flatten(1) for (x,) in images]


def covariances(m: Member) -> Iterator[Look]:
    """Rows of the covariances."""
    x, n = wide(m.result), len(m.chosen)
    outputs = x.shape[1 : (x.ndim + 1) // 2]
    flat = x.reshape(n * outputs.numel(), outputs.numel())
    at = m.rows(x.reshape(n, outputs.numel(), -1).diagonal(dim1=1, dim2=2).flatten())

    def rows(r: Reference, some: torch.Tensor) -> torch.Tensor:
        (found,) = _kernel(m, r, some, True, lambda v: _times(m, v))
        return found.reshape(len(some), n, -1)[torch.arange(len(some)), some // outputs.numel()]

    yield m.look(
        flat[at],
        lambda r: (torch.cat([rows(r, some) for some in r.in_parts(at)]), 0.0),
        lambda k, other: f"the covariance{m.sample(*_place(int(at[k]), (n, *outputs)))} with its output number {other}",
    )


def _place(k: int, shape: Sequence[int]) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(k), tuple(shape))]


def _times(m: Member, v: Tensors) -> Tensors:
    """The covariance of the parameters times vectors `[S, *p]`."""
    reduction, names = m.t.reduction.at(m.problem.leaves), [m.problem.name(i) for i in range(len(v))]
    assert isinstance(reduction, PredictiveCovariance)
    if reduction.vectors:
        own = [reduction.vectors_of(name, x.shape[1:]).to(x) for name, x in zip(names, v, strict=True)]
        return replace(reduction.low_rank, vectors=own) @ list(v)
    if reduction.dense is not None:
        flat = torch.cat([x.reshape(len(x), -1) for x in v], 1)
        parts = (flat @ reduction.dense.to(flat)).split([x[0].numel() for x in v], 1)
        return [part.reshape(x.shape) for part, x in zip(parts, v, strict=True)]
    found = [torch.zeros_like(x) for x in v]
    for i, (name, x) in enumerate(zip(names, v, strict=True)):
        given = reduction.of(name, x.shape[1:])
        if isinstance(given, Kronecker) and (joint := given.origin.joint) is not None:
            bias = next(k for k, other in enumerate(names) if other.endswith(joint.bias.partition("[")[2]))
            both = given @ joint.matrix(x, v[bias])
            found[i], found[bias] = joint.parts(both, v[bias].shape)
        elif given is not None:
            found[i] = given @ x if isinstance(given, Kronecker) else x * given
    return found


def samples_first(x: torch.Tensor, out: int) -> torch.Tensor:
    """`[K, *z] -> [K, N, *out]`"""
    return x.movedim(1 + out % (x.ndim - 1), 1)
