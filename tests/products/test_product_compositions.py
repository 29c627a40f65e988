"""Products inside other transforms, and what they leave as it was."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vmap

from invfunc import diag_ggn, ggnvp, hvp, linearize, tree
from invfunc.errors import ArgumentError, ConvexityError
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import matrices
from tests.criteria import model
from tests.laws import composed
from tests.matrices import COMPOSITIONS, MAKING, READING, SMOOTH, assert_near, differentiated, directions, flat
from tests.networks import LOSSES, network, networks, samples_loss, total
from tests.products.test_products import vectors
from tests.strategies import Numbers, seeded

EXACT = 1e-8


products = pytest.mark.parametrize("product", MAKING)


@products
@pytest.mark.parametrize("composed", COMPOSITIONS.values(), ids=COMPOSITIONS)
@settings(max_examples=2)
@given(data=st.data())
def test_composition_equals_that_of_the_formula(composed, product, data):
    net = network(data.draw(st.sampled_from(SMOOTH)), data.draw(st.integers(2, 3)))
    refused = {COMPOSITIONS["jacfwd"]: ["bce"], COMPOSITIONS["vmap of vmap"]: ["mse_loss", "bce"]}.get(composed, [])
    loss = data.draw(st.sampled_from([loss for loss in LOSSES if loss.called not in refused]))  # by torch itself
    read = READING[data.draw(st.sampled_from(list(READING)))]
    args = (net.params, net.x, loss.target(Numbers(1), net.n))
    make, formula = MAKING[product]

    def along(product):
        return lambda p, x, y: product(p, tree.map_leaves(lambda q: (q + 1).cos(), p), x, y)

    wanted = composed(along(formula(net.f, loss)), *args)
    assert_trees_close(composed(along(read(make(net.f, loss))), *args), wanted, EXACT, 1e-2)


MAPS = {
    "itself": lambda at, v: at(v),
    "vmap": lambda at, v: vmap(at)(rows(v)),
    "vmap of vmap": lambda at, v: vmap(vmap(at))(tree.map_leaves(lambda x: x[None], rows(v))),
    "vmap over the last axis": lambda at, v: vmap(at, -1, -1)(tree.map_leaves(lambda x: x.movedim(0, -1), rows(v))),
    "vmap over one leaf": lambda at, v: vmap(at, (first(v, 0, None),))(first(v, rows(v), v)),
    "grad": lambda at, v: grad(lambda v: total(at(v)))(v),
    "grad of sines": lambda at, v: grad(lambda v: total(tree.map_leaves(torch.sin, at(v))))(v),
    "grad of grad": lambda at, v: grad(lambda v: total(grad(lambda v: total(tree.map_leaves(torch.sin, at(v))))(v), 8))(
        v
    ),
    "jvp": lambda at, v: jvp(at, (v,), (tree.map_leaves(torch.cos, v),)),
    "jvp of grad": lambda at, v: jvp(
        grad(lambda v: total(tree.map_leaves(torch.sin, at(v)))), (v,), (tree.map_leaves(torch.cos, v),)
    ),
    "jacrev": lambda at, v: jacrev(lambda v: total(at(v)).reshape(1))(v),
    "grad of vmap": lambda at, v: grad(lambda v: total(vmap(at)(v)))(rows(v)),
    "vmap of grad": lambda at, v: vmap(grad(lambda v: total(at(v))))(rows(v)),
    "autograd": lambda at, v: differentiated(lambda v: tree.map_leaves(torch.sin, at(v)), (v,), [0]),
    "autograd twice": lambda at, v: differentiated(lambda v: tree.map_leaves(torch.sin, at(v)), (v,), [0], twice=True),
    "no_grad": lambda at, v: torch.no_grad()(at)(v),
    "inference_mode": lambda at, v: torch.inference_mode()(at)(v),
    "inference tensors": lambda at, v: inferred(at, v),
    "inference tensors from before": lambda at, v: at(inferred(lambda v: v, v)),
}


def rows(v):
    return tree.map_leaves(lambda x: torch.stack([x, x.sin(), 2 * x]), v)


def first(v, own, others):
    """A tree like v with something of its own at the first leaf."""
    leaves, structure = tree.flatten(v)
    own, others = tree.leaves(own), tree.leaves(others)
    own, others = own * len(leaves) if len(own) == 1 else own, others * len(leaves) if len(others) == 1 else others
    return tree.unflatten([own[0], *others[1:]], structure)


def inferred(at, v):
    with torch.inference_mode():
        return at(tree.map_leaves(torch.clone, v))


@cache
def matrix_of(product):
    """Matrix of a convolutional network for each product."""
    net, loss = network("convolution", 3), LOSSES[0]
    if product in ("jvp", "vjp"):
        rows = matrices.jacobian(net.f, net.params, net.x)
        return rows if product == "jvp" else rows.T
    return matrices.of(MAKING[product][0](net.f, loss), net.params, net.x, loss.target(Numbers(1), 3))


@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("product", ["hvp of f", "ggnvp of f", "empirical of f and loss", "jvp", "vjp"])
def test_a_linearisation_may_be_composed_later(how, requires_grad, product):
    composed, net, loss = MAPS[how], network("convolution", 3), LOSSES[0]
    params = tree.map_leaves(lambda p: p.clone().requires_grad_(requires_grad), net.params)
    batch = (net.x, loss.target(Numbers(1), 3))
    if product in ("jvp", "vjp"):
        _, *both = linearize(net.f)(params, net.x)
        at, outputs = both[product == "vjp"], torch.zeros(3, 3)
        like, into = (net.params, outputs) if product == "jvp" else (outputs, net.params)
    else:
        at, like, into = MAKING[product][0](net.f, loss).linearize(params, *batch), net.params, net.params
    matrix = matrix_of(product)
    v = tree.map_leaves(lambda p: Numbers(3)(*p.shape), like)
    found = composed(at, v)
    wanted = composed(lambda v: matrices.shaped(matrix @ flat(v), into), v)
    assert_trees_close(tree.map_leaves(torch.detach, found), tree.map_leaves(torch.detach, wanted), EXACT, 1e-2)
    if not requires_grad and how != "autograd":  # that one asks for a graph
        assert not any(x.requires_grad for x in tree.leaves(found))
    assert all(p.grad is None for p in tree.leaves(params))


class TestDerivatives:
    """Of what a product depends on."""

    @products
    def test_of_closed_over_tensors(self, product):
        """A frozen encoder below: its parameters require grad and are not parameters of f."""
        encoder, net, y = nn.Linear(2, 2).double(), network("perceptron", 3), Numbers(1).below(3, 3)
        v = tree.map_leaves(lambda p: Numbers(3)(*p.shape), net.params)

        def slopes(make):
            found = make(lambda p, x: net.f(p, encoder(x).tanh()), LOSSES[0])(net.params, v, net.x, y)
            return torch.autograd.grad(total(found), list(encoder.parameters()))

        make, formula = MAKING[product]
        assert_trees_close(slopes(make), slopes(formula), EXACT)
        assert_trees_close(slopes(lambda f, loss: READING["linearised"](make(f, loss))), slopes(formula), EXACT)


# Products of functions whose samples are mixed, moved or pooled, and where a loss function is split


class TestSamples:
    """Conditions that a product puts on the samples."""

    @staticmethod
    def normalised(p, x):
        return F.batch_norm((x @ p["w"]).tanh(), None, None, p["scale"], p["shift"], training=True)

    @staticmethod
    def args():
        rand = Numbers()
        params = {"w": rand(2, 3), "scale": rand(3), "shift": rand(3)}
        return params, rand(5, 2), rand.below(3, 5)

    def test_may_be_mixed_by_a_model(self):
        args, f = self.args(), self.normalised
        assert_near(
            matrices.of(hvp(f, F.cross_entropy), *args), matrices.hessian(composed(f, F.cross_entropy), *args), 1e-8
        )
        wanted = matrices.ggn(f, F.cross_entropy, *args)
        for product in (ggnvp(f, F.cross_entropy), ggnvp(composed(f, F.cross_entropy))):
            assert_near(matrices.of(product, *args), wanted, 1e-8)
            v = vectors(args[0])
            assert_near(flat(product(args[0], v, *args[1:])), wanted @ flat(v), 1e-8)
        each = composed(f, lambda z, y: F.cross_entropy(z, y, reduction="none"))
        assert_near(matrices.of(ggnvp(each, fisher="empirical"), *args), matrices.fisher(each, *args), 1e-8)

    @pytest.mark.parametrize(
        "loss",
        [
            lambda z, y: (z - z.mean(0)).square().sum(),
            lambda z, y: (z - z.mean(0)).square().sum(1),
            lambda z, y: F.cross_entropy(z @ z.detach().T, torch.arange(len(z))),
            lambda z, y: (z[:, None] - z[None]).square().sum() + F.mse_loss(z.sum(0), y),
        ],
        ids=["centred", "centred losses", "contrastive", "pairs"],
    )
    def test_may_be_mixed_by_a_convex_loss(self, loss):
        f, params = model((3,))
        x, y = Numbers(1)(4, 2), Numbers(2)(3)
        wanted = matrices.ggn(f, loss, params, x, y)
        assert_near(matrices.of(ggnvp(f, loss, in_dims=(0, None)), params, x, y), wanted, 1e-8)
        assert_near(matrices.of(ggnvp(f, loss), params, x, y), wanted, 1e-8)  # 4 samples and 3: none are told apart

    @pytest.mark.parametrize("factor", [1, -1])
    def test_may_have_been_pooled(self, factor):
        """Three outputs of eight samples, with a loss of known structure."""

        def f(p, x):
            return (x @ p["w"]).tanh()[:6].unflatten(0, (3, 2)).mean(1)

        def loss(z, y):
            return factor * F.cross_entropy(z, y, reduction="none")

        args = ({"w": Numbers()(2, 4)}, Numbers(1)(8, 2), Numbers(2).below(4, 3))
        if factor > 0:
            assert_near(matrices.of(ggnvp(f, loss), *args), matrices.ggn(f, loss, *args), 1e-8)
        for reduced in (loss, lambda z, y: loss(z, y).sum()) if factor < 0 else ():
            with pytest.raises(ConvexityError):
                ggnvp(f, reduced).linearize(*args)

    def test_a_mixing_loss_that_is_not_convex_is_refused(self):
        f, params = model((3,))
        with pytest.raises(ConvexityError):
            ggnvp(f, lambda z, y: -z.var(0).sum()).linearize(params, Numbers(1)(4, 2), None)


# Products with the Fisher matrix, empirical and drawn, against the matrices

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
