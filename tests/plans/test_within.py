"""A compiled statistic within the user's own torch.compile, as one operation of one graph; and within torch.export."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import compiled, tree
from invfunc.errors import ArgumentError, ReplayError
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


# Programs of torch.export


class Calling(nn.Module):
    """A module that calls a function of what it is given."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


def program(call, *args, strict=False):
    """The program of a function, as a function."""
    return torch.export.export(Calling(call), args, strict=strict).module()


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("name", ["variance", "diag_ggn", "together", "chunked"])
def test_a_program_is_the_statistic_of_other_numbers(name, strict, data):
    params, x, y = data
    c, t = compiled(MADE[name]()), MADE[name]()
    c(params, x, y)
    found = program(c, params, x, y, strict=strict)
    for k in range(3):
        at = {name: p + k for name, p in params.items()}, (x - k).cos(), (y + k) % 5
        assert_trees_close(found(*at), t(*at), EXACT)


def test_a_program_closes_over_tensors_as_they_were_and_asserts_numbers(data):
    params, x, y = data
    held = Numbers(3)(4, 7).t()

    def made():
        return invfunc.variance(lambda p, x, y: losses(p, x * held, y) * (2 if x.sum() > 0 else 3))

    t, c = made(), compiled(made())
    c(params, x.abs(), y)
    found, wanted = program(c, params, x.abs(), y), t(params, x.abs() + 1, y)
    held.zero_()
    assert_trees_close(found(params, x.abs() + 1, y), wanted, EXACT)
    with pytest.raises(RuntimeError, match=r"numbers that it reads \(at .*test_within.py:\d+\) are others"):
        found(params, -x.abs(), y)


WITHOUT_THIS_LIBRARY = """
import sys, torch
at, wanted, factors = torch.load("wanted.pt")
found = torch.export.load("program.pt2").module()(*at)
assert found.keys() == wanted.keys() and "invfunc" not in sys.modules
assert all(torch.allclose(found[k], wanted[k], rtol=1e-12, atol=0) for k in wanted)
import invfunc
found = torch.export.load("factors.pt2").module()(*at)
assert isinstance(found["w"], invfunc.kronecker.Kronecker)
found = invfunc.tree.tensors(found)
assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(found, factors, strict=True))
"""


def test_a_program_loads_in_a_process_without_this_library_and_objects_where_they_are_known(data, tmp_path):
    made, at = {}, tuple(tree.map_tensors(lambda x: x + 1 if x.is_floating_point() else x, data))
    for name in ("diag_ggn", "kfac"):
        made[name], c = MADE[name](), compiled(MADE[name]())
        c(*data)
        kept = tmp_path / ("program.pt2" if name == "diag_ggn" else "factors.pt2")
        with torch.no_grad():
            torch.export.save(torch.export.export(Calling(c), data, strict=False), kept)
    torch.save((at, made["diag_ggn"](*at), tree.tensors(made["kfac"](*at))), tmp_path / "wanted.pt")
    code = [sys.executable, "-c", WITHOUT_THIS_LIBRARY]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_a_program_cannot_be_of_is_told(data):
    params, x, y = data
    c = compiled(invfunc.variance(losses))
    with pytest.raises(ArgumentError, match="no plan of arguments of these shapes"):
        program(c, params, x, y)
    with pytest.raises(ArgumentError, match="no derivatives"):
        program(c, tree.map_tensors(lambda p: p.clone().requires_grad_(), params), x, y)
    with pytest.raises(ArgumentError, match="pads nothing"):
        program(compiled(invfunc.variance(losses), pad=[8]), params, x, y)
    for f, why in (
        (lambda p, x, y: losses(p, F.dropout(x), y), "draws random numbers"),
        (lambda p, x, y: losses(p, x, y) * x[x > 0].mean(), "shapes"),
    ):
        c = compiled(invfunc.hvp(lambda *a, f=f: f(*a).sum()))
        v = tree.map_tensors(torch.cos, params)
        c(params, v, x, y)
        with pytest.raises(ArgumentError, match=why):
            program(c, params, v, x, y)


def test_another_shape_of_the_result_is_told():
    c = compiled(invfunc.batch_jacobian(lambda w, x: (x * w)[:, : 3 if x.sum() > 0 else 2]))
    ours = torch.compile(lambda w, x: c(w, x) + 0, fullgraph=True, backend="aot_eager")
    w, x = Numbers(0)(3), Numbers(1)(4, 3).abs()
    ours(w, x)
    with pytest.raises(ReplayError, match="other shapes or dtypes"):
        ours(w, -x)
