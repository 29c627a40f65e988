"""Factors above `max_factor_dim` are the diagonals of those without a bound, for each statistic, layer and mode."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import budget as size
from invfunc import (
    chunked,
    distributed,
    ekfac,
    functional,
    kfac,
    sqrt_ggn,
    streamed,
    sum_grad_squared,
)
from invfunc.core import refusals
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import kfoc, kfra
from invfunc.testing import assert_trees_close
from tests.process_group import alone
from tests.reductions.test_kfac import MODULES, Applied, built
from tests.rows import in_blocks
from tests.strategies import Numbers

EXACT, MOST = 1e-9, 2


def seeded():
    return torch.Generator().manual_seed(0)


def tied(m, x):
    return m["words"](x).tanh().mean(1) @ m["words"].weight.T


MORE = {
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)), (2,)),
    "tied embedding": (lambda: Applied(tied, words=nn.Embedding(5, 3)), (2,)),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(6, 6, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (6, 2),
    ),
}
CASES = [*MODULES, *MORE]


def case(called):
    if called in MODULES:
        _, f, params, x = built(called)
        return f, params, x, Numbers(1)(len(x), 3)
    make, shape = MORE[called]
    f, params = functional(make().double())
    x = Numbers(4).below(5, 4, *shape) if "embedding" in called else Numbers(4)(4, *shape)
    return f, {k: Numbers(3)(*p.shape) for k, p in params.items()}, x, Numbers(1)(4, 5 if called.startswith("t") else 3)


def diagonals(factors, most=MOST):
    """The factors with the diagonals of those above a dimension in their place, and how each came."""
    found = {}
    for name, K in factors.items():
        found[name] = tuple(
            f.diagonal(dim1=-2, dim2=-1) if not K.is_diagonal(i) and f.shape[-1] > most else f
            for i, f in enumerate(K.factors)
        )
    return found


def own(factors):
    return {name: K.factors for name, K in factors.items() if K is not None}


STATISTICS = {
    "kfac": lambda f, loss, **o: kfac(f, loss, generator=seeded(), mc_samples=2, **o),
    "exact": lambda f, loss, **o: kfac(f, loss, fisher="exact", **o),
    "reduce": lambda f, loss, **o: kfac(f, loss, weight_sharing="reduce", fisher="exact", **o),
    "backpack": lambda f, loss, **o: kfac(f, loss, weight_sharing="backpack", fisher="exact", **o),
    "joint": lambda f, loss, **o: kfac(f, loss, joint=True, fisher="exact", **o),
    "empirical": lambda f, loss, **o: kfac(f, loss, fisher="empirical", **o),
    "kfoc": lambda f, loss, **o: kfoc(f, loss, fisher="exact", sweeps=1, **o),
}


class TestEqualTheDiagonals:
    @pytest.mark.parametrize("called", CASES)
    @pytest.mark.parametrize("of", STATISTICS)
    def test_of_every_layer(self, called, of):
        if called == "tied embedding" and of != "kfoc":
            pytest.skip("two roles: below")
        f, *args = case(called)
        whole, part = (STATISTICS[of](f, F.mse_loss, max_factor_dim=most)(*args) for most in (None, MOST))
        whole = {name: K for name, K in whole.items() if K is not None}
        assert_trees_close(own(part), diagonals(whole), EXACT, 1e-6)
        assert any(K.is_diagonal(i) for K in part.values() if K is not None for i in range(len(K.factors)))

    def test_a_weight_in_two_roles_has_the_nearest_product_of_diagonals(self):
        f, params, x, y = case("tied embedding")
        K = kfac(f, F.mse_loss, max_factor_dim=4, fisher="exact")(params, x, y)["layers.words.weight"]
        assert [f.ndim for f in K.factors] == [1, 2]
        counts = torch.bincount(x.flatten(), minlength=5).double()
        assert bool((K.factors[0][counts > 0] > 0).all())

    @pytest.mark.parametrize("called", ["perceptron", "embedding", "tied embedding", "groups", "attention"])
    def test_in_all_modes(self, called):
        f, *args = case(called)
        for of, sharing in (
            (partial(kfac, fisher="exact"), {}),
            (ekfac, {"fisher": "exact"}),
            (kfoc, {"fisher": "exact"}),
        ):
            t = of(f, F.mse_loss, max_factor_dim=MOST, **sharing)
            wanted = t(*args)
            for other in (chunked(t, 2), chunked(t, chunk_size=2, over="samples"), chunked(t, 2, over="params")):
                assert_trees_close(
                    [K.dense() for K in other(*args).values()], [K.dense() for K in wanted.values()], EXACT
                )
            assert_trees_close(*([K.dense() for K in k.values()] for k in (in_blocks(t)(*args), wanted)), EXACT, 1e-6)
            total = of(f, lambda z, y: F.mse_loss(z, y, reduction="sum"), max_factor_dim=MOST, **sharing)
            loader, whole = [tuple(x[i : i + 2] for x in args[1:]) for i in (0, 2)], total(*args)
            with alone():
                both = streamed(total)(args[0], loader), distributed(total)(*args)
            for found in both:
                assert_trees_close(
                    [K.dense() for K in found.values()], [K.dense() for K in whole.values()], EXACT, 1e-6
                )


class TestTheBestProductWithADiagonal:
    @pytest.mark.parametrize("sweeps", [1, 2, 3, 4])
    @pytest.mark.parametrize("most", [2, 3, 5])
    def test_is_the_loop(self, sweeps, most):
        def f(w, x):
            return (x @ w.T).tanh()

        w, x, y = Numbers(1)(3, 5), Numbers(2)(4, 2, 5), Numbers(3)(4, 2, 3)
        G = sqrt_ggn(f, F.mse_loss)(w, x, y).flatten(0, 1)
        b, a = torch.eye(3).double(), torch.eye(5).double()

        def of_first(a):
            b = torch.einsum("noi,ij,npj->op", G, a, G)
            return b.diagonal().diag() if most < 3 else b

        def of_last(b):
            a = torch.einsum("noi,op,npj->ij", G, b, G)
            return a.diagonal().diag() if most < 5 else a

        if sweeps == 1:
            b, a = of_first(a), of_last(b)
            wanted = torch.kron(b.contiguous(), a.contiguous()) / b.trace()
        else:
            for k in range(sweeps):
                if k % 2 == 0:
                    b = of_first(a) / a.square().sum()
                else:
                    a = of_last(b) / b.square().sum()
            wanted = torch.kron(b.contiguous(), a.contiguous())
        K = kfoc(f, F.mse_loss, fisher="exact", sweeps=sweeps, max_factor_dim=most)(w, x, y)
        assert_trees_close(K.dense(), wanted, EXACT)


class TestWhatIsTold:
    def test_what_does_not_fit_is_an_error_before_it_is_computed(self, monkeypatch):
        f, params = functional(nn.Sequential(nn.Linear(2, 9_000), nn.Linear(9_000, 1)))
        for module in (size, refusals):
            monkeypatch.setattr(module, "free_on", lambda device: 2**28)
        args = params, torch.zeros(1, 2), torch.zeros(1, 1)
        with pytest.raises(ArgumentError, match=r"take 926.98MiB, but 256.00MiB are free.*9000, 9000.*max_factor_dim"):
            kfac(f, F.mse_loss, fisher="exact")(*args)
        assert kfac(f, F.mse_loss, fisher="exact", max_factor_dim=1_000)(*args)

    @pytest.mark.parametrize("most, error", [(-1, ArgumentError), (2.0, ArgumentTypeError), (True, ArgumentTypeError)])
    def test_the_option_is_checked(self, most, error):
        for of in (kfac, kfra, ekfac, kfoc):
            options = {} if of is kfra else {"fisher": "exact"}
            with pytest.raises(error, match="max_factor_dim"):
                of(sum_grad_squared, F.mse_loss, max_factor_dim=most, **options)
