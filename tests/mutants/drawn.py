"""What faults are looked for on by `certified` alone: certified statistics and products of drawn functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

import invfunc
from invfunc import certified, chunked, together, tree
from invfunc.testing import strategies
from invfunc.testing.laws.rows import BOTH, COLUMNS, MODEL, ROWS
from tests.alarms.calls import CERTIFIED, HESSIANS, NAMES
from tests.crossed import HIGHEST, LOWEST, sides, thresholds_at
from tests.mutants.worlds import DIAGONALS, GIVEN, World
from tests.strategies import Numbers

BY_STRUCTURE = {"CLASS": 0.0, "COLUMN": 0.0, "FEW": 0, "PAYS": math.inf}
"""Thresholds by which the structure of a network is used wherever it can be."""
GROUPS = {
    "first order": [n for n, row in CERTIFIED.items() if row.of_shares is not None and not n.startswith("gram")],
    "curvature": [
        name for name, row in CERTIFIED.items() if row.axes == COLUMNS and BOTH in row.forms and name in GIVEN
    ],
    "inner products": [name for name in CERTIFIED if name.startswith("gram")],
    "Jacobian": ["batch_jacobian"],
    "products": list(NAMES),
}
"""Which come together, and are refused for the same reasons."""


@st.composite
def calls(draw: Any, kind: Any, group: str) -> Callable[[bool], Any]:
    """A statistic or product of a drawn function, on one side of each threshold: `call(certify)`."""
    world = draw(kind)
    names = GROUPS[group] if group == "products" else [name for name in GROUPS[group] if name in world.rows]
    assume(names)
    at = draw(st.one_of(st.just({}), st.sampled_from([LOWEST, HIGHEST]), sides()))
    at = {name: value for name, value in at.items() if name != "ORDERS"}  # of many operands there are too many
    at |= BY_STRUCTURE if world.rows == DIAGONALS else {}
    seed = draw(st.integers(0, 2**31))
    made, args = draw(_product(world, names) if group == "products" else _statistics(world, names))

    def call(certify: bool) -> Any:
        with thresholds_at(**at) if at else nullcontext():
            t = made()
            return certified(t, generator=seed)(*args) if certify else t(*args)

    return call


@st.composite
def _statistics(draw: Any, world: World, taken: list[str]) -> tuple[Callable[[], Any], tuple]:
    """Some statistics of one form together, of some samples, in chunks."""
    form = draw(st.sampled_from(ROWS[taken[0]].forms))
    names = draw(st.one_of(st.just(taken), st.lists(st.sampled_from(taken), min_size=1, max_size=4, unique=True)))
    places = st.one_of(st.permutations(range(world.n)), st.lists(st.integers(-world.n, world.n - 1), min_size=1))
    options = draw(st.one_of(st.just({}), st.fixed_dictionaries({"samples": places})))
    correction = draw(st.sampled_from([0, -0.5]))
    axes = [axis for axis in COLUMNS if all(axis in ROWS[name].axes for name in names)]
    divided = draw(st.lists(strategies.chunkings(axes, most=3), max_size=2))

    def one(name: str) -> Any:
        own = options | ({"correction": correction} if name in ("variance", "grad_and_variance") else {})
        if form == MODEL:
            return ROWS[name].make(world.f, in_dims=world.dims[:-1], **own)
        if form == BOTH:
            return ROWS[name].make(world.f, world.loss, in_dims=world.dims, **own)
        return ROWS[name].make(world.whole, in_dims=world.dims, **own)

    def made() -> Any:
        t = together(*map(one, names)) if len(names) > 1 else one(names[0])
        for how in divided:
            t = chunked(t, **how)
        return t

    return made, (world.params, *(world.inputs if form == MODEL else world.batch))


@st.composite
def _product(draw: Any, world: World, names: list[str]) -> tuple[Callable[[], Any], tuple]:
    """A product with one vector or several, whose leaves may come in another order."""
    name, alone, k = draw(st.sampled_from(names)), draw(st.booleans()), draw(st.integers(1, 2))
    rand, turned = Numbers(draw(st.integers(0, 9))), draw(st.booleans())
    options: Any = {} if name in HESSIANS else {"in_dims": world.dims}
    of: Any = getattr(invfunc, name)
    t = of(world.whole, **options) if alone else of(world.f, world.loss, **options)
    v = tree.map_tensors(lambda p: rand(*[k] * t.lead, *p.shape).to(p), world.params)
    if turned and isinstance(v, dict):
        v = dict(reversed(v.items()))
    return lambda: t, (world.params, v, *world.batch)
