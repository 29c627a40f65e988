"""Exact columns by the structure of a function: the core takes it, with few passes, and the result is that of all."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import diag_ggn, explain, ggn_trace, testing, tree
from invfunc.structure.look import Frame
from invfunc.structure.plan import Structure
from invfunc.testing import assert_trees_close
from tests.laws import composed
from tests.matrices import differentiated
from tests.networks import total
from tests.strategies import Numbers
from tests.structure.test_columns import arranged, assert_as_dense
from tests.structures import NETWORKS, always


def ways_of(make, args):
    """The result, and the ways that were taken to it."""
    found, way = [], Structure.way

    def noted(self):
        found.append((way(self), self))
        return found[-1][0]

    with always(), mock.patch.object(Structure, "way", noted):
        result = make(*args)
    return result, found


def auto_encoder(side):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.ConvTranspose2d(2, 1, 3)
    f, params = invfunc.functional(nn.Sequential(*layers).double())
    x = Numbers(1)(2, 1, side, side)
    return f, (params, x, Numbers(2)(2, 1, side, side))


@pytest.mark.quick
@pytest.mark.parametrize(
    "make", [diag_ggn, partial(invfunc.diag_ggn, per_sample=True), invfunc.ggn_trace], ids=["sum", "samples", "trace"]
)
def test_passes_do_not_grow_with_an_image(make):
    passes = []
    for side in (8, 12):
        f, args = auto_encoder(side)
        result, ((way, structure),) = ways_of(make(f, F.mse_loss), args)
        passes.append(sum(reach.passes for stage in way.stages for reach in stage.reaches))
        assert len(way.closed) == 2 and not way.dense
        assert_trees_close(result, make(f, F.mse_loss, method="dense")(*args), 1e-9)
    assert passes == [9, 9]


def test_a_narrow_layer_leaves_as_many_columns_as_it_is_wide():
    torch.manual_seed(0)
    f, params = invfunc.functional(nn.Sequential(nn.Linear(20, 3), nn.Tanh(), nn.Linear(3, 20)).double())
    args = params, Numbers(1)(4, 20), Numbers(2)(4, 20)
    result, ((way, _),) = ways_of(diag_ggn(f, F.mse_loss), args)
    assert [stage.end and stage.end.rank * stage.end.count for stage in way.stages] == [3, None]
    assert_trees_close(result, testing.dense_diag_ggn(f, F.mse_loss)(*args), 1e-9)


def masked(p, x):
    """A scale for each channel between two layers, of which the first may reach the last by its own place only."""
    h = F.conv1d(x, p["first"], padding=1).tanh().masked_fill(x > 0.5, 0.1)
    return F.conv1d(h * p["scale"], p["second"])


def pooled(p, x):
    """Two first layers, of which one sees pairs of positions, whose centres lie between these."""
    low = F.conv1d(F.max_pool1d(x, 2), p["first"], padding=1).tanh()
    return F.conv1d(low.repeat_interleave(2, -1) + F.conv1d(x, p["other"], padding=1).tanh(), p["second"])


@pytest.mark.parametrize("f", [masked, pooled], ids=lambda f: f.__name__)
def test_sites_beside_and_behind_each_other(f):
    rand = Numbers(1)
    params = {"first": rand(2, 1, 3), "other": rand(2, 1, 3), "second": rand(2, 2, 3), "scale": rand(2, 1)}
    args = params, rand(3, 1, 16), rand(3, 2, 14)
    result, ((_, structure),) = ways_of(diag_ggn(f, F.mse_loss), args)
    for frame in structure.look.frames:
        for boxes in frame.boxes.values():
            assert torch.equal(boxes, boxes.floor()), "boxes are told apart as whole numbers"
    assert_trees_close(result, testing.dense_diag_ggn(f, F.mse_loss)(*args), 1e-9)


def test_a_table_is_told_apart_by_the_rows_that_are_read():
    def f(p, i):
        return F.conv1d((p["table"][i] + p["places"]).tanh().mT, p["head"], padding=1)

    rand = Numbers(1)
    params = {"table": rand(7, 3), "places": rand(5, 3), "head": rand(2, 3, 3)}
    i = torch.tensor([[1, 2, 1, 0, 6], [3, 3, 3, 1, 2]])
    args = params, i, rand(2, 2, 5)
    for make in (diag_ggn, partial(invfunc.diag_ggn, per_sample=True)):
        result, ((way, _),) = ways_of(make(f, F.mse_loss), args)
        assert not way.dense
        assert_trees_close(result, make(f, F.mse_loss, method="dense")(*args), 1e-9)


def test_a_fault_of_the_look_is_not_taken_for_a_refusal_of_f():
    f, args = auto_encoder(6)
    with always(), mock.patch.object(Frame, "used", None), pytest.raises(TypeError, match="not callable"):
        diag_ggn(f, F.mse_loss)(*args)


def test_factors_of_a_vector_with_an_entry_for_each_place():
    """Its entries meet at one position, where columns of one group are to be alone."""

    def f(p, x):
        return F.conv1d((x * p["scale"]).tanh(), p["kernel"])

    rand = Numbers(1)
    args = {"scale": rand(14), "kernel": rand(2, 1, 3)}, rand(2, 1, 14), rand(2, 2, 12)
    result, _ = ways_of(invfunc.kfac(f, F.mse_loss, fisher="exact"), args)
    assert_trees_close(result, invfunc.kfac(f, F.mse_loss, method="dense", fisher="exact")(*args), 1e-9)


# The exact GGN by structure with everything else: chunks, some samples, several statistics, several outputs


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


# Parameters that a function repeats for its samples, as class tokens and learned positions, hide no structure

REPEATED = {
    "expand": lambda p, n: p.expand(n, *p.shape[1:]),
    "repeat": lambda p, n: p.repeat(n, 1, 1),
    "zeros and": lambda p, n: torch.zeros(n, *p.shape[1:], dtype=p.dtype) + p,
    "rows": lambda p, n: F.embedding(torch.arange(p.shape[1]).expand(n, -1), p[0]),
    "one for all tokens": lambda p, n: p[:, :1].expand(n, p.shape[1], -1),
    "scaled": lambda p, n: (0.5 * p).expand(n, -1, -1),
    "twice": lambda p, n: torch.cat([p.expand(n, -1, -1)[..., :1], p.expand(n, -1, -1)[..., 1:]], 2),
}
"""A parameter `[1, k, d]` as `[N, k, d]`."""
JOINED = {
    "none": lambda h, t: h,
    "add": lambda h, t: h + t,
    "scale": lambda h, t: h * t,
    "in place": lambda h, t: h.clone().add_(t),
    "class token": lambda h, t: torch.cat([t[:, :1], h], 1),
    "class token, dropped": lambda h, t: torch.cat([t[:, :1], h], 1)[:, 1:],
    "registers": lambda h, t: torch.cat([h, t[:, :2]], 1),
    "features": lambda h, t: torch.cat([h[..., 1:], t[..., :1]], 2),
    "masked": lambda h, t: torch.where((torch.arange(h.shape[1]) % 2 == 0)[:, None], t, h),
    "stack": lambda h, t: torch.stack([h, t], 3).sum(3),
    "tokens first": lambda h, t: (h.transpose(0, 1) + t.transpose(0, 1)).transpose(0, 1),
}


def patches(repeated, joined, n, tokens=6):
    """Patches that are predicted one by one, with learned positions or a class token."""
    rand = Numbers(1)

    def f(p, x):
        h = JOINED[joined](x @ p["e"], REPEATED[repeated](p["t"], len(x)))
        return (h @ p["a"]).tanh() @ p["b"]

    params = {"e": rand(3, 2), "t": rand(1, tokens, 2), "a": rand(2, 2), "b": rand(2, 4)}
    x = rand(n, tokens, 3)
    return f, (params, x, rand(*f(params, x).shape))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("joined", [*JOINED])
@pytest.mark.parametrize("repeated", ["expand", "repeat", "zeros and"])
def test_the_structure_is_seen(repeated, joined, n):
    f, args = patches(repeated, joined, n)
    for make in (diag_ggn(f, F.mse_loss), diag_ggn(f, F.mse_loss, per_sample=True), invfunc.ggn_trace(f, F.mse_loss)):
        with always():
            told = explain(make)(*args)
        assert told.why == "by the structure of the function" and told.passes <= told.columns / 2
