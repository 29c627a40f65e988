"""The largest eigenvalues of products, densities of all, and leave-one-out estimates, against dense matrices."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import eigenpairs, estimate_diagonal, estimate_trace, ggnvp, hvp, kronecker, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.reductions.estimates import Estimate
from invfunc.spectra import spectral_density
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import matrices
from tests.matrices import assert_near, flat
from tests.networks import LOSSES, network, networks
from tests.products.test_eigenpairs import DAMPING, damped, rows
from tests.strategies import Numbers, seeded

quadratic = hvp(lambda w, matrix: (flat(w) @ matrix @ flat(w)) / 2)
"""The product of a dense matrix, which is the one argument behind the parameters."""


def symmetric(values, seed=0):
    """A matrix of these eigenvalues."""
    q = torch.linalg.qr(Numbers(seed)(len(values), len(values)))[0]
    return (q * values) @ q.T


def assert_largest(pairs, matrix, top, rtol=1e-5):
    """They are the largest positive ones, each inside of its bound, with orthonormal vectors."""
    wanted = torch.linalg.eigvalsh(matrix.double()).flip(0)[:top]
    wanted = wanted[wanted > 1e-5 * matrix.abs().max()]
    values, e = pairs.values.double().cpu(), rows(pairs.vectors()).double().cpu()
    off = (values - wanted.cpu()).abs()
    assert (off <= rtol * wanted.cpu()).all() and (off <= pairs.bounds.double().cpu()).all()
    assert_near(e @ e.T, torch.eye(len(e)), 1e-4)
    assert_near(matrix.double().cpu() @ e.T, e.T * values, 1e-4)


@pytest.mark.quick
class TestLargest:
    @given(
        net=networks(sequences=True),
        loss=st.sampled_from(LOSSES),
        made=st.sampled_from([ggnvp, hvp]),
        top=st.integers(1, 6),
    )
    def test_are_those_of_the_matrix(self, device, dtype, net, loss, made, top):
        args = moved((net.params, net.x, loss.target(Numbers(1), net.n)), dtype, device)
        product = made(net.f, loss)
        matrix = matrices.of(made(net.f, loss), *moved(args, torch.float64, device))
        assert_largest(eigenpairs(product, top=top)(*args), matrix, top)

    def test_of_equal_eigenvalues_none_is_missing(self):
        """As those of a linear model with several outputs are; one vector alone finds one of each."""
        w, x = Numbers(0)(30, 4), Numbers(1)(50, 30)
        args = w, x, Numbers(2)(50, 4)
        pairs = eigenpairs(lambda w, x: x @ w, F.mse_loss, top=10)(*args)
        assert_largest(pairs, matrices.ggn(lambda w, x: x @ w, F.mse_loss, *args), 10)
        assert_near(pairs.values[:4], pairs.values[0].expand(4), 1e-12)
        matrix = symmetric(torch.cat([torch.tensor([5.0, 5.0, 5.0, 4.0]), 0.7 ** torch.arange(100)]).double())
        assert_largest(eigenpairs(quadratic, top=3)(torch.zeros(104).double(), matrix), matrix, 3)

    @pytest.mark.parametrize("top", [1, 5])
    def test_are_found_when_the_room_is_full(self, top):
        matrix = symmetric(torch.linspace(-1, 1, 300).double())
        assert_largest(eigenpairs(quadratic, top=top)(torch.zeros(300).double(), matrix), matrix, top)

    def test_are_as_many_as_are_positive(self):
        matrix = symmetric(torch.cat([torch.tensor([3.0, 2.0, 1.0]), torch.zeros(30), -torch.ones(4)]).double())
        w = {"a": torch.zeros(30).double(), "b": torch.zeros(7).double()}
        pairs = eigenpairs(quadratic, top=6)(w, matrix)
        assert pairs.rank == 3
        assert_largest(pairs, matrix, 6)
        assert eigenpairs(quadratic, top=2)(w, 0 * matrix).rank == 0
        assert_near(
            eigenpairs(quadratic, top=9)(torch.zeros(2).double(), torch.eye(2).double()).values, torch.ones(2), 1e-12
        )

    def test_take_no_more_products_than_scipys(self):
        eigsh = pytest.importorskip("scipy.sparse.linalg").eigsh
        matrix, counts = symmetric(0.8 ** torch.arange(200).double()), []

        class Counted:
            names_of_f = staticmethod(quadratic.names_of_f)
            __call__ = quadratic

            def linearize(self, *args):
                at, place = quadratic.linearize(*args), len(counts)
                counts.append(0)

                def counted(v):
                    counts[place] += 1
                    return at(v)

                return counted

        args = torch.zeros(200).double(), matrix
        eigenpairs(Counted(), top=10)(*args)
        eigsh(invfunc.linear_operator(Counted())(*args), 10, which="LA")
        assert counts[0] <= counts[1]

    def test_of_a_data_set_and_of_f_with_its_loss(self, tmp_path):
        """They are Eigenpairs: with products, solutions, covariances, and saved; without `top`, the same."""
        net, loss = network("perceptron", 6), LOSSES[0]
        args = net.params, net.x, loss.target(Numbers(1), 6)
        whole = eigenpairs(net.f, loss)(*args)
        pairs = eigenpairs(net.f, loss, top=3)(*args)
        loader = [tuple(x[part] for x in args[1:]) for part in (slice(4), slice(4, 6))]
        of_batches = eigenpairs(streamed(invfunc.compiled(ggnvp(net.f, loss))), top=3)(args[0], loader)
        density = partial(spectral_density, probes=2, steps=4)
        nodes = density(ggnvp(net.f, loss), generator=seeded())(*args).nodes
        assert_near(density(streamed(ggnvp(net.f, loss)), generator=seeded())(args[0], loader).nodes, nodes, 1e-9)
        torch.save(pairs, tmp_path / "pairs.pt")
        e, values = rows(whole.vectors(3)), whole.values[:3]
        matrix, v = e.T @ (values[:, None] * e), tree.map_leaves(lambda p: Numbers(2)(*p.shape), net.params)
        for one in (pairs, of_batches, torch.load(tmp_path / "pairs.pt")):
            assert_near(one.values, values, 1e-10)
            assert (one.bounds >= (one.values - values).abs()).all()
            assert_near(flat(one @ v), matrix @ flat(v), 1e-7)
            wanted = torch.linalg.solve(damped(matrix), flat(v))
            assert_near(flat(one.solve(v, DAMPING)), wanted, 1e-7)
            assert_near(flat(kronecker.solve(one, v, DAMPING)), wanted, 1e-7)
            assert_near(one.logdet(DAMPING), torch.logdet(damped(matrix)), 1e-7)
            found, few = one.inverse(DAMPING), whole.inverse(DAMPING, top=3)
            covariance = [invfunc.predictive_covariance(net.f, c)(*args[:2]) for c in (found, few)]
            assert_near(*covariance, 1e-7)
            with pytest.raises(ArgumentError, match=r"\.curvatures\(\): with top= the eigenpairs"):
                one.curvatures()

    def test_leave_aux_and_say_what_they_are(self):
        w, x, y = Numbers(0)(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5)
        t = eigenpairs(lambda w, x: (x @ w, "aux"), F.cross_entropy, top=2, has_aux=True)
        pairs, aux = t(w, x, y)
        assert aux == "aux" and repr(pairs) == f"Eigenpairs({t!r}, rank 2 of 12, dtype=torch.float64)"
        assert repr(eigenpairs(quadratic, top=2)).endswith(", top=2)")
        with pytest.raises(ArgumentError, match=r"eigenpairs\(top=0\): top has to be at least 1"):
            eigenpairs(quadratic, top=0)
        with pytest.raises(ArgumentError, match="as top=10"):
            eigenpairs(quadratic)
        with pytest.raises(ArgumentError, match="not finite"):
            eigenpairs(quadratic, top=1)(torch.zeros(2).double(), torch.full((2, 2), torch.nan).double())
        with pytest.raises(ArgumentError, match="inside of a transform"):
            torch.func.vmap(lambda w: eigenpairs(quadratic, top=1)(w, torch.eye(2)).values)(torch.zeros(3, 2))


class TestDensity:
    values = torch.cat([torch.linspace(-1, 1, 40), torch.tensor([5.0, 8.0])]).double()

    def density(self, **options):
        w, matrix = {"a": torch.zeros(40).double(), "b": torch.zeros(2).double()}, symmetric(self.values)
        return spectral_density(quadratic, **{"probes": 20, "generator": seeded(), "steps": 15, **options})(w, matrix)

    @pytest.mark.quick
    def test_traces_are_those_of_functions_of_the_matrix(self):
        density = self.density()
        for function in (torch.ones_like, torch.square, torch.exp, lambda x: x.abs() / (x.abs() + 0.1)):
            value, error = density.trace(function)
            assert (value - function(self.values).sum()).abs() <= 4 * error + 1e-9 * value.abs()
        assert_near(density.nodes.amax(), self.values.amax(), 1e-6)

    def test_integrates_to_one_and_is_drawn(self):
        pytest.importorskip("matplotlib").use("agg")
        density, points = self.density(), torch.linspace(-4, 12, 4001).double()
        value, error = density(points, width=0.1)
        assert_near(torch.trapezoid(value, points), torch.tensor(1.0), 1e-6)
        smooth = torch.distributions.Normal(self.values, 0.1).log_prob(points[:, None]).exp().mean(1)
        assert ((value - smooth).abs() <= 4 * error + 0.05).all()
        assert density.plot().get_xlabel() == "eigenvalue"

    def test_is_saved_and_of_few_parameters(self, tmp_path):
        density = spectral_density(quadratic, probes=3, generator=seeded())(
            torch.zeros(3), torch.diag(torch.arange(3.0))
        )
        assert density.nodes.shape == (3, 3)
        assert_near(density.nodes, torch.tensor([2.0, 1.0, 0.0]).expand(3, 3), 1e-5)
        torch.save(density, tmp_path / "density.pt")
        assert repr(torch.load(tmp_path / "density.pt")) == repr(density)
        with pytest.raises(ArgumentError, match=r"spectral_density\(.*, steps=0\): steps has to be at least 1"):
            spectral_density(quadratic, probes=3, generator=seeded(), steps=0)


def left_out(matrix, vectors):
    """XTrace's and XDiag's estimates by definition: for each vector, a projection on the products of the others."""
    traces, diagonals = [], []
    for i, v in enumerate(vectors):
        others = [j for j in range(len(vectors)) if j != i]
        q = torch.linalg.qr(matrix @ vectors[others].T)[0] if others else matrix[:, :0]
        off = v - q @ (q.T @ v)
        traces.append((q.T @ matrix @ q).trace() + off @ matrix @ off)
        rest = matrix @ v
        diagonals.append(((q @ q.T) @ matrix).diagonal() + v * (rest - q @ (q.T @ rest)))
    return torch.stack(traces), torch.stack(diagonals)


class TestLeaveOneOut:
    @pytest.mark.quick
    @pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
    @pytest.mark.parametrize("n", [1, 5])
    def test_are_the_means_of_their_definition(self, distribution, n):
        matrix, seen = symmetric(torch.linspace(-1, 3, 20).double()), []
        w = {"a": torch.zeros(8).double(), "b": torch.zeros(3, 4).double()}

        def product(w, v):
            seen.append(flat(v))
            return matrices.shaped(matrix @ seen[-1], w)

        options = {"probes": 2 * n, "distribution": distribution}
        trace = estimate_trace(product, method="xtrace", generator=seeded(), **options)(w)
        diagonal = estimate_diagonal(product, method="xdiag", generator=seeded(), **options)(w)
        assert len(seen) == 4 * n
        traces, diagonals = left_out(matrix, torch.stack(seen[:n]))
        assert_near(trace.value, traces.mean(), 1e-10)
        assert_near(flat(diagonal.value), diagonals.mean(0), 1e-10)
        if n > 1:
            assert_near(trace.standard_error, traces.std() / n**0.5, 1e-10)
            assert_near(flat(diagonal.standard_error), diagonals.std(0) / n**0.5, 1e-10)

    def test_are_exact_for_a_matrix_of_lower_rank(self):
        matrix, w = symmetric(torch.tensor([3.0, -2.0, *[0.0] * 10]).double()), torch.zeros(12).double()
        trace = estimate_trace(quadratic, probes=8, generator=seeded(), method="xtrace")(w, matrix)
        diagonal = estimate_diagonal(quadratic, probes=8, generator=seeded(), method="xdiag")(w, matrix)
        assert_near(trace.value, matrix.trace(), 1e-9)
        assert trace.standard_error < 1e-9
        assert_near(diagonal.value, matrix.diagonal(), 1e-9)
        zero = estimate_trace(quadratic, probes=2, generator=seeded(), method="xtrace")(w, 0 * matrix)
        assert zero.value == 0

    def test_are_unbiased_with_an_error_that_covers_and_smaller_than_hutchinsons(self):
        matrix, w = symmetric(0.7 ** torch.arange(60).double()), torch.zeros(60).double()
        errors = {}
        for method in ("hutchinson", "xtrace"):
            one = partial(estimate_trace, quadratic, probes=30, method=method)
            t = [one(generator=seeded(i))(w, matrix) for i in range(200)]
            off, told = torch.stack([x.value for x in t]) - matrix.trace(), torch.stack([x.standard_error for x in t])
            errors[method] = off.square().mean().sqrt()
            assert off.mean().abs() < 4 * errors[method] / 200**0.5
            assert (off.abs() <= 2 * told).double().mean() >= 0.75
        assert errors["xtrace"] < errors["hutchinson"] / 10

    def test_refuse(self):
        with pytest.raises(ArgumentError, match="probes=3, method='xtrace'.*: probes has to be even"):
            estimate_trace(quadratic, probes=3, generator=seeded(), method="xtrace")
        with pytest.raises(ArgumentError, match="method='xtrace'.*: method is one of 'hutchinson', 'xdiag'"):
            estimate_diagonal(quadratic, probes=2, generator=seeded(), method="xtrace")
        for t in (estimate_trace, estimate_diagonal, spectral_density):
            with pytest.raises(ArgumentTypeError, match=f"{t.__name__}.*: it takes the whole batch"):
                invfunc.chunked(t(quadratic, probes=2, generator=seeded()), 2, fold="mean")
        with pytest.raises(ArgumentError, match="inside of a transform"):
            t = estimate_trace(quadratic, probes=2, generator=seeded(), method="xtrace")
            torch.func.grad(lambda w: t(w, torch.eye(2)).value)(torch.zeros(2))


# Estimates from products with random vectors: unbiased, with the error that they tell, exact where they are to be

DISTRIBUTIONS = ["rademacher", "gaussian"]
estimators = pytest.mark.parametrize("estimator", [estimate_trace, estimate_diagonal], ids=lambda t: t.__name__)


def of_matrix(params, v, matrix):
    """The product of a dense matrix."""
    return matrices.shaped(matrix @ flat(v), params)


class TestValues:
    @given(net=networks(), distribution=st.sampled_from(DISTRIBUTIONS), probes=st.integers(2, 5))
    def test_are_the_mean_over_the_vectors_and_its_error(self, device, dtype, net, distribution, probes):
        """By the formula of the docstrings, with the vectors as the matrix has seen them."""
        args = moved((net.params, net.x, LOSSES[0].target(Numbers(1), net.n)), dtype, device)
        product, seen, rtol = ggnvp(net.f, LOSSES[0]), [], {torch.float64: 1e-10, torch.float32: 1e-4}[dtype]

        def watched(params, v, *batch):
            seen.append((v, product(params, v, *batch)))
            return seen[-1][1]

        options = {"probes": probes, "distribution": distribution}
        trace = estimate_trace(watched, generator=seeded(1, device), **options)(*args)
        values = torch.stack([(flat(v) * flat(y)).sum() for v, y in seen])
        assert isinstance(trace, Estimate) and trace.value.shape == () and trace.value.dtype == dtype
        assert_near(trace.value, values.mean(), rtol)
        assert_near(trace.standard_error, values.std() / probes**0.5, rtol, values.abs().max().item())
        seen.clear()
        diagonal = estimate_diagonal(watched, generator=seeded(1, device), **options)(*args)
        values = torch.stack([flat(v) * flat(y) for v, y in seen])
        assert tree.flatten(diagonal.value)[1] == tree.flatten(diagonal.standard_error)[1] == tree.flatten(args[0])[1]
        assert_near(flat(diagonal.value), values.mean(0), rtol)
        assert_near(flat(diagonal.standard_error), values.std(0) / probes**0.5, rtol)
        assert_near(flat(diagonal.value).sum(), trace.value, rtol, values.abs().max().item())
        again = estimate_diagonal(product, generator=seeded(1, device), **options)(*args)
        assert_trees_close(again, diagonal, 100 * rtol, 1e-2)  # linearised once, with the same numbers

    @estimators
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_are_averaged_in_float32(self, estimator, dtype):
        """A mean in bfloat16 stands still after some hundred vectors, and so do the squares around it."""
        seen: list[torch.Tensor] = []

        def product(params, v):
            y = v + v.roll(1) / 2
            values = v.float() * y.float()
            seen.append(values.sum() if estimator is estimate_trace else values)
            return y

        found = estimator(product, probes=400, generator=seeded())(torch.zeros(8, dtype=dtype))
        values = torch.stack(seen)
        assert_near(found.value.float(), values.mean(0), torch.finfo(dtype).eps)
        assert_near(found.standard_error.float(), values.std(0) / 400**0.5, torch.finfo(dtype).eps)

    def test_draw_from_the_generator_alone(self):
        before, generator = torch.get_rng_state(), seeded()
        estimate_trace(of_matrix, probes=2, generator=generator)(torch.zeros(3), torch.eye(3))
        assert torch.equal(torch.get_rng_state(), before)
        state = generator.get_state()
        assert not torch.equal(state, seeded().get_state())
        gaussian = partial(estimate_trace, of_matrix, probes=2, distribution="gaussian")
        values = [gaussian(generator=g)(torch.zeros(3), torch.eye(3)) for g in (generator, seeded(), seeded())]
        assert values[0] != values[1] == values[2]


class TestRefusals:
    @estimators
    @pytest.mark.parametrize(
        "options, kind, text",
        [
            ({"probes": 0}, ArgumentError, r"probes=0\): probes has to be at least 1"),
            ({"probes": True}, ArgumentTypeError, "probes is of type bool"),
            ({"generator": None}, ArgumentTypeError, "generator is missing, .*generator=torch.Generator"),
            ({"distribution": "uniform"}, ArgumentError, r"distribution='uniform'\): .*'rademacher', 'gaussian'"),
        ],
        ids=str,
    )
    def test_of_options(self, estimator, options, kind, text):
        with pytest.raises(kind, match=rf"{estimator.__name__}\(of_matrix.*{text}"):
            estimator(of_matrix, **{"probes": 2, "generator": seeded()} | options)

    @estimators
    def test_of_products(self, estimator):
        options = {"probes": 2, "generator": seeded()}
        with pytest.raises(ArgumentTypeError, match=rf"{estimator.__name__}\(f\): f is of type int"):
            estimator(3, **options)
        with pytest.raises(ArgumentError, match="several vectors"):
            estimator(invfunc.ggnvp(of_matrix, blocks=True), **options)
        with pytest.raises(ArgumentError, match=r"product has no product\['a'\]; it has to be a tree.* like params"):
            estimator(lambda params, v: v["a"], **options)({"a": torch.ones(2)})
        with pytest.raises(ArgumentTypeError, match=r"params\['a'\] has dtype torch.int64"):
            estimator(of_matrix, **options)({"a": torch.ones(2).long()}, torch.eye(2))
        with pytest.raises(ArgumentError, match=rf"{estimator.__name__}\(of_matrix\)\(params\): params has no tensors"):
            estimator(of_matrix, **options)({})
