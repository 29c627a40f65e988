"""A compiled statistic within the user's own torch.compile, as one operation of one graph."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, tree
from invfunc.errors import ReplayError
from invfunc.testing.oracles import assert_trees_close
from tests.data_sets.test_streamed import linear, losses
from tests.plans.calls import hits, loss, quietly
from tests.strategies import Numbers, seeded

pytestmark = pytest.mark.slow

EXACT = 1e-12


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def data():
    rand = Numbers(0)
    return {"w": rand(4, 5), "b": rand(5)}, rand(7, 4), torch.arange(7) % 5


MADE = {
    "variance": lambda: invfunc.variance(losses),
    "grad_and_variance": lambda: invfunc.grad_and_variance(losses),
    "diag_ggn": lambda: invfunc.diag_ggn(linear, F.cross_entropy),
    "together": lambda: invfunc.together(invfunc.batch_grad(losses), invfunc.diag_ggn(losses)),
    "chunked": lambda: invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2),
    "kfac": lambda: invfunc.kfac(linear, F.cross_entropy, fisher="exact"),
    "ekfac": lambda: invfunc.ekfac(losses, fisher="empirical"),
    "noise_scale": lambda: invfunc.noise_scale(losses),
    "noise_scale of groups": lambda: invfunc.together(
        invfunc.noise_scale(losses, groups=str), invfunc.variance(losses)
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_is_one_operation_of_one_graph(make, data):
    """Of other numbers and shapes, with what is computed before and behind it."""
    params, *args = data
    t, c, graphs = make(), compiled(make()), []

    def use(call, params, *args):
        found = call({name: p * 2 for name, p in params.items()}, *args)
        return torch.utils._pytree.tree_map(torch.sin, found)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    ours = torch.compile(lambda *given: use(c, *given), fullgraph=True, backend=backend)
    for k in range(5):
        at = {name: p + k for name, p in params.items()}
        n = 7 if k < 3 else 5
        part = [x[:n] for x in args]
        assert_trees_close(ours(at, *part), use(t, at, *part), EXACT)
    assert len(graphs) == 2 and hits(c) == 3


def test_products(data):
    params, *args = data
    t, c = invfunc.hvp(losses), compiled(invfunc.hvp(losses))
    ours = torch.compile(lambda p, v, *args: c(p, v, *args)["w"] + 1, fullgraph=True, backend="aot_eager")
    for k in range(3):
        v = tree.map_tensors(lambda p, k=k: (p + k).cos(), params)
        assert_trees_close(ours(params, v, *args), t(params, v, *args)["w"] + 1, EXACT)
    assert hits(c) == 2


def test_what_f_reads_is_that_of_now():
    """A tensor that is closed over, a branch on numbers: the graph is not compiled again, and the plan is."""
    held, graphs = torch.ones(3, dtype=torch.float64), []

    def f(w, x):
        return loss(w, x * held) * (2.0 if x.sum() > 0 else 3.0)

    t, c = invfunc.variance(f), compiled(invfunc.variance(f))
    ours = torch.compile(lambda w, x: c(w, x) * 1, fullgraph=True, backend=lambda g, _: graphs.append(g) or g)
    for k in range(6):
        held.fill_(1.0 + (k > 3))
        w, x = Numbers(k)(3), Numbers(k + 9)(4, 3)
        assert_trees_close(quietly(ours, w, x), t(w, x), EXACT)
    assert len(graphs) == 1


def test_draws_are_those_of_the_calls(data):
    """Two calls in one graph draw one after the other, and what f draws goes on from torch's generator."""
    params, *args = data

    def made(g):
        return invfunc.diag_ggn(lambda p, x: F.dropout(linear(p, x), 0.5), F.cross_entropy, mc_samples=2, generator=g)

    t, c = made(seeded(3)), compiled(made(seeded(3)))
    ours = torch.compile(lambda *a: (c(*a)["w"], c(*a)["w"]), fullgraph=True, backend="aot_eager")
    for k in range(3):
        torch.manual_seed(k)
        wanted, after = (t(params, *args)["w"], t(params, *args)["w"]), torch.rand(2)
        torch.manual_seed(k)
        found = ours(params, *args)
        assert_trees_close((*found, torch.rand(2)), (*wanted, after), EXACT)


