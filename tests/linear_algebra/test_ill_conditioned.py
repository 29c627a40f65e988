"""All that is inverted or decomposed in float32, with eigenvalues over eight decades: right, or an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import vmap

import invfunc
from invfunc import eigenpairs, kronecker, predictive_covariance, tree
from invfunc._torch import values
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import Kronecker, LowRank
from invfunc.linear_algebra.contract import patches_gram
from tests.matrices import assert_near, flat
from tests.strategies import Numbers

RIGHT = 1e-4
DAMPING = [1e-6, 1e-4, 1e-2, 1.0]


def spectrum(size, decades):
    return torch.logspace(0, -decades, size, dtype=torch.float64)


def orthogonal(rows, columns=None, seed=0):
    return torch.linalg.qr(Numbers(seed)(rows, columns or rows))[0]


def apart(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


class Right:
    """Counts what is right, fails for what is neither right nor an error."""

    def __init__(self):
        self.count = 0

    def __call__(self, compute, wanted):
        try:
            found = compute()
        except ArgumentError:
            return
        assert found.dtype == torch.float32
        assert apart(found, wanted) < RIGHT
        self.count += 1


def of_factors(decades, sizes):
    """Factors in float32, with the matrix that they are of, whose negative eigenvalues are rounding."""
    factors = []
    for seed, k in enumerate(sizes):
        q = orthogonal(k, seed=seed)
        factors.append(((q * spectrum(k, decades / len(sizes))) @ q.T).float())
        factors[-1] = (factors[-1] + factors[-1].T) / 2
    whole = torch.ones(1, 1, dtype=torch.float64)
    for f in factors:
        values, vectors = torch.linalg.eigh(f.double())
        whole = torch.kron(whole, (vectors * values.clamp(min=0)) @ vectors.T)
    return Kronecker(tuple(factors), tuple((i,) for i in range(len(sizes))), torch.Size(sizes)), whole


@pytest.mark.parametrize("decades", [6, 8])
@pytest.mark.parametrize("sizes", [(16,), (6, 8)], ids=["one factor", "two factors"])
class TestFactors:
    @pytest.mark.parametrize("damping", DAMPING)
    def test_damped(self, decades, sizes, damping):
        K, whole = of_factors(decades, sizes)
        damped, right = whole + damping * torch.eye(len(whole)), Right()
        along = torch.linalg.eigh(whole)[1][:, -1].float().view(sizes)
        for v in Numbers(7)(*sizes).float(), along:
            wanted = torch.linalg.solve(damped, v.double().flatten()).view(sizes)
            right(lambda v=v: K.solve(v, damping), wanted)
            right(lambda v=v: kronecker.solve({"w": K}, {"w": v}, damping)["w"], wanted)
        right(lambda: K.inverse(damping).dense(), damped.inverse())
        right(lambda: K.logdet(damping), damped.logdet())
        right(lambda: kronecker.logdet({"w": K}, damping), damped.logdet())
        right(lambda: kronecker.logdet(kronecker.eigen({"w": K}), damping), damped.logdet())
        x = Numbers(3)(5, *sizes).float()

        def f(w, x):
            return (x * w).flatten(1).sum(1, keepdim=True)

        rows = x.double().flatten(1)
        variances = ((rows @ damped.inverse()) * rows).sum(1)
        w = torch.zeros(sizes)
        right(lambda: predictive_covariance(f, K.inverse(damping))(w, x).flatten(), variances)
        assert right.count == 9

    def test_undamped(self, decades, sizes):
        K, whole = of_factors(decades, sizes)
        right, v = Right(), Numbers(7)(*sizes).float()
        right(K.sqrt().dense, _root(whole))
        right(K.eigen().dense, whole)
        assert right.count == 2
        right(K.logdet, whole.logdet())
        right(lambda: K.inverse().dense(), whole.inverse())
        right(lambda: K.solve(v), torch.linalg.solve(whole, v.double().flatten()).view(sizes))

    def test_split(self, decades, sizes):
        K, right = of_factors(decades, sizes)[0], Right()
        double, v = Kronecker(tuple(f.double() for f in K.factors), K.groups, K.shape), Numbers(7)(*sizes)
        for damping in DAMPING if len(sizes) == 2 else ():
            right(lambda d=damping: K.solve(v.float(), d, "pi"), double.solve(v.float().double(), damping, "pi"))
            right(lambda d=damping: K.inverse(d, "pi").dense(), double.inverse(damping, "pi").dense())
        assert right.count == 8 * (len(sizes) == 2)


def _root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


@pytest.mark.parametrize("decades", [6, 8])
class TestEigenpairs:
    @pytest.mark.parametrize("damping", DAMPING)
    def test_damped(self, decades, damping):
        """Products with vectors that all but cancel are errors; determinants and covariances are right."""
        x = (orthogonal(30) * spectrum(30, decades / 2)) @ orthogonal(90, 30, seed=1).T
        x, w, y = x.float(), torch.zeros(90, 1), Numbers(2)(30, 1).float()
        pairs = eigenpairs(lambda w, x: x @ w, nn.MSELoss(reduction="sum"))(w, x, y)
        rows, right = x.double(), Right()
        damped = 2 * rows.T @ rows + damping * torch.eye(90)
        top = torch.linalg.eigh(damped)[1][:, -1:].float()
        for v in Numbers(3)(90, 1).float(), x.T @ y, top:
            right(lambda v=v: pairs.solve(v, damping), torch.linalg.solve(damped, v.double()))
        assert right.count > (damping > 1e-6) + (damping > 1e-4)
        right(lambda: pairs.logdet(damping), damped.logdet())
        right(pairs.trace, 2 * rows.square().sum())
        right(lambda: pairs.values, torch.linalg.eigvalsh(2 * rows @ rows.T).flip(0)[: pairs.rank])
        for z in x, top.T, (Numbers(4)(7, 90).float() + 30 * top.T):
            variances = ((z.double() @ damped.inverse()) * z.double()).sum(1)

            def covariance(z=z, size=variances):
                return predictive_covariance(lambda w, x: x @ w, pairs.inverse(damping))(w, z).flatten() / size.float()

            right(lambda c=covariance: c().max()[None], torch.ones(1))
            right(lambda c=covariance: c().min()[None], torch.ones(1))
        assert right.count >= 3 + 1 + 6

    def test_undamped(self, decades):
        x = orthogonal(30, 12) * spectrum(12, decades / 2) @ orthogonal(12, seed=1).T
        x, w, y = x.float(), torch.zeros(12, 1), Numbers(2)(30, 1).float()
        pairs = eigenpairs(lambda w, x: x @ w, nn.MSELoss(reduction="sum"))(w, x, y)
        whole, right, v = 2 * x.double().T @ x.double(), Right(), Numbers(3)(12, 1)
        for vector in v.float(), x.T @ y:
            right(lambda v=vector: pairs.solve(v), torch.linalg.solve(whole, vector.double()))
        right(pairs.logdet, whole.logdet())
        z = x.double()
        right(
            lambda: predictive_covariance(lambda w, x: x @ w, pairs.inverse())(w, x).flatten(),
            ((z @ whole.inverse()) * z).sum(1),
        )

    def test_without_float64_take_more_damping(self, decades, monkeypatch):
        monkeypatch.setattr(values, "WITHOUT_FLOAT64", {"cpu"})
        x = orthogonal(30, 12) * spectrum(12, decades / 2) @ orthogonal(12, seed=1).T
        w, x, y = torch.zeros(12, 1), x.float(), Numbers(2)(30, 1).float()
        pairs, v = eigenpairs(lambda w, x: x @ w, nn.MSELoss(reduction="sum"))(w, x, y), torch.ones(12, 1)
        for use in partial(pairs.solve, v), pairs.logdet, pairs.inverse:
            with pytest.raises(ArgumentError, match=r"in torch.float32 the rounding error may be .* Pass more damping"):
                use(1e-4)
            use(1.0)


@pytest.mark.parametrize(
    "made", [partial(invfunc.kfac, fisher="exact"), invfunc.kfac, invfunc.kronecker.kfra, invfunc.ekfac]
)
def test_factors_that_are_not_finite_say_so(made):
    """One number of the inputs is NaN: statistics are NaN as well, and what is made of them says of which parameter."""
    f, params = invfunc.functional(nn.Linear(4, 3))
    x, y = Numbers(1)(5, 4).float(), Numbers(2).below(3, 5)
    x[0, 0] = torch.nan
    options = {"generator": torch.Generator().manual_seed(0)} if made in (invfunc.kfac, invfunc.ekfac) else {}
    factors = made(f, F.cross_entropy, **options)(params, x, y)
    K = factors["weight"]
    uses = [
        lambda: kronecker.solve(factors, params, 1e-3),
        lambda: kronecker.logdet(factors, 1e-3),
        lambda: K.inverse(1e-3),
        K.sqrt,
        K.logdet,
    ]
    for use in uses:
        with pytest.raises(ArgumentError, match=r"of params\['weight'\] is not finite: \d+ of \d+ entries .* inputs"):
            use()


# The Gram matrix of patches through displacements is the one of the patches

LARGE: Any = (8, 32, 16, 16), (3, 3), [(1, 1)] * 2, (1, 1)


def test_leaves_to_the_patches_what_is_differentiated():
    shape, *options = LARGE
    x = Numbers()(*shape)
    seen = []

    def look(x):
        seen.append(patches_gram(x, *options))
        return x.sum()

    look(x.clone().requires_grad_())
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    assert seen == [None] * 4 and patches_gram(x, *options) is not None


# Matrices of low rank over all parameters, against dense ones

VECTORS = {"w": Numbers(0)(3, 2, 4), "b": Numbers(1)(3)}


@pytest.mark.quick
class TestProduct:
    def test_is_that_of_the_matrix(self):
        u = torch.cat([x.reshape(3, -1) for x in VECTORS.values()], 1)
        v = {"w": Numbers(2)(5, 6, 2, 4), "b": Numbers(3)(5, 6)}
        every = torch.cat([v["w"].flatten(2), v["b"][..., None]], 2)
        for weights, scale in ((None, 0.0), (Numbers(4)(3), 2.0), (Numbers(4)(3), torch.tensor(0.5).double())):
            matrix = u.T @ (torch.ones(3) if weights is None else weights).double().diag() @ u + scale * torch.eye(9)
            given = LowRank(VECTORS, weights, scale)
            found = given @ v
            assert_near(torch.cat([found["w"].flatten(2), found["b"][..., None]], 2), every @ matrix, 1e-12)
            one = {"b": v["b"][0, 0], "w": v["w"][0, 0]}
            assert [*(given @ one)] == ["b", "w"]
            assert_near(flat({name: (given @ one)[name] for name in VECTORS}), matrix @ every[0, 0], 1e-12)

    def test_of_no_vectors_is_that_of_the_scale(self):
        v = {"w": torch.ones(2, 4), "b": torch.ones(())}
        given = LowRank({"w": torch.zeros(0, 2, 4), "b": torch.zeros(0)}, scale=2.0)
        assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in tree.leaves(given @ v))

    def test_has_the_dtype_of_the_vector(self):
        narrow = tree.map_tensors(lambda x: x.bfloat16(), VECTORS)
        v = {"w": torch.ones(2, 4).bfloat16(), "b": torch.ones(()).bfloat16()}
        found = LowRank(narrow, Numbers(4)(3), 2.0) @ v
        wide = tree.map_tensors(torch.Tensor.double, narrow)
        wanted = LowRank(wide, Numbers(4)(3), 2.0) @ tree.map_tensors(torch.Tensor.double, v)
        assert all(x.dtype == torch.bfloat16 for x in tree.leaves(found))
        assert_near(flat(tree.map_tensors(torch.Tensor.double, found)), flat(wanted), 1e-2)

    def test_goes_through_transforms(self):
        given = LowRank(VECTORS, Numbers(4)(3), 2.0)
        assert len(tree.tensors(given)) == 3 and repr(given) == "LowRank(rank 3 of 9, scale=2.0, dtype=torch.float64)"
        v = {"w": Numbers(2)(5, 2, 4), "b": Numbers(3)(5)}
        assert_near(flat(vmap(given.__matmul__)(v)), flat(given @ v), 1e-12)


def test_refusals():
    with pytest.raises(ArgumentError, match=r"vectors\['b'\] has shape \[2\], but has to have 3 vectors along axis 0"):
        LowRank({**VECTORS, "b": torch.ones(2)})
    with pytest.raises(ArgumentTypeError, match=r"vectors\['b'\] is of type NoneType, but has to be a tensor"):
        LowRank({**VECTORS, "b": None})
    with pytest.raises(ArgumentError, match=r"weights has shape \[2\], but has to have \[3\]"):
        LowRank(VECTORS, torch.ones(2))
    with pytest.raises(ArgumentTypeError, match=r"scale is of type str"):
        LowRank(VECTORS, scale="1")
    with pytest.raises(ArgumentError, match=r"vectors has an entry vectors\['b'\], but v has none"):
        LowRank(VECTORS) @ {"w": torch.ones(2, 4)}
    with pytest.raises(ArgumentError, match=r"v\['w'\] has shape \[4, 2\], but has to have \[2, 4\]"):
        LowRank(VECTORS) @ {"w": torch.ones(4, 2), "b": torch.ones(())}
    with pytest.raises(ArgumentError, match=r"v\['b'\] has shape \[4\], but has to have \[5\]"):
        LowRank(VECTORS) @ {"w": torch.ones(5, 2, 4), "b": torch.ones(4)}
