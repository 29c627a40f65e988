"""batch_diag_ggn and sqrt_ggn against the dense J^T H J of each sample: every network and loss, in both forms."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_diag_ggn, chunked, diag_ggn, sqrt_ggn, tree
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_jacobian
from tests.networks import LOSSES, network, total
from tests.strategies import Numbers

EXACT, FLOOR = 1e-10, 1e-6


def user_loss(z, y):
    """Convex, and not one that is known."""
    return (z - y).cosh().log().mean() + 0.5 * (z.sum(1) ** 2).sum()


def flat_loss(z, y):
    """With a Hessian that is singular: along the shift of all outputs the loss is linear."""
    return z.logsumexp(1).mean() - (z * y).mean()


KNOWN = [(loss, loss.target) for loss in LOSSES]
UNKNOWN = [(loss, lambda rand, n: rand(n, 3)) for loss in (user_loss, flat_loss)]
KINDS = [*KNOWN, *UNKNOWN]


def diagonals(f, loss):
    """The diagonal of each sample, one after the other."""

    def oracle(params, x, y):
        each = [dense_diag_ggn(f, loss, samples=[n])(params, x, y) for n in range(len(y))]
        return tree.map_leaves(lambda *leaves: torch.stack(leaves), *each)

    return oracle


def squared(root):
    """The diagonals of what a square root is a root of."""
    return tree.map_leaves(lambda s: s.square().sum(0), root)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind[0], "__name__", repr(kind[0])))
def test_the_products_of_a_root_are_the_matrix(kind):
    (loss, target), net = kind, network("perceptron", 3)
    y = target(Numbers(1), 3)
    jacobian = torch.cat([j.flatten(2) for j in tree.leaves(loop_batch_jacobian(net.f)(net.params, net.x))], 2)
    hessian = torch.func.hessian(lambda z: loss(z, y))(net.f(net.params, net.x))
    root = torch.cat([s.flatten(2) for s in tree.leaves(sqrt_ggn(net.f, loss)(net.params, net.x, y))], 2)
    wanted = torch.einsum("ncp,ncmd,mdq->pq", jacobian, hessian, jacobian)
    assert_trees_close(torch.einsum("vnp,vnq->pq", root, root), wanted, EXACT)
    assert len(root) <= hessian.shape[1]


@pytest.mark.quick
@pytest.mark.parametrize("chosen", [None, [2, 0, 0, -1]], ids=str)
@pytest.mark.parametrize("over", ["outputs", "samples", "params"])
def test_chunks(over, chosen):
    net = network("convolution", 4)
    args = (net.params, net.x, LOSSES[0].target(Numbers(1), 4))
    wanted = diagonals(net.f, LOSSES[0])(*args)
    wanted = wanted if chosen is None else tree.map_leaves(lambda d: d[chosen], wanted)
    found = chunked(batch_diag_ggn(net.f, LOSSES[0], samples=chosen), 3, over=over)(*args)
    assert_trees_close(found, wanted, EXACT, FLOOR)
    root = chunked(sqrt_ggn(net.f, LOSSES[0], samples=chosen), 3, over=over)(*args)
    assert_trees_close(squared(root), wanted, EXACT, FLOOR)


@pytest.mark.quick
@pytest.mark.parametrize("called", ["perceptron", "convolution", "tied"])
def test_derivatives_are_those_of_the_sum(called):
    net, loss = network(called, 3), F.mse_loss
    y = Numbers(1)(*net.f(net.params, net.x).shape)
    wanted = torch.func.grad(lambda p: total(diag_ggn(net.f, loss)(p, net.x, y)))(net.params)
    for t in (batch_diag_ggn(net.f, loss), lambda *args: squared(sqrt_ggn(net.f, loss)(*args))):
        of_each = torch.func.grad(lambda p, t=t: total(tree.map_leaves(lambda d: d.sum(0), t(p, net.x, y))))
        assert_trees_close(of_each(net.params), wanted, EXACT, FLOOR)


@pytest.mark.quick
def test_a_target_that_is_ignored_has_a_root_with_a_derivative():
    net, y = network("perceptron", 3), torch.tensor([-100, 0, 1])
    slope = torch.func.grad(lambda p: total(sqrt_ggn(net.f, F.cross_entropy)(p, net.x, y)))(net.params)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(slope))