def test_factors_know_what_they_are_of_and_multiply_in_the_graph(data):
    """Also those of parameters of one shape, which differ in their names alone."""
    (params, x, y), rand = data, Numbers(5)
    params = {"first": rand(4, 4), "second": rand(4, 4), **params}

    def model(p, x):
        return linear(p, (x @ p["first"]).tanh() @ p["second"])

    t, c = (
        invfunc.kfac(model, F.cross_entropy, fisher="exact"),
        compiled(invfunc.kfac(model, F.cross_entropy, fisher="exact")),
    )
    ours = torch.compile(
        lambda p, *batch: (K := c(p, *batch), K["second"] @ p["second"]), fullgraph=True, backend="aot_eager"
    )
    for n in (7, 7, 5):
        found, product = ours(params, x[:n], y[:n])
        wanted = t(params, x[:n], y[:n])
        assert [repr(K.origin) for K in found.values()] == [repr(K.origin) for K in wanted.values()]
        assert_trees_close(found, wanted, EXACT)
        assert_trees_close(product, wanted["second"] @ params["second"], EXACT)
        assert_trees_close(
            invfunc.kronecker.merge(found, found, reduction="mean"),
            invfunc.kronecker.merge(wanted, wanted, reduction="mean"),
            EXACT,
        )


@pytest.mark.parametrize("kind", ["factors", "aux", "reduced", "differentiable", "autocast"])
def test_what_is_no_tree_of_tensors_is_a_graph_break(kind, data):
    params, *args = data
    make = {
        "factors": lambda: invfunc.kfac(linear, F.cross_entropy, joint=True, fisher="exact"),
        "aux": lambda: invfunc.variance(lambda p, x, y: (losses(p, x, y), x.mean()), has_aux=True),
        "reduced": lambda: invfunc.reduced(invfunc.variance(losses), lambda path, v: v.sum()),
        "differentiable": lambda: invfunc.variance(losses),
        "autocast": lambda: invfunc.variance(losses),
    }[kind]
    t, c = make(), compiled(make())
    if kind == "differentiable":
        params = tree.map_tensors(lambda p: p.requires_grad_(), params)
    with pytest.raises(torch._dynamo.exc.Unsupported), torch.autocast("cpu", enabled=kind == "autocast"):
        torch.compile(lambda *a: c(*a), fullgraph=True, backend="aot_eager")(params, *args)
    torch._dynamo.reset()
    ours = torch.compile(lambda *a: c(*a), backend="aot_eager")
    for _ in range(2):
        found = quietly(ours, params, *args)
        assert_trees_close(found, t(params, *args), EXACT)
    if kind == "differentiable":
        slopes = [torch.autograd.grad(sum(x.sum() for x in r.values()), params["w"])[0] for r in (found, t(*data))]
        assert_trees_close(*slopes, EXACT)
        with torch.no_grad():
            one = torch.compile(lambda *a: c(*a), fullgraph=True, backend="aot_eager")
            assert_trees_close(one(params, *args), t(params, *args), EXACT)


def test_another_shape_of_the_result_is_told():
    c = compiled(invfunc.batch_jacobian(lambda w, x: (x * w)[:, : 3 if x.sum() > 0 else 2]))
    ours = torch.compile(lambda w, x: c(w, x) + 0, fullgraph=True, backend="aot_eager")
    w, x = Numbers(0)(3), Numbers(1)(4, 3).abs()
    ours(w, x)
    with pytest.raises(ReplayError, match="other shapes or dtypes"):
        ours(w, -x)
