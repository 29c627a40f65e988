"""The exact GGN by structure with everything else: chunks, some samples, several statistics, several outputs."""

from functools import partial

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import chunked, diag_ggn, tree
from tests.laws import composed
from tests.strategies import Numbers
from tests.structure.test_columns import STATISTICS, arranged, assert_as_dense
from tests.structures import MOVED, NETWORKS

ANY = st.one_of(*NETWORKS.values())


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


@settings(max_examples=9)
@given(data=st.data())
def test_some_samples(data):
    net = data.draw(ANY)
    functions, args = arranged(data, net)
    make = STATISTICS[data.draw(st.sampled_from(list(STATISTICS)))]
    chosen = data.draw(st.lists(st.integers(-len(net.inputs[0]), len(net.inputs[0]) - 1), min_size=1, max_size=3))
    assert_as_dense(partial(make, *functions, samples=chosen), args)


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
