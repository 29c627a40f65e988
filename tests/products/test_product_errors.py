"""Errors of products: the call as it was written, what came, what was wanted, the fix."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from invfunc import ggnvp, hvp, linearize
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError, SplitError
from tests.evaluation.test_errors import assert_told
from tests.strategies import Numbers

W, X, Y, Z = Numbers()(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5), Numbers(3)(5, 3)
P = {"w": W, "b": [Numbers(4)(3)]}
G = torch.Generator()


def model(params, x):
    return x @ params["w"] + params["b"][0]


def loss(params, x, y):
    return F.cross_entropy(model(params, x), y)


def penalised(params, x, y):
    return loss(params, x, y) + params["w"].square().sum()


def unknown(params, x):
    return model(params, x).exp().sum()


def distances(z, y):
    return (z - y).square().sum(1)


def sample(z, generator):
    return z.detach()


# fmt: off
MAKING = {
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
    "no vector": (hvp(loss), (P,), ArgumentError, "hvp(loss)(params, v): arguments are missing ... vector"),
    "no target": (ggnvp(model, F.mse_loss), (P, V), ArgumentError,
        "ggnvp(model, mse_loss)(params, v): arguments are missing ... target last"),
    "outputs for a loss": (hvp(model), (P, V, X), ArgumentError,
        "hvp(model)(params, v, x): f returned shape (5, 3), but a loss ... a scalar or [N]. ... give the loss too"),
    "no outputs found": (ggnvp(unknown), (P, V, X), SplitError,
        "ggnvp(unknown)(params, v, x): no outputs are found ... outputs(z)"),
    "a path around": (ggnvp(penalised, blocks=True), (P, {"w": W[None], "b": [W[:1]]}, X, Y), SplitError,
        "ggnvp(penalised, blocks=True)(params, V, x, y): a path ... goes around ... outputs(z)"),
    "a scalar Fisher": (ggnvp(unknown, fisher="empirical"), (P, V, X), SplitError,
        "ggnvp(unknown, fisher='empirical')(params, v, x): no outputs are found ... Or return the [N] losses"),
    "mixed by the loss": (ggnvp(model, lambda z, y: z.var(0).sum(), fisher="empirical"), (P, V, X, Z),
        SampleAxisError, "`var`"),
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
OPENING = r"\w+\(.*?\): "


@pytest.mark.parametrize("make, kind, text", MAKING.values(), ids=MAKING)
def test_what_is_wrong_with_a_transform(make, kind, text):
    assert_told(make, kind, text, OPENING)


@pytest.mark.parametrize("t, args, kind, text", CALLS.values(), ids=CALLS)
def test_what_is_wrong_with_a_call(t, args, kind, text):
    assert_told(lambda: t(*args), kind, text, OPENING)


@pytest.mark.parametrize("name", [n for n, (t, *_) in CALLS.items() if not isinstance(t, type(linearize(model)))])
def test_what_is_wrong_with_a_linearisation(name):
    """The same is told, by the call that sees it first."""
    t, args, kind, text = CALLS[name]

    def call():
        t.linearize(args[0], *args[2:])(args[1])

    if len(args) > 1:
        said = re.sub(r"^\w+\(.*?\)\(.*?\)(: | \.\.\. )", "", text)
        assert_told(call, kind, said, r"\w+\(.*?\)\.linearize\(.*?\)(\(V\)|\(v\))?: ")


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
