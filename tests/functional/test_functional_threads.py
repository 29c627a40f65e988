"""`functional(model)` in threads: each call has its own parameters, and the module is never seen changed."""

import sys
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import batch_grad, diag_ggn, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT, IN_PLACE, Counting, kinds, made, numbers
from tests.strategies import Numbers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@kinds
def test_in_threads(kind):
    """Calls of one function at different parameters, and of the module itself, in threads that switch often."""
    model = made(kind)
    f, params = functional(model)
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    model.eval()
    wanted, plain = [f(p, x) for p in points], model(x).detach()
    wrong, calls, interval = [], [], sys.getswitchinterval()
    end = time.perf_counter() + 0.25

    def work(run, expected):
        while time.perf_counter() < end and not wrong:
            calls.append(1)
            if not torch.equal(run(), expected):
                wrong.append(expected)

    jobs = [(lambda p=p: f(p, x), z) for p, z in zip(points, wanted, strict=True)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        work(lambda: model(x).detach(), plain)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and len(calls) > 50


@pytest.mark.parametrize("kind", IN_PLACE.values(), ids=IN_PLACE)
def test_calls_wait_for_each_other_where_the_module_cannot_be_copied(kind):
    f, params = functional(made(kind))
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    wanted, wrong = [f(p, x) for p in points], []

    def work(p, expected):
        for _ in range(100):
            if not torch.equal(f(p, x), expected):
                wrong.append(p)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work, args=job) for job in zip(points, wanted, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert any("other threads must not call the module" in str(w.message) for w in said)


def test_statistics_in_threads():
    model = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    f, params = functional(model)
    x, y = Numbers()(5, 3), Numbers(1)(5, 2)
    statistics = [batch_grad(lambda p, x, y: (f(p, x) - y).square().sum(1)), diag_ggn(f, F.mse_loss)] * 2
    points = [numbers(params, seed) for seed in range(4)]
    wanted = [t(p, x, y) for t, p in zip(statistics, points, strict=True)]
    plain, found, running = model(x).detach(), [[] for _ in points], [True]

    def work(place):
        for _ in range(40):
            found[place].append(statistics[place](points[place], x, y))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        running.append(torch.equal(model(x), plain))
    assert all(running)
    for results, expected in zip(found, wanted, strict=True):
        assert len(results) == 40
        for result in results:
            assert_trees_close(result, expected, EXACT)


def test_in_another_thread_a_warning_says_that_they_are_not_kept():
    model = made(Counting)
    f, params = functional(model)
    x = Numbers()(4, 3)
    f(params, x)
    kept, said = model.divergence, []

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(numbers(params), x)
            f(numbers(params), x)
        said.extend(str(w.message) for w in caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert model.divergence is kept and len(said) == 1 and "'divergence'" in said[0]
