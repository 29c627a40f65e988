"""Products of one vector by forward mode: where it is taken, and where it would give something else."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import functional, ggnvp, outputs, tree
from invfunc.testing.memory import peak_memory
from tests import matrices
from tests.matrices import assert_near, flat
from tests.products.test_products import vectors
from tests.strategies import Numbers

P = {"a": Numbers(1)(3, 4), "b": Numbers(2)(4, 3)}
X, Y = Numbers(3)(5, 3), Numbers(4).below(3, 5)


def plain(p, x):
    return (x @ p["a"]).tanh() @ p["b"]


def with_a_constant(p, x):
    z = plain(p, x)
    with torch.no_grad():
        size = z.square().sum()
    return z * size


def detached(p, x):
    z = plain(p, x)
    return z * z.detach().sum()


class Bent(torch.autograd.Function):
    """A function of the user, which has no derivative in forward mode."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def attention(p, x):
    h = x @ p["a"]
    return F.scaled_dot_product_attention(*[h.view(1, 1, 5, 4)] * 3).view(5, 4) @ p["b"]


MODELS = {
    "plain": plain,
    "constant": with_a_constant,
    "detached": detached,
    "no derivative": lambda p, x: Bent.apply(plain(p, x)),
    "attention": attention,
    "logarithm": lambda p, x: plain(p, x) - F.log_softmax(plain(p, x), 1),
}
ALONE = {
    "criterion": lambda f: lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="sum"),
    "logarithm": lambda f: lambda p, x, y: F.nll_loss(F.log_softmax(f(p, x), 1), y, reduction="sum"),
    "marked": lambda f: lambda p, x, y: -outputs(f(p, x)).log_softmax(1).gather(1, y[:, None]).sum(),
}


@pytest.mark.parametrize("model", MODELS)
def test_products_are_those_of_the_matrices(model):
    f, v = MODELS[model], vectors(P)
    loss = lambda z, y: F.cross_entropy(z, y, reduction="sum")  # noqa: E731
    wanted = matrices.ggn(f, loss, P, X, Y) @ flat(v)
    products = [ggnvp(f, loss), *[ggnvp(make(f)) for make in ALONE.values()]]
    for product in products * 2:  # what forward mode has not is known the second time
        assert_near(flat(product(P, v, X, Y)), wanted, 1e-9)
    each = lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none")  # noqa: E731
    wanted = matrices.fisher(each, P, X, Y) @ flat(v)
    for product in (
        ggnvp(each, fisher="empirical"),
        ggnvp(f, lambda z, y: F.cross_entropy(z, y, reduction="none"), fisher="empirical"),
    ):
        assert_near(flat(product(P, v, X, Y)), wanted, 1e-9)


def test_one_that_draws_from_its_own_generator_is_of_one_run():
    def drawn(generator):
        def f(p, x):
            return plain(p, x) * torch.rand(3, generator=generator, dtype=torch.float64)

        return f

    runs = []
    f = drawn(torch.Generator().manual_seed(0))

    def seen(p, x):
        runs.append(f(p, x))
        return runs[-1]

    v = vectors(P)
    found = ggnvp(seen, F.mse_loss)(P, v, X, X)
    scale = (runs[-1].detach() / plain(P, X)).mean(0)
    wanted = matrices.ggn(lambda p, x: plain(p, x) * scale, F.mse_loss, P, X, X) @ flat(v)
    assert_near(flat(found), wanted, 1e-9)


def test_an_output_that_no_parameter_reaches():
    y, v = torch.zeros(5, 3, dtype=torch.float64), vectors(P)

    def loss(z, y):
        return F.mse_loss(z[0] * z[1].detach().exp(), y)

    wanted = matrices.ggn(plain, lambda z, y: F.mse_loss(z * X.exp(), y), P, X, y) @ flat(v)
    for product in (ggnvp(lambda p, x: (plain(p, x), x), loss), ggnvp(lambda p, x: (plain(p, x), x[:, :3]), loss)):
        found = product(P, v, X, y)
        assert_near(flat(found), wanted, 1e-9)
        assert not any(g.requires_grad for g in tree.leaves(found))


def test_memory_is_less_than_that_of_a_linearisation():
    """Which is that of two gradients."""
    layers = [m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    f, params = functional(torch.nn.Sequential(*layers))
    x, y = torch.randn(4096, 64), torch.randn(4096, 64)
    v, product = tree.map_tensors(torch.ones_like, params), ggnvp(f, F.mse_loss)

    def peak(call):
        return min(peak_memory(call)[1] for _ in range(3))

    assert peak(lambda: product(params, v, x, y)) < 0.8 * peak(lambda: product.linearize(params, x, y)(v))
