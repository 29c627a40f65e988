"""K-factors where they are exact (arXiv 2311.00636 and 2507.05127), draws that average to them, ekfac and kfra."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import (
    InvFuncError,
    batch_grad,
    diag_ggn,
    ekfac,
    functional,
    ggn_trace,
    kfac,
    reduced,
    sqrt_ggn,
    tree,
)
from invfunc.errors import ArgumentError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close, dense_ggn
from tests.kfac_loops import loop_kfra
from tests.laws import composed
from tests.modules import MODELS
from tests.networks import CLASSES, LOSSES
from tests.reductions.test_kfac import FLOOR, MODULES, SHARINGS, built, matrices
from tests.strategies import Numbers, seeded
from tests.torch_layers import LAYERS

EXACT = 1e-9
ACTIVATIONS = [nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ReLU, nn.LeakyReLU, nn.Hardtanh]
sharings = pytest.mark.parametrize("sharing", SHARINGS)


@pytest.mark.quick
@sharings
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@given(cut=st.integers(1, 3), steps=st.integers(1, 3))
def test_a_layer_in_parts_has_the_factors_of_the_whole(sharing, dim, cut, steps):
    """Of what is divided, those entries that one part sees; all where the parts are added up first."""
    w, x, y = Numbers()(4, 4), Numbers(1)(3, steps, 4), Numbers(2)(3, steps, 4)

    def in_parts(w, x):
        if dim == 0:
            return torch.cat([x @ part.T for part in w.split([cut, 4 - cut])], -1)
        parts = zip(x.split([cut, 4 - cut], -1), w.split([cut, 4 - cut], 1), strict=True)
        return sum(a @ part.T for a, part in parts)

    whole, found = (
        kfac(f, F.mse_loss, weight_sharing=sharing, fisher="exact")(w, x, y).factors
        for f in (lambda w, x: x @ w.T, in_parts)
    )
    part = torch.arange(4) < cut
    wanted = [k * (part == part[:, None]) if i == dim and sharing != "reduce" else k for i, k in enumerate(whole)]
    assert_trees_close(found, tuple(wanted), EXACT, FLOOR)


def dense(found):
    return {name: k.dense() for name, k in found.items() if k is not None}


def arranged(module, x, loss):
    """Its function, with arguments."""
    f, params = functional(module.double())
    rand = Numbers(3)
    return f, ({name: 0.7 * rand(*p.shape) for name, p in params.items()}, x, loss.target(Numbers(1), len(x)))


def perceptron(activation):
    return nn.Sequential(
        nn.Linear(2, 3), activation(), nn.Linear(3, 3, bias=False), activation(), nn.Linear(3, CLASSES)
    )


def deep_linear(bias=True):
    return nn.Sequential(nn.Linear(2, 3, bias), nn.Identity(), nn.Linear(3, 2, bias), nn.Linear(2, CLASSES, bias))


class TestExactness:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_of_one_sample(self, activation, loss):
        """Whatever the nonlinearities, no two samples are averaged apart."""
        f, args = arranged(perceptron(activation), Numbers(4)(1, 2), loss)
        wanted = dense_ggn(f, loss)(*args)
        for make in (partial(kfac, fisher="exact"), ekfac, kfra):
            options = dict[str, Any](fisher="exact") if make is ekfac else {}
            assert_trees_close(dense(make(f, loss, **options)(*args)), wanted, EXACT)

    @sharings
    @pytest.mark.parametrize("n", [1, 4])
    def test_of_deep_linear_networks(self, sharing, n):
        f, args = arranged(deep_linear(), Numbers(4)(n, 2), LOSSES[1])
        wanted = dense_ggn(f, F.mse_loss)(*args)
        assert_trees_close(dense(kfac(f, F.mse_loss, weight_sharing=sharing, fisher="exact")(*args)), wanted, EXACT)
        assert_trees_close(dense(kfra(f, F.mse_loss)(*args)), wanted, EXACT)

    def test_of_a_weight_with_its_bias(self):
        """The block of [weight, bias] of a function that takes both as one."""
        f, args = arranged(perceptron(nn.Tanh), Numbers(4)(1, 2), LOSSES[0])
        found = kfac(f, LOSSES[0], joint=True, fisher="exact")(*args)
        for name in ("0", "4"):
            weight, bias = (args[0][f"{name}.{part}"] for part in ("weight", "bias"))
            both = torch.cat([weight, bias[:, None]], 1)

            def joined(both, x, name=name):
                return f(args[0] | {f"{name}.weight": both[:, :-1], f"{name}.bias": both[:, -1]}, x)

            assert found[f"{name}.bias"] is None
            assert_trees_close(found[f"{name}.weight"].dense(), dense_ggn(joined, LOSSES[0])(both, *args[1:]), EXACT)


COLUMNS = {"exact": {}, "mc": {"mc_samples": 3}, "empirical": {}}


@pytest.mark.parametrize("called", ["perceptron", "positions", "convolution", "layer norm", "a layer used twice"])
class TestEkfac:
    @pytest.mark.quick
    @sharings
    @pytest.mark.parametrize("fisher", COLUMNS)
    def test_values_are_the_diagonal_of_the_block(self, called, sharing, fisher):
        """In the eigenbasis of the K-factors, with the shares of the columns."""
        _, f, params, x = built(called)
        loss = LOSSES[0]
        args = (params, x, loss.target(Numbers(1), len(x)))

        def of(make, *functions, **options):
            generator = {"generator": seeded()} if fisher == "mc" else {}
            return make(*functions, **COLUMNS[fisher], **generator, **options)(*args)

        shares = of(batch_grad, composed(f, loss)) if fisher == "empirical" else of(sqrt_ggn, f, loss)
        found, factors = (of(make, f, loss, fisher=fisher, weight_sharing=sharing) for make in (ekfac, kfac))
        for name, k in found.items():
            columns = shares[name].reshape(-1, *params[name].shape)
            for q, a in zip(matrices(k), matrices(factors[name]), strict=True):
                assert_trees_close(q.T @ q, torch.eye(len(q)).double(), EXACT)
                turned = q.T @ a @ q
                assert_trees_close(turned, torch.diag(turned.diagonal()), EXACT, FLOOR)
            assert k.groups == factors[name].groups and k.shape == params[name].shape
            sizes = [len(q) for q in k.factors]
            rows = columns.permute(0, *[1 + d for group in k.groups for d in group]).reshape(len(columns), *sizes)
            for i, q in enumerate(matrices(k), 1):
                rows = (rows.movedim(i, -1) @ q).movedim(-1, i)
            assert_trees_close(k.values, rows.square().sum(0), EXACT, FLOOR)


WITHOUT_FACTORS = {"weight_norm", "spectral_norm", "orthogonal", "language"}
WITHOUT_FACTORS |= {f"{read} as the weight" for read in ("softplus(w)", "mask * w", "w + b @ a")}
"""Whose parameters are computed before they are used."""
AT_TIMES_WITHOUT = {"Conv1-3d", "ConvTranspose1-3d", "Bilinear"}
"""Layers that are also drawn with such parameters."""


@pytest.mark.filterwarnings(
    "ignore:Support for mismatched",
    "ignore:LSTM with projections",
    "ignore:Using padding='same' with even",
    "ignore:enable_nested_tensor",
)
@pytest.mark.parametrize("called", [*LAYERS, *MODELS])
@settings(max_examples=2)
@given(data=st.data())
def test_any_layer_has_the_trace_of_its_block_or_no_factors(called, data):
    """Refused are parameters that enter otherwise, by their names."""
    case = data.draw((LAYERS | MODELS)[called])
    args = (case.params, *case.inputs, case.f(case.params, *case.inputs).detach().cos())
    options = dict[str, Any](in_dims=(*case.in_dims, 0))
    t = ekfac(case.f, F.mse_loss, fisher="exact", **options)
    try:
        found = reduced(t, lambda path, k: k.trace())(*args)
    except InvFuncError as error:
        assert called in WITHOUT_FACTORS | AT_TIMES_WITHOUT, str(error)
        if isinstance(error, ArgumentError):
            assert any(f"params{path}" in str(error) for path, _ in tree.named_leaves(case.params))
    else:
        wanted = ggn_trace(case.f, F.mse_loss, per_parameter=True, **options)(*args)
        assert_trees_close(found, wanted, EXACT, FLOOR)


class TestKfra:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_a_chain_of_layers(self, activation, loss):
        module = perceptron(activation)
        f, args = arranged(module, Numbers(4)(4, 2), loss)
        wanted = loop_kfra(module, loss)(*args)
        for t in (kfra(f, loss), kfra(composed(f, loss))):
            assert_trees_close({name: matrices(k) for name, k in t(*args).items()}, wanted, EXACT)

    def test_a_weight_with_its_bias(self):
        module = perceptron(nn.Sigmoid)
        f, args = arranged(module, Numbers(4)(4, 2), LOSSES[1])
        found, apart = kfra(f, F.mse_loss, joint=True)(*args), kfra(f, F.mse_loss)(*args)
        for name in ("0", "4"):
            b, a = matrices(found[f"{name}.weight"])
            assert found[f"{name}.bias"] is None
            assert_trees_close((b, a[:-1, :-1]), matrices(apart[f"{name}.weight"]), EXACT)
            assert_trees_close(a[-1, -1], torch.ones(()).double(), EXACT)

    @pytest.mark.parametrize("called", ["a skip connection", "a layer used in parallel", "attention", "recurrence"])
    def test_what_is_no_chain(self, called):
        assert called in MODULES
        _, f, params, x = built(called)
        with pytest.raises(InvFuncError, match="chain"):
            kfra(f, F.mse_loss)(params, x, torch.zeros(4, 3).double())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_ekfac_of_a_parameter_without_curvature_has_eigenvectors_and_eigenvalues_zero(fisher):
    params = {"w": Numbers(1)(3, 1), "unused": Numbers(2)(2, 3), "scalar": Numbers(3)()}
    found = ekfac(lambda p, x: x @ p["w"], F.cross_entropy, fisher=fisher)(
        params, Numbers(4)(5, 3), torch.zeros(5, dtype=torch.long)
    )
    for name, p in params.items():  # one class has no curvature at all
        assert found[name].values is not None and not found[name].values.any()
        assert_trees_close(found[name].solve(p, damping=0.5), 2 * p, EXACT)


@pytest.mark.parametrize("n", [3, 4])
def test_recurrent_layers_have_factors_with_as_many_layers_as_samples(n):
    """The first state is `[layers * directions, N, H]`, of which both may be 4."""
    f, params = functional(nn.Sequential(nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True)))
    args = params, torch.randn(n, 3, 3), torch.randn(n, 4)
    exact = diag_ggn(last := lambda p, x: f(p, x)[0][:, -1], F.mse_loss)(*args)
    for name, factors in ekfac(last, F.mse_loss, fisher="exact")(*args).items():
        torch.testing.assert_close(factors.trace(), exact[name].sum())


@pytest.mark.parametrize("first", [lambda x: torch.zeros(3), lambda x: x.new_zeros(len(x), 3)])
def test_a_weight_that_meets_a_first_state_of_zeros_has_factors(first):
    def f(w, x):
        h = first(x)
        for row in x.unbind(1):
            h = torch.tanh(row + h @ w)
        return h

    args = torch.randn(3, 3), torch.randn(4, 2, 3), torch.randn(4, 3)
    torch.testing.assert_close(
        ekfac(f, F.mse_loss, fisher="exact")(*args).trace(), diag_ggn(f, F.mse_loss)(*args).sum()
    )
