"""Statistics of a checkpointed network are those of the network, as is chunking them or taking many at once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

import invfunc
import invfunc as i
from invfunc import additive_coupling, chunked, invertible_checkpoint, thresholds, together, tree
from invfunc.testing import assert_trees_close, peak_memory, return_freed_memory
from invfunc.testing.models import moved
from tests.invertible.test_composition import Module, steps, turned
from tests.invertible_cases import FLOOR, RTOL, Sizes, Twins, sizes, twins
from tests.rows import BOTH, FACTORS, FIRST_ORDER, LEAVES, LOSS, MODEL, WHOLE, Row, made_of, rows
from tests.strategies import Numbers
from tests.torch_layers import LAYERS

CLASSES = 3


def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y)


def model(h: Callable) -> Callable:
    """`f(params, x) -> [N, CLASSES]`, whose last parameter is a linear layer behind the network."""

    def f(params: Any, x: Any) -> torch.Tensor:
        y = [t if t.ndim > 1 else t[:, None] for t in tree.leaves(h(x, params[0]))]
        return torch.cat(y, 1) @ params[1]

    f.__name__ = "model"
    return f


def of_loss(f: Callable) -> Callable:
    return lambda params, x, y: loss(f(params, x), y)


def along(product: Callable) -> Callable:
    """A product with a matrix, as a function of the parameters and the batch."""
    return lambda params, *batch: product(params, turned(params), *batch)


def both(f: Callable) -> Callable:
    return i.together(i.variance(f), i.diag_ggn(f))


def each_loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y, reduction="none")


def made(some: dict[str, Row], form: str | None = None) -> dict[str, Callable]:
    """Statistics as functions of a model; of several results that are first-order, the losses are those of samples."""
    return {
        name: lambda f, row=row: made_of(row, f, each_loss if row.of_shares and row.gives != WHOLE else loss, form)
        for name, row in some.items()
    }


FIRST = {"grad": lambda f: grad(of_loss(f)), **made(FIRST_ORDER, LOSS), **made(rows(form=MODEL), MODEL)}
CURVATURE = {
    **{name: lambda f, of=of: lambda *args: of(f)(*args) for name, of in made(rows(LEAVES, WHOLE, form=BOTH)).items()},
    "diag_ggn of f": lambda f: i.diag_ggn(of_loss(f)),
    "hvp": lambda f: along(i.hvp(of_loss(f))),
    "ggnvp": lambda f: along(i.ggnvp(f, loss)),
}
CHUNKED = {
    "variance over samples": lambda f: i.chunked(i.variance(of_loss(f)), 2),
    "variance over params": lambda f: i.chunked(i.variance(of_loss(f)), 2, over="params"),
    "diag_ggn over outputs": lambda f: i.chunked(i.diag_ggn(f, loss), 2),
    "diag_ggn over samples": lambda f: i.chunked(i.diag_ggn(f, loss), 2, over="samples"),
    "diag_ggn over params": lambda f: i.chunked(i.diag_ggn(of_loss(f)), 3, over="params"),
    "gradients over samples": lambda f: (
        lambda params, x, y: i.chunked(
            lambda params, x, y: grad(lambda p: F.cross_entropy(f(p, x), y, reduction="sum"))(params), 2, fold="sum"
        )(params, x, y)
    ),
    "together": lambda f: both(of_loss(f)),
    "together over params": lambda f: i.chunked(both(of_loss(f)), 2, over="params"),
}
COMPOSED = {
    "vmap of variance": lambda f: lambda p, x, y: vmap(i.variance(of_loss(f)), (0, None, None))(steps(p), x, y),
    "vmap of diag_ggn over data": lambda f: lambda p, x, y: vmap(i.diag_ggn(f, loss), (None, 0, None))(p, steps(x), y),
    "grad of variance": lambda f: grad(lambda p, x, y: total_of(i.variance(of_loss(f))(p, x, y))),
    "grad of diag_ggn": lambda f: grad(lambda p, x, y: total_of(i.diag_ggn(f, loss)(p, x, y))),
}
KRONECKER = {
    name: lambda f, of=of: lambda *args: of(f)(*args)
    for name, of in made({name: row for name, row in rows(FACTORS).items() if row.axes}).items()
}
"""Of all but chains."""
TABLE = FIRST | CURVATURE | CHUNKED | COMPOSED
ALL = ["additive", "affine", "functions of a dict", "no inverse", "repeated, stacked, anchored", "nested"]
"""Whose samples do not meet."""


def total_of(found: Any) -> torch.Tensor:
    return sum((t.sin().sum() for t in tree.leaves(found)), torch.zeros(()))


def arguments(pair: Twins) -> tuple[Any, Any, torch.Tensor]:
    rand = Numbers(11)
    leaves = tree.leaves(pair.f(pair.x, pair.params))
    width = sum(t.shape[1] if t.ndim > 1 else 1 for t in leaves)
    n = len(leaves[0])
    return (pair.params, rand(width, CLASSES) / width**0.5), pair.x, rand.below(CLASSES, n)


def assert_same(of: Callable, form: str, s: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    pair = twins(form, s)
    (params, last), x, y = arguments(pair)
    pair = Twins(form, pair.f, pair.g, x, (params, last)).to(dtype, device)
    found, wanted = (of(model(h))(pair.params, pair.x, y.to(device)) for h in (pair.g, pair.f))
    assert_trees_close(found, wanted, RTOL[dtype], FLOOR)


MET = [
    (form, of)
    for i, form in enumerate(ALL)
    for k, of in enumerate(TABLE)
    if form in ("additive", "functions of a dict") or (i + k) % 2
]
"""Two forms meet every statistic; what the others meet takes turns, so that every statistic meets some of them."""


@pytest.mark.parametrize(("form", "of"), MET)
def test_equals_that_of_the_function(form, of, dtype, device):
    assert_same(TABLE[of], form, Sizes(n=4), dtype, device)


@pytest.mark.parametrize("of", KRONECKER.values(), ids=KRONECKER)
@pytest.mark.parametrize("form", ["additive", "affine", "no inverse", "repeated"])
def test_kronecker_factors_equal_those_of_the_function(form, of, dtype, device):
    assert_same(of, form, Sizes(n=4), dtype, device)


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_equals_that_of_the_function_at_any_size(data, dtype, device):
    form, of = data.draw(st.sampled_from(ALL)), data.draw(st.sampled_from(list(TABLE)))
    assert_same(TABLE[of], form, data.draw(sizes()), dtype, device)


@pytest.mark.parametrize("of", (FIRST | CURVATURE).values(), ids=FIRST | CURVATURE)
def test_of_a_module_that_uses_blocks(of, dtype, device):
    """Its own parameters, as `functional` finds them."""
    pair = twins("additive", Sizes(n=4)).to(dtype, device)
    y = Numbers(11).below(CLASSES, 4).to(device)

    def found(h: Callable) -> Any:
        f, params = i.functional(Module(h, pair.params))
        return of(lambda params, x: torch.cat(tree.leaves(f(params, x)), 1)[:, :CLASSES])(params, pair.x, y)

    assert_trees_close(found(pair.g), found(pair.f), RTOL[dtype], FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_of_each_layer_in_a_block(layer, dtype, device):
    """Operations that a statistic decomposes, or evaluates by another form, are evaluated so the second time too."""
    case = find(LAYERS[layer], lambda case: True, settings=settings(derandomize=True, database=None))
    params, *inputs = moved((case.params, *case.inputs), dtype, device)

    def added(f: Callable, y: torch.Tensor, *args: Any) -> torch.Tensor:
        return y + f(*args)

    def taken(f: Callable, y: torch.Tensor, *args: Any) -> torch.Tensor:
        return y - f(*args)

    def through(h: Callable) -> Callable:
        return lambda p, *xs: h(torch.ones_like(like), p, *xs).flatten(1).square().sum(1).mean()

    like = case.f(params, *inputs).detach()
    pair = i.Invertible(added, taken, (case.f,))
    block = i.invertible_checkpoint(pair)
    found, wanted = (i.batch_grad(through(h), in_dims=case.in_dims)(params, *inputs) for h in (block, pair))
    assert_trees_close(found, wanted, RTOL[dtype], FLOOR)


# Statistics of a reversible network: their memory does not grow with its depth, and their time not faster than it

SHALLOW, DEEP, N, WIDTH, MANY = 4, 8, 2048, 32, 4  # 65536 numbers a column: pulled back one by one on a CPU
FEW = 64
"""Samples where it is not memory that is measured."""


def cross_entropy(f):
    return lambda params, x, y: F.cross_entropy(f(params, x), y)


STATISTICS = {
    "sum_grad_squared": lambda f: invfunc.sum_grad_squared(cross_entropy(f)),
    "batch_l2_grad": lambda f: invfunc.batch_l2_grad(cross_entropy(f)),
    "variance": lambda f: invfunc.variance(cross_entropy(f)),
    "diag_ggn, drawn": lambda f: invfunc.diag_ggn(f, F.cross_entropy, mc_samples=1, generator=torch.Generator()),
    "clipped_grad by layers": lambda f: invfunc.clipped_grad(cross_entropy(f), 1e-4, groups="layer"),
    "diag_ggn, in passes of a column": lambda f: chunked(invfunc.diag_ggn(f, F.cross_entropy), MANY - 1),
    "exact kfac": lambda f: invfunc.kfac(f, F.cross_entropy, fisher="exact"),
    "diag_ggn": lambda f: invfunc.diag_ggn(f, F.cross_entropy),
    "diag_ggn beside exact kfac": lambda f: together(
        invfunc.diag_ggn(f, F.cross_entropy), invfunc.kfac(f, F.cross_entropy, fisher="exact")
    ),
    "diag_ggn of chunks of samples": lambda f: chunked(invfunc.diag_ggn(f, F.cross_entropy), 4, over="samples"),
}
LEAN = list(STATISTICS)[:5]
"""Statistics that pull back one vector, and are reduced during the backward pass."""


class Network:
    """Couplings as wide as the batch is long, and how often their parts are evaluated."""

    def __init__(self, depth, dtype, device, tied=False, n=N):
        numbers = Numbers()

        def rand(*shape):
            return numbers(*shape).to(device, dtype)

        self.params = [tuple((rand(WIDTH, WIDTH) / 8, rand(WIDTH)) for _ in "FG") for _ in range(1 if tied else depth)]
        self.depth, self.evaluated, self.tied = depth, 0, tied
        self.x = rand(n, 2 * WIDTH)
        self.y = torch.arange(n, device=device) % MANY
        self.pair = additive_coupling(self.part, self.part)

    def part(self, b, p):
        self.evaluated += 1
        return F.linear(b, *p).tanh()

    def model(self, wrap):
        block = wrap(self.pair)

        def f(params, x):
            state = x.chunk(2, 1)
            for k in range(self.depth):
                state = block(state, params[0 if self.tied else k])
            return state[0][:, :MANY]

        return f


def as_it_is(pair):
    return pair


def running(statistic, wrap, network):
    return partial(STATISTICS[statistic](network.model(wrap)), network.params, network.x, network.y)


def peaks():
    """In states of the network, of each statistic with checkpoints, and of one without, at two depths."""
    found = {}
    cases = [(LEAN[0], "plain", as_it_is), *((statistic, "invertible", invertible_checkpoint) for statistic in LEAN)]
    for (statistic, name, wrap), depth in itertools.product(cases, (SHALLOW, DEEP)):
        if depth == SHALLOW:
            running(statistic, wrap, Network(1, torch.float64, "cpu"))()  # what is allocated by a first call and stays
        network = Network(depth, torch.float64, "cpu")
        found[f"{statistic}, {name}, {depth}"] = peak_memory(running(statistic, wrap, network))[1] / network.x.nbytes
    return found


def of_a_process():
    """The peaks in a process of their own, as the size of this one says little."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no meter")
