"""What is read of a weight by an attribute, such as its transpose, is read of the weight."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vmap

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

READS = {
    "T": lambda z, w: z @ w.T,
    "mT": lambda z, w: z @ w.mT,
    "H": lambda z, w: z @ w.H,
    "real": lambda z, w: z @ w.real,
    "data": lambda z, w: z @ w * w.data.sum(),
    "version": lambda z, w: z @ w if w._version >= 0 else z,
    "grad": lambda z, w: z @ w if w.grad is None else z,
    "jacobian": lambda z, w: z + vmap(jacrev(lambda r: (r @ w.T).sin().sum()))(z),
}


class Part(torch.nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.weight = read, torch.nn.Parameter(Numbers()(3, 3))

    def forward(self, z):
        return self.read(z, self.weight).tanh()


class Net(torch.nn.Module):
    def __init__(self, read, wrap):
        super().__init__()
        self.F, self.G = Part(read), Part(read)
        self.block = wrap(additive_coupling(self.F, self.G, split_dim=1))

    def forward(self, x):
        return self.block(self.block(x))


X = Numbers(1)(4, 6)
PARAMS = {"F.weight": Numbers(2)(3, 3), "G.weight": Numbers(3)(3, 3)}


def loss(net, params, x):
    return functional_call(net, params, (x,)).square().sum()


RUNS = {
    "backward": lambda net: torch.autograd.grad(net(X).square().sum(), list(net.parameters())),
    "grad": lambda net: grad(lambda p: loss(net, p, X))(PARAMS),
    "of each sample": lambda net: vmap(grad(lambda p, x: loss(net, p, x[None])), (None, 0))(PARAMS, X),
    "second": lambda net: grad(lambda x: grad(lambda p: loss(net, p, x))(PARAMS)["F.weight"].square().sum())(X),
    "vmap of jacrev": lambda net: vmap(jacrev(lambda x: net(x[None])[0]))(X),
    "vmap of jacrev of functional_call": lambda net: vmap(
        jacrev(lambda p, x: functional_call(net, p, (x[None],))[0]), (None, 0)
    )(PARAMS, X),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_equals_the_function(read, run):
    assert_trees_close(run(Net(read, invertible_checkpoint)), run(Net(read, lambda pair: pair)), 1e-9)
