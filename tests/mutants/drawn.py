"""What faults are looked for on by `certified` alone: certified statistics and products of drawn functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import invfunc
from invfunc import certified, chunked, outputs, together, tree
from invfunc.certificates.of_products import HESSIANS, NAMES
from invfunc.testing import strategies
from invfunc.testing.laws.rows import BOTH, COLUMNS, FACTORS, FIRST_ORDER, MODEL, ROWS
from tests import criteria, moved
from tests.crossed import HIGHEST, LOWEST, sides, thresholds_at
from tests.forms import FORMS
from tests.lost import WAYS
from tests.strategies import (
    Numbers,
    convolutions,
    formed,
    linears,
    matmuls,
    transposed_convolutions,
)
from tests.structure_losses import criteria_of
from tests.structures import NETWORKS
from tests.torch_layers import LAYERS

BY_STRUCTURE = {"CLASS": 0.0, "COLUMN": 0.0, "FEW": 0, "PAYS": math.inf}
"""Thresholds by which the structure of a network is used wherever it can be."""
GIVEN = [name for name, row in ROWS.items() if row.gives != FACTORS]
GROUPS = [
    [name for name in FIRST_ORDER if not name.startswith("gram")],
    [
        name
        for name, row in ROWS.items()
        if row.axes == COLUMNS and BOTH in row.forms and not row.drawn and name in GIVEN
    ],
    ["gram", "gram per parameter"],
    [name for name in GIVEN if ROWS[name].drawn],
    ["batch_jacobian"],
]
"""Which come together, and are refused for the same reasons."""
DIAGONALS = ["diag_ggn", "batch_diag_ggn", "ggn_trace", "ggn_trace per parameter", "diag_hessian"]
"""What a structure is for."""


@dataclass(frozen=True, repr=False)
class World:
    """A model function and its loss with data, and the statistics that are worth a look."""

    called: str
    f: Callable
    loss: Callable
    params: Any
    inputs: tuple
    target: torch.Tensor
    dims: tuple
    rows: Sequence[str] = tuple(GIVEN)
    thresholds: Any = None

    @property
    def batch(self) -> tuple:
        return *self.inputs, self.target

    @property
    def n(self) -> int:
        return self.target.shape[self.dims[-1]]

    def whole(self, params: Any, *batch: Any) -> torch.Tensor:
        return self.loss(self.f(params, *batch[:-1]), batch[-1])


def certificates(data: Any) -> tuple[Callable[[], Any], str]:
    """A certified statistic or product of a drawn function, on one side of each threshold."""
    world = data.draw(st.sampled_from(list(WORLDS)).flatmap(WORLDS.__getitem__))
    at = data.draw(st.one_of(st.just({}), st.sampled_from([LOWEST, HIGHEST]), sides()))
    at = at | BY_STRUCTURE if world.rows == DIAGONALS else at
    seed = data.draw(st.integers(0, 2**31))
    certify = data.draw(_products(world) if data.draw(st.integers(0, 4)) == 4 else _statistics(world))

    def call() -> Any:
        with thresholds_at(**at) if at else nullcontext():
            return certify(seed)

    return call, world.called


@st.composite
def _statistics(draw: Any, world: World) -> Callable[[int], Any]:
    """Some statistics of one form together, of some samples, in chunks."""
    group = draw(st.sampled_from(GROUPS))
    taken = [name for name in group if name in world.rows] or DIAGONALS
    form = draw(st.sampled_from(ROWS[taken[0]].forms))
    names = draw(st.lists(st.sampled_from(taken), min_size=1, max_size=5, unique=True))
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


# Functions with their losses


@st.composite
def _families(draw: Any) -> World:
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    problem = draw(strategies.problems(n=(1, 6), in_dims=(0, 1), dtype=dtype))
    model = problem.model
    sharp = draw(st.sampled_from([1.0, 8.0]))

    def f(params: Any, *xs: Any) -> Any:
        return sharp * model.f(params, *xs)

    loss = draw(st.sampled_from([problem.loss, *_weighted(problem)]))
    return World(str(problem), f, loss, model.params, problem.batch[:-1], problem.batch[-1], problem.in_dims)


def _weighted(problem: Any) -> list[Callable]:
    """Cross entropies with weights, targets that are ignored, and smoothed labels."""
    if problem.loss.called != "cross_entropy":
        return []
    weight = torch.tensor([0.5, 2.0, 1.0])
    options = ({"weight": weight}, {"ignore_index": 1}, {"label_smoothing": 0.2})
    options += ({"weight": weight, "label_smoothing": 0.2, "ignore_index": 0},)

    def loss(o: dict) -> Callable:
        return lambda z, y: F.cross_entropy(z, y, **{k: v.to(z) if k == "weight" else v for k, v in o.items()})

    return [loss(o) for o in options]


@st.composite
def _losses(draw: Any) -> World:
    """All options of the losses of torch."""
    found = draw(st.one_of(criteria.cross_entropies(), criteria.elementwise(), criteria.after_logarithms()))
    f, params = criteria.model(found.one)
    sharp, n = draw(st.sampled_from([1.0, 8.0])), len(found.target)
    scaled = lambda p, x: sharp * f(p, x)  # noqa: E731
    return World(str(found), scaled, found.loss, params, (Numbers(1)(n, 2),), found.target, (0, 0), GGNS)


GGNS = [*DIAGONALS, "sqrt_ggn", "batch_diag_hessian", *(name for name in GIVEN if ROWS[name].drawn)]


def _each(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (z - y).square().reshape(len(z), -1).sum(1)


def _bent(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Not convex."""
    return (z - y).sin().square().reshape(len(z), -1).sum(1)


