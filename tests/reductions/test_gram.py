"""gram and batch_jacobian, of losses and of models: against plain loops, torch.func and each other."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from invfunc import (
    batch_jacobian,
    chunked,
    distributed,
    ekfac,
    functional,
    gram,
    kfac,
    sqrt_ggn,
    streamed,
    sum_grad_squared,
    tree,
)
from invfunc import budget as size
from invfunc.core import refusals
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import kfoc, kfra
from invfunc.reductions.columns import ProductsWithOthers
from invfunc.testing import assert_trees_close, loop_batch_jacobian, loop_gram
from tests.laws import OF_MODELS
from tests.many_processes import alone
from tests.networks import LOSSES, NETWORKS, network, networks, samples_loss
from tests.reductions.test_kfac import MODULES, Applied, built
from tests.rows import in_blocks
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


# Factors above `max_factor_dim` are the diagonals of those without a bound, for each statistic, layer and mode

TIGHT, MOST = 1e-9, 2


def seeded():
    return torch.Generator().manual_seed(0)


def tied(m, x):
    return m["words"](x).tanh().mean(1) @ m["words"].weight.T


MORE = {
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)), (2,)),
    "tied embedding": (lambda: Applied(tied, words=nn.Embedding(5, 3)), (2,)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(6, 6, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)), (6, 2)),
}
CASES = [*MODULES, *MORE]


def case(called):
    if called in MODULES:
        _, f, params, x = built(called)
        return f, params, x, Numbers(1)(len(x), 3)
    make, shape = MORE[called]
    f, params = functional(make().double())
    x = Numbers(4).below(5, 4, *shape) if "embedding" in called else Numbers(4)(4, *shape)
    return f, {k: Numbers(3)(*p.shape) for k, p in params.items()}, x, Numbers(1)(4, 5 if called.startswith("t") else 3)


def diagonals(factors, most=MOST):
    """The factors with the diagonals of those above a dimension in their place, and how each came."""
    found = {}
    for name, K in factors.items():
        found[name] = tuple(
            f.diagonal(dim1=-2, dim2=-1) if not K.is_diagonal(i) and f.shape[-1] > most else f
            for i, f in enumerate(K.factors)
        )
    return found


def own(factors):
    return {name: K.factors for name, K in factors.items() if K is not None}


STATISTICS = {
    "kfac": lambda f, loss, **o: kfac(f, loss, generator=seeded(), mc_samples=2, **o),
    "exact": lambda f, loss, **o: kfac(f, loss, fisher="exact", **o),
    "reduce": lambda f, loss, **o: kfac(f, loss, weight_sharing="reduce", fisher="exact", **o),
    "backpack": lambda f, loss, **o: kfac(f, loss, weight_sharing="backpack", fisher="exact", **o),
    "joint": lambda f, loss, **o: kfac(f, loss, joint=True, fisher="exact", **o),
    "empirical": lambda f, loss, **o: kfac(f, loss, fisher="empirical", **o),
    "kfoc": lambda f, loss, **o: kfoc(f, loss, fisher="exact", sweeps=1, **o),
}


class TestEqualTheDiagonals:
    @pytest.mark.parametrize("called", CASES)
    @pytest.mark.parametrize("of", STATISTICS)
    def test_of_every_layer(self, called, of):
        if called == "tied embedding" and of != "kfoc":
            pytest.skip("two roles: below")
        f, *args = case(called)
        whole, part = (STATISTICS[of](f, F.mse_loss, max_factor_dim=most)(*args) for most in (None, MOST))
        whole = {name: K for name, K in whole.items() if K is not None}
        assert_trees_close(own(part), diagonals(whole), TIGHT, 1e-6)
        assert any(K.is_diagonal(i) for K in part.values() if K is not None for i in range(len(K.factors)))

    def test_a_weight_in_two_roles_has_the_nearest_product_of_diagonals(self):
        f, params, x, y = case("tied embedding")
        K = kfac(f, F.mse_loss, max_factor_dim=4, fisher="exact")(params, x, y)["layers.words.weight"]
        assert [f.ndim for f in K.factors] == [1, 2]
        counts = torch.bincount(x.flatten(), minlength=5).double()
        assert bool((K.factors[0][counts > 0] > 0).all())

    @pytest.mark.parametrize("called", ["perceptron", "embedding", "tied embedding", "groups", "attention"])
    def test_in_all_modes(self, called):
        f, *args = case(called)
        for of, sharing in (
            (partial(kfac, fisher="exact"), {}),
            (ekfac, {"fisher": "exact"}),
            (kfoc, {"fisher": "exact"}),
        ):
            t = of(f, F.mse_loss, max_factor_dim=MOST, **sharing)
            wanted = t(*args)
            for other in (chunked(t, 2), chunked(t, chunk_size=2, over="samples"), chunked(t, 2, over="params")):
                assert_trees_close(
                    [K.dense() for K in other(*args).values()], [K.dense() for K in wanted.values()], TIGHT
                )
            assert_trees_close(*([K.dense() for K in k.values()] for k in (in_blocks(t)(*args), wanted)), TIGHT, 1e-6)
            total = of(f, lambda z, y: F.mse_loss(z, y, reduction="sum"), max_factor_dim=MOST, **sharing)
            loader, whole = [tuple(x[i : i + 2] for x in args[1:]) for i in (0, 2)], total(*args)
            with alone():
                both = streamed(total)(args[0], loader), distributed(total)(*args)
            for found in both:
                assert_trees_close(
                    [K.dense() for K in found.values()], [K.dense() for K in whole.values()], TIGHT, 1e-6
                )


class TestTheBestProductWithADiagonal:
    @pytest.mark.parametrize("sweeps", [1, 2, 3, 4])
    @pytest.mark.parametrize("most", [2, 3, 5])
    def test_is_the_loop(self, sweeps, most):
        def f(w, x):
            return (x @ w.T).tanh()

        w, x, y = Numbers(1)(3, 5), Numbers(2)(4, 2, 5), Numbers(3)(4, 2, 3)
        G = sqrt_ggn(f, F.mse_loss)(w, x, y).flatten(0, 1)
        b, a = torch.eye(3).double(), torch.eye(5).double()

        def of_first(a):
            b = torch.einsum("noi,ij,npj->op", G, a, G)
            return b.diagonal().diag() if most < 3 else b

        def of_last(b):
            a = torch.einsum("noi,op,npj->ij", G, b, G)
            return a.diagonal().diag() if most < 5 else a

        if sweeps == 1:
            b, a = of_first(a), of_last(b)
            wanted = torch.kron(b.contiguous(), a.contiguous()) / b.trace()
        else:
            for k in range(sweeps):
                if k % 2 == 0:
                    b = of_first(a) / a.square().sum()
                else:
                    a = of_last(b) / b.square().sum()
            wanted = torch.kron(b.contiguous(), a.contiguous())
        K = kfoc(f, F.mse_loss, fisher="exact", sweeps=sweeps, max_factor_dim=most)(w, x, y)
        assert_trees_close(K.dense(), wanted, TIGHT)


class TestWhatIsTold:
    def test_what_does_not_fit_is_an_error_before_it_is_computed(self, monkeypatch):
        f, params = functional(nn.Sequential(nn.Linear(2, 9_000), nn.Linear(9_000, 1)))
        for module in (size, refusals):
            monkeypatch.setattr(module, "free_on", lambda device: 2**28)
        args = params, torch.zeros(1, 2), torch.zeros(1, 1)
        with pytest.raises(ArgumentError, match=r"take 926.98MiB, but 256.00MiB are free.*9000, 9000.*max_factor_dim"):
            kfac(f, F.mse_loss, fisher="exact")(*args)
        assert kfac(f, F.mse_loss, fisher="exact", max_factor_dim=1_000)(*args)

    @pytest.mark.parametrize("most, error", [(-1, ArgumentError), (2.0, ArgumentTypeError), (True, ArgumentTypeError)])
    def test_the_option_is_checked(self, most, error):
        for of in (kfac, kfra, ekfac, kfoc):
            options = {} if of is kfra else {"fisher": "exact"}
            with pytest.raises(error, match="max_factor_dim"):
                of(sum_grad_squared, F.mse_loss, max_factor_dim=most, **options)


def test_a_process_without_batches_keeps_no_products_with_others():
    assert ProductsWithOthers(False, 2).init(torch.zeros(3), 0, 1)[0].shape == (1, 0, 1, 2)
