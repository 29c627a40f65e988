"""gram and batch_jacobian, of losses and of models: against plain loops, torch.func and each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_jacobian, chunked, gram, tree
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, loop_batch_jacobian, loop_gram
from tests.laws import OF_MODELS
from tests.networks import LOSSES, NETWORKS, network, networks, samples_loss
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


# gram between two batches: the loop, the block of the joined batch, compositions, memory, and what is refused

EXACT_BETWEEN = 1e-10
names, losses, sizes = st.sampled_from(sorted({*NETWORKS} - {"module"})), st.sampled_from(LOSSES), st.integers(1, 4)


def batches(called, loss, n, m):
    """A loss function, parameters, and two batches."""
    one, other = network(called, n), network(called, m, seed=1)
    return (
        samples_loss(one, loss),
        one.params,
        (one.x, loss.target(Numbers(1), n)),
        (other.x, loss.target(Numbers(2), m)),
    )


def classifier():
    rand = Numbers()
    params = {"w": rand(6, 8), "v": rand(8, 5)}
    return (lambda p, x: (x @ p["w"]).tanh() @ p["v"]), params, rand(4, 6), rand(3, 6)


@pytest.mark.quick
class TestBetweenBatches:
    @given(names, losses, sizes, sizes, st.booleans())
    def test_of_losses_equals_the_loop(self, called, loss, n, m, per_parameter):
        f, params, batch, others = batches(called, loss, n, m)
        found = gram(f, others=others, per_parameter=per_parameter)(params, *batch)
        assert_trees_close(
            found, loop_gram(f, others=others, per_parameter=per_parameter)(params, *batch), EXACT_BETWEEN, 1e-12
        )

    @given(names, sizes, sizes)
    def test_of_a_model_equals_the_loop(self, called, n, m):
        net, others = network(called, n), (network(called, m, seed=1).x,)
        found = gram(net.f, others=others)(net.params, net.x)
        assert_trees_close(found, loop_gram(net.f, others=others)(net.params, net.x), EXACT_BETWEEN)

    @given(names, losses, st.lists(st.integers(-3, 2), min_size=1, max_size=4))
    def test_samples_are_those_of_the_call(self, called, loss, samples):
        f, params, batch, others = batches(called, loss, 3, 2)
        found = gram(f, others=others, samples=samples)(params, *batch)
        assert_trees_close(found, gram(f, others=others)(params, *batch)[samples], EXACT_BETWEEN, 1e-12)

    @given(names, losses, sizes)
    def test_does_not_depend_on_passes_over_parameters_or_tiles(self, called, loss, k):
        f, params, batch, others = batches(called, loss, 4, 3)
        t = gram(f, others=others)
        for divided in (chunked(t, k, over="params"), chunked(lambda *args: t(*args), k)):
            assert_trees_close(divided(params, *batch), t(params, *batch), EXACT_BETWEEN, 1e-12)

    def test_is_differentiable_in_both_batches_and_maps_over_either(self):
        f, params, x, u = classifier()
        loop = lambda p, x, u: loop_gram(f, others=(u,))(p, x)  # noqa: E731
        t = lambda p, x, u: gram(f, others=(u,))(p, x)  # noqa: E731
        c = Numbers(3)(4, 5, 3, 5)
        given = [y.clone().requires_grad_() for y in (params["w"], x, u)]
        wanted = torch.autograd.grad((loop(params | {"w": given[0]}, *given[1:]) * c).sum(), given)
        plain = torch.autograd.grad((t(params | {"w": given[0]}, *given[1:]) * c).sum(), given)
        of_func = torch.func.grad(lambda w, x, u: (t(params | {"w": w}, x, u) * c).sum(), (0, 1, 2))(params["w"], x, u)
        assert_trees_close(plain, wanted, EXACT_BETWEEN)
        assert_trees_close(of_func, wanted, EXACT_BETWEEN)
        many = torch.stack([u, 2 * u])
        mapped = torch.vmap(lambda u: t(params, x, u))(many)
        assert_trees_close(mapped, torch.stack([loop(params, x, u) for u in many]), EXACT_BETWEEN)


class TestWithoutTheShares:
    def test_forms_no_shares_where_gram_does_not(self):
        """Two layers of 2^20 weights: the shares of 6 samples would be 12 times that."""
        w, largest = {"a": Numbers()(1024, 1024), "b": Numbers(1)(1024, 1024)}, []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                largest.extend(y.numel() for y in tree.tensors(out) if y.shape not in [(1024, 1024)])
                return out

        t = gram(lambda w, x: ((x @ w["a"]).tanh() @ w["b"]).square().sum(1), others=(Numbers(2)(2, 1024),))
        with Sizes():
            t(w, Numbers(3)(4, 1024))
        assert largest and max(largest) < 2**15


class TestErrorsBetween:
    f, params, x, u = classifier()
    f = staticmethod(f)

    @pytest.mark.parametrize(
        ("others", "text"),
        [
            ((), r"others has 0 entries, but there are 1 batch arguments: \(x\)"),
            ((u, u), "others has 2 entries"),
            (({"a": u},), "others.0. has another structure than x"),
            ((u[:, :5],), "others.0. has shape .3, 5.*beside .4, 6.*Pad"),
            ((u.float(),), "float32.*float64.*have to agree"),
            ((u[:0],), "no samples"),
            ((torch.tensor(1.0),), "no axis 0"),
        ],
        ids=["none", "two", "a tree", "short", "float32", "empty", "no axis"],
    )
    def test_names_what_does_not_fit(self, others, text):
        with pytest.raises(ArgumentError, match=f"gram.*{text}"):
            gram(self.f, others=others)(self.params, self.x)

    @pytest.mark.parametrize("scalar", [torch.sum, torch.mean])
    def test_refuses_a_loss_of_both_batches_together(self, scalar):
        t = gram(lambda p, x: scalar(self.f(p, x)), others=(self.u,))
        with pytest.raises(ArgumentError, match=r"tell their scales apart.*Return the \[N\] losses"):
            t(self.params, self.x)
