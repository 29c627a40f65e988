"""f takes gradients itself, by the losses that its outputs are found at: an adversary's attack on its data."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import (
    chunked,
    diag_ggn,
    diag_hessian,
    ggnvp,
    kfac,
    outputs,
    sqrt_ggn,
    variance,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N = 4
X = Numbers()(N, 3)
Y = torch.tensor([0, 1, 1, 0])
PARAMS = {"w": Numbers(1)(3, 5), "v": Numbers(2)(5, 2)}
V = {"w": Numbers(3)(3, 5), "v": Numbers(4)(5, 2)}


def net(p, x):
    return torch.tanh(x @ p["w"]) @ p["v"]


def near(a, x):
    """What keeps an attack near its data, a second path from it."""
    return 0.5 * (a - x).square().sum(-1)


def by_grad(p, x, y):
    a = (x + 0.05).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(net(p, a), y, reduction="sum") - near(a, x).sum(), a)
    return (a + 0.2 * g).detach()


def without_another_path(p, x, y):
    a = (x + 0.05).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(net(p, a), y, reduction="sum"), a)
    return (a + 0.2 * g).detach()


def by_logarithm(p, x, y):
    a = (x + 0.05).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.log_softmax(net(p, a), -1)[:, 0].sum() + near(a, x).sum(), a)
    return (a + 0.2 * g).detach()


def of_marked_outputs(p, x, y):
    a = (x + 0.05).detach().requires_grad_()
    (g,) = torch.autograd.grad(outputs(net(p, a)).square().sum() + near(a, x).sum(), a)
    return (a + 0.2 * g).detach()


def in_two_steps(p, x, y):
    return by_grad(p, by_logarithm(p, x, y), y)


ATTACKS = [by_grad, without_another_path, by_logarithm, of_marked_outputs, in_two_steps]
STATISTICS = {
    "diag_ggn": lambda *f: diag_ggn(*f),
    "parts": lambda *f: chunked(diag_ggn(*f), 2, over="samples"),
    "columns": lambda *f: chunked(diag_ggn(*f), 2),
    "sqrt_ggn": lambda *f: lambda *args: ([s @ s.mT for s in _flat(sqrt_ggn(*f)(*args))]),
    "diag_hessian": lambda *f: diag_hessian(*f),
    "exact kfac": lambda *f: lambda *args: {name: k.dense() for name, k in kfac(*f, fisher="exact")(*args).items()},
    "ggnvp": lambda *f: lambda p, *args: ggnvp(*f)(p, V, *args),
    "ggnvp of blocks": lambda *f: lambda p, *args: ggnvp(*f, blocks=True)(p, {k: v[None] for k, v in V.items()}, *args),
    "variance": lambda f, loss=None: variance(f if loss is None else lambda p, x, y: loss(f(p, x), y)),
}


def _flat(roots):
    return [s.flatten(1).mT if s.ndim == 2 else s.flatten(2).flatten(0, 1).mT for s in roots.values()]


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_is_that_of_the_attacked_data(attack, name):
    if name == "variance" and attack is of_marked_outputs:
        pytest.skip("has no outputs")

    def loss(p, x, y):
        z = net(p, attack(p, x, y))
        return F.cross_entropy(outputs(z) if attack is of_marked_outputs else z, y)

    data = attack({name: p.clone().requires_grad_() for name, p in PARAMS.items()}, X, Y)
    found = STATISTICS[name](loss)(PARAMS, X, Y)
    assert_trees_close(found, STATISTICS[name](net, F.cross_entropy)(PARAMS, data, Y), 1e-9)


@pytest.mark.parametrize("name", ["diag_ggn", "diag_hessian", "sqrt_ggn", "ggnvp", "variance"])
def test_weights_of_samples_by_the_gradient_at_their_outputs(name):
    """The gradient ends at the outputs, so that it does not go through them."""

    def weighted(z, y, weights=None):
        losses = F.cross_entropy(z, y, reduction="none")
        if weights is None:
            (g,) = torch.autograd.grad(losses.sum() + z.square().sum(), z, retain_graph=True)
            weights = g.norm(dim=1).detach()
        return (losses * weights).sum(), weights

    def given(p, x, y):
        return weighted(outputs(net(p, x)), y)[0]

    _, weights = weighted(net({k: p.clone().requires_grad_() for k, p in PARAMS.items()}, X), Y)
    statistic = STATISTICS[name]
    found = statistic(given)(PARAMS, X, Y)
    if name == "variance":
        wanted = variance(lambda p, x, y, w: weighted(net(p, x), y, w)[0])(PARAMS, X, Y, weights)
    else:
        wanted = statistic(net, lambda z, t: weighted(z, t[0], t[1])[0])(PARAMS, X, (Y, weights))
    assert_trees_close(found, wanted, 1e-9)
