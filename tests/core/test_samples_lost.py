"""Samples that go where they are not seen: the shares of a scalar loss are those of the plain loop, or refused."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from invfunc import InvFuncError, batch_diag_hessian, batch_grad, diag_ggn, diag_hessian
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import FIRST_ORDER
from tests.lost import FOUND, WAYS, strange
from tests.strategies import Numbers

EXACT = 1e-9
CENTRE = Numbers(5)(3, 3)
P, X, Y = Numbers()(3, 3), Numbers(1)(4, 3), torch.tensor([0, 2, 1, 2])

LOSSES = {
    "alone": lambda g: lambda p, x, y: (g(x) @ p).tanh().square().mean(),
    "with a target": lambda g: lambda p, x, y: F.cross_entropy(g(x) @ p, y),
    "beside what is seen": lambda g: lambda p, x, y: ((g(x) @ p).tanh() - x).square().mean(),
    "beside a term that is seen": lambda g: (
        lambda p, x, y: F.cross_entropy(x @ p, y) + (g(x) @ p).tanh().square().mean()
    ),
}
"""Means over the samples, of what a way gives."""


def loop(f, p, *batch):
    """The plain loop: f on each sample alone."""
    n, shares = len(batch[0]), []
    for i in range(n):
        q = p.clone().requires_grad_()
        shares.append(torch.autograd.grad(f(q, *(x[i : i + 1].clone() for x in batch)), q)[0] / n)
    return torch.stack(shares)


class Penalised:
    def __init__(self, centre):
        self.centre = centre

    def loss(self, p, x, y):
        return F.cross_entropy(x @ p, y) + (p - self.centre).square().sum()


class WithBuffer(torch.nn.Module):
    def __init__(self, centre):
        super().__init__()
        self.register_buffer("centre", centre)


def quietly(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_shares_are_those_of_the_loop_or_refused(way, loss):
    f = loss(WAYS[way])
    try:
        found = quietly(batch_grad(f), P, X, Y)
    except InvFuncError:
        assert way not in FOUND
        return
    assert_trees_close(found, quietly(loop, f, P, X, Y), EXACT)


STATISTICS = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "chosen": (lambda f: batch_grad(f, samples=[2, 0]), lambda g: g[[2, 0]]),
}


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_statistic(statistic, n):
    make, of_shares = statistic
    f, batch = LOSSES["beside a term that is seen"](strange), (Numbers(4)(max(n, 3), 3)[:n], Y[:n])
    if n < 3 and make is STATISTICS["chosen"][0]:
        pytest.skip("there is no sample 2")
    if any(make is row.make and n < row.fewest for row in FIRST_ORDER.values()):
        pytest.skip("it is of more samples")
    assert_trees_close(make(f)(P, *batch), of_shares(loop(f, P, *batch)), EXACT)


class TestNothingIsGuessed:
    def test_where_samples_are_equal(self):
        """A wrong order cannot be seen in samples that are the same, nor does it matter there."""
        x, f = X[[0, 0, 1, 1]], LOSSES["alone"](strange)
        assert_trees_close(batch_grad(f)(P, x, Y), loop(f, P, x, Y), EXACT)

    def test_a_term_in_the_parameters_alone(self):
        with pytest.raises(SampleAxisError, match="computed from the parameters alone, as an L2 term"):
            batch_grad(lambda p, x: p.square().sum())(P, X)

    def test_what_is_a_sum_needs_no_shares(self):
        f = LOSSES["alone"]
        lost, seen = f(lambda x: strange(x.roll(1, 0))), f(lambda x: x.roll(1, 0).sin())
        assert_trees_close(diag_hessian(lost)(P, X, Y), diag_hessian(seen)(P, X, Y), EXACT)
        assert_trees_close(diag_hessian(lambda p, x: p.pow(3).sum())(P, X), 6 * P, EXACT)
        assert_trees_close(batch_diag_hessian(lost)(P, X, Y), batch_diag_hessian(seen)(P, X, Y), EXACT)

    def test_numbers_that_are_read_and_not_used(self):
        def f(p, x, y):
            assert float(x[0, 0]) < 100
            return F.cross_entropy(x @ p, y) + p.square().sum()

        wanted = batch_grad(lambda p, x, y: F.cross_entropy(x @ p, y) + p.square().sum())(P, X, Y)
        assert_trees_close(batch_grad(f)(P, X, Y), wanted, EXACT)


@pytest.mark.parametrize("way", ["item", "copy", "pickle", "memoryview", "set_"])
def test_samples_alone_tell_where_they_went(way):
    g, f = WAYS[way], LOSSES["with a target"](WAYS[way])

    def losses(p, x, y):
        return F.cross_entropy(g(x) @ p, y, reduction="none")

    assert_trees_close(batch_grad(f)(P, X, Y), loop(f, P, X, Y), EXACT)
    assert_trees_close(batch_grad(losses)(P, X, Y), 4 * loop(f, P, X, Y), EXACT)
    wanted = diag_ggn(lambda p, z: z @ p, F.cross_entropy)(P, g(X), Y)
    assert_trees_close(diag_ggn(lambda p, x: g(x) @ p, F.cross_entropy)(P, X, Y), wanted, EXACT)


READ = {
    "weights of the classes": lambda p, x, y: (
        (F.cross_entropy(x @ p, y, reduction="none") * torch.tensor([[1.0, 2.0, 0.5][v] for v in y])).sum()
        / sum([1.0, 2.0, 0.5][v] for v in y)
    ),
    "how many of a class": lambda p, x, y: F.cross_entropy(
        x @ p, y, weight=torch.tensor([1.0 / (1 + y.tolist().count(c)) for c in range(3)]).double()
    ),
    "targets": lambda p, x, y: F.cross_entropy(x @ p, torch.tensor([int(v) for v in y])),
    "terms": lambda p, x, y: sum(
        float(v) * F.cross_entropy(x[i : i + 1] @ p, y[i : i + 1]) for i, v in enumerate(x[:, 0])
    ),
    "the largest": lambda p, x, y: F.cross_entropy(x @ p / float(x.abs().max()), y),
    "asserted": lambda p, x, y: F.cross_entropy(x @ p, y) if float(x[0, 0]) < 100 else None,
}
"""Numbers that are read off samples, each of which is used at its own sample or as a constant of all."""

OF_ONE = {
    "a factor": lambda p, x, y: F.cross_entropy(x @ p, y) * float(x[0, 0]),
    "a summand": lambda p, x, y: F.cross_entropy((x * 0 + float(x[0, 0])) @ p, y),
    "a row": lambda p, x, y: F.cross_entropy((x + torch.tensor(x[0].tolist()).to(x)) @ p, y),
    "a bound": lambda p, x, y: F.cross_entropy((x @ p).clamp(max=float(x[1, 1].abs())), y),
    "a target": lambda p, x, y: F.cross_entropy(x @ p, torch.tensor([int(y[1])] * len(y))),
}
"""Numbers of one sample that go into the terms of the others."""


class TestNumbersReadOffSamples:
    @pytest.mark.parametrize("f", READ.values(), ids=READ)
    def test_each_at_its_own(self, f):
        shares = batch_grad(f)(P, X, Y)
        assert_trees_close(shares.sum(0), torch.func.grad(f)(P, X, Y), EXACT)
        order = [2, 0, 3, 1]
        assert_trees_close(batch_grad(f)(P, X[order], Y[order]), shares[order], EXACT)

    @pytest.mark.parametrize("f", OF_ONE.values(), ids=OF_ONE)
    def test_what_is_a_sum_needs_no_shares(self, f):
        whole = torch.func.hessian(f)(P, X, Y).reshape(P.numel(), P.numel())
        assert_trees_close(diag_hessian(f)(P, X, Y), whole.diagonal().view_as(P), EXACT)


class TestHowOftenItRuns:
    def counted(self, f):
        def counting(*args):
            counting.runs += 1
            return f(*args)

        counting.runs = 0
        return counting

    def test_what_it_keeps_while_it_runs_is_not_held(self):
        kept = {}

        def f(p, x, y):
            kept["x"] = strange(x)
            return (kept["x"] @ p).tanh().square().mean()

        for _ in range(2):
            assert_trees_close(batch_grad(f)(P, X, Y), loop(f, P, X, Y), EXACT)

    def test_random_numbers_of_one_call(self):
        """However often it runs, the generator ends where one call leaves it, and the masks are those of one call."""
        far = SimpleNamespace(centre=Numbers(6)(3, 3))

        def f(p, x, y):
            return F.cross_entropy(F.dropout(x) @ p, y) + (p - far.centre).square().sum()

        counting = self.counted(f)
        for statistic in (batch_grad, diag_hessian):
            torch.manual_seed(3)
            wanted, after = torch.func.grad(f)(P, X, Y), torch.rand(2)
            torch.manual_seed(3)
            found = statistic(counting)(P, X, Y)
            assert torch.equal(torch.rand(2), after)
            if statistic is batch_grad:
                assert counting.runs > 2
                assert_trees_close(found.sum(0), wanted, EXACT)
