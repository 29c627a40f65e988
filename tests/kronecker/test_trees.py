"""Of all parameters together: solves and determinants against dense matrices of each block, in any tree."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jvp, vmap

from invfunc import diag_ggn, eigenpairs, ekfac, functional, kfac, kronecker, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import Kronecker, LowRank, kfra
from invfunc.products.eigenpairs import Eigenpairs
from invfunc.spectra import SpectralDensity
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from invfunc.testing.strategies import models
from tests.kronecker.test_matrix import EXACT, eye, matrix, small, split
from tests.laws import RTOL
from tests.networks import total
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


# Kronecker as a pytree, under vmap and grad, and its derivatives against those of the dense matrix


def logdet(matrix):
    """The log-determinant by Cholesky, as torch's own has a wrong second derivative in forward mode."""
    return 2 * torch.linalg.cholesky(matrix).diagonal().log().sum()


SMOOTH = {
    "trace": (lambda K, v: K.trace(), lambda K, v: matrix(K).trace()),
    "product": (lambda K, v: K @ v, lambda K, v: matrix(K) @ v.flatten()),
    "logdet": (lambda K, v: K.logdet(0.3), lambda K, v: logdet(matrix(K) + 0.3 * eye(K))),
    "solve": (lambda K, v: K.solve(v), lambda K, v: matrix(K).inverse() @ v.flatten()),
    "solve with a split": (
        lambda K, v: K.solve(v, 0.3, split="pi"),
        lambda K, v: split(K, 0.3).inverse() @ v.flatten(),
    ),
}
WITH_EIGENVECTORS = {
    "solve with damping": (
        lambda K, v: K.solve(v, 0.3),
        lambda K, v: (matrix(K) + 0.3 * eye(K)).inverse() @ v.flatten(),
    ),
    "inverse": (lambda K, v: K.inverse(0.3).dense(), lambda K, v: (matrix(K) + 0.3 * eye(K)).inverse()),
    "eigen": (lambda K, v: K.eigen().dense(), lambda K, v: matrix(K)),
    "square of the root": (lambda K, v: K.sqrt() @ (K.sqrt() @ v), lambda K, v: matrix(K) @ v.flatten()),
}
ALL = SMOOTH | WITH_EIGENVECTORS
DIRECTIONS = Numbers(3)(2, 3)


def symmetric(tree_of_matrices):
    return tree.map_leaves(lambda f: f + f.mT if f.ndim == 2 else f, tree_of_matrices)


def several():
    """Like a Kronecker, with an axis of four of them in front."""
    return tree.map_leaves(lambda *f: torch.stack(f), *(small("dense", "diagonal", seed=i) for i in range(4)))


POINT, STEP = small("dense", "dense"), symmetric(small("dense", "dense", seed=1))


def along(fn):
    """The slope of a function at each point in one direction."""
    return lambda K: jvp(fn, (K,), (STEP,))[1]


DERIVATIVES = {
    "grad": lambda fn: symmetric(grad(fn)(POINT)),
    "vmap of grad": lambda fn: vmap(lambda K: symmetric(grad(fn)(K)))(several()),
    "grad of grad": lambda fn: symmetric(grad(lambda K: total(symmetric(grad(fn)(K))))(POINT)),
    "jvp": lambda fn: along(fn)(POINT),
    "jvp of grad": lambda fn: symmetric(along(grad(fn))(POINT)),
    "jvp of jvp": lambda fn: along(along(fn))(POINT),
}


