"""explain says what a statistic is going to do, and does not do it."""

import re
import sys
from contextlib import nullcontext
from html import unescape
from unittest import mock

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import (
    additive_coupling,
    batch_grad,
    chain,
    check_inverse,
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
    operation,
    reduced,
    sqrt_ggn,
    together,
    variance,
)
from invfunc.core.run import Run
from invfunc.errors import ArgumentTypeError
from invfunc.pairs import drift
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
    assert found.passes == 6 and 0 < found.cost < 1
    assert found.bytes == sum(p.nbytes for p in args[0].values())
    assert found.parts[1].params == ("params['0.weight']", "params['0.bias']")
    assert "local: 6 backward passes for 72 columns" in str(found)


def test_of_narrow_layers():
    f, args = arranged(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 40), x=torch.randn(4, 40))
    with always():
        assert ways(explain(diag_ggn(f, F.mse_loss))(*args)) == [("closed form", 0), ("narrow", 3)]
        assert ways(explain(kfac(f, F.mse_loss, fisher="exact"))(*args)) == [("closed form", 0), ("narrow", 3)]


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


@pytest.mark.parametrize("given", [lambda p, x: x, nn.Linear(2, 2), 3], ids=["function", "module", "number"])
def test_of_something_else(given):
    with pytest.raises(ArgumentTypeError, match="has to be a statistic.*held_states.*drift"):
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
    "one sample": lambda f: diag_ggn(f, F.mse_loss, samples=[1], per_sample=True),
    "loss without structure": lambda f: diag_ggn(f, lambda z, y: (z - y).cosh().log().mean()),
    "reduced root": lambda f: reduced(sqrt_ggn(f, F.mse_loss), torch.sum),
    "exact kfac": lambda f: kfac(f, F.mse_loss, fisher="exact"),
    "kfac": lambda f: kfac(f, F.mse_loss, **drawn()),
    "ekfac": lambda f: ekfac(f, F.mse_loss, **drawn()),
    "diag_hessian": lambda f: diag_hessian(f, F.mse_loss),
    "gram": lambda f: gram(losses(f)),
    "together": lambda f: together(
        diag_ggn(f, F.mse_loss), ggn_trace(f, F.mse_loss), kfac(f, F.mse_loss, fisher="exact")
    ),
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
    """Number of backward passes, and of the columns in all of them."""
    found, stream, columns = [], Run.stream, Run.pull_columns

    def one(self, *rest):
        found.append(1)
        return stream(self, *rest)

    def several(self, out, given, *rest, **options):
        found.append(len(given[0] if isinstance(given, list) else given))
        return columns(self, out, given, *rest, **options)

    with (
        mock.patch.multiple(Run, stream=one, pull_columns=several),
        mock.patch("invfunc.statistic.PARTS", True, create=True),
    ):
        statistic(*args)
    return len(found), sum(found)


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
    if any(part.way != "dense" for m in found.members or [found] for part in m.parts):
        closed = sum(part.way == "closed form" for m in found.members or [found] for part in m.parts)
        assert found.passes <= columns + closed  # factors at a narrow layer come on top
    else:
        assert found.pullbacks == pullbacks
        assert found.passes in (columns, pullbacks) if "chunked" in found.name else found.passes == columns


def test_which_parameters_are_fast():
    own = operation(lambda x, w: (x * w).sin())

    def f(p, x):
        h = F.linear(x, p["linear"]) + F.conv1d(x[:, None], p["conv"], padding=1).flatten(1)
        return own(h, p["own"]) * p["twice"] + torch.maximum(h, p["far"]) + p["twice"]

    p = {"linear": torch.randn(4, 4), "conv": torch.randn(1, 1, 3), "own": torch.randn(4), "twice": torch.randn(4)}
    p |= {"far": torch.randn(4), "unread": torch.randn(2)}
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for statistic in (diag_ggn(f, F.mse_loss), batch_grad(losses(f)), kfac(f, F.mse_loss, fisher="exact")):
        found = explain(statistic)(p, x, y)
        ways = {q.name: (q.way, q.operations, q.generic) for q in found.params}
        assert ways["params['linear']"] == ("fast", ("linear",), ())
        assert ways["params['conv']"] == ("fast", ("conv1d",), ())
        assert ways["params['twice']"][0] == "fast" and set(ways["params['twice']"][1]) == {"mul", "add"}
        assert ways["params['far']"][0] == "fast" and ways["params['unread']"] == ("unread", (), ())
        assert ways["params['own']"][0] == "generic" and "operation" in ways["params['own']"][2][0]
        assert "params['own']     generic  operation" in str(found) and repr(found) == str(found)


# Output in a notebook: tables of the numbers in a result, and pictures

matplotlib.use("agg")

X, Y = torch.rand(4, 6), torch.arange(4)


def f(params, x):
    return torch.tanh(x @ params["first <b>"]) @ params["second"]


def half(x, w):
    return torch.tanh(x @ w)


@pytest.fixture
def params():
    return {"first <b>": torch.rand(6, 5), "second": torch.rand(5, 4)}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def cells(shown):
    """The rows of a table, as texts."""
    rows = re.findall(r"<tr>(.*?)</tr>", shown._repr_html_())
    return [[unescape(x) for x in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in rows]


class TestTables:
    def test_of_an_inverse_have_both_errors_of_each_tensor(self):
        report = check_inverse(additive_coupling(half, half), (X[:, :3], X[:, 3:]), (torch.rand(3, 3),) * 2)
        assert [row[1] for row in cells(report)[1:]] == [*report.x, *report.y]
        assert f"{report.condition:.3g} times" in report._repr_html_()

    def test_of_factors_have_each(self, params, generator):
        found = kfac(f, F.cross_entropy, generator=generator)(params, X, Y)["second"]
        parts = zip(found.groups, found.factors, strict=True)
        assert [row[:2] for row in cells(found)[1:]] == [[f"dims {[*dims]}", str([*x.shape])] for dims, x in parts]


class TestPictures:
    def test_of_a_drift_have_its_errors_also_where_some_are_zero(self):
        third = invfunc.Invertible(lambda x, c: x / c, lambda y, c: y * c)
        found = drift(third, torch.rand(5), [3.0, 1.0, 7.0])
        ax = drift(third, torch.rand(5), [1.0, 2.0]).plot()
        assert found.plot(ax) is ax
        assert list(ax.lines[1].get_ydata()) == found and ax.get_xlabel() and ax.get_ylabel()

    def test_without_matplotlib_the_extra_is_named(self):
        with (
            mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}),
            pytest.raises(invfunc.errors.MissingExtraError, match=r"invfunc\[notebooks\]"),
        ):
            drift(chain(additive_coupling(half, half)), (X[:, :3], X[:, 3:]), [(torch.rand(3, 3),) * 2]).plot()
