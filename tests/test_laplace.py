"""The backends for the Laplace library: against dense matrices, with a stand-in for it, and against its own."""

import sys
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import invfunc.laplace
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

RTOL = 1e-12
LIKELIHOODS = ["regression", "classification"]
C = 3


class Interface:
    """The used part of Laplace's base class of all backends."""

    def __init__(self, model, likelihood, last_layer=False, subnetwork_indices=None, stochastic=False, num_samples=1):
        self.model, self.last_layer, self.subnetwork_indices = model, last_layer, subnetwork_indices
        self.stochastic, self.num_samples = stochastic, num_samples
        regression = likelihood == "regression"
        self.lossfunc = (nn.MSELoss if regression else nn.CrossEntropyLoss)(reduction="sum")
        self.factor = 0.5 if regression else 1.0
        self.params_dict = {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    @property
    def _model(self):
        return self.model.last_layer if self.last_layer else self.model


class Kron:
    """The used part of Laplace's class of factors."""

    def __init__(self, kfacs):
        self.kfacs = kfacs

    def __rmul__(self, factor):
        return Kron([[factor ** (1 / len(part)) * x for x in part] for part in self.kfacs])

    def __add__(self, other):
        return Kron([[x + y for x, y in zip(*both, strict=True)] for both in zip(self.kfacs, other.kfacs, strict=True)])


@pytest.fixture(params=["stand-in", "laplace"], scope="class", autouse=True)
def library(request):
    """A stand-in for Laplace, so that the backends are tested without it; and itself, where it is installed."""
    if request.param == "laplace":
        pytest.importorskip("laplace", reason="laplace-torch is not installed")
        yield
        return
    interfaces = dict.fromkeys(("CurvatureInterface", "GGNInterface", "EFInterface"), Interface)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "laplace", SimpleNamespace())
        patch.setitem(sys.modules, "laplace.curvature", SimpleNamespace(**interfaces))
        patch.setitem(sys.modules, "laplace.utils", SimpleNamespace(Kron=Kron))
        yield


class Features(nn.Module):
    """A model that knows what its last layer reads."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        object.__setattr__(self, "last_layer", model[-1])  # as in Laplace, it is no module of its own

    def forward_with_features(self, x):
        features = self.model[:-1](x)
        return self.last_layer(features), features


class Transposed(nn.Module):
    """A linear layer whose weight is `[in, out]`, and what no operation reads."""

    def __init__(self):
        super().__init__()
        self.weight, self.idle = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(2, 2, 2))

    def forward(self, x):
        return x @ self.weight


MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)),
    "transposed": lambda: nn.Sequential(Transposed(), nn.LayerNorm(5), nn.Linear(5, C, bias=False)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, (1, 2)), nn.Sigmoid(), nn.Flatten(), nn.Linear(4, C)
    ),
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def data_of(likelihood, n=5, seed=0):
    rand = Numbers(seed)
    return rand(n, 4), rand(n, C) if likelihood == "regression" else torch.arange(n) % C


def backend_of(called, *args, **options):
    return getattr(invfunc.laplace, called)(*args, **options)


@dataclass(frozen=True)
class Case:
    """A model, and of which of its parameters the curvature is."""

    name: str
    likelihood: str
    scope: str
    n: int

    def backend(self, called):
        model = model_of(self.name)
        if self.scope == "last layer":
            return backend_of(called, Features(model), self.likelihood, last_layer=True)
        return backend_of(called, model, self.likelihood, subnetwork_indices=self.chosen)

    @property
    def chosen(self):
        return torch.tensor([7, 2, 3]) if self.scope == "subnetwork" else None

    def dense(self):
        """The outputs and the loss, half of the squared error, as functions of the parameters that count."""
        model, (x, _) = model_of(self.name), data_of(self.likelihood, self.n)
        last = {f"{len(model) - 1}.{name}" for name, _ in model[-1].named_parameters()}
        params = {k: p.detach() for k, p in model.named_parameters() if self.scope != "last layer" or k in last}
        flat = torch.cat([p.flatten() for p in params.values()])
        start, chosen = flat, slice(None) if self.chosen is None else self.chosen

        def z(some):
            every = start.clone().index_put((torch.arange(len(start))[chosen],), some)
            parts = every.split([p.numel() for p in params.values()])
            return functional_call(model, {k: v.view_as(params[k]) for k, v in zip(params, parts, strict=True)}, (x,))

        return z, flat[chosen]

    def loss(self, z, y):
        return (z - y).square().sum() / 2 if self.likelihood == "regression" else F.cross_entropy(z, y, reduction="sum")


CASES = st.builds(
    Case,
    st.sampled_from(list(MODELS)),
    st.sampled_from(LIKELIHOODS),
    st.sampled_from(["all", "last layer", "subnetwork"]),
    st.integers(1, 5),
)


def wanted(called, case):
    """The dense matrix with Laplace's scale, and the loss."""
    (z, at), (_, y) = case.dense(), data_of(case.likelihood, case.n)
    J, loss = jacrev(z)(at), case.loss(z(at), y)
    if called == "InvFuncHessian":
        return jacrev(grad(lambda some: case.loss(z(some), y)))(at), loss  # `hessian` has no norms
    if called == "InvFuncGGN":
        H = vmap(hessian(case.loss))(z(at), y)
        return torch.einsum("ncp,ncd,ndq->pq", J, H, J), loss
    scale = 2 if case.likelihood == "regression" else 1  # Laplace squares the gradient of the error without the half
    G = torch.einsum("ncp,nc->np", J, scale * grad(case.loss)(z(at), y))
    return G.mT @ G / scale, loss


