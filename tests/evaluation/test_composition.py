"""Every statistic inside other transforms, against the same composition of the plain formula."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import chunked, tree
from invfunc.testing.oracles import assert_trees_close, dense_diag_ggn, loop_batch_grad, loop_variance
from tests.networks import LOSSES, NETWORKS, STATISTICS, network, plain, total
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("statistic", STATISTICS)


def steps(n, like):
    """n points around a tree."""
    rand = Numbers(5)
    return tree.map_leaves(lambda x: x + 0.3 * rand(n, *x.shape), like)


def sets(n, *batch):
    """n data sets: the samples of each in another order, shifted."""
    shifts = [0.1 * i for i in range(n)]
    moved = [[x.roll(i, 0) + (d if x.is_floating_point() else 0) for i, d in enumerate(shifts)] for x in batch]
    return [torch.stack(x) for x in moved]


def over_sets(t):
    return lambda p, *batch: vmap(t, (None, 0, 0))(p, *sets(2, *batch))


def last(batch):
    return [x.movedim(0, -1) for x in batch]


def tangent(like):
    return tree.map_leaves(lambda x: Numbers(6)(*x.shape), like)


def differentiated(t, args, wanted, twice=False):
    """By torch.autograd."""
    args = list(args)
    for i in wanted:
        args[i] = tree.map_leaves(lambda x: x.clone().requires_grad_(), args[i])
    leaves = [x for i in wanted for x in tree.leaves(args[i])]
    nothing = 0 * total(leaves)  # a result may be constant
    found = torch.autograd.grad(total(t(*args)) + nothing, leaves, create_graph=True, materialize_grads=True)
    if twice:
        found = torch.autograd.grad(total(found, 8) + nothing, leaves, materialize_grads=True)
    assert all(x.grad is None for x in leaves)
    return list(found)


def slope(t):
    return grad(lambda p, x, y: total(t(p, x, y)))


COMPOSITIONS = {
    "itself": lambda t, p, x, y: t(p, x, y),
    "grad": lambda t, p, x, y: slope(t)(p, x, y),
    "grad in the inputs": lambda t, p, x, y: grad(lambda x: total(t(p, x, y)))(x),
    "jvp": lambda t, p, x, y: jvp(lambda p: t(p, x, y), (p,), (tangent(p),)),
    "jvp in the inputs": lambda t, p, x, y: jvp(lambda x: t(p, x, y), (x,), (tangent(x),)),
    "vjp": lambda t, p, x, y: vjp(lambda p: total(t(p, x, y)), p)[1](torch.tensor(2.0).double()),
    "vmap over params": lambda t, p, x, y: vmap(t, in_dims=(0, None, None))(steps(2, p), x, y),
    "vmap over data sets": lambda t, p, x, y: over_sets(t)(p, x, y),
    "vmap over both": lambda t, p, x, y: vmap(t)(steps(2, p), *sets(2, x, y)),
    "vmap of vmap": lambda t, p, x, y: vmap(vmap(t, (0, None, None)), (None, 0, 0))(steps(3, p), *sets(2, x, y)),
    "vmap over the last axis": lambda t, p, x, y: vmap(t, (None, -1, -1), 1)(p, *last(sets(2, x, y))),
    "vmap of grad": lambda t, p, x, y: vmap(slope(t), (0, None, None))(steps(2, p), x, y),
    "grad of vmap": lambda t, p, x, y: grad(lambda p: total(vmap(t, (0, None, None))(p, x, y)))(steps(2, p)),
    "grad of vmap over data sets": lambda t, p, x, y: slope(lambda p, *b: vmap(t, (None, 0, 0))(p, *sets(2, *b)))(
        p, x, y
    ),
    "grad of grad": lambda t, p, x, y: grad(lambda p: total(slope(t)(p, x, y), 8))(p),
    "jvp of grad": lambda t, p, x, y: jvp(lambda p: slope(t)(p, x, y), (p,), (tangent(p),)),
    "jacrev": lambda t, p, x, y: jacrev(lambda p: total(t(p, x, y)).reshape(1, 1))(p),
    "jacfwd": lambda t, p, x, y: jacfwd(lambda c: total(t(p, c * x, y)))(torch.ones(2, 1).double().mean()),
    "autograd": lambda t, p, x, y: differentiated(t, (p, x, y), [0]),
    "autograd in the inputs": lambda t, p, x, y: differentiated(t, (p, x, y), [1]),
    "autograd in both": lambda t, p, x, y: differentiated(t, (p, x, y), [0, 1]),
    "autograd twice": lambda t, p, x, y: differentiated(t, (p, x, y), [0], twice=True),
    "autograd of vmap": lambda t, p, x, y: differentiated(vmap(t, (0, None, None)), (steps(2, p), x, y), [0]),
    "no_grad": lambda t, p, x, y: torch.no_grad()(t)(p, x, y),
    "grad in no_grad": lambda t, p, x, y: torch.no_grad()(slope(t))(p, x, y),
    "inference_mode": lambda t, p, x, y: torch.inference_mode()(t)(p, x, y),
    "inference tensors": lambda t, p, x, y: inferring(t, p, x, y),
}
SMOOTH = [name for name in NETWORKS if name != "generic"]  # the inputs of that one are a tree with integers


def inferring(t, *args):
    with torch.inference_mode():
        return t(*tree.map_leaves(torch.clone, args))


@statistics
@pytest.mark.parametrize("composed", COMPOSITIONS.values(), ids=COMPOSITIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_composition_equals_that_of_the_formula(composed, statistic, data):
    net = network(data.draw(st.sampled_from(SMOOTH)), data.draw(st.integers(2, 3)))
    refused = {COMPOSITIONS["jacfwd"]: ["bce"], COMPOSITIONS["vmap of vmap"]: ["mse_loss", "bce"]}.get(composed, [])
    loss = data.draw(st.sampled_from([loss for loss in LOSSES if loss.called not in refused]))  # by torch itself
    args = (net.params, net.x, loss.target(Numbers(1), net.n))
    t = STATISTICS[statistic](net.f, loss)
    over = data.draw(st.sampled_from([None, "samples", "params"] + ["outputs"] * ("ggn" in statistic)))
    t = t if over is None else chunked(t, 2, over=over)
    found, wanted = composed(t, *args), composed(plain(statistic)(net.f, loss), *args)
    assert_trees_close(found, wanted, EXACT)


@statistics
def test_layers_that_the_outputs_do_not_read(statistic):
    """In a pass of vmap, some layers are reached and others are not: the first one here is not."""
    x, y = Numbers(1)(4, 3), LOSSES[0].target(Numbers(2), 4)

    def f(p, x):
        (x @ p["a"]).tanh()
        return (x @ p["b"]).tanh() @ p["c"]

    params, t = {name: Numbers(i)(3, 3) for i, name in enumerate("abc")}, STATISTICS[statistic](f, LOSSES[0])
    at = steps(2, params)
    found = vmap(t, (0, None, None))(at, x, y)
    for i in range(2):
        one = tree.map_leaves(lambda leaf, i=i: leaf[i], at)
        assert_trees_close(tree.map_leaves(lambda leaf, i=i: leaf[i], found), t(one, x, y), EXACT)


class TestWhatIsDifferentiated:
    """Statistics depend on what f closes over too, and on nothing that is detached."""

    @statistics
    @pytest.mark.parametrize("where", ["scale", "shift"])
    @pytest.mark.parametrize("by", ["grad", "autograd", "vmap", "jvp"])
    def test_closed_over_tensors(self, statistic, where, by):
        net, loss, y = network("perceptron", 3), LOSSES[0], Numbers(1).below(3, 3)

        def result(make, c):
            f = {"scale": lambda p, x: net.f(p, x) * c, "shift": lambda p, x: net.f(p, x + c)}[where]
            return make(f, loss)(net.params, net.x, y)

        def composed(make):
            c = torch.tensor(0.7).double()
            if by == "grad":
                return grad(lambda c: total(result(make, c)))(c)
            if by == "vmap":
                return vmap(lambda c: result(make, c))(torch.stack([c, 2 * c]))
            if by == "jvp":
                return jvp(lambda c: result(make, c), (c,), (c,))
            c.requires_grad_()
            return torch.autograd.grad(total(result(make, c)), c)

        assert_trees_close(composed(STATISTICS[statistic]), composed(plain(statistic)), EXACT)

    @statistics
    def test_closed_over_module_parameters(self, statistic):
        """A frozen encoder below: its parameters require grad and are not parameters of f."""
        encoder, net, loss = torch.nn.Linear(2, 2).double(), network("perceptron", 3), LOSSES[0]
        y = Numbers(1).below(3, 3)

        def composed(make):
            result = make(lambda p, x: net.f(p, encoder(x).tanh()), loss)(net.params, net.x, y)
            return torch.autograd.grad(total(result), list(encoder.parameters()))

        assert_trees_close(composed(STATISTICS[statistic]), composed(plain(statistic)), EXACT)

    @statistics
    def test_results_require_grad_only_where_something_did(self, statistic):
        net, y = network("affine", 3), Numbers(1).below(3, 3)
        t = STATISTICS[statistic](net.f, LOSSES[0])
        assert not any(r.requires_grad for r in tree.leaves(t(net.params, net.x, y)))
        params = tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params)
        assert all(r.requires_grad for r in tree.leaves(t(params, net.x, y)))
        with torch.no_grad():
            assert not any(r.requires_grad for r in tree.leaves(t(params, net.x, y)))

    @statistics
    def test_aux_goes_along(self, statistic):
        net, y = network("affine", 3), Numbers(1).below(3, 3)
        transform, options = getattr(invfunc, statistic.split()[0]), {"has_aux": True}
        if statistic.endswith("loss"):
            t = transform(lambda p, x: ((z := net.f(p, x)), z.exp()), lambda z, y: LOSSES[0](z, y), **options)
        else:
            t = transform(lambda p, x, y: (LOSSES[0](z := net.f(p, x), y), z.exp()), **options)

        def value(p):
            result, aux = t(p, net.x, y)
            return total(result), aux

        slopes, aux = grad(value, has_aux=True)(net.params)
        assert torch.allclose(aux, net.f(net.params, net.x).exp())
        assert_trees_close(slopes, grad(lambda p: value(p)[0])(net.params), EXACT)
        through = grad(lambda p: total(value(p)[1]))(net.params)
        assert_trees_close(through, grad(lambda p: total(net.f(p, net.x).exp()))(net.params), EXACT)


class Doubled(torch.autograd.Function):
    """A function of the user with rules for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return 2 * (x @ w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.mT, 2 * x.mT @ g


def dense(w, x):
    return (x @ w).tanh()


INSIDE = {
    "vmap": vmap(dense, (None, 0)),
    "vmap of a gradient": vmap(lambda w, x: grad(lambda x: dense(w, x).sum())(x), (None, 0)),
    "jvp": lambda w, x: jvp(lambda x: dense(w, x), (x,), (x.cos(),))[1],
    "vmap of jacrev": lambda w, x: vmap(lambda x: jacrev(dense, 1)(w, x).sum(0))(x),
    "checkpoint": lambda w, x: checkpoint(dense, w, x, use_reentrant=False),
    "autograd.Function": lambda w, x: Doubled.apply(x, w).tanh(),
}


class TestTransformsInside:
    """f may itself use transforms, as long as a sample can be told from the others."""

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_in_losses_of_the_samples(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))

        def each(w, x):
            return f(w, x).square().sum(1)

        assert_trees_close(invfunc.batch_grad(each)(*args), loop_batch_grad(each)(*args), EXACT)
        assert_trees_close(invfunc.variance(each)(*args), loop_variance(each)(*args), EXACT)

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_in_a_model_function(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))
        args = (*args, Numbers(2)(*f(*args).shape))
        assert_trees_close(invfunc.diag_ggn(f, F.mse_loss)(*args), dense_diag_ggn(f, F.mse_loss)(*args), EXACT)

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_in_a_mean_a_checkpoint_is_seen_through_and_others_refused(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))
        args = (*args, Numbers(2)(*f(*args).shape))

        def mean(w, x, y):
            return F.mse_loss(f(w, x), y)

        if f is INSIDE["checkpoint"]:
            assert_trees_close(invfunc.diag_ggn(mean)(*args), dense_diag_ggn(f, F.mse_loss)(*args), EXACT)
            return
        with pytest.raises((invfunc.SplitError, invfunc.SampleAxisError)):
            invfunc.diag_ggn(mean)(*args)


@pytest.mark.quick
@pytest.mark.parametrize("t", [invfunc.variance, invfunc.diag_ggn], ids=lambda t: t.__name__)
def test_compiled_functions_may_use_them(t):
    """The compiler leaves a statistic as it is, and compiles what is around it."""
    w, x, y = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)

    def step(w, x, y):
        return w.sin() - t(lambda w, x, y: torch.nn.functional.mse_loss(x @ w, y))(w, x, y).sqrt()

    assert_trees_close(torch.compile(step, backend="eager")(w, x, y), step(w, x, y), 1e-12)
