"""Products inside other transforms, and what they leave as it was."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

from invfunc import ggnvp, hvp, linearize, tree
from invfunc.testing import assert_trees_close
from tests import matrices
from tests.around import COMPOSITIONS, SMOOTH, differentiated
from tests.evaluation.test_effects import DRAWS, rng, shaken
from tests.matrices import MAKING, READING, flat, loss_of, summed
from tests.networks import LOSSES, NETWORKS, network, total
from tests.strategies import Numbers

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
    """That of a convolutional network for all maps of it."""
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

    @pytest.mark.parametrize("make", [hvp, ggnvp])
    @pytest.mark.parametrize("by", [grad, lambda f: lambda p: differentiated(f, (p,), [0])], ids=["func", "autograd"])
    def test_of_blocks(self, make, by):
        net, loss = network("perceptron", 3), LOSSES[0]
        batch, like = (net.x, loss.target(Numbers(1), 3)), net.params
        rows = tree.map_leaves(lambda p: Numbers(3)(2, *p.shape), like)

        def dense(p):
            matrix = hessian(p) if make is hvp else gauss_newton(p)
            parts = zip(matrices.blocks(matrix, like), tree.leaves(rows), strict=True)
            return [(x.flatten(1) @ b.T).view_as(x) for b, x in parts]

        def hessian(p):
            return torch.func.hessian(lambda q: loss_of(net.f, loss)(matrices.shaped(q, like), *batch))(flat(p))

        def gauss_newton(p):
            rows = jacrev(lambda q: net.f(matrices.shaped(q, like), net.x).flatten())(flat(p))
            z = net.f(p, net.x).flatten()
            return rows.T @ torch.func.hessian(lambda z: loss(z.view(3, -1), batch[1], "sum"))(z) @ rows

        found = by(lambda p: total(make(net.f, summed(loss), blocks=True)(p, rows, *batch)))(like)
        wanted = by(lambda p: total(dense(p)))(like)
        assert_trees_close(tree.leaves(found), tree.leaves(wanted), EXACT, 1e-2)

    @products
    @pytest.mark.parametrize("seen", [True, False], ids=["operation", "autograd.Function"])
    def test_of_closed_over_tensors(self, product, seen):
        """A frozen encoder below: its parameters require grad and are not parameters of f."""
        encoder, net, y = nn.Linear(2, 2).double(), network("perceptron", 3), Numbers(1).below(3, 3)
        encode = encoder if seen else (lambda x: Product.apply(x, encoder.weight.T) + encoder.bias)
        v = tree.map_leaves(lambda p: Numbers(3)(*p.shape), net.params)
        if not seen and product in ("ggnvp of f", "empirical of f"):
            return  # what cannot be seen is followed in models that are given apart, and in losses of the samples

        def slopes(make):
            found = make(lambda p, x: net.f(p, encode(x).tanh()), LOSSES[0])(net.params, v, net.x, y)
            return torch.autograd.grad(total(found), list(encoder.parameters()))

        make, formula = MAKING[product]
        assert_trees_close(slopes(make), slopes(formula), EXACT)
        assert_trees_close(slopes(lambda f, loss: READING["linearised"](make(f, loss))), slopes(formula), EXACT)

    @products
    def test_require_grad_only_where_something_did(self, product):
        net, y = network("affine", 3), Numbers(1).below(3, 3)
        t, v = MAKING[product][0](net.f, LOSSES[0]), tree.map_leaves(torch.cos, network("affine", 3).params)
        tracked = tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params)
        for params, vector, wanted in [(net.params, v, False), (tracked, v, True), (net.params, tracked, True)]:
            for make in READING.values():
                assert all(r.requires_grad == wanted for r in tree.leaves(make(t)(params, vector, net.x, y)))
                with torch.no_grad():
                    assert not any(r.requires_grad for r in tree.leaves(make(t)(params, vector, net.x, y)))


class Product(torch.autograd.Function):
    """A function of the user that no mode of torch sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return Product.apply(g, w.mT), Product.apply(x.mT, g)

    @staticmethod
    def jvp(ctx, dx, dw):
        raise NotImplementedError  # as in most functions of one's own: products take reverse mode only


@products
class TestLeavesAsTheyWere:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
    @pytest.mark.parametrize("read", READING.values(), ids=READING)
    def test_arguments_modes_and_the_generator(self, product, mode, read):
        for called in NETWORKS:
            net, y = network(called, 4), Numbers(1).below(3, 4)
            params, v = (tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params) for _ in range(2))
            args = tree.tensors((params, v, net.x, y))
            before = [(x.clone(), x._version, x.requires_grad) for x in args]
            with mode():
                modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), rng()
                read(MAKING[product][0](net.f, LOSSES[0]))(params, v, net.x, y)
                assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), rng()) == modes
            assert torch._C._len_torch_function_stack() == 0
            for x, (value, version, requires_grad) in zip(args, before, strict=True):
                assert torch.equal(x, value) and x._version == version
                assert x.requires_grad == requires_grad and x.grad is None

    @pytest.mark.parametrize("noise", DRAWS.values(), ids=DRAWS)
    def test_random_numbers_are_those_of_one_call(self, product, noise):
        f, params, x, y = shaken(noise)
        v = tree.map_leaves(torch.cos, params)
        torch.manual_seed(3)
        f(params, x)
        after, (make, formula) = rng(), MAKING[product]

        def again(p, x):
            torch.manual_seed(3)
            return f(p, x)

        wanted = formula(again, LOSSES[0])(params, v, x, y)
        for read in READING.values():
            torch.manual_seed(3)
            assert_trees_close(read(make(f, LOSSES[0]))(params, v, x, y), wanted, EXACT)
            assert rng() == after
