"""Common slips in a call: each gets an error that says what to write."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import batch_grad, batch_l2_grad, chunked, diag_ggn, functional, ggnvp, hvp, outputs
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

P, X, Y = {"w": Numbers()(3, 2)}, Numbers(1)(4, 3), Numbers(2).below(2, 4)
NET = nn.Linear(3, 2).double()
G, Q = functional(NET)


def model(params, x):
    return x @ params["w"]


def loss(params, x, y):
    return F.cross_entropy(model(params, x), y)


def of_module(params, x, y):
    return F.cross_entropy(G(params, x), y)


def scaled(a, w, x):
    return (x @ w * a.sum()).square().sum(1)


# fmt: off
SLIPS = {
    "forgotten target": (lambda: diag_ggn(model, F.cross_entropy)(P, X),
        "diag_ggn(model, cross_entropy)(params, target): the target is missing. It is called as (params, x, target)."),
    "forgotten target of a product": (lambda: ggnvp(model, F.cross_entropy)(P, P, X), "the target is missing"),
    "target by keyword": (lambda: diag_ggn(model, F.cross_entropy)(P, X, target=Y),
        "target is passed by keyword, but has to be the last positional argument ... (params, x, target)"),
    "a list of arguments": (lambda: batch_grad(loss)(P, [X, Y]),
        "x is one list of 2, which are arguments of their own. It is called as (params, x, y)."),
    "a list of arguments and target": (lambda: diag_ggn(model, F.cross_entropy)(P, [X, Y]),
        "target is one list of 2, which are arguments of their own. It is called as (params, x, target)."),
    "a target without a loss": (lambda: batch_grad(model)(P, X, Y),
        "f takes (params, x), and got 3 positional arguments. If the last one is a target, give the loss"),
    "a keyword that f does not have": (lambda: batch_grad(loss)(P, X, target=Y),
        "f takes (params, x, y), and got 2 positional arguments and target=."),
    "an option at the call": (lambda: diag_ggn(model, F.cross_entropy)(P, X, Y, generator=torch.Generator()),
        "and got 2 positional arguments and generator=. What is an option of the transform is given where it is made"),
    "too few": (lambda: hvp(loss)(P, P, X), "f takes (params, x, y), and got 2 positional arguments"),
    "arrays": (lambda: batch_grad(loss)(P, X.numpy(), Y.numpy()), "x is a numpy array ... torch.from_numpy(x)"),
    "an array in a tree": (lambda: batch_grad(lambda params, d: model(params, d["x"]).sum(1))(P, {"x": X.numpy()}),
        "d['x'] is a numpy array ... torch.from_numpy(d['x'])"),
    "a list of parameters": (lambda: batch_grad(of_module)(list(NET.parameters()), X, Y),
        "params is of type list, but has to be the dict ... dict(model.named_parameters())"),
    "a generator": (lambda: batch_grad(of_module)(NET.parameters(), X, Y),
        "params is of type generator, but parameters are tensors ... dict(model.named_parameters())"),
    "a module for parameters": (lambda: batch_grad(of_module)(NET, X, Y),
        "params is of type Linear ... f, params = functional(model)"),
    "the class of a loss": (lambda: diag_ggn(model, nn.CrossEntropyLoss), "is the class CrossEntropyLoss ... Loss()"),
    "the class, of a product": (lambda: ggnvp(model, nn.MSELoss), "loss is the class MSELoss ... MSELoss()"),
    "the class of a model": (lambda: batch_grad(nn.Linear), "f is the class Linear ... functional(Linear(...))"),
    "swapped": (lambda: diag_ggn(F.cross_entropy, model), "diag_ggn(cross_entropy, model): f is a loss, but the model"),
    "swapped, a module": (lambda: ggnvp(nn.MSELoss(), G), "f is a loss, but the model comes first: ggnvp(f, loss)"),
    "a model for a loss": (lambda: diag_ggn(model, G), "loss is a model, functional(Linear)"),
}
SIZES = {
    "of two": (lambda: batch_grad(scaled, argnums=1)(torch.ones(3), torch.ones(3, 2), X.float()),
        "a has 3 samples but x has 4 ... in_dims=(0, None) to hold x fixed, or in_dims=(None, 0) to hold a fixed."),
    "of three": (lambda: batch_grad(lambda p, a, b, c: scaled(a, p, b))(torch.ones(3, 2), torch.ones(7), X, X),
        "a has 7 samples but b has 4 ... pass in_dims=(None, 0, 0) to hold a fixed."),
    "data before the parameters": (lambda: batch_grad(scaled)(X, P, X), "argument 2, a dict ... parameters come first"),
    "in one tree": (lambda: batch_grad(lambda p, d: d)(P, {"a": X, "b": X[:2]}), "d['a'] has 4 samples but d['b'] has"),
}
# fmt: on


def matching(text):
    return ".*".join(re.escape(part) for part in text.split(" ... "))


@pytest.mark.quick
@pytest.mark.parametrize("slip, text", SLIPS.values(), ids=SLIPS)
def test_a_slip_in_a_call(slip, text):
    with pytest.raises(ArgumentTypeError, match=matching(text)):
        slip()


@pytest.mark.quick
@pytest.mark.parametrize("slip, text", SIZES.values(), ids=SIZES)
def test_sizes_that_differ(slip, text):
    with pytest.raises(ArgumentError, match=matching(text)):
        slip()


@pytest.mark.quick
def test_the_ways_out_that_sizes_name_are_ones():
    a, w, x = torch.ones(3).double(), Numbers()(3, 2), X
    assert batch_grad(scaled, argnums=1, in_dims=(None, 0))(a, w, x).shape == (4, 3, 2)


@pytest.mark.quick
def test_errors_of_f_that_got_the_data_before_the_parameters_have_a_note():
    with pytest.raises(Exception) as caught:  # whatever f makes of it
        batch_grad(lambda x, params: x @ params)(X, {"w": X})
    assert "parameters come first" in caught.value.__notes__[0]
    with pytest.raises(Exception) as caught:
        batch_grad(lambda x, params: model(params, x), argnums=1)(X[:, :2], P)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.quick
def test_type_errors_of_the_function_pass_through():
    def broken(params, x):
        raise TypeError("mine")

    for call in (lambda: batch_grad(broken)(P, X), lambda: hvp(broken)(P, P, X)):
        with pytest.raises(TypeError, match="^mine$") as caught:
            call()
        assert caught.value.__cause__ is None


@pytest.mark.quick
@pytest.mark.parametrize("chosen", [slice(1, 3), slice(None, None, -2), range(1, 3)], ids=str)
def test_samples_by_slices(chosen):
    places = list(range(4)[chosen]) if isinstance(chosen, slice) else list(chosen)
    expected = batch_grad(loss, samples=places)(P, X, Y)
    assert_trees_close(batch_grad(loss, samples=chosen)(P, X, Y), expected, 0.0)


@pytest.mark.quick
def test_chunks_of_a_scalar_loss():
    p, x, y = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)

    def in_chunks(f):
        return chunked(batch_l2_grad(f), 2, over="samples")(p, x, y)

    with pytest.raises(SampleAxisError, match=r"neither the mean nor the sum.*Return the \[N\] losses"):
        in_chunks(lambda p, x, y: (x @ p - y).square().mean() / x.sum())
    wanted = batch_l2_grad(lambda p, x, y: (x @ p - y).square().mean())(p, x, y)
    assert_trees_close(in_chunks(lambda p, x, y: (x @ p - y).square().mean()), wanted, 1e-9)
    assert_trees_close(in_chunks(lambda p, x, y: F.mse_loss(x @ p, y)), wanted, 1e-9)
    assert_trees_close(in_chunks(lambda p, x, y: (outputs(x @ p) - y).square().mean()), wanted, 1e-9)
    assert_trees_close(in_chunks(lambda p, x, y: (x @ p - y).square().mean(1) / 4), wanted, 1e-9)


@pytest.mark.quick
def test_scripted_parts_are_right():
    p, x = Numbers()(3, 2), Numbers(1)(4, 3)
    part = torch.jit.trace(nn.Tanh(), x @ p)
    wanted = batch_grad(lambda p, x: (x @ p).tanh().mean())(p, x)
    for f in (lambda p, x: part(x @ p).mean(), lambda p, x: part(x @ p).mean(1) / 4):
        assert_trees_close(batch_grad(f)(p, x), wanted, 1e-9)


@pytest.mark.quick
def test_shapes_of_samples_that_do_not_meet_are_told():
    p, x, y = Numbers()(3, 1), Numbers(1)(4, 3), Numbers(2)(4)
    with pytest.raises(
        SampleAxisError, match=r"along axis 0 of a tensor \[4, 1\] with .* along axis 0 of a tensor \[4\]"
    ):
        batch_grad(lambda p, x, y: (x @ p - y).square().mean())(p, x, y)
    batch_grad(lambda p, x, y: ((x @ p)[:, 0] - y).square().mean())(p, x, y)
