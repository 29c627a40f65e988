"""Errors of products: the call as it was written, what came, what was wanted, the fix."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import InvFuncError, ggnvp, hvp, linearize
from invfunc.errors import ArgumentError, ArgumentTypeError, ConvexityError, SampleAxisError, SplitError
from tests.strategies import Numbers

W, X, Y, Z = Numbers()(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5), Numbers(3)(5, 3)
P = {"w": W, "b": [Numbers(4)(3)]}
G = torch.Generator()


def model(params, x):
    return x @ params["w"] + params["b"][0]


def loss(params, x, y):
    return F.cross_entropy(model(params, x), y)


def normalised(params, x, y):
    return F.cross_entropy(F.batch_norm(model(params, x), None, None, training=True), y)


def penalised(params, x, y):
    return loss(params, x, y) + params["w"].square().sum()


def unknown(params, x):
    return model(params, x).exp().sum()


def bent(z, y):
    return z.sin().sum()


def distances(z, y):
    return (z - y).square().sum(1)


def sample(z, generator):
    return z.detach()


# fmt: off
MAKING = {
    "not callable": (lambda: hvp(3), ArgumentTypeError, "hvp(f): f is ... int ... function"),
    "a module": (lambda: ggnvp(nn.Linear(2, 2), F.mse_loss), ArgumentTypeError,
        "ggnvp(f) ... Linear ... functional(model)"),
    "a module, linearised": (lambda: linearize(nn.Linear(2, 2)), ArgumentTypeError,
        "linearize(f) ... Linear ... functional(model)"),
    "a tensor for a loss": (lambda: hvp(model, Y, blocks=True), ArgumentTypeError,
        "hvp(f, loss): loss is ... Tensor ... function"),
    "mc_samples = 0": (lambda: ggnvp(model, F.mse_loss, mc_samples=0, generator=G, fisher="mc"), ArgumentError,
        "ggnvp(mc_samples=0) ... at least 1"),
    "no generator": (lambda: ggnvp(model, F.mse_loss, mc_samples=1, fisher="mc"), ArgumentTypeError,
        "ggnvp(mc_samples=1 ... generator is missing ... torch.Generator"),
    "a sampler alone": (lambda: ggnvp(model, F.mse_loss, sample=sample), ArgumentError,
        "ggnvp(fisher='exact'): nothing is drawn ... fisher='mc'"),
    "no blocks": (lambda: hvp(model, F.mse_loss, modify="abs"), ArgumentError,
        "hvp(model, modify='abs') ... pass blocks=True"),
}

V = {"w": torch.ones_like(W), "b": [torch.ones_like(P["b"][0])]}
CALLS = {
    "shape": (hvp(loss), (P, V | {"w": W.T}, X, Y), ArgumentError,
        "hvp(loss)(params, v, x, y): v['w'] has shape (3, 4), but params['w'] has (4, 3)."),
    "shape of a block": (ggnvp(loss, blocks=True), (P, V, X, Y), ArgumentError,
        "ggnvp(loss, blocks=True)(params, V, x, y): V['w'] has shape (4, 3), but params['w'] has (4, 3), which is that "
        "of each vector behind axis 0."),
    "several numbers of vectors": (hvp(loss, blocks=True), (P, {"w": W[None], "b": [torch.ones(2, 3).double()]},
        X, Y), ArgumentError, "V['w'] has 1 vectors but V['b'][0] has 2"),
    "dtype": (ggnvp(model, F.cross_entropy), (P, V | {"b": [torch.ones(3)]}, X, Y), ArgumentTypeError,
        "ggnvp(model, cross_entropy)(params, v, x, target): v['b'][0] has dtype torch.float32, but params['b'][0] has "
        "torch.float64."),
    "integers": (ggnvp(loss, fisher="empirical"), (P, V | {"w": W.long()}, X, Y), ArgumentTypeError,
        "v['w'] has dtype torch.int64"),
    "no tensor": (hvp(loss), (P, V | {"b": [None]}, X, Y), ArgumentTypeError,
        "v['b'][0] is of type NoneType, but params['b'][0] is a tensor."),
    "device": (hvp(loss), (P, V | {"w": W.to("meta")}, X, Y), ArgumentError,
        "v['w'] is on meta, but params['w'] on cpu."),
    "a leaf is missing": (hvp(loss), (P, {"w": W}, X, Y), ArgumentError, "v has no v['b'][0]; ... tree ... params"),
    "a leaf too many": (hvp(loss), (P, V | {"c": W}, X, Y), ArgumentError, "v has an entry v['c'] too many;"),
    "a flat vector": (hvp(loss), (P, torch.ones(15), X, Y), ArgumentError, "v has no v['w']; ... tree"),
    "no vector": (hvp(loss), (P,), ArgumentError, "hvp(loss)(params, v): arguments are missing ... vector"),
    "nothing": (hvp(loss), (), ArgumentError, "arguments are missing ... vector"),
    "no target": (ggnvp(model, F.mse_loss), (P, V), ArgumentError,
        "ggnvp(model, mse_loss)(params, v): arguments are missing ... target last"),
    "no parameters": (hvp(loss), ({}, {}, X, Y), ArgumentError, "hvp(loss)(params, v, x, y): params has no tensors"),
    "integer parameters": (hvp(loss), (P | {"w": W.long()}, V, X, Y), ArgumentTypeError,
        "params['w'] has dtype torch.int64 ... floating-point"),
    "outputs for a loss": (hvp(model), (P, V, X), ArgumentError,
        "hvp(model)(params, v, x): f returned shape (5, 3), but a loss ... a scalar or [N]. ... give the loss too"),
    "a loss that is none": (hvp(model, lambda z, y: z), (P, V, X, Z), ArgumentError,
        "the loss returned shape (5, 3), but a loss"),
    "a number": (hvp(lambda p, x: 1.5), (P, V, X), ArgumentError, "object of type float, but a loss"),
    "an integer loss": (hvp(lambda p, x: model(p, x).argmax(1)), (P, V, X), ArgumentError, "torch.int64, but a loss"),
    "integer outputs": (ggnvp(lambda p, x: model(p, x).argmax(1), F.mse_loss), (P, V, X, Z), ArgumentError,
        "f returned a tensor of torch.int64, but outputs are floating-point tensors"),
    "no outputs": (ggnvp(lambda p, x: (), F.mse_loss), (P, V, X, Z), ArgumentError, "f returned no tensors"),
    "None for outputs": (ggnvp(lambda p, x: None, F.mse_loss), (P, V, X, Z), ArgumentError, "object of NoneType"),
    "a model that is split": (ggnvp(model), (P, V, X), ArgumentError, "shape (5, 3) ... looks like a model function"),
    "a loss of many": (ggnvp(model, lambda z, y: z.square()), (P, V, X, Z), ArgumentError,
        "the loss returned shape (5, 3), but a loss"),
    "no pair": (hvp(loss, has_aux=True), (P, V, X, Y), ArgumentError, "has_aux=True ... pair"),
    "no outputs found": (ggnvp(unknown), (P, V, X), SplitError,
        "ggnvp(unknown)(params, v, x): no outputs are found ... outputs(z)"),
    "a path around": (ggnvp(penalised, blocks=True), (P, {"w": W[None], "b": [W[:1]]}, X, Y), SplitError,
        "ggnvp(penalised, blocks=True)(params, V, x, y): a path ... goes around ... outputs(z)"),
    "a scalar Fisher": (ggnvp(unknown, fisher="empirical"), (P, V, X), SplitError,
        "ggnvp(unknown, fisher='empirical')(params, v, x): no outputs are found ... Or return the [N] losses"),
    "mixed for Fisher": (ggnvp(normalised, fisher="empirical"), (P, V, X, Y), SampleAxisError, "batch_norm"),
    "mixed by the loss": (ggnvp(model, lambda z, y: z.var(0).sum(), fisher="empirical"), (P, V, X, Z),
        SampleAxisError, "`var`"),
    "sizes": (ggnvp(model, F.cross_entropy, fisher="empirical"), (P, V, X, Y[:4]), ArgumentError,
        "ggnvp(model, cross_entropy, fisher='empirical')(params, v, x, target): x has 5 samples but target has 4"),
    "outputs along another axis": (ggnvp(lambda p, x: model(p, x).T, F.mse_loss, fisher="empirical"), (P, V, X, Z),
        ArgumentError, "f returned shape (3, 5) for N = 5 ... axis 0"),
    "in_dims": (ggnvp(model, F.mse_loss, in_dims=(0,)), (P, V, X, Z), ArgumentError, "in_dims=(0,) has 1 ... 2 batch"),
    "not convex": (ggnvp(model, bent), (P, V, X, Z), ConvexityError,
        "ggnvp(model, bent)(params, v, x, target) ... not convex in the outputs"),
    "no sampler": (ggnvp(model, distances, mc_samples=1, generator=G, fisher="mc"), (P, V, X, Z), ArgumentError,
        "ggnvp(model, distances, fisher='mc')(params, v, x, target) ... sample="),
    "a sampler and no loss": (ggnvp(loss, mc_samples=1, generator=G, sample=sample, fisher="mc"), (P, V, X, Y),
        ArgumentError, "sample= ... loss has to be given apart"),
    "a sampler and a scalar": (ggnvp(model, F.mse_loss, fisher="mc", generator=G, sample=sample), (P, V, X, Z),
        ArgumentError, "sample= ... [N] losses"),
    "linearised outputs": (linearize(lambda p, x: x > 0), (P, X), ArgumentError,
        "linearize(<lambda>)(p, x): f returned a tensor of torch.bool"),
}
# fmt: on


@pytest.mark.parametrize("make, kind, text", MAKING.values(), ids=MAKING)
def test_what_is_wrong_with_a_transform(make, kind, text):
    assert_told(make, kind, text)


@pytest.mark.parametrize("t, args, kind, text", CALLS.values(), ids=CALLS)
def test_what_is_wrong_with_a_call(t, args, kind, text):
    assert_told(lambda: t(*args), kind, text)


@pytest.mark.parametrize("name", [n for n, (t, *_) in CALLS.items() if not isinstance(t, type(linearize(model)))])
def test_what_is_wrong_with_a_linearisation(name):
    """The same is told, by the call that sees it first."""
    t, args, kind, text = CALLS[name]

    def call():
        t.linearize(args[0], *args[2:])(args[1])

    if len(args) > 1:
        said = re.sub(r"^\w+\(.*?\)\(.*?\)(: | \.\.\. )", "", text)
        assert_told(call, kind, said, of=r"\w+\(.*?\)\.linearize\(.*?\)(\(V\)|\(v\))?: ")


def assert_told(call, kind, text, of=r"\w+\(.*?\): "):
    pattern = ".*".join(re.escape(words) for words in text.split(" ... "))
    with pytest.raises(kind, match=pattern) as told:
        call()
    error, message = told.value, str(told.value)
    assert isinstance(error, InvFuncError)
    assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)
    opening = re.match(of, message)
    assert opening and message.count(opening.group()) == 1  # told once
    assert len(message) < 500 and "\n" not in message.strip()


class TestOfLinearisations:
    def test_of_vectors(self):
        _, jvp, vjp = linearize(model)(P, X)
        opening = r"linearize\(model\)\(params, x\)\[\d\]\(\w\): "
        assert_told(lambda: jvp(Z), ArgumentError, "linearize(model)(params, x)[1](v): v has no v['w']", opening)
        assert_told(lambda: vjp(Z.T), ArgumentError, "[2](c): c has shape (3, 5), but outputs has (5, 3).", opening)

    def test_a_tangent_of_forward_mode_is_refused(self):
        at = hvp(loss).linearize(P, X, Y)
        with torch.autograd.forward_ad.dual_level():
            v = {"w": torch.autograd.forward_ad.make_dual(W, W), "b": P["b"]}
            for call in (lambda: at(v), lambda: hvp(loss)(P, v, X, Y), lambda: hvp(loss)(v, P, X, Y)):
                with pytest.raises(ArgumentError, match="forward_ad"):
                    call()


class TestSaysWhatItIs:
    @pytest.mark.parametrize("aux", ["a string", None, {"t": [torch.ones(2), "x"]}], ids=repr)
    def test_aux_comes_last(self, aux):
        def with_aux(p, x, *, scale):
            return scale * model(p, x), aux

        for product in (hvp, ggnvp, partial(ggnvp, fisher="empirical")):
            wanted = product(lambda p, x: 2 * model(p, x), F.cross_entropy)(P, V, X, Y)
            found, told = product(with_aux, F.cross_entropy, has_aux=True)(P, V, X, Y, scale=2)
            assert torch.allclose(found["w"], wanted["w"]) and repr(told) == repr(aux)
            at, told = product(with_aux, F.cross_entropy, has_aux=True).linearize(P, X, Y, scale=2)
            assert torch.allclose(at(V)["w"], wanted["w"]) and repr(told) == repr(aux)
        assert repr(linearize(with_aux, has_aux=True)(P, X, scale=2)[3]) == repr(aux)
