"""What is looked at of each statistic: some of its numbers, and the same ones by another path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from invfunc.certificates.draws import Places
from invfunc.certificates.look import Look, Member, Remembered, Tensors
from invfunc.certificates.reference import Reference, Run, units, wide
from invfunc.certificates.rounding import units as units_of
from invfunc.recording.problem import Problem
from invfunc.reductions.gradients import CentredSquares, ClippedSum, EachSample, SquaredNorms, SumAndCentredSquares
from invfunc.reductions.squares import (
    InnerProducts,
    JacobianRows,
    MatrixTrace,
    SquareRoot,
    SquaresOfEach,
    SumOfSquares,
)
from invfunc.statistic import Statistic

# What there is along an entry


def _shares(m: Member, r: Reference, leaf: int, places: torch.Tensor) -> torch.Tensor:
    """`G[n]` at some entries: `[K, n]` of the samples that were chosen."""
    run = r.loss
    return run.along(run.forth(leaf, units(r.leaves[leaf], places)), run.gradient)[0][:, m.chosen]


def _squares(m: Member, r: Reference, leaf: int, places: torch.Tensor) -> torch.Tensor:
    """What the columns of each sample add to the diagonal at some entries: `[K, n]`."""
    q = m.t.quantity
    if q.kind.first_order:
        return _shares(m, r, leaf, places).square()
    t = r.outputs.forth(leaf, units(r.leaves[leaf], places))
    if q.drawing is None:
        return r.outputs.curved(t, t)[:, m.chosen]
    return r.outputs.along(t, r.drawn[q.columns]).square().sum(0)[:, m.chosen]


def _weights(m: Member, of: torch.Tensor) -> torch.Tensor:
    """Weights `[N]` of the samples, from those of the chosen ones."""
    return torch.zeros(m.problem.n, dtype=of.dtype).index_add(0, m.chosen, of)


# What each statistic is made of


def _each_sample(m: Member) -> Iterator[Look]:
    leaves = m.leaves(m.result)
    yield from m.at_entries([leaves], lambda r, i, at: [_shares(m, r, i, at)])
    yield from _gradient(m, [x.sum(0) for x in map(wide, leaves)], [wide(x).abs().sum(0) for x in leaves])


def _gradient(m: Member, sums: Tensors, sizes: Tensors) -> Iterator[Look]:
    """All entries of the gradient, beside a backward pass."""
    counts = _weights(m, torch.ones(len(m.chosen)))
    for i, (x, size) in enumerate(zip(sums, sizes, strict=True)):
        if x.numel():
            yield m.look(
                x.flatten(),
                lambda r, i=i: wide(r.loss.shares(counts[None])[i]).flatten(),
                lambda k, i=i: m.entry(i, k),
                size=float(size.max()),
            )


def _sum_of_squares(m: Member) -> Iterator[Look]:
    if m.t.kind.second_order:
        weights = _weights(m, torch.ones(len(m.chosen)))
        yield from m.at_entries([m.leaves(m.result)], lambda r, i, at: [r.hessian(weights)(i, at)])
    else:
        yield from m.at_entries([m.leaves(m.result)], lambda r, i, at: [_squares(m, r, i, at).sum(1)])


def _squares_of_each(m: Member) -> Iterator[Look]:
    leaves = m.leaves(m.result)
    if not m.t.kind.second_order:
        yield from m.at_entries([leaves], lambda r, i, at: [_squares(m, r, i, at)])
        return
    drawn = m.tape.draw(lambda g: torch.randn(len(m.chosen), generator=g, dtype=torch.float64))
    weights = _weights(m, drawn)
    mixed = [torch.tensordot(drawn, wide(x), 1) for x in leaves]
    yield from m.at_entries([mixed], lambda r, i, at: [r.hessian(weights)(i, at)])


def _centred(m: Member, g: torch.Tensor) -> torch.Tensor:
    reduction = m.t.reduction
    assert isinstance(reduction, CentredSquares)
    m.largest = max(m.largest, float(g.square().max()))
    return (g - g.mean(1, keepdim=True)).square().sum(1) / (g.shape[1] - reduction.correction)


def _centred_squares(m: Member) -> Iterator[Look]:
    leaves = m.leaves(m.result)
    yield from m.at_entries([leaves], lambda r, i, at: [_centred(m, _shares(m, r, i, at))], lambda: _cancelled(m))


def _cancelled(m: Member) -> float:
    """The size of numbers whose rounding error is the square of that of the shares."""
    return m.largest * max(units_of(p.dtype, m.problem.n) for p in m.problem.leaves)


def _sum_and_centred_squares(m: Member) -> Iterator[Look]:
    trees = [m.leaves(x) for x in m.result]

    def numbers(r: Reference, leaf: int, places: torch.Tensor) -> Tensors:
        g = _shares(m, r, leaf, places)
        return [g.sum(1), _centred(m, g)]

    yield from m.at_entries(trees, numbers, lambda: _cancelled(m))
    n = len(m.chosen)
    sums, spread = [[wide(x) for x in leaves] for leaves in trees]
    yield from _gradient(m, sums, [(s.square() + n * n * v).sqrt() for s, v in zip(sums, spread, strict=True)])


def _squared_norms(m: Member) -> Iterator[Look]:
    leaves = [wide(x) for x in m.leaves(m.result)]
    yield from _norms(m, [x for x in leaves], torch.stack(leaves).sum(0), lambda each: each)


def _norms(m: Member, found: Tensors, sizes: torch.Tensor, of: Callable[[Tensors], Tensors]) -> Iterator[Look]:
    """Norms of shares `[n]`, each beside a backward pass of its sample alone."""
    at = m.rows(sizes)
    weights = torch.nn.functional.one_hot(m.chosen[at], m.problem.n)

    def norms(r: Reference, _leaf: int, which: torch.Tensor) -> Tensors:
        shares = r.loss.shares(weights[which])
        return of([wide(g).reshape(len(which), -1).square().sum(1) for g in shares])

    computed = Remembered(norms, _largest(m.problem), torch.arange(len(at)))
    for i, x in enumerate(found):
        of_whom = m.problem.name(i) + ", " if len(found) > 1 else ""
        yield m.look(
            x[at], lambda r, i=i: computed(r)[i], lambda k, of_whom=of_whom: f"{of_whom}sample {int(at[k])}", len(at)
        )


def _largest(problem: Problem) -> int:
    return max(range(len(problem.leaves)), key=lambda i: problem.leaves[i].numel())


def _clipped_sum(m: Member) -> Iterator[Look]:
    sums, norms = m.result
    reduction = m.t.reduction
    assert isinstance(reduction, ClippedSum)
    most = torch.as_tensor(reduction.max_norm, dtype=torch.float64).detach().cpu()
    scales = (most / wide(norms)).clamp(max=1).nan_to_num(1)
    yield from _norms(m, [wide(norms)], wide(norms).square(), lambda each: [torch.stack(each).sum(0).sqrt()])
    yield from m.at_entries([m.leaves(sums)], lambda r, i, at: [_shares(m, r, i, at) @ scales])


def _matrix_trace(m: Member) -> Iterator[Look]:
    """The sum of the diagonal, which is computed as well: the result is a pair of the trace and of it."""
    trace, diagonal = m.result
    leaves = m.leaves(diagonal)
    yield from m.at_entries([leaves], lambda r, i, at: [_squares(m, r, i, at).sum(1)])
    sums = torch.stack([wide(x).sum() for x in leaves])
    found = torch.stack([wide(x) for x in m.leaves(trace)])
    whole = len(found) != len(sums) or m.t.reduction.whole
    expected = sums.sum()[None] if whole else sums
    yield m.look(found, lambda r: expected, lambda k: "the trace" if whole else f"the trace of {m.problem.name(k)}")


def _square_root(m: Member) -> Iterator[Look]:
    """Products of the columns at pairs of entries: of each with itself, and with one that is drawn."""
    leaves = m.leaves(m.result)
    places = m.drawn([leaves])
    at = [(i, place) for i, of in enumerate(places.of) for place in of.tolist()]
    order = m.tape.draw(lambda g: torch.randperm(len(at), generator=g))
    S = torch.cat([wide(x).reshape(*x.shape[:2], -1)[..., of] for x, of in zip(leaves, places.of, strict=True)], 2)

    def products(r: Reference, _leaf: int, which: torch.Tensor) -> Tensors:
        run, q = r.outputs, m.t.quantity
        t = _images(r, run, places, which)
        others = _images(r, run, places, order[which])
        if q.drawing is None:
            return [run.curved(t, t)[:, m.chosen], run.curved(t, others)[:, m.chosen]]
        s, more = run.along(t, r.drawn[q.columns]), run.along(others, r.drawn[q.columns])
        return [(s * s).sum(0)[:, m.chosen], (s * more).sum(0)[:, m.chosen]]

    computed = Remembered(products, _largest(m.problem), torch.arange(len(at)))
    for k, other in enumerate((S, S[..., order])):
        size = float((S.square().sum(0) * other.square().sum(0)).sqrt().max())
        yield m.look(
            (S * other).sum(0).T,
            lambda r, k=k: computed(r)[k],
            lambda j, k=k: m.entry(*at[j]) + (f" times {m.entry(*at[int(order[j])])}" if k else " squared"),
            size=size,
        )


def _images(r: Reference, run: Run, places: Places, which: torch.Tensor) -> Tensors:
    """`J e` for entries of several leaves, numbered one leaf after the other: `[K, *z]` of each output."""
    starts = torch.tensor([0, *map(len, places.of)]).cumsum(0)
    found = [z.new_zeros(len(which), *z.shape).detach() for z in run.split.values]
    for i, of in enumerate(places.of):
        mine = ((which >= starts[i]) & (which < starts[i + 1])).nonzero()[:, 0]
        if len(mine):
            t = run.forth(i, units(r.leaves[i], of[which[mine] - starts[i]]))
            for z, x in zip(found, t, strict=True):
                z[mine] = x
    return found


def _jacobian_rows(m: Member) -> Iterator[Look]:
    flat = m.leaves(m.result)
    count = len(m.problem.leaves)
    trees = [flat[i : i + count] for i in range(0, len(flat), count)]
    out = m.problem.out_dims

    def numbers(r: Reference, leaf: int, places: torch.Tensor) -> Tensors:
        run = r.model
        t = run.forth(leaf, units(r.leaves[leaf], places))
        full = [
            z.new_zeros(len(places), *z.shape) if x is None else x for x, z in zip(t, run.split.values, strict=True)
        ]
        return [wide(_samples_first(x, out))[:, m.chosen] for x in full]

    yield from m.at_entries(trees, numbers)


def _samples_first(x: torch.Tensor, out: int) -> torch.Tensor:
    """`[K, *z] -> [K, N, *out]`"""
    return x.movedim(1 + out % (x.ndim - 1), 1)


def _inner_products(m: Member) -> Iterator[Look]:
    whole = m.t.reduction.whole
    grams = [m.result] if whole else m.leaves(m.result)
    of_model = grams[0].ndim > 2
    flat = [wide(x).flatten(0, x.ndim // 2 - 1).flatten(1) for x in grams]
    at = m.rows(torch.stack([x.diagonal() for x in flat]).sum(0))
    of = _kernel if of_model else _products
    computed = Remembered(
        lambda r, _leaf, which: of(m, r, at[which], whole), _largest(m.problem), torch.arange(len(at))
    )
    for i, x in enumerate(flat):
        name = "" if whole else m.problem.name(i) + ", "
        size = float(x.diagonal().abs().max())
        yield m.look(x[at], lambda r, i=i: computed(r)[i], lambda k, name=name: f"{name}row {int(at[k])}", size=size)
        yield m.look(x, lambda r, x=x: x.T, lambda k, name=name: f"{name}row {k}, beside column {k},", size=size)


def _products(m: Member, r: Reference, rows: torch.Tensor, whole: bool) -> Tensors:
    """`G G[n]^T` of some samples n: `[S, n]`."""
    run = r.loss
    shares = run.shares(torch.nn.functional.one_hot(m.chosen[rows], m.problem.n))
    images = [run.there(shares)] if whole else [run.forth(i, g) for i, g in enumerate(shares)]
    return [run.along(t, run.gradient)[0][:, m.chosen] for t in images]


def _kernel(m: Member, r: Reference, rows: torch.Tensor, whole: bool) -> Tensors:
    """`J J[n, c]^T` of some outputs c of samples n: `[S, n * C]`."""
    run, out = r.model, m.problem.out_dims
    (z,) = run.split.values
    first = z.movedim(out, 0)
    each = first[0].numel()
    c = torch.nn.functional.one_hot(m.chosen[rows // each] * each + rows % each, first.numel())
    cotangents = c.to(z).reshape(len(rows), *first.shape).movedim(1, 1 + out % z.ndim)
    shares = run.back([cotangents])
    images = [run.there(shares)] if whole else [run.forth(i, g) for i, g in enumerate(shares)]
    return [wide(_samples_first(x, out))[:, m.chosen].flatten(1) for (x,) in images]


_LOOKS: dict[type, Callable[[Member], Iterator[Look]]] = {
    EachSample: _each_sample,
    SumOfSquares: _sum_of_squares,
    SquaresOfEach: _squares_of_each,
    CentredSquares: _centred_squares,
    SumAndCentredSquares: _sum_and_centred_squares,
    SquaredNorms: _squared_norms,
    ClippedSum: _clipped_sum,
    MatrixTrace: _matrix_trace,
    SquareRoot: _square_root,
    JacobianRows: _jacobian_rows,
    InnerProducts: _inner_products,
}


def looks(m: Member) -> Iterator[Look]:
    """What there is to look at of a statistic."""
    return _LOOKS[type(m.t.reduction)](m)


def unknown(t: Statistic) -> str:
    """Why there is nothing to compare a statistic with; empty if there is."""
    if type(t.reduction) in _LOOKS:
        return ""
    return (
        f"the entries of {t.name} are no derivatives of f along an entry of its parameters, so that there is nothing "
        "to compare them with. Certify `diag_ggn` or `batch_grad` of the same function, which go through the same "
        "operations."
    )
