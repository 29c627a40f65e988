"""gram and batch_jacobian, of losses and of models: against plain loops, torch.func and each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_jacobian, chunked, gram
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, loop_batch_jacobian
from tests.laws import OF_MODELS
from tests.networks import networks
from tests.statistics.test_first_order import EXACT
from tests.strategies import Numbers

of_models = pytest.mark.parametrize("kind", OF_MODELS.values(), ids=OF_MODELS)


@of_models
class TestOfModels:
    @given(networks(sequences=True))
    def test_equals_the_loop(self, kind, net):
        assert_trees_close(kind.make(net.f)(net.params, net.x), kind.loop(net.f)(net.params, net.x), EXACT)

    @given(st.data(), networks(sequences=True))
    def test_does_not_depend_on_chunks(self, kind, data, net):
        t = divided = kind.make(net.f)
        for over in data.draw(st.lists(st.sampled_from(kind.axes), min_size=1, max_size=3)):
            divided = chunked(divided, data.draw(st.integers(1, 6)), over=over)
        assert_trees_close(divided(net.params, net.x), t(net.params, net.x), EXACT)


def forked(p, x):
    """A tree of outputs of several sizes: an [N], an image for each sample, one of the data alone."""
    z = (x @ p["w"]).tanh()
    return {"sum": z.sum(1) * p["s"], "more": [z[:, :, None] * p["v"], (x[:, :2],)]}


FORK = {"w": Numbers()(3, 2), "v": Numbers(1)(4), "s": Numbers(2)()}


class TestJacobian:
    @pytest.mark.parametrize("over", [None, "outputs", "samples", "params"])
    @pytest.mark.parametrize("n", [1, 4])
    def test_of_a_tree_of_outputs_is_a_tree_of_these(self, over, n):
        x = Numbers(3)(n, 3)
        t = batch_jacobian(forked) if over is None else chunked(batch_jacobian(forked), 2, over=over)
        assert_trees_close(t(FORK, x), torch.func.jacrev(forked)(FORK, x), EXACT)
        assert_trees_close(t(FORK, x), loop_batch_jacobian(forked)(FORK, x), EXACT)


class TestErrors:
    w, x = Numbers()(3, 2), Numbers(1)(4, 3)

    @pytest.mark.parametrize(
        "returned", [lambda z: z.sum(), lambda z: (z, z.mean()), lambda z: z.T, lambda z: z.argmax(1), lambda z: None]
    )
    def test_jacobian_refuses_what_no_model_returns(self, returned):
        t = batch_jacobian(lambda w, x: returned(x @ w))
        with pytest.raises(ArgumentError, match=r"batch_jacobian\(<lambda>\)\(w, x\): f returned"):
            t(self.w, self.x)

    def test_jacobian_of_a_loss_function_says_so(self):
        with pytest.raises(ArgumentError, match=r"shape \(\) for N = 4.*loss function.*model function"):
            batch_jacobian(lambda w, x: (x @ w).sum())(self.w, self.x)

    @pytest.mark.parametrize("returned", [lambda z: (z, z), lambda z: {"z": z}, lambda z: z.sum(0), lambda z: None])
    def test_gram_refuses_what_is_neither_losses_nor_one_output(self, returned):
        with pytest.raises(ArgumentError, match=r"gram\(<lambda>\)\(w, x\): f returned"):
            gram(lambda w, x: returned(x @ w))(self.w, self.x)
