"""`functional(model)` in threads: each call has its own parameters."""

import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import batch_grad, diag_ggn, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT, kinds, made, numbers
from tests.strategies import Numbers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@kinds
def test_in_threads(kind):
    """Calls of one function at different parameters, in threads that switch often."""
    f, params = functional(made(kind).eval())
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    wanted = [f(p, x) for p in points]
    wrong, calls, interval = [], [], sys.getswitchinterval()
    end = time.perf_counter() + 0.1

    def work(p, expected):
        while time.perf_counter() < end and not wrong:
            calls.append(1)
            if not torch.equal(f(p, x), expected):
                wrong.append(expected)

    threads = [threading.Thread(target=work, args=job) for job in zip(points, wanted, strict=True)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and len(calls) > 20


def test_statistics_in_threads():
    f, params = functional(made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))))
    x, y = Numbers()(5, 3), Numbers(1)(5, 2)
    statistics = [batch_grad(lambda p, x, y: (f(p, x) - y).square().sum(1)), diag_ggn(f, F.mse_loss)] * 2
    points = [numbers(params, seed) for seed in range(4)]
    wanted = [t(p, x, y) for t, p in zip(statistics, points, strict=True)]
    found = [[] for _ in points]

    def work(place):
        for _ in range(40):
            found[place].append(statistics[place](points[place], x, y))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, expected in zip(found, wanted, strict=True):
        assert len(results) == 40
        for result in results:
            assert_trees_close(result, expected, EXACT)
