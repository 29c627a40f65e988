"""explain says what a statistic is going to do, and does not do it."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import (
    ArgumentTypeError,
    batch_diag_ggn,
    batch_grad,
    chunked,
    clipped_grad,
    diag_ggn,
    diag_hessian,
    ekfac,
    explain,
    functional,
    ggn_trace,
    gram,
    kfac,
    kflr,
    operation,
    reduced,
    sqrt_ggn,
    together,
    variance,
)
from invfunc.passes.pullback import Pullback
from invfunc.sparsity.execute import Closed
from tests.meter import Meter, nothing_collected
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
    assert "local: 6 backward passes for 72 columns" in str(found)


def test_of_narrow_layers():
    f, args = arranged(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 40), x=torch.randn(4, 40))
    with always():
        assert ways(explain(diag_ggn(f, F.mse_loss))(*args)) == [("closed form", 0), ("narrow", 3)]
        assert ways(explain(kflr(f, F.mse_loss))(*args)) == [("closed form", 0), ("narrow", 3)]


REASONS = {
    "few columns": lambda f, args: explain(diag_ggn(f, lambda z, y: F.mse_loss(z[:, :1, :4], y[:, :1, :4])))(*args),
    "method='dense'": lambda f, args: explain(ggn_trace(f, F.mse_loss, method="dense"))(*args),
    "chunked asks for it": lambda f, args: explain(chunked(diag_ggn(f, F.mse_loss), 3))(*args),
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
    assert why in found.why and found.passes in (3, found.columns) and not found.parts


def test_consumes_no_random_numbers():
    f, args = local()
    state = torch.get_rng_state()
    with always():
        explain(diag_ggn(f, F.mse_loss))(*args)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_from_no_generator():
    f, args = local()
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    found = explain(diag_ggn(f, F.mse_loss, mc_samples=2, generator=generator))(*args)
    assert found.columns == found.passes == 2 and torch.equal(state, generator.get_state())
    noisy = diag_ggn(lambda p, x: F.dropout(f(p, x), 0.5), F.mse_loss)
    state = torch.get_rng_state()
    explain(noisy)(*args)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("given", [lambda p, x: x, nn.Linear(2, 2), 3], ids=["function", "module", "number"])
def test_of_something_else(given):
    with pytest.raises(ArgumentTypeError, match="has to be a statistic"):
        explain(given)


# What it says is what is done


def losses(f):
    return lambda p, x, y: (f(p, x) - y).square().flatten(1).sum(1)


def drawn():
    return {"mc_samples": 2, "generator": torch.Generator().manual_seed(0)}


STATISTICS = {
    "batch_grad": lambda f: batch_grad(losses(f)),
    "variance": lambda f: variance(losses(f)),
    "clipped_grad": lambda f: clipped_grad(losses(f), max_norm=1.0),
    "reduced": lambda f: reduced(batch_grad(losses(f)), torch.sum),
    "diag_ggn": lambda f: diag_ggn(f, F.mse_loss),
    "diag_ggn, found": lambda f: diag_ggn(lambda p, x, y: F.mse_loss(f(p, x), y)),
    "dense": lambda f: diag_ggn(f, F.mse_loss, method="dense"),
    "drawn": lambda f: diag_ggn(f, F.mse_loss, **drawn()),
    "one sample": lambda f: batch_diag_ggn(f, F.mse_loss, samples=[1]),
    "loss without structure": lambda f: diag_ggn(f, lambda z, y: (z - y).cosh().log().mean()),
    "reduced root": lambda f: reduced(sqrt_ggn(f, F.mse_loss), torch.sum),
    "kflr": lambda f: kflr(f, F.mse_loss),
    "kfac": lambda f: kfac(f, F.mse_loss, **drawn()),
    "ekfac": lambda f: ekfac(f, F.mse_loss, **drawn()),
    "diag_hessian": lambda f: diag_hessian(f, F.mse_loss),
    "gram": lambda f: gram(losses(f)),
    "together": lambda f: together(diag_ggn(f, F.mse_loss), ggn_trace(f, F.mse_loss), kflr(f, F.mse_loss)),
    "chunked together": lambda f: chunked(together(diag_ggn(f, F.mse_loss), ggn_trace(f, F.mse_loss)), 3),
    "chunked twice": lambda f: chunked(chunked(diag_ggn(f, F.mse_loss), 3), 2, over="samples"),
    "samples": lambda f: chunked(variance(losses(f)), 2),
    **{f"{n} passes": lambda f, n=n: chunked(diag_ggn(f, F.mse_loss), n) for n in (1, 2, 7, 1000)},
    **{
        f"in {n} {o}": lambda f, n=n, o=o: chunked(diag_ggn(f, F.mse_loss), n, over=o)
        for n in (1, 2, 9)
        for o in ("samples", "params")
    },
}
NETWORKS = {
    "local": local,
    "narrow": lambda: arranged(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 40), x=torch.randn(4, 40)),
    "perceptron": lambda: arranged(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), x=torch.randn(3, 5)),
}


def counted(statistic, args):
    """How often something is pulled back, and how many columns together."""
    found, cotangents, stream = [], Pullback.cotangents, Pullback._stream

    def pulled(self, columns, sites):
        found.append(len(next(iter(columns.values()))))
        return cotangents(self, columns, sites)

    def streamed(self, *rest, **options):
        found.append(1)
        return stream(self, *rest, **options)

    with mock.patch.object(Pullback, "cotangents", pulled), mock.patch.object(Pullback, "_stream", streamed):
        with mock.patch.object(Closed, "cotangents", cotangents):  # which belong to no column
            statistic(*args)
    return len(found), sum(found)


@pytest.mark.usefixtures("old_core")
@pytest.mark.quick
@pytest.mark.parametrize("called", STATISTICS)
@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("shorter", [False, True], ids=["", "with structure"])
def test_it_is_what_is_done(called, net, shorter):
    f, args = NETWORKS[net]()
    statistic = STATISTICS[called](f)
    with always() if shorter else nullcontext():
        found = explain(statistic)(*args)
        pullbacks, columns = counted(statistic, args)
    if any(part.way == "narrow" for m in found.members or [found] for part in m.parts):
        assert found.passes <= columns  # the factors at the narrow layer come on top
    else:
        assert found.pullbacks == pullbacks
        assert found.passes in (columns, pullbacks) if "chunked" in found.name else found.passes == columns


@pytest.mark.parametrize("n", [1, 2, 7])
def test_chunks_are_as_many_as_were_asked_for_and_smaller(n):
    f, args = arranged(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), x=torch.randn(16, 20))
    found = explain(chunked(diag_ggn(f, F.mse_loss), n))(*args)
    whole = explain(diag_ggn(f, F.mse_loss))(*args)
    assert found.passes == found.pullbacks == n and found.columns == whole.columns == 30
    assert whole.bytes / n <= found.bytes <= 1.2 * whole.bytes / n + 8000
    assert explain(chunked(diag_ggn(f, F.mse_loss), 1000))(*args).passes == 30


def test_which_parameters_are_fast():
    own = operation(lambda x, w: (x * w).sin())

    def f(p, x):
        h = F.linear(x, p["linear"]) + F.conv1d(x[:, None], p["conv"], padding=1).flatten(1)
        return own(h, p["own"]) * p["twice"] + torch.maximum(h, p["far"]) + p["twice"]

    p = {"linear": torch.randn(4, 4), "conv": torch.randn(1, 1, 3), "own": torch.randn(4), "twice": torch.randn(4)}
    p |= {"far": torch.randn(4), "unread": torch.randn(2)}
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for statistic in (diag_ggn(f, F.mse_loss), batch_grad(losses(f)), kflr(f, F.mse_loss)):
        found = explain(statistic)(p, x, y)
        ways = {q.name: (q.way, q.operations, q.generic) for q in found.params}
        assert ways["params['linear']"] == ("fast", ("linear",), ())
        assert ways["params['conv']"] == ("fast", ("conv1d",), ())
        assert ways["params['twice']"][0] == "fast" and set(ways["params['twice']"][1]) == {"mul", "add"}
        assert ways["params['far']"][0] == "generic" and ways["params['unread']"] == ("unread", (), ())
        assert ways["params['own']"][0] == "generic" and "operation" in ways["params['own']"][2][0]
        assert "params['far']     generic  maximum" in str(found) and repr(found) == str(found)


def test_where_f_cannot_be_followed():
    def f(p, x):
        return torch.func.vmap(lambda x: x @ p["w"])(x)

    found = explain(batch_grad(losses(f)))({"w": torch.randn(3, 2)}, torch.randn(4, 3), torch.randn(4, 2))
    assert [(q.way, q.generic) for q in found.params] == [("generic", ("f",))]


def test_of_the_members():
    f, args = NETWORKS["perceptron"]()
    found = explain(together(diag_ggn(f, F.mse_loss), kflr(f, F.mse_loss), ggn_trace(f, F.mse_loss)))(*args)
    assert [m.name for m in found.members] == [
        "diag_ggn(Sequential, mse_loss)",
        "kflr(Sequential, mse_loss)",
        "ggn_trace(Sequential, mse_loss)",
    ]
    assert (
        all(m.columns == 7 and m.name in str(found) for m in found.members) and found.passes == 14
    )  # two share theirs


@pytest.mark.parametrize(
    "called",
    ["batch_grad", "variance", "reduced", "dense", "drawn", "kflr", "2 passes", "7 passes", "in 2 samples", "samples"],
)
def test_the_memory_is_about_what_is_measured(called):
    f, args = arranged(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 20),
        x=torch.randn(16, 3, 12, 12),
    )
    assert_about_what_is_measured(STATISTICS[called](f), f, args)


@pytest.mark.parametrize("n", [16, 128])
@pytest.mark.parametrize("sizes", [(20, 32, 10), (64, 128, 10), (256, 256, 10)], ids=str)
@pytest.mark.parametrize("called", ["kfac", "kflr", "ekfac", "exact ekfac"])
def test_the_memory_of_factors_is_about_what_is_measured(called, sizes, n):
    """Of small networks, too, where matrices as wide as the layers are most of it."""
    first, second, third = sizes
    f, args = arranged(nn.Linear(first, second), nn.Tanh(), nn.Linear(second, third), x=torch.randn(n, first))
    statistic = ekfac(f, F.mse_loss, fisher="exact") if called == "exact ekfac" else STATISTICS[called](f)
    least = 1 / 12 if "ekfac" in called else 1 / 4  # of one position, shares in the eigenbasis are not formed
    assert_about_what_is_measured(statistic, f, args, least=least)


def test_the_memory_of_the_factors_of_a_table():
    """Whose rows have a diagonal. The eigenbasis is taken in float64, of a matrix that is most of this one's memory."""
    f, args = arranged(nn.Embedding(2000, 8), nn.Tanh(), nn.Flatten(), nn.Linear(40, 3), x=torch.arange(80).view(16, 5))
    for statistic in (kfac(f, F.mse_loss, **drawn()), ekfac(f, F.mse_loss, **drawn())):
        assert_about_what_is_measured(statistic, f, args, most=5)


def assert_about_what_is_measured(statistic, f, args, most=4, least=1 / 4):
    def forward(p, x, y):
        return losses(f)({k: v.detach().requires_grad_() for k, v in p.items()}, x, y)

    statistic(*args)
    peaks = []
    for run in (statistic, forward):
        with nothing_collected(), Meter() as meter:
            result = run(*args)
        peaks.append(meter.peak(result))
        del result
    said = explain(statistic)(*args).bytes
    assert said * least < peaks[0] - peaks[1] < most * said, (peaks, said)


@pytest.mark.parametrize("n", [2, 5, 9])
@pytest.mark.parametrize("of", [diag_ggn, ggn_trace, batch_diag_ggn, sqrt_ggn])
def test_a_loss_whose_outputs_are_found_costs_as_many_passes_as_one_that_is_given(n, of):
    f, args = arranged(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 3), x=torch.randn(n, 2, 12))
    given, found = explain(of(f, F.mse_loss))(*args), explain(of(lambda p, x, y: F.mse_loss(f(p, x), y)))(*args)
    assert (found.passes, found.pullbacks) == (given.passes, given.pullbacks)
