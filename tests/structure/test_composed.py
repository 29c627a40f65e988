"""The exact GGN by structure with everything else: chunks, some samples, several statistics, several outputs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import chunked, diag_ggn, functional, tree
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.laws import RTOL, composed
from tests.strategies import Numbers
from tests.structure.test_columns import EXACT, FLOOR, STATISTICS, arranged, assert_as_dense
from tests.structure_layers import FEW
from tests.structures import MOVED, NETWORKS, always

ANY = st.one_of(*NETWORKS.values())


class Code(nn.Module):
    """An auto-encoder that gives its code, too, and another head on it."""

    def __init__(self, code, wide):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(2 * wide, code))
        self.decoder = nn.Sequential(nn.Linear(code, 2 * wide), nn.Unflatten(1, (2, -1)), nn.Conv1d(2, 1, 3, padding=1))
        self.head = nn.Linear(code, 3)

    def forward(self, x):
        h = self.encoder(x)
        return self.decoder(h.tanh()), self.head(h), h


@settings(max_examples=9)
@given(data=st.data())
@pytest.mark.parametrize("over", ["outputs", "samples", "params"])
def test_in_chunks(over, data):
    net = data.draw(ANY)
    functions, args = arranged(data, net)
    make, n = STATISTICS[data.draw(st.sampled_from(list(STATISTICS)))], data.draw(st.integers(1, 5))

    def divided(method):
        return chunked(make(*functions, method=method), n, over=over)

    weighed = over == "samples" and len(functions) == 1  # a part does not show the weights of all
    assert_as_dense(divided, args, refusable=net.called in MOVED or weighed)


REPEATED = {
    "bmm(x, W.expand)": lambda w, x: torch.bmm(x, w.expand(len(x), -1, -1)),
    "bmm(x, W.repeat)": lambda w, x: torch.bmm(x, w.repeat(len(x), 1, 1)),
    "bmm(x, stack)": lambda w, x: torch.bmm(x, torch.stack([w] * len(x))),
    "baddbmm": lambda w, x: torch.baddbmm(x, x, w.expand(len(x), -1, -1)),
    "einsum": lambda w, x: torch.einsum("nts,nsd->ntd", x, w.expand(len(x), -1, -1)),
    "queries": lambda w, x: F.scaled_dot_product_attention(w.expand(len(x), -1, -1), x, x),
    "x * W.expand": lambda w, x: x * w.expand(len(x), -1, -1),
    "x + W[0].repeat": lambda w, x: x + w[0].repeat(len(x), 1)[:, None],
    "cat([W.expand, x])": lambda w, x: torch.cat([w[:1].expand(len(x), -1, -1), x], 1),
}


@settings(max_examples=9)
@given(how=st.sampled_from(list(REPEATED)), n=st.integers(1, 6), parts=st.integers(1, 6), width=st.integers(1, 4))
@pytest.mark.parametrize("make", [name for name in STATISTICS if not name.startswith("exact kfac")])
def test_a_parameter_that_is_repeated_for_the_samples_in_chunks_of_any_length(make, how, n, parts, width):
    """In a chunk of one sample it is read elsewhere than in a chunk of several."""
    rand = Numbers(7)
    params, x = {"W": rand(width, width), "V": rand(width, width)}, rand(n, width, width)

    def f(p, x):
        return torch.tanh(REPEATED[how](p["W"], x)) @ p["V"]

    def divided(method):
        return chunked(STATISTICS[make](f, F.mse_loss, method=method), parts, over="samples")

    args = (params, x, rand(*f(params, x).shape))
    assert_as_dense(divided, args)
    with always():
        assert_trees_close(divided("auto")(*args), STATISTICS[make](f, F.mse_loss)(*args), EXACT, FLOOR)


@settings(max_examples=9)
@given(data=st.data())
def test_some_samples(data):
    net = data.draw(ANY)
    functions, args = arranged(data, net)
    make = STATISTICS[data.draw(st.sampled_from(list(STATISTICS)))]
    chosen = data.draw(st.lists(st.integers(-len(net.inputs[0]), len(net.inputs[0]) - 1), min_size=1, max_size=3))
    assert_as_dense(partial(make, *functions, samples=chosen), args)


@settings(max_examples=9)
@given(data=st.data())
def test_in_single_precision(data):
    functions, args = arranged(data, data.draw(ANY))
    args = moved(args, torch.float32, args[-1].device)
    assert_as_dense(partial(diag_ggn, *functions), args, RTOL[torch.float32], 1e-2)


@settings(max_examples=13)
@given(data=st.data())
def test_samples_along_other_axes(data):
    net = data.draw(st.one_of(NETWORKS["1d"], NETWORKS["2d"], NETWORKS["u-net"], NETWORKS["sequence"]))
    (x,), z = net.inputs, net.f(net.params, *net.inputs)
    at, to = data.draw(st.integers(0, x.ndim - 1)), data.draw(st.integers(0, z.ndim - 1))

    def f(p, x):
        return net.f(p, x.movedim(at, 0)).movedim(0, to)

    args = (net.params, x.movedim(0, at), Numbers(1)(*z.shape).movedim(0, to))
    assert_as_dense(partial(diag_ggn, f, F.mse_loss, in_dims=(at, to), out_dims=to), args)
    alone = partial(diag_ggn, lambda p, x, y: F.mse_loss(f(p, x).movedim(to, 0), y.movedim(to, 0)), in_dims=(at, to))
    assert_as_dense(alone, args)


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

    @given(code=st.integers(1, 3), wide=st.integers(3, 9), parts=st.sets(st.integers(0, 2), min_size=1), n=FEW)
    def test_at_a_narrow_layer_and_above_it(self, code, wide, parts, n):
        rand, (model, shapes) = Numbers(), functional(Code(code, wide))
        params, x = {name: rand(*p.shape) for name, p in shapes.items()}, rand(n, 1, wide)

        def f(p, x):
            return tuple(z for i, z in enumerate(model(p, x)) if i in parts)

        def loss(z, y):
            return sum(F.mse_loss(a, b, reduction="sum") for a, b in zip(z, y, strict=True))

        args = (params, x, tuple(rand(*z.shape) for z in f(params, x)))
        assert_as_dense(partial(diag_ggn, f, loss), args)
        assert_as_dense(partial(diag_ggn, composed(f, loss)), args)
