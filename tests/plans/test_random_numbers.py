"""Random numbers that a call draws by a plan are those that it draws without one."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import EXACT, dropping, given, hits, loss, of, quietly
from tests.strategies import Numbers


def forking(w, x):
    with torch.random.fork_rng():
        noise = torch.rand(3)
    return loss(w, x + noise + torch.rand(3))


def seeding(w, x):
    torch.manual_seed(4)
    return loss(w, x + torch.rand(3))


def rewinding(w, x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return loss(w, x + first + torch.rand(3) + torch.randn(3))


def pythons(w, x):
    import random

    return loss(w, x) * random.random()


@pytest.mark.quick
class TestRandomNumbers:
    @pytest.mark.parametrize("f", [dropping, forking, seeding, rewinding])
    @pytest.mark.parametrize("make", [invfunc.variance, invfunc.sum_grad_squared, invfunc.diag_hessian])
    def test_are_those_of_the_call(self, f, make):
        def summed(w, x):
            return f(w, x).mean()

        t = make(f) if make is not invfunc.diag_hessian else make(lambda w, x: f(w, x), lambda z, y: F.mse_loss(z, y))
        c = compiled(t)
        more = () if make is not invfunc.diag_hessian else (torch.ones(4, dtype=torch.float64),)
        for k in range(4):
            torch.manual_seed(k)
            wanted, after = t(*given(k), *more), torch.rand(2)
            torch.manual_seed(k)
            assert_trees_close((quietly(c, *given(k), *more), torch.rand(2)), (wanted, after), EXACT)
        assert hits(c) == (0 if f is seeding else 3)

    def test_of_python_are_not_those_of_another_call(self):
        c = compiled(invfunc.variance(pythons))
        assert not torch.equal(quietly(c, *given()), quietly(c, *given()))

    def test_are_drawn_once_where_a_guard_misses(self):
        def f(w, x):
            return dropping(w, x) * (2 if x.sum() > 0 else 3)

        t, c = of(f)
        for k in range(4):
            w, x = given(k)
            for inputs in (x.abs(), -x.abs()):
                torch.manual_seed(k)
                wanted, after = t(w, inputs), torch.rand(2)
                torch.manual_seed(k)
                assert_trees_close((quietly(c, w, inputs), torch.rand(2)), (wanted, after), EXACT)

    def test_of_a_generator_go_on(self):
        def drawn(g):
            return invfunc.diag_ggn(lambda w, x: x @ w, F.cross_entropy, mc_samples=2, generator=g)

        a, b = (torch.Generator().manual_seed(3) for _ in range(2))
        t, c = drawn(a), compiled(drawn(b))
        w, x, y = Numbers()(3, 5), Numbers(1)(4, 3), torch.arange(4)
        for _ in range(4):
            assert_trees_close(c(w, x, y), t(w, x, y), EXACT)
            assert torch.equal(a.get_state(), b.get_state())
        assert hits(c) == 3