def _line(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A Hessian of rank one."""
    return (z - y).reshape(len(z), -1).sum(1).square()


@st.composite
def _cases(draw: Any, cases: Any) -> World:
    """A model function that is drawn alone, with squares."""
    case = draw(cases)
    with torch.no_grad():
        shape = case.f(case.params, *case.inputs).shape
    loss = draw(st.sampled_from([F.mse_loss, _each, _bent, _line]))
    return World(str(case), case.f, loss, case.params, case.inputs, Numbers(1)(*shape), (*case.in_dims, 0))


@st.composite
def _structures(draw: Any) -> World:
    """Networks whose outputs see few of their entries."""
    net = draw(st.one_of(*NETWORKS.values()))
    with torch.no_grad():
        criterion = draw(criteria_of(tuple(net.f(net.params, *net.inputs).shape)))
    dims = (*net.in_dims, 0)
    return World(
        f"{net}, {criterion}", net.f, criterion.loss, net.params, net.inputs, criterion.target, dims, DIAGONALS
    )


@st.composite
def _moved(draw: Any) -> World:
    """Programs that move their samples, some of them so that they are no functions of single samples."""
    r = Random(draw(st.integers(0, 2**20)))
    careless, whole = draw(st.booleans()), draw(st.booleans())
    (f, _), (w, *data) = moved.program(r, careless, whole), moved.arguments(r)
    loss = draw(st.sampled_from([F.mse_loss, _each]))
    return World("samples that are moved", f, loss, w, tuple(data), Numbers(2)(*data[0].shape), (0, 0, 0, 0))


class _Apart(torch.autograd.Function):
    """Mixes samples where nobody sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g - g.mean(0)


@st.composite
def _hidden(draw: Any) -> World:
    """Samples that go where they are not seen, and may be mixed there."""
    called = draw(st.sampled_from(["mixed", *WAYS]))
    g = _Apart.apply if called == "mixed" else WAYS[called]
    after = draw(st.booleans())

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (_Apart.apply(x @ p) if called == "mixed" and after else g(x) @ p).tanh()

    loss = draw(st.sampled_from([F.mse_loss, _each]))
    return World(called, f, loss, Numbers()(3, 3), (Numbers(1)(4, 3),), Numbers(2)(4, 3), (0, 0))


@st.composite
def _graphs(draw: Any) -> World:
    """A loss for each graph of a batch, whose messages are written into zeros."""
    nodes, n = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    edges, seed = draw(st.integers(0, 4)), draw(st.integers(0, 99))
    write = draw(st.sampled_from(list(MESSAGES)))
    rand = Numbers(seed)

    def f(p: Any, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        def one(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            h = x @ p["a"]
            return torch.tanh(h + MESSAGES[write](h, e)).sum(0) @ p["b"]

        return torch.stack([one(x[i], e[i]) for i in range(len(x))])

    params = {"a": rand(2, 3), "b": rand(3, 2)}
    data = rand(n, nodes, 2), rand.below(nodes, n, 2, edges)
    return World(write, f, draw(st.sampled_from([_each, F.mse_loss])), params, data, rand(n, 2), (0, 0, 0))


MESSAGES: dict[str, Callable] = {
    "index_add": lambda h, e: torch.zeros_like(h).index_add(0, e[1], h[e[0]]),
    "index_add_": lambda h, e: torch.zeros_like(h).index_add_(0, e[1], h[e[0]]),
    "index_put": lambda h, e: torch.zeros_like(h).index_put((e[1],), h[e[0]], accumulate=True),
    "scatter_add": lambda h, e: torch.zeros_like(h).scatter_add(0, e[1][:, None].expand(-1, h.shape[1]), h[e[0]]),
}


@st.composite
def _several(draw: Any) -> World:
    """Several outputs, with a bottleneck on the way that others go around, and samples along any axis."""
    rand, n = Numbers(draw(st.integers(0, 9))), draw(st.integers(1, 5))
    at, around, twice = draw(st.integers(0, 1)), draw(st.booleans()), draw(st.booleans())

    def f(p: Any, x: torch.Tensor) -> Any:
        x = x.movedim(at, 0)
        gates = F.log_softmax(x @ p["gates"], 1).exp()
        z = torch.einsum("nk,kij,ni->nj", gates, p["experts"], x)
        return z, F.log_softmax(z * p["scale"] + (x @ p["gates"] if around else 0), 1)[:, :2]

    def loss(z: Any, y: torch.Tensor) -> torch.Tensor:
        z = tuple(map(outputs, z)) if twice else z
        y = y.movedim(at, 0)
        return (z[0] - y[:, :3]).square().mean() + F.mse_loss(z[1], y[:, 3:])

    params = {"gates": rand(2, 3), "experts": rand(3, 2, 3), "scale": rand(3)}
    x, y = rand(n, 2).movedim(0, at), rand(n, 5).movedim(0, at)
    return World("several outputs", f, loss, params, (x,), y, (at, at))


OPERATIONS = [linears(), matmuls(), *(c(d) for c in (convolutions, transposed_convolutions) for d in (1, 2))]
WORLDS: dict[str, Any] = {
    "families": _families(),
    "losses": _losses(),
    "forms": _cases(st.sampled_from([form for of in FORMS.values() for form in of]).flatmap(formed)),
    "layers": _cases(st.sampled_from(list(LAYERS)).flatmap(LAYERS.__getitem__)),
    "operations": _cases(st.one_of(*OPERATIONS)),
    "structures": _structures(),
    "moved": _moved(),
    "hidden": _hidden(),
    "graphs": _graphs(),
    "several": _several(),
}
