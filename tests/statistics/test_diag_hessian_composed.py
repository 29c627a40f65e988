"""diag_hessian, of all and of each sample: options, chunks, transforms of torch.func around it, what it refuses."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from invfunc import diag_hessian
from invfunc.errors import ArgumentTypeError, InvFuncError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian, dense_diag_hessian
from tests.laws import composed
from tests.networks import total
from tests.strategies import Numbers

EXACT, DERIVED = 1e-8, 1e-7
KINDS = {
    "whole": (diag_hessian, dense_diag_hessian),
    "each": (partial(diag_hessian, per_sample=True), dense_batch_diag_hessian),
}
kinds = pytest.mark.parametrize("make, dense", KINDS.values(), ids=KINDS)


def bent(z, y):
    """Neither convex nor known."""
    return (z.sin() * (z - y)).sum(1).mean()


def standardised(x, dims):
    x = x - x.mean(dims, keepdim=True)
    return x / (x.square().mean(dims, keepdim=True) + 0.1).sqrt()


SQUARE = Numbers(9)(4, 4)
WRITTEN_OUT = {
    "layer_norm": (lambda h, w: F.layer_norm(h, (4,), w, None, 0.1), lambda h, w: standardised(h, 1) * w),
    "group_norm": (
        lambda h, w: F.group_norm(h, 2, w, None, 0.1),
        lambda h, w: standardised(h.unflatten(1, (2, 2)), 2).flatten(1) * w,
    ),
    "rms_norm": (
        lambda h, w: F.rms_norm(h, (4,), w, 0.1),
        lambda h, w: h / (h.square().mean(1, keepdim=True) + 0.1).sqrt() * w,
    ),
    "instance_norm": (
        lambda h, w: F.instance_norm(h.view(-1, 2, 2), weight=w[:2], eps=0.1).flatten(1),
        lambda h, w: (standardised(h.view(-1, 2, 2), 2) * w[:2, None]).flatten(1),
    ),
    "weight_norm": (
        lambda h, w: h @ torch._weight_norm(SQUARE * w, w[:, None], 0),
        lambda h, w: h @ ((u := SQUARE * w) * (w[:, None] / u.norm(dim=1, keepdim=True))),
    ),
    "softmax": (lambda h, w: (h * w).softmax(1), lambda h, w: (e := (h * w).exp()) / e.sum(1, keepdim=True)),
}
"""Torch's own, some of which have wrong derivatives of higher order or under vmap (2.13), and what they stand for."""


@kinds
class TestDerivatives:
    @pytest.mark.parametrize("native, written", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
    def test_of_norms(self, make, dense, native, written):
        rand = Numbers(3)
        params, x, y = {"v": rand(2, 4), "w": rand(4)}, rand(3, 2), rand(3, 4)

        def of(norm):
            return lambda p, x: norm(x @ p["v"], p["w"]).tanh()

        wanted = dense(of(written), bent)(params, x, y)
        assert_trees_close(make(of(native), bent)(params, x, y), wanted, EXACT, 1e-3)
        slope = grad(lambda p: total(dense(of(written), bent)(p, x, y)))(params)
        found = grad(lambda p: total(make(of(native), bent)(p, x, y)))(params)
        assert_trees_close(found, slope, DERIVED, 1e-3)
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        found = torch.autograd.grad(total(make(of(native), bent)(leaves, x, y)), list(leaves.values()))
        assert_trees_close(dict(zip(leaves, found, strict=True)), slope, DERIVED, 1e-3)


@settings(max_examples=10)
@given(st.permutations(range(3)), st.integers(0, 1), st.sampled_from(list(KINDS)))
def test_samples_along_other_axes(order, other, kind):
    def f(p, x):
        return (x @ p).sin().unflatten(1, (2, 3))

    def loss(z, y):
        return (z - y).pow(4).mean()

    make, dense = KINDS[kind]
    w, x, y = Numbers()(2, 6), Numbers(1)(4, 2), Numbers(2)(4, 2, 3)
    args, at, back = (w, x.movedim(0, other), y.permute(order)), order.index(0), [order.index(d) for d in range(3)]
    wanted = dense(f, loss)(w, x, y)

    def turned(p, x):
        return f(p, x.movedim(other, 0)).permute(order)

    assert_trees_close(make(turned, loss, in_dims=(other, at), out_dims=at)(*args), wanted, EXACT)
    alone = make(lambda p, x, y: loss(turned(p, x).permute(back), y.permute(back)), in_dims=(other, at))
    assert_trees_close(alone(*args), wanted, EXACT)


@kinds
class TestArguments:
    args = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)

    @pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0), (-3,)], ids=str)
    def test_parameters_at_argnums(self, make, dense, argnums):
        _, x, y = self.args
        a, b = {"w": self.args[0]}, [Numbers(3)(2), Numbers(4)(2)]

        def f(a, b, x):
            return (x @ a["w"]).tanh() * b[0].exp() + b[1]

        wanted = argnums if isinstance(argnums, tuple) else (argnums,)
        fixed = tuple(None for i in range(2) if i not in [k % 3 for k in wanted])
        both = dense(lambda pair, x: f(pair[0], pair[1], x), bent)((a, b), x, y)
        picked = tuple(both[k % 3] for k in wanted)
        found = make(f, bent, argnums=argnums, in_dims=(*fixed, 0, 0))(a, b, x, y)
        assert_trees_close(found, picked if isinstance(argnums, tuple) else picked[0], EXACT)

    @pytest.mark.parametrize("aux", ["a string", None, {"t": [torch.ones(2), "x"]}], ids=repr)
    def test_aux_and_keyword_arguments(self, make, dense, aux):
        def f(w, x, *, scale):
            return (x @ w * scale).tanh(), aux

        wanted = dense(lambda w, x: (2 * x @ w).tanh(), bent)(*self.args)
        result, found = make(f, bent, has_aux=True)(*self.args, scale=2)
        assert_trees_close(result, wanted, EXACT)
        assert repr(found) == repr(aux)
        alone = make(lambda w, x, y, *, scale: (bent((scale * x @ w).tanh(), y), aux), has_aux=True)
        result, found = alone(*self.args, scale=2)
        assert_trees_close(result, wanted, EXACT)
        assert repr(found) == repr(aux)

    def test_parameters_without_influence(self, make, dense):
        w, x, y = self.args
        found = make(lambda p, x: (x @ p["w"]).sin(), bent)({"w": w, "none": torch.ones(2).double()}, x, y)
        assert not found["none"].any()
        assert_trees_close(found["w"], dense(lambda w, x: (x @ w).sin(), bent)(w, x, y), EXACT)


