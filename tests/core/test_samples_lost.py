"""Samples that go where function modes do not see them: shares of a scalar loss are those of the loop, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap

from invfunc import InvFuncError, batch_grad, diag_hessian
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-9
P, X, Y = Numbers()(3, 3), Numbers(1)(4, 3), torch.tensor([0, 2, 1, 2])
LAYER = nn.Linear(3, 3).double().requires_grad_(False)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return g


@torch.library.custom_op("invfunc_tests::lost", mutates_args=())
def own_op(x: torch.Tensor) -> torch.Tensor:
    return x.square()


def differentiated(x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(x.pow(3).sum(), x)[0]


def backward(x):
    x = x.detach().clone().requires_grad_()
    x.pow(3).sum().backward()
    return x.grad


def strange(x):
    return torch.vmap(torch.sin)(x)


FOUND = {
    "vmap": vmap(torch.sin),
    "vmap of a layer": vmap(lambda row: LAYER(row).tanh()),
    "vmap, samples last": lambda x: vmap(torch.sin, 0, -1)(x).T,
    "vmap over features": vmap(torch.sin, 1, 1),
    "grad": grad(lambda x: x.pow(3).sum()),
    "vmap of grad": vmap(grad(lambda x: x.pow(3).sum())),
    "jvp": lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: jacrev(lambda x: x.sin().sum(0))(x).sum(0),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "buffer": nn.Buffer,
    "autograd.Function": Squares.apply,
    "functional_call": lambda x: functional_call(LAYER, dict(LAYER.named_parameters()), (x,)),
    "deepcopy": copy.deepcopy,
    "data": lambda x: x.data.clone(),
}
"""What is followed."""
WAYS = FOUND | {
    "vmap in chunks": lambda x: vmap(torch.sin, chunk_size=2)(x),
    "vjp": lambda x: vjp(torch.sin, x)[1](torch.ones_like(x))[0],
    "jacfwd": lambda x: jacfwd(lambda x: x.sin().sum(0))(x).sum(0),
    "linearize": lambda x: linearize(torch.sin, x)[1](torch.ones_like(x)),
    "autograd.grad": differentiated,
    "backward": backward,
    "jagged": lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged).values().view(x.shape),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "custom op": own_op,
    "mean": lambda x: strange(x).mean(0).expand(x.shape),
    "roll": lambda x: strange(x.roll(1, 0)),
    "next": lambda x: strange(torch.cat([x[1:], x[-1:]])),
}
"""Functions of torch alone, of a batch `[N, 3]`."""
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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_shares_are_those_of_the_loop_or_refused(way, loss):
    f = loss(WAYS[way])
    try:
        found = batch_grad(f)(P, X, Y)
    except InvFuncError:
        assert way not in FOUND
        return
    assert_trees_close(found, loop(f, P, X, Y), EXACT)


def test_random_numbers_are_those_of_one_call():
    """However often f runs, the generator ends where one call leaves it, and the masks are those of one call."""
    runs = []

    def f(p, x, y):
        runs.append(1)
        return F.cross_entropy(strange(F.dropout(x)) @ p, y)

    for statistic in (batch_grad, diag_hessian):
        torch.manual_seed(3)
        wanted, after = torch.func.grad(f)(P, X, Y), torch.rand(2)
        torch.manual_seed(3)
        found = statistic(f)(P, X, Y)
        assert torch.equal(torch.rand(2), after)
        if statistic is batch_grad:
            assert_trees_close(found.sum(0), wanted, EXACT)
    assert len(runs) > 2
