"""What derivatives of statistics leave behind, and those of functions that draw; for all others see the laws.

Private is what counts the tensors of a process, and its memory, over many evaluations.
"""

import gc
import weakref

import pytest
import torch

from invfunc import tree
from tests.laws import STATISTICS, arranged
from tests.networks import LOSSES, Network, network, total

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
