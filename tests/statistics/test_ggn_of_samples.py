"""diag_ggn of each sample and sqrt_ggn against the dense J^T H J of each: every network and loss, in both forms."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, sqrt_ggn, tree
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, loop_batch_jacobian
from tests.networks import LOSSES, network, total
from tests.strategies import Numbers, seeded

EXACT = 1e-10


def user_loss(z, y):
    """Convex, and not one that is known."""
    return (z - y).cosh().log().mean() + 0.5 * (z.sum(1) ** 2).sum()


def flat_loss(z, y):
    """With a Hessian that is singular: along the shift of all outputs the loss is linear."""
    return z.logsumexp(1).mean() - (z * y).mean()


KNOWN = [(loss, loss.target) for loss in LOSSES]
UNKNOWN = [(loss, lambda rand, n: rand(n, 3)) for loss in (user_loss, flat_loss)]
KINDS = [*KNOWN, *UNKNOWN]


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
def test_a_target_that_is_ignored_has_a_root_with_a_derivative():
    net, y = network("perceptron", 3), torch.tensor([-100, 0, 1])
    slope = torch.func.grad(lambda p: total(sqrt_ggn(net.f, F.cross_entropy)(p, net.x, y)))(net.params)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(slope))


@pytest.mark.quick
def test_each_is_an_option_that_the_result_tells():
    t = diag_ggn(torch.mul, F.mse_loss, per_sample=True)
    assert repr(t) == "diag_ggn(mul, mse_loss, per_sample=True)"
    with pytest.raises(ArgumentError, match="with_error=True, per_sample=True.*Leave one of the two out"):
        diag_ggn(torch.mul, F.mse_loss, mc_samples=2, generator=seeded(), with_error=True, per_sample=True)
