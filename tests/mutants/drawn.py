"""What faults are looked for on by `certified` alone: certified statistics and products of drawn functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from hypothesis import strategies as st

import invfunc
from invfunc import certified, chunked, together, tree
from invfunc.certificates.of_products import HESSIANS, NAMES
from invfunc.testing import strategies
from invfunc.testing.laws.rows import BOTH, COLUMNS, FIRST_ORDER, MODEL, ROWS
from tests.crossed import HIGHEST, LOWEST, sides, thresholds_at
from tests.mutants.worlds import DIAGONALS, GIVEN, World, worlds
from tests.strategies import Numbers

BY_STRUCTURE = {"CLASS": 0.0, "COLUMN": 0.0, "FEW": 0, "PAYS": math.inf}
"""Thresholds by which the structure of a network is used wherever it can be."""
GROUPS = [
    [name for name in FIRST_ORDER if not name.startswith("gram")],
    [
        name
        for name, row in ROWS.items()
        if row.axes == COLUMNS and BOTH in row.forms and not row.drawn and name in GIVEN
    ],
    [name for name in FIRST_ORDER if name.startswith("gram")],
    ["batch_jacobian"],
    [name for name in GIVEN if ROWS[name].drawn],
]
"""Which come together, and are refused for the same reasons."""


def certificates(data: Any) -> tuple[Callable[[], Any], str]:
    """A certified statistic or product of a drawn function, on one side of each threshold."""
    world = data.draw(worlds())
    at = data.draw(st.one_of(st.just({}), st.sampled_from([LOWEST, HIGHEST]), sides()))
    at = {name: value for name, value in at.items() if name != "ORDERS"}  # of many operands there are too many
    at |= BY_STRUCTURE if world.rows == DIAGONALS else {}
    seed = data.draw(st.integers(0, 2**31))
    certify = data.draw(_products(world) if data.draw(st.integers(0, 4)) == 4 else _statistics(world))

    def call() -> Any:
        with thresholds_at(**at) if at else nullcontext():
            return certify(seed)

    return call, world.called


@st.composite
def _statistics(draw: Any, world: World) -> Callable[[int], Any]:
    """Some statistics of one form together, of some samples, in chunks."""
    groups = [[name for name in group if name in world.rows] for group in GROUPS]
    taken = draw(st.sampled_from([group for group in groups if group]))
    form = draw(st.sampled_from(ROWS[taken[0]].forms))
    names = draw(st.one_of(st.just(taken), st.lists(st.sampled_from(taken), min_size=1, max_size=4, unique=True)))
    places = st.one_of(st.permutations(range(world.n)), st.lists(st.integers(-world.n, world.n - 1), min_size=1))
    options = draw(st.one_of(st.just({}), st.fixed_dictionaries({"samples": places})))
    correction = draw(st.sampled_from([0, -0.5]))
    axes = [axis for axis in COLUMNS if all(axis in ROWS[name].axes for name in names)]
    divided = draw(st.lists(strategies.chunkings(axes, most=3), max_size=2))

    def made(name: str) -> Any:
        own = options | ({"correction": correction} if name in ("variance", "grad_and_variance") else {})
        if form == MODEL:
            return ROWS[name].make(world.f, in_dims=world.dims[:-1], **own)
        if form == BOTH:
            return ROWS[name].make(world.f, world.loss, in_dims=world.dims, **own)
        return ROWS[name].make(world.whole, in_dims=world.dims, **own)

    def certify(seed: int) -> Any:
        t = together(*map(made, names)) if len(names) > 1 else made(names[0])
        for how in divided:
            t = chunked(t, **how)
        batch = world.inputs if form == MODEL else world.batch
        return certified(t, generator=seed)(world.params, *batch)

    return certify


@st.composite
def _products(draw: Any, world: World) -> Callable[[int], Any]:
    name, alone, k = draw(st.sampled_from(NAMES)), draw(st.booleans()), draw(st.integers(1, 2))
    rand, turned = Numbers(draw(st.integers(0, 9))), draw(st.booleans())

    def certify(seed: int) -> Any:
        options = {} if name in HESSIANS else {"in_dims": world.dims}
        of: Any = getattr(invfunc, name)
        t = of(world.whole, **options) if alone else of(world.f, world.loss, **options)
        v = tree.map_tensors(lambda p: rand(*[k] * t.lead, *p.shape).to(p), world.params)
        if turned and isinstance(v, dict):
            v = dict(reversed(v.items()))
        return certified(t, generator=seed)(world.params, v, *world.batch)

    return certify
