"""explain says what a statistic is going to do, and does not do it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import ArgumentTypeError, chunked, diag_ggn, explain, functional, ggn_trace, kflr, sum_grad_squared
from tests.structures import always


def arranged(*layers, x):
    f, params = functional(nn.Sequential(*layers))
    return f, (params, x, torch.zeros_like(f(params, x)).detach())


def local(n=2):
    return arranged(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 3), x=torch.randn(n, 2, 40))


def ways(found):
    return [(part.way, part.passes) for part in found.parts]


def test_of_local_layers():
    f, args = local()
    with always():
        found = explain(diag_ggn(f, F.mse_loss))(*args)
    assert found.columns == 72 and ways(found) == [("closed form", 0), ("local", 6)]  # three colours, two channels
    assert found.passes == 6 and 0 < found.cost < 1 and found.bytes > 0
    assert found.parts[1].params == ("params['0.weight']", "params['0.bias']")
    assert "local: 6 passes for 72 columns" in str(found)


def test_of_narrow_layers():
    f, args = arranged(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 40), x=torch.randn(4, 40))
    with always():
        assert ways(explain(diag_ggn(f, F.mse_loss))(*args)) == [("closed form", 0), ("narrow", 3)]
        assert ways(explain(kflr(f, F.mse_loss))(*args)) == [("dense", 40), ("narrow", 3)]


REASONS = {
    "few columns": lambda f, args: explain(diag_ggn(f, lambda z, y: F.mse_loss(z[:, :1, :4], y[:, :1, :4])))(*args),
    "method='dense'": lambda f, args: explain(ggn_trace(f, F.mse_loss, method="dense"))(*args),
    "passes were asked for": lambda f, args: explain(chunked(diag_ggn(f, F.mse_loss), 3))(*args),
    "differentiated": lambda f, args: [
        found := [],
        torch.func.grad(lambda x: found.append(explain(diag_ggn(f, F.mse_loss))(args[0], x, args[2])) or x.sum())(
            args[1]
        ),
        found[0],
    ][-1],
}


@pytest.mark.parametrize("why", REASONS)
def test_of_all_columns(why):
    f, args = local()
    found = REASONS[why](f, args)
    assert why in found.why and found.passes == found.columns and not found.parts


def test_consumes_no_random_numbers():
    f, args = local()
    state = torch.get_rng_state()
    with always():
        explain(diag_ggn(f, F.mse_loss))(*args)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("what", ["a function", "of gradients", "drawn"])
def test_of_something_else(what):
    f, _ = local()
    drawn = diag_ggn(f, F.mse_loss, mc_samples=1, generator=torch.Generator())
    given = {"a function": f, "of gradients": sum_grad_squared(f), "drawn": drawn}[what]
    with pytest.raises(ArgumentTypeError, match="it explains statistics of the exact columns of a GGN"):
        explain(given)