def normalised(w, x):
    return F.batch_norm(x @ w, None, None, training=True)


@kinds
class TestRefusals:
    args = TestArguments.args

    def test_what_is_no_function(self, make, dense):
        with pytest.raises(ArgumentTypeError, match=r"diag_hessian\(f\): f is of type int"):
            make(3)
        with pytest.raises(ArgumentTypeError, match=r"functional\(model\)"):
            make(torch.nn.Linear(2, 2))
        with pytest.raises(ArgumentTypeError, match="loss is of type str"):
            make(F.linear, "mse")

    def test_integer_parameters(self, make, dense):
        with pytest.raises(InvFuncError, match=r"\['i'\]"):
            make(lambda p, x: x @ p["w"], bent)({"w": self.args[0], "i": torch.arange(3)}, *self.args[1:])

    def test_a_result_that_is_no_loss(self, make, dense):
        with pytest.raises(InvFuncError, match=r"\(4, 2\)"):
            make(lambda w, x: x @ w)(*self.args[:2])

    def test_samples_that_are_mixed(self, make, dense):
        for functions in ((normalised, bent), (composed(normalised, bent),)):
            if make is diag_hessian:  # of all samples it is defined
                assert_trees_close(make(*functions)(*self.args), dense(*functions)(*self.args), 1e-9)
                continue
            with pytest.raises(SampleAxisError, match="batch_norm"):
                make(*functions)(*self.args)

    def test_samples_that_are_not_there(self, make, dense):
        with pytest.raises(InvFuncError, match="7"):
            make(lambda w, x: x @ w, bent, samples=[7])(*self.args)


SPECTRA = {
    "abs": lambda z: torch.fft.fft(z).abs(),
    "exp": lambda z: torch.complex(z, z.cos()).exp().real,
    "square": lambda z: torch.view_as_real(torch.fft.rfft(z).square()).sum(-1),
    "product": lambda z: (torch.fft.fft(z) * torch.fft.fft(z.sin()).conj()).imag,
}


@kinds
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_what_bends_complex_numbers_is_part_of_it(make, dense, spectrum):
    params = {"w": Numbers()(3, 3), "v": Numbers(1)(1)}
    x = Numbers(2)(4, 3)
    y = spectrum(x.cos())

    def f(p, x):
        return spectrum((x @ p["w"]).tanh()) * p["v"]

    for loss in (F.mse_loss, bent):
        assert_trees_close(make(f, loss)(params, x, y), dense(f, loss)(params, x, y), EXACT)
