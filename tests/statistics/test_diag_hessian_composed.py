"""diag_hessian and batch_diag_hessian: options, chunks, transforms of torch.func around them, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from invfunc import batch_diag_hessian, chunked, diag_hessian, functional, outputs, tree
from invfunc.errors import ArgumentTypeError, InvFuncError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian, dense_diag_hessian
from invfunc.testing.laws.rows import in_blocks
from invfunc.testing.models import moved
from tests.laws import composed
from tests.networks import LOSSES, network, total
from tests.strategies import Numbers

EXACT, DERIVED = 1e-8, 1e-7
CALLED = ["perceptron", "convolution", "tied", "derived"]
KINDS = {"whole": (diag_hessian, dense_diag_hessian), "each": (batch_diag_hessian, dense_batch_diag_hessian)}
kinds = pytest.mark.parametrize("make, dense", KINDS.values(), ids=KINDS)


def bent(z, y):
    """Neither convex nor known."""
    return (z.sin() * (z - y)).sum(1).mean()


def arranged(called, n=4):
    net = network(called, n)
    return net.f, (net.params, net.x, LOSSES[1].target(Numbers(1), n))


@kinds
@pytest.mark.parametrize("called", CALLED)
class TestChunks:
    @pytest.mark.parametrize("axis", ["outputs", "samples", "params"])
    @pytest.mark.parametrize("n", [1, 3])
    def test_over_any_axis(self, make, dense, called, axis, n):
        f, args = arranged(called)
        wanted = dense(f, bent)(*args)
        t = make(f, bent)
        assert {"samples", "params"} <= set(t.axes)
        if axis in t.axes:
            assert_trees_close(chunked(t, n, over=axis)(*args), wanted, EXACT)
            assert_trees_close(in_blocks(chunked(t, n, over=axis))(*args), wanted, EXACT)

    def test_over_two_axes_and_of_some_samples(self, make, dense, called):
        f, args = arranged(called)
        each, chosen = dense_batch_diag_hessian(f, bent)(*args), [2, 0, 0, -1]
        picked = tree.map_leaves(lambda d: d[chosen] if make is batch_diag_hessian else d[chosen].sum(0), each)
        t = make(f, bent, samples=chosen)
        for found in (t, in_blocks(t), chunked(t, 2, over="samples"), chunked(t, 2, over="params")):
            assert_trees_close(found(*args), picked, EXACT)
        both = chunked(chunked(t, 2, over="samples"), chunk_size=1, over="params")
        assert_trees_close(both(*args), picked, EXACT)

    def test_of_a_loss_function_over_samples(self, make, dense, called):
        """Its known loss runs once on all outputs, so that the mean keeps its scale."""
        f, args = arranged(called)
        t = chunked(make(composed(f, F.mse_loss)), 3, over="samples")
        assert_trees_close(t(*args), dense(f, F.mse_loss)(*args), EXACT)


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

    @pytest.mark.parametrize("called", CALLED)
    def test_by_torch_func(self, make, dense, called):
        f, (params, x, y) = arranged(called, 2)
        found, wanted = (grad(lambda p, t=t: total(t(f, bent)(p, x, y)))(params) for t in (make, dense))
        assert_trees_close(found, wanted, DERIVED, 1e-3)

    @pytest.mark.parametrize("called", CALLED)
    def test_by_autograd(self, make, dense, called):
        f, (params, x, y) = arranged(called, 2)
        slopes = []
        for t in (make, dense):
            p, given = tree.map_leaves(lambda leaf: leaf.clone().requires_grad_(), (params, x))
            leaves = tree.leaves((p, given))
            slopes.append(torch.autograd.grad(total(t(f, bent)(p, given, y)), leaves, materialize_grads=True))
            assert all(leaf.grad is None for leaf in leaves)
        assert_trees_close(slopes[0], slopes[1], DERIVED, 1e-3)

    def test_forward_mode(self, make, dense):
        f, (params, x, y) = arranged("perceptron", 2)
        along = tree.map_leaves(lambda p: Numbers(3)(*p.shape), params)
        found, wanted = (jvp(lambda p, t=t: total(t(f, bent)(p, x, y)), (params,), (along,))[1] for t in (make, dense))
        assert_trees_close(found, wanted, DERIVED)

    @pytest.mark.parametrize("called", CALLED)
    def test_under_vmap_over_parameters(self, make, dense, called):
        f, (params, x, y) = arranged(called, 2)
        several = [tree.map_leaves(lambda p, k=k: p + 0.1 * k, params) for k in range(2)]
        stacked = tree.map_leaves(lambda *leaves: torch.stack(leaves), *several)
        wanted = tree.map_leaves(lambda *d: torch.stack(d), *(dense(f, bent)(p, x, y) for p in several))
        for t in (make(f, bent), make(composed(f, lambda z, y: bent(outputs(z), y)))):
            assert_trees_close(vmap(t, in_dims=(0, None, None))(stacked, x, y), wanted, EXACT)


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

    def test_of_what_is_linear_it_is_zero(self, make, dense):
        found = make(lambda w, x: x @ w, lambda z, y: (z * y).sum())(*self.args)
        assert_trees_close(found, torch.zeros(4, 3, 2)[: len(found)] if found.ndim == 3 else torch.zeros(3, 2), EXACT)

    def test_float32(self, make, dense):
        net = network("convolution", 4)
        args = net.params, net.x, Numbers(1)(4, 3)
        found = make(net.f, bent)(*moved(args, torch.float32, torch.device("cpu")))
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(found))
        assert_trees_close(found, dense(net.f, bent)(*args), 1e-4)

    def test_no_grad_changes_nothing(self, make, dense):
        f, args = arranged("perceptron")
        with torch.no_grad():
            found = make(f, bent)(*args)
        assert_trees_close(found, dense(f, bent)(*args), EXACT)
        assert not any(leaf.requires_grad for leaf in tree.leaves(found))

    def test_the_function_draws_what_one_call_draws(self, make, dense):
        """Dropout in train mode: the numbers are those of one call, and the global generator goes on as after it."""
        f, params = functional(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)).double())
        _, x, y = self.args
        torch.manual_seed(0)
        kept = f(params, x).detach() != 0
        after = torch.get_rng_state()

        def fixed(p, x):
            return F.linear(x, p["0.weight"], p["0.bias"]) * kept * 2

        for t in (make(f, bent), make(composed(f, bent))):
            torch.manual_seed(0)
            assert_trees_close(t(params, x, y), dense(fixed, bent)(params, x, y), EXACT)
            assert torch.equal(torch.get_rng_state(), after)

    def test_says_what_it_is(self, make, dense):
        name = make.__name__
        assert repr(make(F.linear, F.mse_loss)) == f"{name}(linear, mse_loss)"
        assert repr(make(F.linear)) == f"{name}(linear)"


def normalised(w, x):
    return F.batch_norm(x @ w, None, None, training=True)


@kinds
class TestRefusals:
    args = TestArguments.args

    def test_what_is_no_function(self, make, dense):
        name = make.__name__
        with pytest.raises(ArgumentTypeError, match=rf"{name}\(f\): f is of type int"):
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
