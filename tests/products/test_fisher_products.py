"""Products with the Fisher matrix, empirical and drawn, against the matrices."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, hessian, jacrev

from invfunc import diag_ggn, ggnvp, hvp
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import matrices
from tests.laws import composed
from tests.matrices import assert_near, directions, flat
from tests.networks import LOSSES, network, networks, samples_loss
from tests.strategies import Numbers, seeded

RTOL = {torch.float64: 1e-8, torch.float32: 1e-4}


class TestEmpirical:
    @given(net=networks(), loss=st.sampled_from(LOSSES))
    def test_the_empirical_fisher_matrix(self, device, dtype, net, loss):
        each = samples_loss(net, loss)
        args = moved((net.params, net.x, loss.target(Numbers(1), net.n)), dtype, device)
        along = directions(net.params).to(device, dtype)
        wanted, rtol = matrices.fisher(each, *args) @ along.T, RTOL[dtype]
        for product in (
            ggnvp(each, fisher="empirical"),
            ggnvp(net.f, lambda z, y: each_of(loss, z, y), fisher="empirical"),
            ggnvp(net.f, lambda z, y: loss(z, y, "sum"), fisher="empirical"),
            ggnvp(lambda *a: each(*a).sum(), fisher="empirical"),
        ):
            assert_near(matrices.of(product, *args, along=along), wanted, rtol)
        mean = matrices.of(ggnvp(lambda *a: each(*a).mean(), fisher="empirical"), *args, along=along)
        assert_near(mean * net.n**2, wanted, rtol)


def each_of(loss, z, y):
    losses = loss(z, y, "none")
    return losses if losses.ndim == 1 else losses.sum(1)


class TestDrawn:
    """Rows of drawn targets, whose averages are those of drawn diagonals."""

    @pytest.mark.parametrize("loss", LOSSES[:4], ids=str)
    def test_drawn_columns_are_those_of_the_same_seed(self, loss):
        net = network("perceptron", 4)
        args, drawn = (net.params, net.x, loss.target(Numbers(1), 4)), {"mc_samples": 3}
        diagonal = diag_ggn(net.f, loss, generator=seeded(1), **drawn)(*args)
        for given_as in ((net.f, loss), (composed(net.f, loss),)):
            product = ggnvp(*given_as, generator=seeded(1), fisher="mc", **drawn)
            assert_near(matrices.of(product, *args).diagonal(), flat(diagonal), 1e-10)


# Products with the positive-curvature Hessian: each operation that bends adds its own part, made positive

POSITIVE = {"abs": torch.abs, "clip": lambda h: h.clamp(min=0)}
ACTIVATIONS = [torch.tanh, torch.sigmoid, F.softplus, F.gelu, F.silu, torch.relu, torch.sin, torch.square]
LOSSES_PCH = {
    "cross entropy": (F.cross_entropy, torch.tensor([0, 2, 1, 1])),
    "mean of squares": (F.mse_loss, Numbers(9)(4, 3)),
    "squares": (lambda z, y: (z - y).square().sum(), Numbers(9)(4, 3)),
}
PARAMS = {"a": Numbers(1)(3, 4), "b": Numbers(2)(4), "c": Numbers(3)(4, 4), "d": Numbers(4)(4, 3)}
X = Numbers(5)(4, 3)


def network_of_pch(activation):
    """And the inputs of its activations."""

    def bent(p, x):
        first = x @ p["a"] + p["b"]
        return [first, activation(first) @ p["c"]]

    def f(p, x):
        return activation(bent(p, x)[1]) @ p["d"]

    return f, bent


def dense(activation, loss, target, positive):
    """The blocks, from the Jacobians of the outputs and of the inputs of the activations."""
    f, bent = network_of_pch(activation)
    outputs, inputs = f(PARAMS, X), bent(PARAMS, X)

    def rest(u, k):
        """The loss as a function of what activation k returns."""
        h = u if k == 1 else activation(u @ PARAMS["c"])
        return loss(h @ PARAMS["d"], target)

    jacobians = [jacrev(f)(PARAMS, X), *({name: J[name] for name in PARAMS} for J in jacrev(bent)(PARAMS, X))]
    curved = hessian(loss)(outputs, target).reshape(outputs.numel(), -1)
    found = {}
    for name, p in PARAMS.items():
        rows = [J[name].reshape(-1, p.numel()) for J in jacobians]
        block = rows[0].T @ curved @ rows[0]
        for k, u in enumerate(inputs):
            slope = grad(rest)(activation(u), k)
            second = grad(lambda x: grad(lambda x: activation(x).sum())(x).sum())(u)
            block = block + rows[1 + k].T @ (positive(slope * second).reshape(-1, 1) * rows[1 + k])
        found[name] = block
    return found


def units():
    """As many vectors for all parameters as the largest has entries."""
    count = max(p.numel() for p in PARAMS.values())
    return {name: torch.eye(count, p.numel()).double().reshape(count, *p.shape) for name, p in PARAMS.items()}


@pytest.mark.quick
@pytest.mark.parametrize("modify", POSITIVE)
@pytest.mark.parametrize("kind", LOSSES_PCH)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_is_the_sum_of_its_parts(activation, kind, modify):
    (f, _), (loss, target) = network_of_pch(activation), LOSSES_PCH[kind]
    wanted = dense(activation, loss, target, POSITIVE[modify])
    for t in (hvp(f, loss, modify=modify, blocks=True), hvp(composed(f, loss), modify=modify, blocks=True)):
        if t.loss is None and kind == "squares":
            continue  # a loss whose outputs cannot be found
        found = t(PARAMS, units(), X, target)
        found = {name: v.reshape(len(v), -1)[: v[0].numel()] for name, v in found.items()}
        assert_trees_close(found, wanted, 1e-10, 1e-3)


BOTH = (lambda z: torch.stack([*torch.var_mean(z, 1), z[:, 0]], 1), "var_mean")
"""An operation with two results."""


def test_what_is_not_element_wise_is_refused():
    V, y = {"a": Numbers(7)(2, 3, 4)}, torch.tensor([0, 2, 1, 1])
    for bent, named in ((lambda z: z.softmax(1), "softmax"), (lambda z: F.layer_norm(z, (4,)), "layer_norm"), BOTH):

        def f(p, x, bent=bent):
            return bent(x @ p["a"]).sin()

        with pytest.raises(ArgumentError, match=named):
            hvp(f, F.cross_entropy, blocks=True, modify="abs")({"a": PARAMS["a"]}, V, X, y)
    with pytest.raises(ArgumentError, match="modify='square'.*'abs', 'clip'"):
        hvp(F.linear, F.mse_loss, modify="square", blocks=True)