def test_memory_does_not_grow_with_depth():
    """One test, as each process of pytest-xdist that has one of several would measure all."""
    measured = of_a_process()

    def grown(statistic, name):
        shallow, deep = (measured[f"{statistic}, {name}, {depth}"] for depth in (SHALLOW, DEEP))
        return (deep - shallow) / (DEEP - SHALLOW)

    invertible = {statistic: grown(statistic, "invertible") for statistic in LEAN}
    plain = grown(LEAN[0], "plain")
    assert plain > 1, plain  # a state for each block and more, so the meter works
    assert max(invertible.values()) < 0.4, invertible  # the meter is off by 1 MiB, of four blocks


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("tied", [False, True])
def test_time_grows_as_depth_does(statistic, tied, dtype, device, monkeypatch):
    monkeypatch.setattr(thresholds, "APART", FEW * WIDTH)  # one by one here, too
    counts = []
    for depth in (2, 4, 6):
        network = Network(depth, dtype, device, tied, FEW)
        result = running(statistic, invertible_checkpoint, network)()
        counts.append(network.evaluated)
        if "drawn" not in statistic:
            plain = running(statistic, as_it_is, network)()
            assert_trees_close(result, plain, rtol=1e-9 if dtype == torch.float64 else 1e-3)
    assert counts[2] - counts[1] <= 1.1 * (counts[1] - counts[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    return_freed_memory()
    sys.stdout.write(json.dumps(peaks()))
