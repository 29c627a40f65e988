"""Kronecker as a pytree, under vmap and grad, and its derivatives against those of the dense matrix."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap

from invfunc import ekfac, functional, kfac, kronecker, tree
from invfunc.kronecker import Kronecker, LowRank, kfra
from invfunc.products.eigenpairs import Eigenpairs
from invfunc.spectra import SpectralDensity
from invfunc.testing import assert_trees_close
from tests.kronecker.test_matrix import EXACT, eye, matrix, small, split
from tests.networks import total
from tests.strategies import Numbers


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
V = Numbers(3)(2, 3)


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
        each = [fn(tree.map_leaves(lambda f, i=i: f[i], made), V) for i in range(4)]
        assert_trees_close(vmap(fn, (0, None))(made, V), torch.stack(each), EXACT)

    @pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
    @pytest.mark.parametrize(("fn", "dense"), ALL.values(), ids=ALL)
    def test_has_the_derivatives_of_the_matrix(self, fn, dense, derivative):
        wanted = derivative(lambda K: total(dense(K, V).flatten()))
        assert_trees_close(derivative(lambda K: total(fn(K, V).flatten())), wanted, 1e-8, 1e-3)

    @pytest.mark.parametrize(("fn", "dense"), SMOOTH.values(), ids=SMOOTH)
    def test_has_derivatives_at_equal_eigenvalues(self, fn, dense):
        K = replace(small("dense", "dense"), factors=(torch.eye(2).double(), 2 * torch.eye(3).double()))
        of, wanted = (grad(lambda K, g=g: total(g(K, V).flatten()))(K) for g in (fn, dense))
        assert_trees_close(symmetric(of), symmetric(wanted), EXACT)

    @pytest.mark.parametrize("options", [{}, {"split": "pi"}], ids=["exact", "pi"])
    def test_has_derivatives_in_the_damping(self, options):
        K, damping = small("dense", "dense"), torch.tensor(0.3).double()
        of = grad(lambda d: total(K.solve(V, d, **options)))(damping)
        dense = (lambda d: split(K, d)) if options else (lambda d: matrix(K) + d * eye(K))
        wanted = grad(lambda d: total(dense(d).inverse() @ V.flatten()))(damping)
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


MADE = {
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
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
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