@pytest.mark.quick
class TestBackends:
    @given(case=CASES, called=st.sampled_from(["InvFuncGGN", "InvFuncEF", "InvFuncHessian"]))
    def test_have_the_dense_matrix_and_its_diagonal(self, case, called):
        assume((called, case.scope) != ("InvFuncHessian", "subnetwork"))  # which Laplace does not take
        (x, y), (H, loss) = data_of(case.likelihood, case.n), wanted(called, case)
        backend = case.backend(called)
        found = backend.full(x, y, N=99)
        assert not any(part.requires_grad for part in found)
        assert_trees_close(found, (loss, H), 1e-9)
        assert_trees_close(backend.diag(x, y, N=99), (loss, H.diagonal()), 1e-9)

    @given(case=CASES)
    def test_have_jacobians_and_gradients(self, case):
        (z, at), (x, y) = case.dense(), data_of(case.likelihood, case.n)
        J, backend = jacrev(z)(at), case.backend("InvFuncEF")
        assert_trees_close(backend.jacobians(x), (J, z(at)), RTOL)
        chosen = torch.arange(2 * case.n).reshape(-1, 2) % C
        assert_trees_close(
            backend.selected_output_jacobians(x, chosen), (J[torch.arange(case.n)[:, None], chosen], z(at)), RTOL
        )
        found, loss = backend.gradients(x, y)
        total = grad_and_value(lambda some: case.loss(z(some), y))(at)
        assert_trees_close((backend.factor * found.sum(0), backend.factor * loss), total, RTOL, 1e-9)
        assert found.shape == (case.n, len(at))

    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    @pytest.mark.parametrize("called", ["InvFuncGGN", "InvFuncEF"])
    @pytest.mark.parametrize("name", ["perceptron", "transposed"])
    def test_factors_of_one_sample_are_its_blocks(self, likelihood, called, name):
        """And Laplace's scale is divided between them."""
        case = Case(name, likelihood, "all", 1)
        H, loss = wanted(called, case)
        found, kron = case.backend(called).kron(*data_of(likelihood, 1), N=1)
        assert_trees_close(found, loss, RTOL)
        start = 0
        for factors in kron.kfacs:
            block = factors[0] if len(factors) == 1 else torch.kron(*factors)
            assert_trees_close(block, H[start : start + len(block), start : start + len(block)], RTOL, 1e-15)
            start += len(block)
        assert start == len(H)

    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    @pytest.mark.parametrize("called", ["InvFuncGGN", "InvFuncEF"])
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("sharing", ["expand", "reduce"])
    def test_factors_of_batches_add_up_to_those_of_all(self, likelihood, called, name, sharing):
        x, y = data_of(likelihood)
        backend = backend_of(called, model_of(name), likelihood)
        _, whole = backend.kron(x, y, N=5, kfac_approx=sharing)
        (_, one), (_, two) = (backend.kron(x[s], y[s], N=5, kfac_approx=sharing) for s in (slice(2), slice(2, 5)))
        assert_trees_close((one + two).kfacs, whole.kfacs, RTOL)

    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    def test_draw_as_torchs_generator_says(self, likelihood):
        """Columns whose mean is the matrix."""
        x, y = data_of(likelihood)
        backend = backend_of("InvFuncGGN", model_of("perceptron"), likelihood, stochastic=True, num_samples=2)
        exact = backend_of("InvFuncGGN", model_of("perceptron"), likelihood)
        for called in ("full", "diag", "kron"):

            def found(backend, called=called, **options):
                torch.manual_seed(0)
                found = getattr(backend, called)(x, y, N=5, **options)[1]
                return [torch.kron(*(*ks, torch.ones(1, 1))[:2]) for ks in found.kfacs] if called == "kron" else [found]

            one, again, many = found(backend), found(backend), found(backend, mc_samples=3000)
            other = getattr(backend, called)(x, y, N=5)[1]
            assert all(map(torch.equal, one, again))
            if called != "kron":
                assert not torch.equal(one[0], other)
            for a, b in zip(many, found(exact), strict=True):
                assert (a - b).norm() < 0.1 * b.norm()

    @pytest.mark.parametrize("scope", ["all", "last layer"])
    def test_are_differentiable_if_asked(self, scope):
        case = Case("perceptron", "regression", scope, 5)
        x, backend = data_of("regression")[0].requires_grad_(), case.backend("InvFuncGGN")
        J, z = backend.jacobians(x, enable_backprop=True)
        of_all = [*(backend.model.model if scope == "last layer" else backend.model).parameters()]
        found = torch.autograd.grad(J.square().sum() + z.sum(), [x, *of_all[:2]])
        model = model_of("perceptron")
        last = {name: p for name, p in model.named_parameters() if scope == "all" or name.startswith("2")}
        plain = jacrev(lambda last: functional_call(model, last, (x,)))(last)
        squares = sum(j.square().sum() for j in plain.values()) + model(x).sum()
        assert_trees_close(found, torch.autograd.grad(squares, [x, *[*model.parameters()][:2]]), RTOL)
        assert not any(t.requires_grad for t in backend.jacobians(x))

    def test_refuse_factors_that_laplace_has_no_place_for(self):
        x, y = data_of("classification")
        groups = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, C))
        with pytest.raises(ArgumentError, match=r"kron: 1\.weight has Kronecker.*hessian_structure='diag'"):
            backend_of("InvFuncGGN", groups.double(), "classification").kron(x, y, N=5)


