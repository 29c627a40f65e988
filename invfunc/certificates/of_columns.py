"""What is looked at of statistics that are made of columns: diagonals, traces, square roots, Jacobians."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from invfunc.certificates.look import Look, Member, Remembered, at_places
from invfunc.certificates.of_shares import gradient, samples_first, shares, summed
from invfunc.certificates.reference import Reference
from invfunc.certificates.rounding import Numbers, largest
from invfunc.certificates.run import units, wide
from invfunc.reductions.noise import SumAndNoise
from invfunc.reductions.squares import MatrixTrace


def _squares(m: Member, r: Reference, leaf: int, places: torch.Tensor) -> torch.Tensor:
    """What the columns of each sample add to the diagonal at some entries: `[K, n]`; of Hessians its part of it."""
    q = m.t.quantity
    if q.kind.first_order:
        return shares(m, r, leaf, places).square()
    if q.kind.second_order:
        return r.parts.hessian(leaf, places)[:, m.chosen]
    t = r.outputs.forth(leaf, units(r.leaves[leaf], places))
    if q.drawing is None:
        return r.outputs.curved(t, t)[:, m.chosen]
    return r.outputs.along(t, r.drawn[q.columns]).square().sum(0)[:, m.chosen]


def sum_of_squares(m: Member) -> Iterator[Look]:
    """A diagonal."""
    whole = m.t.kind.second_order and m.problem.samples is None

    def numbers(r: Reference, leaf: int, places: torch.Tensor) -> list[Numbers]:
        return [(r.hessian(leaf, places), 0.0) if whole else summed(_squares(m, r, leaf, places))]

    yield from m.at_entries([m.leaves(m.result)], numbers)


def squares_of_each(m: Member) -> Iterator[Look]:
    """The diagonal of each sample."""
    yield from m.at_entries([m.leaves(m.result)], lambda r, i, at: [(_squares(m, r, i, at), 0.0)])


def matrix_trace(m: Member) -> Iterator[Look]:
    """The sum of the diagonal, which is computed as well: the result is a pair of the trace and of it."""
    trace, diagonal = m.result
    leaves = m.leaves(diagonal)
    yield from m.at_entries([leaves], lambda r, i, at: [(_squares(m, r, i, at).sum(1), 0.0)])
    sums = torch.stack([wide(x).sum() for x in leaves])
    found = torch.stack([wide(x) for x in m.leaves(trace)])
    assert isinstance(m.t.reduction, MatrixTrace)
    whole = m.t.reduction.whole
    expected = sums.sum()[None] if whole else sums
    name = "the trace" if whole else "the trace of "
    yield m.look(found, lambda r: (expected, 0.0), lambda k: name if whole else name + m.problem.name(k))


def sum_and_noise(m: Member) -> Iterator[Look]:
    """The gradient, all of it, and what comes of its squares and of those of the shares, which are computed as well."""
    (sums, noise), diagonal = m.result
    reduction, n = m.t.reduction, len(m.chosen)
    assert isinstance(reduction, SumAndNoise)
    sums, squares = ([wide(x) for x in m.leaves(of)] for of in (sums, diagonal))
    yield from m.at_entries([squares], lambda r, i, at: [summed(_squares(m, r, i, at))])
    yield from gradient(m, sums, squares)
    for name, found in {"": noise}.items() if reduction.groups is None else noise.items():
        own = [i for i, path in enumerate(m.problem.paths) if reduction.group(path) == name]
        each = torch.stack([squares[i].sum() for i in own]).sum()
        mean = torch.stack([(sums[i] / n).square().sum() for i in own]).sum()
        trace = (each - n * mean) / (n - 1)
        called = f" of the group {name}" if name else ""
        for x, expected, size, what in (
            (found.squared_norm, mean - trace / n, mean + each / n, "the squared norm of the gradient"),
            (found.trace, trace, each / (n - 1), "the trace of the covariance"),
        ):
            numbers = expected[None], largest(size)
            yield m.look(x[None], lambda r, numbers=numbers: numbers, lambda k, of=what + called: of)


def square_root(m: Member) -> Iterator[Look]:
    """Products of the columns at pairs of entries: of each with itself, and with one that is drawn."""
    leaves, params = m.leaves(m.result), m.problem.leaves
    places = m.drawn([leaves])
    at = [(i, place) for i, of in enumerate(places.of) for place in of.tolist()]
    order = m.tape.draw(lambda g: torch.randperm(len(at), generator=g))
    S = torch.cat([at_places(x, p, of) for x, p, of in zip(leaves, params, places.of, strict=True)])

    def products(r: Reference) -> list[Numbers]:
        run, q = r.outputs, m.t.quantity
        images = [run.forth(i, units(r.leaves[i], of)) for i, of in enumerate(places.of) if len(of)]
        t = [torch.cat(z) for z in zip(*images, strict=True)]
        others = [z[order] for z in t]
        if q.drawing is None:
            own, mixed = run.curved(t, t), run.curved(t, others)
        else:
            s, more = run.along(t, r.drawn[q.columns]), run.along(others, r.drawn[q.columns])
            own, mixed = s.square().sum(0), (s * more).sum(0)
        return [(own[:, m.chosen], 0.0), (mixed[:, m.chosen], largest(own * own[order]) ** 0.5)]

    def called(j: int, n: int) -> str:
        return f"{m.entry(*at[j])}, squared and summed over what is pulled back,{m.sample(n)}"

    def both(j: int, n: int) -> str:
        return f"{m.entry(*at[j])} times {m.entry(*at[int(order[j])])}, summed over what is pulled back,{m.sample(n)}"

    computed = Remembered(products)
    yield m.look(S.square().sum(1), lambda r: computed(r)[0], called)
    yield m.look((S * S[order]).sum(1), lambda r: computed(r)[1], both)


def jacobian_rows(m: Member) -> Iterator[Look]:
    """The Jacobians of all outputs."""
    flat, count, out = m.leaves(m.result), len(m.problem.leaves), m.problem.out_dims

    def numbers(r: Reference, leaf: int, places: torch.Tensor) -> list[Numbers]:
        t = r.model.forth(leaf, units(r.leaves[leaf], places))
        return [(wide(samples_first(x, out))[:, m.chosen], 0.0) for x in t]

    yield from m.at_entries([flat[i : i + count] for i in range(0, len(flat), count)], numbers)
