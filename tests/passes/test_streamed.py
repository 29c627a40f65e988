"""Cotangents of several columns: each parameter is reduced as they arrive at its operation."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc.passes.pullback import Pullback
from invfunc.recording.scope import Scope
from invfunc.testing import assert_trees_close
from tests.crossed import FAR, thresholds_at
from tests.strategies import Numbers

pytestmark = pytest.mark.usefixtures("old_core")

N, WIDTH, CLASSES = 64, 16, 5
STATISTICS = {
    "diag_ggn": invfunc.diag_ggn,
    "batch_diag_ggn": invfunc.batch_diag_ggn,
    "kflr": invfunc.kflr,
    "diag_hessian": invfunc.diag_hessian,
    "several": lambda f, loss: invfunc.together(invfunc.diag_ggn(f, loss), invfunc.ggn_trace(f, loss)),
}


def deep(depth, device="cpu", dtype=torch.float64):
    """A network whose layers read parameters once, twice, and one of all layers; and some data."""
    numbers = Numbers()

    def rand(*shape):
        return numbers(*shape).to(device, dtype)

    params = {"w": [rand(WIDTH, WIDTH) / 4 for _ in range(depth)], "all": rand(WIDTH), "none": rand(2)}

    def f(params, x):
        for k, w in enumerate(params["w"]):
            x = torch.tanh(F.linear(x, w, params["all"]))
            x = x + F.linear(x, w) if k == 1 else x
        return x[:, :CLASSES]

    return f, params, rand(N, WIDTH), torch.arange(N, device=device) % CLASSES


@pytest.mark.parametrize("name", STATISTICS)
def test_reduced_as_they_arrive_is_what_all_at_once_give(name, device, dtype):
    f, *given = deep(4, device, dtype)
    statistic = STATISTICS[name](f, F.cross_entropy)
    found = []
    for numbers in (0, FAR):
        with thresholds_at(STREAMED=numbers):
            found.append(statistic(*given))
    assert_trees_close(*found, rtol=1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_has_no_rule_for_batches_is_pulled_back_column_by_column(name, after, monkeypatch):
    """Some parameters are reduced by then, and count once."""
    f, *given = deep(4)
    statistic, stream, failures = STATISTICS[name](f, F.cross_entropy), Scope.stream, []

    def failing(scope, outputs, cotangents, edges, arrived, **options):
        left = after

        def arrives(site, cotangent):
            nonlocal left
            if left == 0 and options["batched"]:
                failures.append(site)
                raise RuntimeError("Batching rule not implemented")
            left -= 1
            arrived(site, cotangent)

        stream(scope, outputs, cotangents, edges, arrives, **options)

    with thresholds_at(STREAMED=0):
        expected = statistic(*given)
        monkeypatch.setattr(Scope, "stream", failing)
        assert_trees_close(statistic(*given), expected, rtol=1e-12)
    assert failures


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_errors_of_what_reduces_them_are_raised(name, at, error, monkeypatch):
    """None is taken for that of a derivative without a rule."""
    f, *given = deep(4)
    statistic, shares, calls = STATISTICS[name](f, F.cross_entropy), Pullback.shares, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == at:
            raise error("there is no memory")
        return shares(*args, **options)

    with thresholds_at(STREAMED=0):
        expected = statistic(*given)
        with monkeypatch.context() as patched:
            patched.setattr(Pullback, "shares", failing)
            with pytest.raises(error, match="there is no memory"):
                statistic(*given)
        assert_trees_close(statistic(*given), expected, rtol=1e-12)


@pytest.mark.parametrize("name", STATISTICS)
def test_cotangents_of_few_operations_are_there_at_once(name, monkeypatch):
    """One that reads a parameter which another one reads, too, waits for that."""
    _, *given = deep(6)

    def f(params, x):
        for w in params["w"]:
            x = torch.tanh(F.linear(x, w))
        return x[:, :CLASSES]

    statistic, exposed = STATISTICS[name](f, F.cross_entropy), Pullback._exposed
    made, alive = list[Any](), list[int]()

    def noted(pullback, site, cotangent):
        found = exposed(pullback, site, cotangent)
        if len(found) > 1:
            made.append(weakref.ref(found))
            alive.append(sum(one() is not None for one in made))
        return found

    monkeypatch.setattr(Pullback, "_exposed", noted)
    most = []
    for numbers in (0, FAR):
        with thresholds_at(STREAMED=numbers):
            statistic(*given)
        most.append(max(alive))
        made.clear()
        alive.clear()
    assert most[0] <= 2 < 6 <= most[1], most
