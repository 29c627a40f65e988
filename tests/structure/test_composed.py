"""The exact GGN by structure with everything else: chunks, some samples, several statistics, several outputs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import diag_ggn, ggn_trace, tree
from invfunc.testing import assert_trees_close
from tests.around import differentiated
from tests.laws import composed
from tests.networks import total
from tests.strategies import Numbers
from tests.structure.test_columns import arranged, assert_as_dense
from tests.structures import NETWORKS, always


class TestSeveralOutputs:
    @settings(max_examples=9)
    @given(data=st.data(), packed=st.booleans(), above=st.booleans())
    def test_of_two_networks_or_of_one_on_the_other(self, data, packed, above):
        net, other = data.draw(NETWORKS["perceptron"]), data.draw(NETWORKS["perceptron"])
        (x,), rand = net.inputs, Numbers(5)
        n, c, d = *x.shape, other.inputs[0].shape[1]
        params = {"one": net.params, "two": other.params, "between": rand(c, d), "scale": rand()}

        def f(p, x):
            a = net.f(p["one"], x)
            b = p["scale"] * other.f(p["two"], (a if above else x) @ p["between"])
            return {"a": [a], "b": {"of": b}} if packed else (a, b)

        def loss(z, y):
            a, b = tree.leaves(z)
            return F.mse_loss(a, y["a"], reduction="sum") + 2 * F.cross_entropy(b, y["b"])

        args = (params, x, {"a": rand(n, c), "b": rand(n, d).softmax(1)})
        assert_as_dense(partial(diag_ggn, f, loss), args)
        assert_as_dense(partial(diag_ggn, composed(f, loss)), args)


# Derivatives of the exact GGN by structure, and other transforms around it, are those of the one by all columns

EXACT, FLOOR = 1e-8, 1e-6
MAKERS = {"diag_ggn": diag_ggn, "diag_ggn of each": partial(diag_ggn, per_sample=True), "ggn_trace": ggn_trace}


def local(p, x):
    h = F.conv1d(x, p[0], p[1], padding=1).tanh()
    return F.conv1d(h + F.conv1d(h, p[2], padding=1).sigmoid(), p[3])


def u_net(p, x):
    h = F.conv1d(x, p[0], p[1], padding=1).tanh()
    low = F.conv1d(F.avg_pool1d(h, 2), p[2], padding=1).tanh()
    return F.conv1d(h * F.interpolate(low, scale_factor=2), p[3])


def narrow(p, x):
    h = F.linear(F.linear(x.flatten(1), p[4]).tanh(), p[5]).sigmoid()
    return local(p, F.linear(h, p[4].mT).unflatten(1, (1, -1)))


def tied(p, x):
    return F.linear((x.flatten(1) @ p[4].mT).tanh() * p[1][0], p[4].mT).unflatten(1, (1, -1)) + 0 * local(p, x)


NETS = {f.__name__: f for f in (local, u_net, narrow, tied)}


def example(called, n=2):
    rand = Numbers(8)
    params = [rand(2, 1, 3), rand(2), rand(2, 2, 3), rand(2 if called != "tied" else 1, 2, 1), rand(2, 12), rand(2, 2)]
    x = rand(n, 1, 12)
    z = NETS[called](params, x)
    return params, x, rand(*z.shape).softmax(1)


@pytest.mark.parametrize("kind", ["1d", "u-net", "auto-encoder", "perceptron", "sequence"])
@settings(max_examples=7)
@given(data=st.data(), make=st.sampled_from(list(MAKERS)))
def test_the_gradient_of_the_sum(kind, make, data):
    """By autograd, of networks with kinks, pools and norms too."""
    functions, args = arranged(data, data.draw(NETWORKS[kind]))
    wanted = differentiated(MAKERS[make](*functions, method="dense"), args, [0])
    with always():
        found = differentiated(MAKERS[make](*functions), args, [0])
    assert_trees_close(found, wanted, EXACT, FLOOR)


@pytest.mark.quick
@pytest.mark.parametrize("called", NETS)
def test_what_f_closes_over_is_differentiated(called):
    """A scale of the parameters, of the inputs and of the targets."""
    params, x, y = example(called)
    found = {}
    for method in ("dense", "auto"):
        c = torch.tensor([1.1, 0.9, 1.2], dtype=x.dtype, requires_grad=True)
        f = partial(lambda c, p, x: c[1] * NETS[called]([c[0] * q for q in p], x), c)
        with always():
            t = diag_ggn(f, lambda z, y, c=c: c[2] * F.mse_loss(z, y), method=method)
            (found[method],) = torch.autograd.grad(total(t(params, x, y)), c)
    assert_trees_close(found["auto"], found["dense"], EXACT)