class TestLaplace:
    """Laplace's results from our curvature equal its results from its own."""

    @pytest.fixture(autouse=True)
    def its_own(self):
        if isinstance(sys.modules["laplace"], SimpleNamespace):
            pytest.skip("a stand-in has no posterior")
        torch.set_default_dtype(torch.float64)  # in which it makes some of its tensors, whatever the model has
        yield
        torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    @pytest.mark.parametrize(
        ("weights", "structure"),
        [*product(["all", "last_layer"], ["full", "diag", "kron"]), ("subnetwork", "full"), ("subnetwork", "diag")],
    )
    @pytest.mark.parametrize("kind", ["GGN", "EF"])
    def test_posterior_evidence_and_predictive(self, likelihood, structure, weights, kind):
        from laplace import Laplace
        from laplace.curvature import BackPackEF, CurvlinopsEF, CurvlinopsGGN

        own = CurvlinopsGGN if kind == "GGN" else CurvlinopsEF
        if (own, weights, structure) == (CurvlinopsEF, "last_layer", "diag"):
            own = BackPackEF  # that of curvlinops is zero
        (x, y), found = data_of(likelihood, 7), []
        loader = DataLoader(TensorDataset(x, y), batch_size=3)
        options = {"subnetwork_indices": torch.tensor([7, 2, 3])} if weights == "subnetwork" else {}
        for backend in (getattr(invfunc.laplace, f"InvFunc{kind}"), own):
            posterior = Laplace(model_of("convolution"), likelihood, weights, structure, backend=backend, **options)
            posterior.fit(loader)
            precision = posterior.posterior_precision
            precision = precision.to_matrix() if structure == "kron" else precision
            found.append([precision, posterior.log_marginal_likelihood().detach(), posterior(x + 1)])
        assert_trees_close(*found, 1e-9)
