"""`functional(model)` in threads: each call has its own parameters."""

import sys
import threading
import time

import pytest
import torch

from invfunc import functional
from tests.functional_modules import kinds, made, numbers
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
