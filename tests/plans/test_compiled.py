"""Calls that are repeated by a plan give what they give without it, of other numbers: every statistic and product."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import chunked, compiled, explain, linear_operator, tree
from invfunc.testing.oracles import assert_trees_close
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.calls import EXACT, given, hits, loss, of, other, outcome, quietly, same, whys
from tests.rows import CASES, MODEL, made_of
from tests.strategies import Numbers
from tests.structures import always

FAMILIES = list(NETWORKS)
exact = partial(invfunc.kfac, fisher="exact")


def called(row, form, family, seed=0):
    """A statistic of a network, and how it is called."""
    net = network(family, 4, seed)
    if form == MODEL:
        return row.make(net.f), (net.params, net.x)
    return made_of(row, net.f, LOSSES[0], form), (net.params, net.x, LOSSES[0].target(Numbers(seed), 4))


@pytest.mark.parametrize("case", CASES)
def test_is_the_call_itself_at_other_numbers(case):
    """Of one network each; the next case takes the next one."""
    row, form = CASES[case]
    family = FAMILIES[list(CASES).index(case) % len(FAMILIES)]
    t, args = called(row, form, family)
    c, refused = compiled(called(row, form, family)[0]), False
    for k in (0, 1, 2):
        (wanted, after), (found, ours) = outcome(t, other(args, k)), quietly(outcome, c, other(args, k))
        refused = isinstance(wanted, str)
        if refused:
            assert found == wanted
        else:
            assert_trees_close(found, wanted, EXACT)
        assert torch.equal(after, ours)
    draws_by_itself = "sketched_grad" in case and any("it draws from a generator that is not" in w for w in whys(c))
    assert refused or hits(c) > 0 or draws_by_itself, whys(c)


PRODUCTS = {
    "hvp": lambda f: invfunc.hvp(f, F.cross_entropy),
    "ggnvp": lambda f: invfunc.ggnvp(f, F.cross_entropy),
    "ggnvp empirical": lambda f: invfunc.ggnvp(f, F.cross_entropy, fisher="empirical"),
    "ggnvp drawn": lambda f: invfunc.ggnvp(
        f, F.cross_entropy, mc_samples=2, generator=torch.Generator().manual_seed(0), fisher="mc"
    ),
}


@pytest.mark.parametrize("family", ["perceptron", "convolution"])
@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_the_call_itself(make, family):
    """On fresh data, where a second derivative that was written down would be wrong; as operators, too."""
    net, y = network(family, 4), Numbers(1).below(3, 4)
    t, c = make(net.f), compiled(make(net.f))
    for k in range(3):
        params, x = other((net.params, net.x), k)
        v = tree.map_tensors(torch.cos, params)
        assert_trees_close(c(params, v, x, y), t(params, v, x, y), EXACT)
        a, b = (product.linearize(params, x, y) for product in (c, t))
        assert_trees_close(a(v), b(v), EXACT)
        assert linear_operator(c)(params, x, y).shape == linear_operator(t)(params, x, y).shape
    assert hits(c) == 2


def second_order(w, x):
    """Of gradients, inside of a function: a penalty on the slope in the inputs."""
    slope = torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).sin() * x[0], argnums=1), (None, 0))(w, x)
    return slope.square().sum(1) + F.softplus(x @ w)


@pytest.mark.parametrize("make", [invfunc.variance, invfunc.diag_hessian, invfunc.hvp])
def test_second_derivatives_are_those_of_fresh_data(make):
    t, c = make(second_order), compiled(make(second_order))
    for k in range(4):
        w, x = given(k)
        more = (w.cos(),) if make is invfunc.hvp else ()
        same(c, t, w, *more, x)
    assert hits(c) == 3


@pytest.mark.parametrize("make", [invfunc.diag_ggn, partial(invfunc.diag_ggn, per_sample=True), exact])
def test_columns_by_structure_are_planned_where_they_are_checked_by_numbers(make):
    """Of a token head, which the loss transposes: that is looked at by numbers that are the same in each call."""
    sizes, rand = ((12, 24), (24, 3), (3, 24), (24, 40)), Numbers(0)
    params = {f"w{i}": rand(b, a) / a**0.5 for i, (a, b) in enumerate(sizes)}

    def f(p, x):
        for w in p.values():
            x = F.linear(torch.tanh(x), w)
        return x

    def loss(z, y):
        return F.cross_entropy(z.mT, y)

    c, t = compiled(make(f, loss)), make(f, loss)
    with always():
        for k in range(3):
            args = params | {"w0": params["w0"] + k}, rand(4, 6, 12), torch.arange(24).reshape(4, 6) + k
            assert_trees_close(c(*args), t(*args), EXACT)
            assert_trees_close(c(*args), make(f, loss, method="dense")(*args), 1e-10)
    assert hits(c) == 5


@pytest.mark.parametrize("over", ["samples", "params"])
def test_chunks_are_the_call_itself(over):
    t = chunked(invfunc.variance(loss), 3, over=over)
    c = compiled(t)
    for k in range(3):
        same(c, t, *given(k, 7))
    assert hits(c) == 2


@pytest.mark.slow
def test_inductor_is_the_call_up_to_rounding():
    t, c = invfunc.variance(loss), compiled(invfunc.variance(loss), backend="inductor")
    for k in range(3):
        assert_trees_close(c(*given(k)), t(*given(k)), 1e-9)
    assert hits(c) == 2 and not c.calls.warned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_are_the_call_and_results_are_kept():
    t, c = invfunc.variance(loss), compiled(invfunc.variance(loss), backend="cudagraphs")
    args = [tree.map_tensors(torch.Tensor.cuda, given(k)) for k in range(4)]
    found = [c(*each) for each in args]
    for each, result in zip(args, found, strict=True):
        assert_trees_close(result, t(*each), EXACT)


@pytest.mark.quick
class TestOptions:
    def test_explain_tells_of_the_plan_and_draws_nothing(self):
        def f(w, x):
            return F.dropout(x @ w, 0.5) * (2 if x.sum() > 0 else 3)

        c = compiled(invfunc.diag_ggn(f, F.cross_entropy))
        args = Numbers()(3, 5), Numbers(1)(4, 3), torch.arange(4)
        before = torch.get_rng_state()
        found = explain(c)(*args)
        assert torch.equal(before, torch.get_rng_state())
        assert "a plan of" in str(found) and "numbers, read at plans/test_compiled.py" in found.plan
        assert "torch.ops.aten" in found.code and found.name == "compiled(diag_ggn(f, cross_entropy))"
        c(*args)
        assert hits(c) == 1

    def test_many_shapes_are_told(self):
        t, c = of(loss)
        w, x = given(n=12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for n in range(1, 9):
                same(c, t, w, x[:n])
        with pytest.warns(invfunc.InvFuncWarning, match="more than 8 shapes.*or pad"):
            c(w, x[:9])