class TestTransforms:
    @pytest.mark.parametrize("fn", [fn for fn, _ in ALL.values()], ids=ALL)
    def test_goes_through_vmap(self, fn):
        x = Numbers()(4, 5, 3)
        made = vmap(lambda x: Kronecker((x[:, :2].mT @ x[:, :2], x[0].square() + 1), ((0,), (1,)), torch.Size([2, 3])))(
            x
        )
        assert made.factors[0].shape == (4, 2, 2) and made.factors[1].shape == (4, 3)
        each = [fn(tree.map_leaves(lambda f, i=i: f[i], made), DIRECTIONS) for i in range(4)]
        assert_trees_close(vmap(fn, (0, None))(made, DIRECTIONS), torch.stack(each), EXACT)

    @pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
    @pytest.mark.parametrize(("fn", "dense"), ALL.values(), ids=ALL)
    def test_has_the_derivatives_of_the_matrix(self, fn, dense, derivative):
        wanted = derivative(lambda K: total(dense(K, DIRECTIONS).flatten()))
        assert_trees_close(derivative(lambda K: total(fn(K, DIRECTIONS).flatten())), wanted, 1e-8, 1e-3)

    @pytest.mark.parametrize(("fn", "dense"), SMOOTH.values(), ids=SMOOTH)
    def test_has_derivatives_at_equal_eigenvalues(self, fn, dense):
        K = replace(small("dense", "dense"), factors=(torch.eye(2).double(), 2 * torch.eye(3).double()))
        of, wanted = (grad(lambda K, g=g: total(g(K, DIRECTIONS).flatten()))(K) for g in (fn, dense))
        assert_trees_close(symmetric(of), symmetric(wanted), EXACT)

    @pytest.mark.parametrize("options", [{}, {"split": "pi"}], ids=["exact", "pi"])
    def test_has_derivatives_in_the_damping(self, options):
        K, damping = small("dense", "dense"), torch.tensor(0.3).double()
        of = grad(lambda d: total(K.solve(DIRECTIONS, d, **options)))(damping)
        dense = (lambda d: split(K, d)) if options else (lambda d: matrix(K) + d * eye(K))
        wanted = grad(lambda d: total(dense(d).inverse() @ DIRECTIONS.flatten()))(damping)
        assert_trees_close(of, wanted, EXACT)
        many = torch.tensor([0.1, 1.0])
        each = [K.inverse(d, **options).dense() for d in many]
        assert_trees_close(vmap(lambda d: K.inverse(d, **options).dense())(many), torch.stack(each), 1e-6)


# torch.save and torch.load with their default settings keep factors, in this process and in another one


def computed(make, layers, shape, **options):
    """Factors of a small network."""
    model = nn.Sequential(*layers(), nn.Flatten()).double()
    f, params = functional(model)
    rand, x = Numbers(1), Numbers(2)(5, *shape)
    return make(f, F.mse_loss, **options)(
        {n: rand(*p.shape) for n, p in params.items()}, x, Numbers(3)(*f(params, x).shape)
    )


def dense():
    return [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)]


BUILT = {
    "kfac": lambda: computed(kfac, dense, (2,), generator=torch.Generator().manual_seed(0)),
    "exact kfac, joint": lambda: computed(partial(kfac, fisher="exact"), dense, (2,), joint=True),
    "exact kfac in groups, joint": lambda: computed(
        partial(kfac, fisher="exact"), lambda: [nn.Conv1d(2, 4, 2, groups=2)], (2, 2), joint=True
    ),
    "exact kfac, diagonals": lambda: computed(partial(kfac, fisher="exact"), dense, (2,), max_factor_dim=2),
    "kfra": lambda: computed(kfra, dense, (2,)),
    "ekfac": lambda: computed(ekfac, dense, (2,), fisher="exact"),
}


def forms(factors):
    """All of it that is no tensor."""
    return [(path, None if K is None else described(K)) for path, K in tree.named_parts(factors, Kronecker)[0]]


def described(K):
    return K.groups, K.shape, K.blocks, {**vars(K.origin)}


@pytest.mark.quick
@pytest.mark.parametrize("made", BUILT.values(), ids=BUILT)
def test_factors_are_loaded_as_they_were(made):
    factors, file = made(), io.BytesIO()
    torch.save({"factors": factors, "epoch": 3}, file)
    file.seek(0)
    found = torch.load(file, map_location="cpu")["factors"]
    assert_trees_close(found, factors, 0)
    assert forms(found) == forms(factors)


def test_nothing_else_becomes_safe():
    ours = {
        kind for kind in torch.serialization.get_safe_globals() if getattr(kind, "__module__", "").startswith("invfunc")
    }
    assert ours == {Kronecker, kronecker.Joint, kronecker.Origin, Eigenpairs, LowRank, SpectralDensity}
