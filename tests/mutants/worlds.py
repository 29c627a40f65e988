"""Functions of parameters with their losses and data, of many kinds, on which `certified` looks for faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from invfunc import outputs
from invfunc.testing import strategies
from invfunc.testing.laws.rows import FACTORS, ROWS
from invfunc.testing.models import FAMILIES
from tests import criteria, moved
from tests.core.test_hidden import Averaged
from tests.forms import FORMS
from tests.lost import WAYS
from tests.modules import of_module
from tests.operations.test_thresholds import PROGRAMS, built
from tests.strategies import Case, Numbers, convolutions, formed, linears, matmuls, transposed_convolutions
from tests.structure_losses import criteria_of
from tests.structures import NETWORKS
from tests.torch_layers import LAYERS

GIVEN = [name for name, row in ROWS.items() if row.gives != FACTORS and "with error" not in name]
DIAGONALS = ["diag_ggn", "batch_diag_ggn", "ggn_trace", "ggn_trace per parameter", "diag_hessian"]
"""What a structure is for."""
GGNS = [*DIAGONALS, "sqrt_ggn", "batch_diag_hessian", *(name for name in GIVEN if ROWS[name].drawn)]


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


@st.composite
def _families(draw: Any, names: list[str]) -> World:
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    problem = draw(strategies.problems(names, n=(1, 6), in_dims=(0, 1), dtype=dtype))
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


def _each(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (z - y).square().reshape(len(z), -1).sum(1)


def _bent(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Not convex."""
    return (z - y).sin().square().reshape(len(z), -1).sum(1)


def _line(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A Hessian of rank one."""
    return (z - y).reshape(len(z), -1).sum(1).square()


def _both_orders(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A sum of two criteria, whose samples come in two orders."""
    return F.mse_loss(z, y) + F.mse_loss(z.flip(0).tanh(), y.flip(0))


@st.composite
def _cases(draw: Any, cases: Any) -> World:
    """A model function that is drawn alone, with squares."""
    case = draw(cases)
    with torch.no_grad():
        shape = case.f(case.params, *case.inputs).shape
    loss = draw(st.sampled_from([F.mse_loss, _each, _bent, _line, _both_orders]))
    return World(str(case), case.f, loss, case.params, case.inputs, Numbers(1)(*shape), (*case.in_dims, 0))


@st.composite
def _structures(draw: Any, networks: Any) -> World:
    """Networks whose outputs see few of their entries."""
    net = draw(networks)
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
    unseen = {"mixed": _Apart.apply, "averaged": Averaged.apply}
    called = draw(st.sampled_from([*unseen, *WAYS]))
    after, g = called in unseen and draw(st.booleans()), (unseen | WAYS)[called]

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (g(x @ p) if after else g(x) @ p).tanh()

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


def _program(name: str) -> Case:
    """Layers one after the other, for each of which there are several ways."""
    return of_module(name, *built(name))


def _dense() -> Any:
    return st.one_of(linears(), matmuls(), *(c(d) for c in (convolutions, transposed_convolutions) for d in (1, 2)))


KINDS: dict[str, Any] = {
    **{f"model: {name}": _families([name]) for name in FAMILIES if name != "sequence"},
    "losses": _losses(),
    **{f"expressions: {name}": _cases(st.sampled_from(forms).flatmap(formed)) for name, forms in FORMS.items()},
    **{f"layer: {name}": _cases(layer) for name, layer in LAYERS.items()},
    **{f"program: {name}": _cases(st.builds(_program, st.just(name))) for name in PROGRAMS},
    "products of any shape": _cases(_dense()),
    **{f"structure: {name}": _structures(networks) for name, networks in NETWORKS.items()},
    "moved": _moved(),
    "hidden": _hidden(),
    "graphs": _graphs(),
    "several outputs": _several(),
}
"""What is drawn."""
