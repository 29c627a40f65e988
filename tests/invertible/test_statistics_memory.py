"""Statistics of a reversible network: their memory does not grow with its depth, and their time not faster than it."""

import itertools
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import additive_coupling, chunked, invertible_checkpoint, thresholds, together
from invfunc.testing import assert_trees_close, peak_memory, return_freed_memory
from tests.strategies import Numbers

SHALLOW, DEEP, N, WIDTH, CLASSES = 4, 8, 2048, 32, 4  # 65536 numbers a column: pulled back one by one on a CPU
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
    "diag_ggn, in passes of a column": lambda f: chunked(invfunc.diag_ggn(f, F.cross_entropy), CLASSES - 1),
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
        self.y = torch.arange(n, device=device) % CLASSES
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
            return state[0][:, :CLASSES]

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
