"""K-factors against plain loops over hooks, for each layer and way of sharing weights; and where they are exact."""

import copy
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
    chunked,
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
from invfunc.testing.models import moved
from tests.kfac_loops import loop_kfac, loop_kfra
from tests.laws import composed
from tests.modules import MODELS
from tests.networks import CLASSES, LOSSES
from tests.rows import in_blocks
from tests.strategies import Numbers, seeded
from tests.torch_layers import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel", "ignore:enable_nested_tensor")
EXACT, FLOOR = 1e-10, 1e-3
SHARINGS = ["expand", "reduce", "backpack"]
sharings = pytest.mark.parametrize("sharing", SHARINGS)


def matrices(kronecker):
    """The factors; a vector is a diagonal."""
    return tuple(torch.diag(x) if x.ndim == 1 else x for x in kronecker.factors)


def assert_factors(found, wanted, rtol=EXACT, floor=FLOOR):
    """Of a dict of results, where None has its place with another parameter."""
    assert {name for name, k in found.items() if k is not None} == set(wanted)
    assert_trees_close({name: matrices(found[name]) for name in wanted}, wanted, rtol, floor)


class Applied(nn.Module):
    """Layers by their names, and what is done with them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.call = nn.ModuleDict(layers), forward

    def forward(self, x):
        return self.call(self.layers, x)


def attended(m, x):
    """Self-attention with two heads."""
    q, k, v = (m[name](x).unflatten(-1, (2, -1)).transpose(1, 2) for name in "qkv")
    return m["out"]((q @ k.mT / 2**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(-2)).mean(1)


def skipping(m, x):
    h = m["a"](x).tanh()
    return h + m["b"](h)


def recurrent(m, x):
    h = 0 * x[:, 0]
    for step in x.unbind(1):
        h = (m["ih"](step) + m["hh"](h)).tanh()
    return h


def chain(*layers):
    return lambda: nn.Sequential(*[layer() for layer in layers])


def linear(i, o, bias=True):
    return lambda: nn.Linear(i, o, bias=bias)


MODULES = {
    "perceptron": (
        chain(linear(2, 3), nn.Tanh, linear(3, 3, False), lambda: nn.ReLU(inplace=True), linear(3, 3)),
        (2,),
    ),
    "positions": (chain(linear(2, 3), nn.GELU, lambda: nn.Flatten(1), linear(6, 3)), (2, 2)),
    "positions in two dimensions": (
        lambda: Applied(lambda m, x: m["b"](m["a"](x).sin()).mean((1, 2)), a=nn.Linear(2, 2), b=nn.Linear(2, 3)),
        (2, 2, 2),
    ),
    "convolution": (chain(lambda: nn.Conv2d(2, 2, 2), nn.Sigmoid, nn.Flatten, linear(8, 3)), (2, 3, 3)),
    "transposed convolution": (
        chain(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, padding=1), nn.Tanh, nn.Flatten, linear(12, 3)),
        (2, 2, 2),
    ),
    "layer norm": (chain(linear(2, 3), lambda: nn.LayerNorm(3), nn.Tanh, nn.Flatten, linear(6, 3)), (2, 2)),
    "RMS norm": (chain(linear(2, 3), lambda: nn.RMSNorm([2, 3]), nn.Flatten, linear(6, 3)), (2, 2)),
    "group norm": (chain(lambda: nn.Conv1d(2, 4, 1), lambda: nn.GroupNorm(2, 4), nn.Flatten, linear(8, 3)), (2, 2)),
    "batch norm": (chain(lambda: nn.Conv2d(2, 2, 1), lambda: nn.BatchNorm2d(2), nn.Flatten, linear(8, 3)), (2, 2, 2)),
    "a layer used twice": (lambda: Applied(lambda m, x: m["a"](m["a"](x).tanh()), a=nn.Linear(3, 3)), (3,)),
    "a layer used in parallel": (
        lambda: Applied(lambda m, x: m["a"](x).tanh() * m["a"](x.cos()), a=nn.Linear(2, 3)),
        (2,),
    ),
    "a skip connection": (lambda: Applied(skipping, a=nn.Linear(2, 3), b=nn.Linear(3, 3)), (2,)),
    "attention": (
        lambda: Applied(attended, **{k: nn.Linear(2, 4 if k != "out" else 3) for k in "qkv"}, out=nn.Linear(4, 3)),
        (3, 2),
    ),
    "recurrence": (lambda: Applied(recurrent, ih=nn.Linear(3, 3), hh=nn.Linear(3, 3)), (2, 3)),
}


def built(called, n=4):
    """A module, its function with parameters, and inputs."""
    make, shape = MODULES[called]
    module = make().double().eval()
    f, params = functional(module)
    rand = Numbers(3)
    return module, f, {name: 0.7 * rand(*p.shape) for name, p in params.items()}, Numbers(4)(n, *shape)


@pytest.mark.parametrize("called", MODULES)
@sharings
def test_every_layer(called, sharing, device, dtype):
    module, _, params, x = built(called)
    f, _ = functional(copy.deepcopy(module).to(device, dtype))
    for loss, joint in zip(LOSSES[:3], [False, True, False], strict=True):
        args = (params, x, loss.target(Numbers(1), len(x)))
        wanted = loop_kfac(module, loss, weight_sharing=sharing, joint=joint)(*args)
        options = {"weight_sharing": sharing, "joint": joint}
        given, rtol = moved(args, dtype, device), EXACT if dtype == torch.float64 else 1e-3
        assert_factors(kfac(f, loss, fisher="exact", **options)(*given), wanted, rtol)
        assert_factors(in_blocks(kfac(f, loss, fisher="exact", **options))(*given), wanted, rtol)
        assert_factors(kfac(composed(f, loss), fisher="exact", **options)(*given), wanted, rtol)
        assert_factors(kfac(f, loss, fisher="exact", **options)(*given), wanted, rtol)


@pytest.mark.parametrize("called", MODULES)
@sharings
def test_empirical(called, sharing):
    """The columns are the shares of the gradient, with the scale that batch_grad gives them."""
    module, f, params, x = built(called)
    for loss, reduction, joint in zip(LOSSES[:3], ["none", "mean", "sum"], [False, False, True], strict=True):

        def of(z, y, loss=loss, reduction=reduction):
            losses = loss(z, y, reduction)
            return losses.sum(1) if losses.ndim > 1 else losses

        args = (params, x, loss.target(Numbers(1), len(x)))
        options = {"fisher": "empirical", "weight_sharing": sharing, "joint": joint}
        wanted = loop_kfac(module, of, **options)(*args)
        assert_factors(kfac(f, of, **options)(*args), wanted)
        assert_factors(kfac(composed(f, of), **options)(*args), wanted)


@st.composite
def convolved(draw):
    """A convolution in any dimensions with any options, before a linear layer."""
    d = draw(st.integers(1, 3))
    each = st.tuples(*[st.integers(1, 2)] * d)
    kernel, dilation, stride, transposed = draw(each), draw(each), draw(each), draw(st.booleans())
    mode = "zeros" if transposed else draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    options = {"dilation": dilation, "stride": stride, "bias": draw(st.booleans())}
    options |= {"padding": draw(st.sampled_from([0, 1]))}
    if not transposed and draw(st.booleans()):
        options |= {"padding": "same", "stride": 1}
    kind = getattr(nn, f"ConvTranspose{d}d" if transposed else f"Conv{d}d")
    first = kind(draw(st.integers(1, 2)), 2, kernel, padding_mode=mode, **options).double()
    x = Numbers(4)(draw(st.integers(1, 3)), first.in_channels, *[3] * d)
    width = first(x)[0].numel()
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2).double()), x


@pytest.mark.quick
@settings(max_examples=10)
@given(case=convolved(), sharing=st.sampled_from(SHARINGS), joint=st.booleans())
def test_convolutions(case, sharing, joint):
    module, x = case
    f, params = functional(module)
    rand = Numbers(5)
    args = ({name: 0.5 * rand(*p.shape) for name, p in params.items()}, x, rand(len(x), 2))
    wanted = loop_kfac(module, F.mse_loss, weight_sharing=sharing, joint=joint)(*args)
    assert_factors(kfac(f, F.mse_loss, weight_sharing=sharing, joint=joint, fisher="exact")(*args), wanted)


W, V, X, Y = Numbers(1)(3, 2), Numbers(2)(2, 3), Numbers(3)(4, 2, 3), Numbers(4)(4, 2, 3)
READINGS = {
    "x @ w": (lambda x, w: x @ w, (1, 0), lambda w: w),
    "torch.matmul": (lambda x, w: torch.matmul(x, w), (1, 0), lambda w: w),
    "(w.T @ x.T).T": (lambda x, w: (w.T @ x.mT).mT, (1, 0), lambda w: w),
    "x @ w.T": (lambda x, w: x @ w.T, (0, 1), lambda w: w.T.clone()),
    "F.linear": (lambda x, w: F.linear(x, w), (0, 1), lambda w: w.T.clone()),
    "einsum": (lambda x, w: torch.einsum("nti,io->nto", x, w), (1, 0), lambda w: w),
    "einsum, turned": (lambda x, w: torch.einsum("oi,nti->nto", w, x), (0, 1), lambda w: w.T.clone()),
    "steps merged": (lambda x, w: (x.reshape(-1, 3) @ w).view(4, 2, 2), (1, 0), lambda w: w),
    "addmm": (lambda x, w: torch.addmm(w.new_zeros(2), x.flatten(0, 1), w).unflatten(0, (4, 2)), (1, 0), lambda w: w),
}


@sharings
@pytest.mark.parametrize("read, order, of", READINGS.values(), ids=READINGS)
def test_functional_code(read, order, of, sharing):
    """The factors stand in the order of the dimensions of the parameter."""

    def f(p, x):
        return (read(x, p["w"]).tanh() @ p["v"]).sin()

    first, last = nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 3, bias=False).double()
    module = Applied(lambda m, x: m["b"](m["a"](x).tanh()).sin(), a=first, b=last)
    given = {"layers.a.weight": W.T.clone(), "layers.b.weight": V.T.clone()}
    wanted = loop_kfac(module, F.mse_loss, weight_sharing=sharing)(given, X, Y)
    (b, a), (c, d) = wanted["layers.a.weight"], wanted["layers.b.weight"]
    found = kfac(f, F.mse_loss, weight_sharing=sharing, fisher="exact")({"w": of(W), "v": V}, X, Y)
    assert_factors(found, {"w": tuple((a, b)[1 - i] for i in order), "v": (d, c)})
    assert found["w"].shape == of(W).shape and found["w"].groups == ((0,), (1,))


# kfac and its relatives: their options, in chunks, under transforms of torch.func, and what they refuse

EXACT_REFUSED, DERIVED = 1e-9, 1e-7


NOT_LINEAR = {
    "exp(w) @ x": lambda p, x: x @ p["w"].exp(),
    "w * w": lambda p, x: x @ (p["w"] * p["w"]),
    "masked": lambda p, x: x @ p["w"].tril(),
    "low rank": lambda p, x: x @ (p["w"] @ p["w"].T),
}


class TestRefusals:
    x, y = Numbers(1)(4, 3), Numbers(2)(4, 3)

    @pytest.mark.parametrize(
        "make", [partial(kfac, fisher="exact"), partial(ekfac, fisher="exact"), kfra], ids=["exact", "ekfac", "kfra"]
    )
    def test_name_all_parameters_at_once(self, make):
        def f(p, x):
            return (x @ p["w"].exp()).tanh() @ p["fine"] @ p["v"].tril()

        params = {name: Numbers(i)(3, 3) for i, name in enumerate(("w", "fine", "v"))}
        with pytest.raises(ArgumentError, match=r"\['w'\]: .*; .*\['v'\]: .*'diagonal'.*'skip'") as error:
            make(f, F.mse_loss)(params, self.x, self.y)
        assert "fine" not in str(error.value)

    @pytest.mark.parametrize("f", NOT_LINEAR.values(), ids=NOT_LINEAR)
    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_or_have_the_diagonal_of_their_block(self, f, loss):
        args = {"w": Numbers(3)(3, 3)}, self.x, loss.target(Numbers(1), 4)
        wanted = diag_ggn(f, loss)(*args)["w"]
        for make in (partial(kfac, fisher="exact"), partial(ekfac, fisher="exact")):
            found = make(f, loss, unsupported="diagonal")(*args)["w"]
            assert_trees_close(found.dense(), wanted.flatten().diag(), EXACT_REFUSED)
            assert_trees_close(found.solve(found @ args[0]["w"] + args[0]["w"], 1.0), args[0]["w"], EXACT_REFUSED)
        drawn = kfac(f, loss, mc_samples=2, generator=seeded(), unsupported="diagonal")(*args)["w"]
        same = diag_ggn(f, loss, mc_samples=2, generator=seeded())(*args)["w"]
        assert_trees_close(drawn.dense(), same.flatten().diag(), EXACT_REFUSED)

    @pytest.mark.parametrize("over", ["outputs", "samples", "params"])
    def test_or_are_left_out(self, over):
        def f(p, x):
            return x @ p["w"].exp() @ p["v"]

        args = {"w": Numbers(3)(3, 3), "v": Numbers(2)(3, 3)}, self.x, self.y
        v = matrices(kfac(lambda v, x: f(args[0] | {"v": v}, x), F.mse_loss, fisher="exact")(args[0]["v"], *args[1:]))
        for unsupported in ("skip", "diagonal"):
            t = chunked(kfac(f, F.mse_loss, unsupported=unsupported, fisher="exact"), 2, over=over)
            found = t(*args)
            assert (found["w"] is None) == (unsupported == "skip")
            assert_trees_close(matrices(found["v"]), v, EXACT_REFUSED)
            named = reduced(t, lambda path, k: k.trace())(*args)
            assert (named["w"] is None) == (unsupported == "skip")
        with pytest.raises(ArgumentError, match="'w'"):
            chunked(kfac(f, F.mse_loss, fisher="exact"), 2, over=over)(*args)
        with pytest.raises(ArgumentError, match="'w'"):
            reduced(kfac(f, F.mse_loss, fisher="exact"), lambda path, k: k.trace())(*args)


# K-factors where they are exact (arXiv 2311.00636 and 2507.05127), draws that average to them, ekfac and kfra

TIGHT = 1e-9
ACTIVATIONS = [nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ReLU, nn.LeakyReLU, nn.Hardtanh]


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
    assert_trees_close(found, tuple(wanted), TIGHT, FLOOR)


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
            assert_trees_close(dense(make(f, loss, **options)(*args)), wanted, TIGHT)

    @sharings
    @pytest.mark.parametrize("n", [1, 4])
    def test_of_deep_linear_networks(self, sharing, n):
        f, args = arranged(deep_linear(), Numbers(4)(n, 2), LOSSES[1])
        wanted = dense_ggn(f, F.mse_loss)(*args)
        assert_trees_close(dense(kfac(f, F.mse_loss, weight_sharing=sharing, fisher="exact")(*args)), wanted, TIGHT)
        assert_trees_close(dense(kfra(f, F.mse_loss)(*args)), wanted, TIGHT)

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
            assert_trees_close(found[f"{name}.weight"].dense(), dense_ggn(joined, LOSSES[0])(both, *args[1:]), TIGHT)


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
                assert_trees_close(q.T @ q, torch.eye(len(q)).double(), TIGHT)
                turned = q.T @ a @ q
                assert_trees_close(turned, torch.diag(turned.diagonal()), TIGHT, FLOOR)
            assert k.groups == factors[name].groups and k.shape == params[name].shape
            sizes = [len(q) for q in k.factors]
            rows = columns.permute(0, *[1 + d for group in k.groups for d in group]).reshape(len(columns), *sizes)
            for i, q in enumerate(matrices(k), 1):
                rows = (rows.movedim(i, -1) @ q).movedim(-1, i)
            assert_trees_close(k.values, rows.square().sum(0), TIGHT, FLOOR)


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
        assert_trees_close(found, wanted, TIGHT, FLOOR)


class TestKfra:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_a_chain_of_layers(self, activation, loss):
        module = perceptron(activation)
        f, args = arranged(module, Numbers(4)(4, 2), loss)
        wanted = loop_kfra(module, loss)(*args)
        for t in (kfra(f, loss), kfra(composed(f, loss))):
            assert_trees_close({name: matrices(k) for name, k in t(*args).items()}, wanted, TIGHT)

    def test_a_weight_with_its_bias(self):
        module = perceptron(nn.Sigmoid)
        f, args = arranged(module, Numbers(4)(4, 2), LOSSES[1])
        found, apart = kfra(f, F.mse_loss, joint=True)(*args), kfra(f, F.mse_loss)(*args)
        for name in ("0", "4"):
            b, a = matrices(found[f"{name}.weight"])
            assert found[f"{name}.bias"] is None
            assert_trees_close((b, a[:-1, :-1]), matrices(apart[f"{name}.weight"]), TIGHT)
            assert_trees_close(a[-1, -1], torch.ones(()).double(), TIGHT)

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
        assert_trees_close(found[name].solve(p, damping=0.5), 2 * p, TIGHT)


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
