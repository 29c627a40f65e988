"""What derivatives of statistics leave behind, and those of functions that draw; for all others see the laws.

Private is what counts the tensors of a process, and its memory, over many evaluations.
"""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import functional, tree
from invfunc.testing import laws
from tests import ways
from tests.laws import STATISTICS, arranged
from tests.networks import LOSSES, Network, network, total
from tests.strategies import Numbers

statistics = pytest.mark.parametrize("statistic", STATISTICS)


def tensors_alive():
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # isinstance wakes lazy modules


@statistics
class TestNothingStays:
    def test_of_the_tensors_of_an_evaluation(self, statistic):
        """Neither of what is forgotten nor, in a cycle, until the garbage collector comes."""
        net, hidden = network("perceptron", 3), []

        def f(p, x):
            z = net.f(p, x)
            hidden.append(weakref.ref(z))
            return z

        kind, functions, (params, *batch) = arranged(statistic, Network("", f, net.params, net.x, 3), LOSSES[1])
        t = kind.make(*functions)
        params = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), params)

        def step():
            torch.autograd.grad(total(t(params, *batch)), tree.leaves(params), materialize_grads=True)

        step()
        gc.collect()
        gc.disable()
        try:
            before = tensors_alive()
            for _ in range(3):
                step()
            assert tensors_alive() == before and hidden and all(ref() is None for ref in hidden)
        finally:
            gc.enable()
        assert all(leaf.grad is None and not leaf._backward_hooks for leaf in tree.leaves(params))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the meter reads /proc")
def test_memory_stays_where_it_was_over_many_evaluations():
    """backward through the variance, in a loop as one would regularise with it; in a process without other holes."""
    code = """
import torch, invfunc
from invfunc.testing import peak_memory, return_freed_memory

return_freed_memory()
torch.set_num_threads(1)
params = [torch.randn(300, 300).requires_grad_() for _ in range(2)]
x = torch.randn(32, 300)
t = invfunc.variance(lambda p, x: ((x @ p[0]).tanh() @ p[1]).square().mean(1))

def steps(count):
    for _ in range(count):
        sum(v.square().sum() for v in t(params, x)).backward(inputs=params)
        for p in params:
            p.grad = None

steps(2)
once, often = (peak_memory(lambda: steps(count))[1] for count in (1, 50))
assert once > 4 * 300**2 and often < once + 10 * 4 * 300**2, (once, often)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class TestRandomNumbers:
    """They are those of one call of f on the whole batch, from the same state to the same state."""

    VALUES = [
        "per-sample gradients equal their loop",
        "the GGN equals its loop",
        "Jacobians equal their loop",
        "samples= picks",
    ]
    DERIVATIVES = [name for name in (*laws.LAWS, *ways.BOOK) if "of a statistic is that of its loop" in name]
    PASSES = ["the generators end where f leaves them", "blocks do not matter", "chunks do not matter"]

    def holds(self, f, params, only):
        args = Numbers(2)(4, 3), Numbers(3).below(3, 4)
        refused, tables = set(), []
        for check, book in (laws.check, laws.LAWS), (ways.check, ways.BOOK):
            if not (names := [name for name in only if name in book and "vmap" not in name]):
                continue
            tables.append(table := check(f, params, *args, loss=F.cross_entropy, only=names, seconds=300))
            states = {outcome.law.name: outcome.state for outcome in table.outcomes}
            assert {*states.values()} - {"does not apply"} == {"holds"}, table
            refused |= {of for of in table.refused if not of.startswith("kf")}
        assert all("over samples" in of for of in refused), tables  # their blocks would draw in another order
        return refused, tables

    @pytest.mark.parametrize("only", [VALUES, PASSES, DERIVATIVES], ids=["values", "passes", "derivatives"])
    def test_are_those_of_one_call(self, only):
        def noisy(p, x):
            return F.dropout(F.dropout(x @ p["a"], 0.4).tanh() @ p["b"], 0.4)

        refused, tables = self.holds(noisy, {"a": Numbers()(3, 5), "b": Numbers(1)(5, 3)}, only)
        assert all("which draws" in str(table) for table in tables) and not refused

    @pytest.mark.parametrize("train", [True, False])
    def test_of_a_module_are_those_of_its_mode(self, train):
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
        _, tables = self.holds(*functional(model.train(train)), [*self.VALUES[:2], *self.PASSES[:1]])
        assert all(("which draws" in str(table)) == train for table in tables)
        assert all(p.grad is None for p in model.parameters())


def test_two_models_at_once_do_not_know_of_each_other():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shared = nn.Linear(3, 3)
        models = [nn.Sequential(shared, nn.Tanh(), nn.Linear(3, 3)), nn.Sequential(shared, nn.Sigmoid(), shared)]
    (f, p), (g, q) = (functional(model.double()) for model in models)

    def both(params, x):
        inner = invfunc.batch_l2_grad(lambda q, x: g(q, x).square().sum(1))(q, x.detach())["0.weight"]
        return f(params["f"], x) * g(params["g"], x) * inner[:, None]  # the statistic of one inside the other

    only = ["per-sample gradients equal their loop", "the GGN equals its loop", "Jacobians equal their loop"]
    table = laws.check(both, {"f": p, "g": q}, Numbers()(4, 3), Numbers(1)(4, 3), loss=F.mse_loss, only=only)
    assert {outcome.state for outcome in table.outcomes} == {"holds"} and not table.refused, table
    assert all(leaf.grad is None for model in models for leaf in model.parameters())
