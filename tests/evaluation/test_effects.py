"""Things that the transforms do not change: arguments, modes, random numbers, and the module of `functional`."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import invfunc
from invfunc import tree
from invfunc.testing.oracles import assert_trees_close
from tests.laws import STATISTICS as KINDS
from tests.laws import arranged
from tests.networks import LOSSES, STATISTICS, Network, chunkings, network, plain, total
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("statistic", STATISTICS)


@statistics
class TestLeavesAsTheyWere:
    def test_also_where_f_fails(self, statistic):
        net, y, modes = network("affine", 4), Numbers(1).below(3, 4), self.modes()

        def f(p, x):
            torch.rand(())
            net.f(p, x)
            torch.set_grad_enabled(False)  # and leaves it so
            raise KeyError("the user's own")

        for make in chunkings(statistic):
            with pytest.raises((KeyError, invfunc.errors.RandomnessError)):
                make(f, LOSSES[0])(net.params, net.x, y)
            assert self.modes() == modes

    @staticmethod
    def modes():
        depth = torch._C._len_torch_function_stack()
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth, torch.get_default_dtype()


def rows(x, rate):
    return x * (torch.rand(len(x), 1, dtype=x.dtype) > rate)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "rand": lambda x: rows(x, 0.4),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x.detach(), 0.6)),
    "in place": lambda x: x * torch.empty(x.shape, dtype=x.dtype).bernoulli_(0.6),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "Normal": lambda x: x + torch.distributions.Normal(torch.zeros_like(x.detach()), 0.1).rsample(),
    "nothing": lambda x: F.dropout(x, 0.4, training=False),
}


def shaken(noise):
    """A network that draws twice."""
    rand = Numbers()
    params = {"a": rand(3, 5), "b": rand(5, 4), "c": rand(4, 3)}

    def f(p, x):
        return noise(noise(x @ p["a"]).tanh() @ p["b"]).tanh() @ p["c"]

    return f, params, rand(6, 3), rand.below(3, 6)


@statistics
class TestRandomNumbers:
    def test_are_replayed_under_transforms(self, statistic):
        f, params, x, y = shaken(DRAWS["dropout"])

        def composed(make):
            return self.seeded(lambda f, loss: grad(lambda *args: total(make(f, loss)(*args))), f, params, x, y)

        assert_trees_close(composed(STATISTICS[statistic]), composed(plain_once(statistic)), EXACT)

    def test_of_a_generator_are_replayed(self, statistic):
        generator = torch.Generator()

        def noise(x):
            return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

        f, params, x, y = shaken(noise)
        generator.manual_seed(3)
        wanted = plain_once(statistic, generator)(f, LOSSES[0])(params, x, y)
        after = generator.get_state()
        for make in chunkings(statistic):
            t = make(f, LOSSES[0])
            if "over='samples'" not in repr(t):
                generator.manual_seed(3)
                assert_trees_close(t(params, x, y), wanted, EXACT)
                assert torch.equal(generator.get_state(), after)

    @staticmethod
    def seeded(make, f, *args):
        torch.manual_seed(3)
        return make(f, LOSSES[0])(*args)


def plain_once(statistic, generator=torch.default_generator):
    """`plain(statistic)` of a function that may be called once only: it draws."""

    def make(f, loss):
        def formula(p, x, y):
            draws = generator.get_state()

            def again(p, x):
                generator.set_state(draws)
                return f(p, x)

            return plain(statistic)(again, loss)(p, x, y)

        return formula

    return make


# What derivatives of statistics leave behind


def tensors_alive():
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # isinstance wakes lazy modules


@pytest.mark.parametrize("statistic", KINDS)
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
