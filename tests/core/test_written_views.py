"""What is written in place through a view: the base of the view has it, and all that is computed from it afterwards."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, diag_ggn, diag_hessian, variance
from invfunc.errors import InvFuncError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian, loop_batch_grad, loop_variance
from tests.strategies import Numbers

N = 4
X, Y = Numbers()(N, 3, 5), torch.tensor([0, 2, 1, 2])
P = {"first": Numbers(1)(5, 5), "in place": Numbers(2)(5), "head": Numbers(3)(3, 15)}

VIEWS = {
    "slice": lambda h: h[:, 1:],
    "select": lambda h: h[:, 0],
    "all": lambda h: h[:],
    "view": lambda h: h.view(-1, 5),
    "transposed": lambda h: h.transpose(0, 1),
    "narrow": lambda h: h.narrow(1, 0, 2),
    "view of a view": lambda h: h.view(-1, 5).view_as(h)[:, :2],
}
WRITES = {
    "add_": lambda v, p: v.add_(p),
    "mul_": lambda v, p: v.mul_(p),
    "iadd": lambda v, p: v.__iadd__(p),
    "imul": lambda v, p: v.__imul__(p),
    "div_": lambda v, p: v.div_(p + 4),
    "sub_, keyword": lambda v, p: v.sub_(other=p, alpha=0.5),
    "addcmul_": lambda v, p: v.addcmul_(v.detach().clone(), p),
    "copy_": lambda v, p: v.copy_(v.clone() * p),
    "twice": lambda v, p: v.add_(p).mul_(p),
    "nonlinear": lambda v, p: v.mul_(p).tanh_(),
    "relu": lambda v, p: F.relu(v.add_(p), inplace=True),
    "leaky": lambda v, p: F.leaky_relu_(v.add_(p), 0.1),
}


def model(view, write):
    def f(p, x):
        h = F.linear(x, p["first"]).sin()
        write(view(h), p["in place"])
        return F.linear(h.tanh().flatten(1), p["head"])

    return f


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, p):
        ctx.mark_dirty(h)
        return h.add_(p)

    @staticmethod
    def backward(ctx, g):
        return g, g.flatten(0, -2).sum(0)


def listed(v, p):
    torch._foreach_mul_([v], [p])


@pytest.mark.parametrize("write", [Added.apply, listed])
def test_what_writes_unseen_or_into_several(write):
    """Right, sample by sample."""
    f = model(lambda h: h, write)

    def losses(p, x, y):
        return F.cross_entropy(f(p, x), y, reduction="none")

    for loss in (losses, lambda p, x, y: losses(p, x, y).sum()):
        assert_trees_close(batch_grad(loss)(P, X, Y), loop_batch_grad(losses)(P, X, Y), rtol=1e-10)


REPEATED = {
    "+=": lambda b, z: b[:, 0].__iadd__(z[:, 0]),
    "item +=": lambda b, z: b.__setitem__((slice(None), 0), b[:, 0].add_(z[:, 0])),
    "*=": lambda b, z: b[:, 0].mul_(z[:, 0]),
    "copy_": lambda b, z: b[:, 0].copy_(z[:, 0]),
    "[:, 0] =": lambda b, z: b.__setitem__((slice(None), 0), z[:, 0]),
}


@pytest.mark.parametrize("called", REPEATED)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("form", ["[N]", "sum"])
def test_what_is_written_into_a_repeated_parameter(called, n, form):
    """Right, or an error of ours."""

    def losses(p, x):
        b = p["b"].repeat(len(x), 1)
        REPEATED[called](b, x @ p["w"])
        return b.square().sum(1)

    params, x = {"w": Numbers(1)(3, 2), "b": Numbers(2)(2)}, Numbers(3)(n, 3)
    for make in (batch_grad, diag_hessian):
        try:
            found = make(losses if form == "[N]" else lambda p, x: losses(p, x).sum())(params, x)
        except InvFuncError:
            continue
        wanted = loop_batch_grad if make is batch_grad else dense_diag_hessian
        assert_trees_close(found, wanted(losses)(params, x), 1e-10)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestWrittenViews:
    def test_shares(self, view, write):
        f = model(view, write)

        def losses(p, x, y):
            return F.cross_entropy(f(p, x), y, reduction="none")

        wanted = loop_batch_grad(losses)(P, X, Y)
        assert_trees_close(batch_grad(losses)(P, X, Y), wanted, rtol=1e-10)
        assert_trees_close(variance(losses)(P, X, Y), loop_variance(losses)(P, X, Y), rtol=1e-10)

        def loss(p, x, y):
            return F.cross_entropy(f(p, x), y, reduction="sum")

        assert_trees_close(batch_grad(loss)(P, X, Y), wanted, rtol=1e-10)

    def test_curvature(self, view, write):
        f = model(view, write)
        wanted = dense_diag_ggn(f, F.cross_entropy)(P, X, Y)
        assert_trees_close(diag_ggn(f, F.cross_entropy)(P, X, Y), wanted, rtol=1e-10)
        each = diag_ggn(f, F.cross_entropy, per_sample=True)(P, X, Y)
        assert_trees_close({k: v.sum(0) for k, v in each.items()}, wanted, rtol=1e-10)

    def test_hessian(self, view, write):
        f = model(view, write)
        wanted = dense_diag_hessian(lambda p, x, y: F.cross_entropy(f(p, x), y))(P, X, Y)
        assert_trees_close(diag_hessian(f, F.cross_entropy)(P, X, Y), wanted, rtol=1e-9)
