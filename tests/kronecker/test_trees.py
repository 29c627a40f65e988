"""Of all parameters together: solves and determinants against dense matrices of each block, in any tree."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad

from invfunc import diag_ggn, eigenpairs, ekfac, functional, kfac, kronecker, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import Kronecker, kfra
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from invfunc.testing.strategies import models
from tests.kronecker.test_matrix import EXACT, small
from tests.laws import RTOL
from tests.strategies import Numbers

MADE = {
    "kfac": lambda f, **options: kfac(f, F.mse_loss, generator=torch.Generator().manual_seed(0), **options),
    "exact kfac": lambda f, **options: kfac(f, F.mse_loss, fisher="exact", **options),
    "ekfac": lambda f, **options: ekfac(f, F.mse_loss, fisher="exact", **options),
    "kfra": lambda f, **options: kfra(f, F.mse_loss, **options),
}
DAMPING = 0.3


def arranged(model, called="exact kfac", **options):
    """The factors of a model, and vectors for them."""
    made = MADE[called](model.f, unsupported="diagonal", **options)
    rand = Numbers(7)
    return made(model.params, model.x, Numbers(8)(model.n, 3)), tree.map_tensors(lambda p: rand(*p.shape), model.params)


def solved(K, *vs, damping=DAMPING):
    """By the dense matrix over the entries of some vectors, those of its last one behind each row of the first."""
    columns = [v.reshape(K.shape[0], -1) if len(vs) > 1 else v.reshape(-1, 1) for v in vs]
    v, dense = torch.cat(columns, 1), K.dense()
    x = torch.linalg.solve(dense + damping * torch.eye(len(dense)).to(dense), v.flatten()).reshape(v.shape)
    return [part.reshape(v.shape) for part, v in zip(x.split([c.shape[1] for c in columns], 1), vs, strict=True)]


@pytest.mark.quick
class TestSolve:
    @given(model=models(), called=st.sampled_from(["kfac", "exact kfac", "ekfac"]))
    def test_is_that_of_each_block(self, model, called, device, dtype):
        factors, v = arranged(model, called)
        found = kronecker.solve(*moved((factors, v), dtype, device), damping=DAMPING)
        each = zip(tree.tensors(found), tree.named_parts(factors, Kronecker)[0], tree.tensors(v), strict=True)
        for x, (_, K), part in each:
            assert_trees_close(x, solved(K, part)[0], RTOL[dtype])
        assert tree.flatten(found)[1] == tree.flatten(v)[1]

    @given(model=models(["perceptron", "convolution", "module"]), called=st.sampled_from(["exact kfac", "ekfac"]))
    def test_of_a_weight_with_its_bias_is_that_of_their_block(self, model, called, device, dtype):
        """Here each bias comes behind its weight."""
        factors, v = arranged(model, called, joint=True)
        found = dict(tree.named_leaves(kronecker.solve(*moved((factors, v), dtype, device), damping=DAMPING)))
        matrices, given = tree.named_parts(factors, Kronecker)[0], dict(tree.named_leaves(v))
        for (path, K), (after, bias) in zip(matrices, [*matrices[1:], ("", 0)], strict=True):
            paths = [] if K is None else [path, after] if bias is None else [path]
            wanted = [] if K is None else solved(K, *(given[p] for p in paths))
            assert_trees_close([found[p] for p in paths], wanted, RTOL[dtype])
        assert None in [K for _, K in matrices]


def two_layers(made, bias=True, **options):
    """The factors of a small perceptron, positive definite."""
    f, params = functional(nn.Sequential(nn.Linear(2, 3, bias), nn.Tanh(), nn.Linear(3, 2, bias)).double())
    rand = Numbers(2)
    params = {name: rand(*p.shape) for name, p in params.items()}
    return made(f, **options)(params, Numbers(3)(9, 2), Numbers(4)(9, 2))


class TestOthers:
    @given(model=models())
    def test_logdet_is_that_of_all_blocks(self, model, device, dtype):
        factors, _ = arranged(model)
        dense = torch.block_diag(*(K.dense() for _, K in tree.named_parts(factors, Kronecker)[0]))
        wanted = (dense + DAMPING * torch.eye(len(dense)).double()).logdet()
        for found in (moved(factors, dtype, device), kronecker.eigen(moved(factors, dtype, device))):
            assert_trees_close(kronecker.logdet(found, DAMPING), wanted, RTOL[dtype], 1)

    def test_logdet_of_a_weight_with_its_bias_counts_both_once(self):
        factors = two_layers(MADE["exact kfac"], joint=True)
        wanted = factors["0.weight"].logdet(DAMPING) + factors["2.weight"].logdet(DAMPING)
        assert_trees_close(kronecker.logdet(factors, DAMPING), wanted, EXACT)

    @pytest.mark.parametrize("made", [diag_ggn, partial(kfac, fisher="exact"), eigenpairs])
    @pytest.mark.parametrize("scale", [1.0, 6.0])
    def test_evidence_of_a_linear_model_is_that_of_a_gaussian(self, made, scale):
        """At the best parameters, where its derivative is that of the exact one, too; x has orthogonal columns."""
        x, eye = torch.linalg.qr(Numbers(0)(6, 3)).Q * Numbers(1)(3), torch.eye(6).double()
        y, prior = Numbers(2)(6, 1), torch.tensor(0.5).double()
        w = torch.linalg.solve(x.T @ x + prior * eye[:3, :3], x.T @ y)

        def loss(z, y):
            return F.gaussian_nll_loss(z, y, torch.ones_like(y), full=True, reduction="sum") / scale

        def exact(prior):
            return torch.distributions.MultivariateNormal(0 * y[:, 0], eye + x @ x.T / prior).log_prob(y[:, 0])

        factors = made(lambda w, x: x @ w, loss)(w, x, y)
        found = partial(kronecker.log_evidence, factors, w, loss(x @ w, y), scale=scale)
        assert_trees_close((found(prior), grad(found)(prior)), (exact(prior), grad(exact)(prior)), EXACT)
        assert_trees_close(found(0.5), exact(prior), EXACT)


SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (2, 3), "2.bias": (2,)}


ONE = {"w": small("dense", "dense")}
V = {"w": torch.ones(2, 3)}
JOINT = two_layers(MADE["exact kfac"], joint=True)
FULL = {name: torch.ones(s) for name, s in SHAPES.items()}
RENAMED = {name.replace("0.", "first."): K for name, K in JOINT.items()}
# fmt: off
WRONG = {
    "another tree": (lambda: kronecker.solve(ONE, {"v": V["w"]}), ArgumentError, "factors['w'] ... v has none"),
    "more vectors": (lambda: kronecker.solve(ONE, V | {"b": V["w"]}), ArgumentError, "v['b'] ... factors has none"),
    "no vector": (lambda: kronecker.solve(ONE, {"w": None}), ArgumentTypeError, "v['w'] ... NoneType ... tensor"),
    "another shape": (lambda: kronecker.solve(ONE, {"w": torch.ones(3, 2)}), ArgumentError, "v['w'] ... [3, 2] ... 3]"),
    "no matrix": (lambda: kronecker.solve({"w": 3.0}, V), ArgumentTypeError, "factors['w'] ... float ... Kronecker"),
    "no matrices": (lambda: kronecker.logdet({"w": None}), ArgumentError, "logdet ... no Kronecker"),
    "a bias of other samples": (lambda: kronecker.solve(JOINT, FULL | {"2.bias": torch.ones(3, 2)}, 1.0), ArgumentError,
        "v['2.bias'] ... [3, 2]"),
    "a joint weight, renamed": (lambda: kronecker.solve(RENAMED, {n: torch.ones(3, 2) for n in RENAMED}, 1.0),
        ArgumentError, "factors['first.weight'] ... no entry for params['0.bias']"),
    "a joint weight without its bias": (lambda: kronecker.solve({"0.weight": JOINT["0.weight"]}, {
        "0.weight": torch.ones(3, 2)}, 1.0), ArgumentError, "no entry for params['0.bias']"),
    "negative damping": (lambda: kronecker.solve(ONE, V, -1.0), ArgumentError, "damping is -1.0"),
    "negative damping of logdet": (lambda: kronecker.logdet(ONE, -1.0), ArgumentError, "damping is -1.0"),
    "no prior": (lambda: kronecker.log_evidence(ONE, V, V["w"], 0), ArgumentError, "prior_precision ... above"),
    "singular": (lambda: kronecker.logdet(SINGULAR), ArgumentError, "factors[0] of params['w'] ... singular"),
    "singular, solved": (lambda: kronecker.solve(SINGULAR, {"w": torch.ones(2, 1)}), ArgumentError, "params['w']"),
}
# fmt: on
SINGULAR = kfac(lambda p, x: x @ p["w"], F.mse_loss, fisher="exact")(
    {"w": torch.ones(2, 1)}, torch.ones(3, 2), torch.ones(3, 1)
)


@pytest.mark.parametrize(("wrong", "kind", "text"), WRONG.values(), ids=WRONG)
def test_errors_name_the_place(wrong, kind, text):
    with pytest.raises(kind, match=".*".join(map(re.escape, text.split(" ... ")))):
        wrong()
