"""Eigenpairs of curvature matrices, and what is solved by them, against the whole matrices."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

import invfunc
from invfunc import eigenpairs, ggnvp, kronecker, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError, SplitError
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from invfunc.testing.models import moved
from tests import matrices
from tests.laws import composed
from tests.matrices import assert_near, flat, shaped
from tests.networks import LOSSES, network, networks, samples_loss
from tests.products.test_products import arranged
from tests.strategies import Numbers

DAMPING = 0.1
RTOL = {torch.float64: 1e-9, torch.float32: 3e-4}


def seeded():
    return torch.Generator().manual_seed(0)


def of_drawn(f, loss):
    options = {"mc_samples": 2, "generator": seeded()}
    product = ggnvp(f, loss, mc_samples=2, generator=seeded(), fisher="mc")
    return eigenpairs(f, loss, fisher="mc", **options), lambda f, loss, *args: matrices.of(product, *args)


def of_shares(f, loss, *given):
    def matrix(f, loss, *args):
        g = rows(invfunc.batch_grad(composed(f, loss))(*args))
        return g.T @ g

    return eigenpairs(*given, fisher="empirical"), matrix


FORMS = {
    "f and loss": lambda f, loss: (eigenpairs(f, loss), matrices.ggn),
    "f": lambda f, loss: (eigenpairs(composed(f, loss)), matrices.ggn),
    "drawn": of_drawn,
    "empirical, f and loss": lambda f, loss: of_shares(f, loss, f, loss),
    "empirical": lambda f, loss: of_shares(f, loss, composed(f, loss)),
}
"""Makers of eigenpairs from a model function and a loss, each with its matrix."""


def rows(vectors):
    """`[k, P]`"""
    return torch.cat([x.reshape(len(x), -1) for x in tree.leaves(vectors)], 1)


def damped(matrix, damping=DAMPING):
    return matrix + damping * torch.eye(len(matrix)).to(matrix)


class TestPairs:
    @pytest.mark.quick
    @given(
        net=networks(sequences=True),
        loss=st.sampled_from(LOSSES),
        form=st.sampled_from([*FORMS]),
        reduction=st.sampled_from(["mean", "sum", "none"]),
    )
    def test_are_those_of_the_matrix(self, device, dtype, net, loss, form, reduction):
        """Products, solutions, determinants, traces, and what each sample adds along the eigenvectors."""
        form = "f" if loss.called == "log cosh of outputs" and form == "drawn" else form  # which has no sampler
        criterion, args = arranged(net, loss, reduction)
        args, rtol, n = moved(args, dtype, device), RTOL[dtype], net.n
        t, of = FORMS[form](net.f, criterion)
        pairs, matrix, params = t(*args), of(net.f, criterion, *args), args[0]
        assert pairs.size == len(matrix) and pairs.values.dtype == dtype
        assert torch.equal(pairs.values, pairs.values.sort(descending=True)[0]) and (pairs.values > 0).all()
        e = rows(pairs.vectors())
        assert_near(e.T @ (pairs.values[:, None] * e), matrix, rtol)
        sure = pairs.values > 1e-3 * pairs.values.sum()
        assert_near((e @ e.T)[sure][:, sure], torch.eye(int(sure.sum())), 10 * rtol)
        assert_near(pairs.trace(), matrix.trace(), rtol)
        v, damping = Numbers(5)(len(matrix)).to(e), DAMPING * max(matrix.abs().max().item(), 1e-2)
        assert_near(flat(pairs @ shaped(v, params)), matrix @ v, 10 * rtol)
        wide = damped(matrix.double(), damping)
        wanted = torch.linalg.solve(wide, v.double())
        assert_near(flat(pairs.solve(shaped(v, params), damping)), wanted, 10 * rtol)
        assert_near(flat(pairs.inverse(damping) @ shaped(v, params)), wanted, 10 * rtol)
        assert_near(pairs.logdet(damping), torch.logdet(wide), 10 * rtol)
        slopes = rows(invfunc.batch_grad(composed(net.f, criterion))(*args)) @ e.T
        assert_near(pairs.slopes(), slopes, 10 * rtol)
        curvatures = pairs.curvatures()
        assert curvatures.shape == (n, pairs.rank)
        assert_near(curvatures.sum(0), pairs.values, rtol)
        if form.startswith("empirical"):
            assert_near(curvatures, slopes.square(), 10 * rtol)
        elif form != "drawn":
            columns = invfunc.sqrt_ggn(net.f, criterion)(*args)
            s = torch.cat([x.reshape(*x.shape[:2], -1) for x in tree.leaves(columns)], 2)
            assert_near(curvatures, torch.einsum("vnp,kp->vnk", s, e).square().sum(0), 10 * rtol)

    def test_of_the_largest_eigenvalues(self):
        loss, net = LOSSES[0], network("convolution", 5)
        args = net.params, net.x, loss.target(Numbers(1), 5)
        pairs = eigenpairs(net.f, loss)(*args)
        e = rows(pairs.vectors())
        assert len(e) == 10 and torch.equal(rows(pairs.vectors(top=3)), e[:3])
        assert_near(pairs.slopes(top=3), pairs.slopes()[:, :3], 1e-12)
        assert_near(pairs.curvatures(top=3), pairs.curvatures()[:, :3], 1e-12)
        assert len(rows(pairs.vectors(top=100))) == 10
        few = pairs.inverse(DAMPING, top=3)
        v = Numbers(2)(pairs.size)
        matrix = e[:3].T @ (pairs.values[:3, None] * e[:3])
        assert_near(flat(few @ shaped(v, net.params)), torch.linalg.solve(damped(matrix), v), 1e-10)

    def test_are_as_many_as_the_rank(self, monkeypatch):
        """Samples that come twice, that have no weight, and that are more than parameters; vectors in blocks."""
        monkeypatch.setattr("invfunc.thresholds.DIRECTIONS", 3)
        w, x, y = Numbers(0)(4, 3), Numbers(1)(3, 4), Numbers(2).below(3, 3)
        loss, twice = partial(F.cross_entropy, ignore_index=2), torch.tensor([0, 1, 2, 0, 0, 1])
        for args in ((w, x[twice], y[twice]), (w, 0 * x, y), (w, Numbers(3)(9, 4), Numbers(4).below(3, 9))):
            matrix = matrices.ggn(lambda w, x: x @ w, loss, *args)
            pairs = eigenpairs(lambda w, x: x @ w, loss)(*args)
            assert pairs.rank == torch.linalg.matrix_rank(matrix, hermitian=True) == len(pairs.vectors())
            v = Numbers(5)(4, 3)
            wanted = torch.linalg.solve(damped(matrix), v.flatten())
            assert_near(pairs.solve(v, DAMPING).flatten(), wanted, 1e-10)

    def test_form_no_rows(self):
        """Rows of 48 samples with 9 columns would have 440 MiB, the matrix 260 GiB."""
        f, params = invfunc.functional(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)))
        x, y = torch.randn(48, 512), torch.randint(10, (48,))
        pairs = eigenpairs(f, F.cross_entropy)(params, x, y)
        v = tree.map_tensors(torch.randn_like, params)
        assert peak_memory(lambda: eigenpairs(f, F.cross_entropy)(params, x, y))[1] < 40 * 2**20
        assert peak_memory(lambda: pairs.solve(v, 1.0))[1] < 16 * 2**20
        assert peak_memory(lambda: pairs.vectors(top=2))[1] < 16 * 2**20


class TestRuns:
    def test_draw_the_same_numbers(self):
        """As sqrt_ggn does of f once, and the generator ends there."""
        f, params = invfunc.functional(nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3)).double())
        x, y = Numbers(1)(5, 4), Numbers(2).below(3, 5)
        for of in ((f, F.cross_entropy), (composed(f, F.cross_entropy),)):
            torch.manual_seed(0)
            s = rows(tree.map_tensors(lambda s: s.flatten(0, 1), invfunc.sqrt_ggn(*of)(params, x, y)))
            after = torch.get_rng_state()
            torch.manual_seed(0)
            pairs = eigenpairs(*of)(params, x, y)
            assert torch.equal(torch.get_rng_state(), after)
            assert_near(pairs.values, torch.linalg.eigvalsh(s @ s.T).flip(0)[: pairs.rank], 1e-10)
            v = Numbers(3)(pairs.size)
            assert_near(flat(pairs @ shaped(v, params)), s.T @ (s @ v), 1e-10)

    def test_leave_aux_and_dims(self):
        w, x, y = Numbers(0)(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5)
        t = eigenpairs(
            lambda w, x: ((x.T @ w).T, "aux"),
            lambda z, y: F.cross_entropy(z.T, y),
            in_dims=(1, 0),
            out_dims=1,
            has_aux=True,
        )
        pairs, aux = t(w.requires_grad_(), x.T, y)
        assert aux == "aux" and not pairs.values.requires_grad
        assert_near(pairs.values, eigenpairs(lambda w, x: x @ w, F.cross_entropy)(w, x, y).values, 1e-12)


def test_refusals():
    w, x, y = Numbers(0)(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5)

    def f(w, x):
        return x @ w

    t = eigenpairs(f, F.cross_entropy)
    pairs = t(w, x, y)
    assert (
        repr(t) == "eigenpairs(f, cross_entropy)"
        and repr(pairs) == f"Eigenpairs({t!r}, rank 8 of 12, dtype=torch.float64)"
    )
    for fails in (lambda: pairs.solve(w), pairs.logdet, pairs.inverse):
        with pytest.raises(ArgumentError, match=r"^Eigenpairs\(.*\)\..*: damping is 0, but a matrix of rank 8 over 12"):
            fails()
    with pytest.raises(ArgumentError, match=r"\.inverse\(damping\): damping is 0, but a matrix of rank 2 over 12"):
        pairs.inverse(0.0, top=2)
    with pytest.raises(ArgumentError, match=r"damping is -1.0, but has to be finite"):
        pairs.solve(w, -1.0)
    with pytest.raises(ArgumentTypeError, match=r"damping is str"):
        pairs.solve(w, "a")
    with pytest.raises(ArgumentError, match=r"\.solve\(v, damping\): v has shape \(4, 2\), but w has \(4, 3\)"):
        pairs.solve(w[:, :2], DAMPING)
    with pytest.raises(ArgumentTypeError, match=r" @ v: v has dtype torch.float32"):
        pairs @ w.float()
    with pytest.raises(ArgumentError, match=r"\.vectors\(top=0\): top has to be at least 1"):
        pairs.vectors(0)
    with pytest.raises(ArgumentError, match=r"kronecker.solve\(factors, v\): split='pi' is of two factors"):
        kronecker.solve(pairs, w, DAMPING, split="pi")
    with pytest.raises(ArgumentError, match=r"eigenpairs\(f, cross_entropy\)\(w, x, target\): it is inside of"):
        vmap(lambda x: t(w, x, y).values)(x[None])
    with pytest.raises(ArgumentError, match=r"not finite: f or its loss gives NaN"):
        t(w, x * math.nan, y)
    with pytest.raises(SampleAxisError, match="batch_norm"):
        eigenpairs(lambda w, x, y: F.cross_entropy(F.batch_norm(x @ w, None, None, training=True), y))(w, x, y)
    with pytest.raises(SplitError, match=r"goes around the outputs"):
        eigenpairs(lambda w, x, y: F.cross_entropy(x @ w, y) + w.square().sum())(w, x, y)
    with pytest.raises(ArgumentError, match=r"eigenpairs\(fisher='all'\)"):
        eigenpairs(f, F.cross_entropy, fisher="all")
    with pytest.raises(ArgumentTypeError, match="Chunk the statistic inside"):
        invfunc.chunked(t, 2)


class TestTheSmallerSide:
    """With twice as many columns as parameters, S itself is decomposed; all results are the same."""

    @staticmethod
    def both(monkeypatch, fisher="exact"):
        f = lambda p, x: (x @ p["w"]).tanh() + p["b"]  # noqa: E731
        args = {"w": Numbers(1)(2, 3), "b": Numbers(2)(3)}, Numbers(3)(40, 2), Numbers(4)(40, 3)
        t = (
            eigenpairs(f, F.mse_loss, fisher=fisher)
            if fisher == "exact"
            else eigenpairs(lambda p, x, y: (f(p, x) - y).square().sum(1), fisher=fisher)
        )
        small = t(*args)
        monkeypatch.setattr("invfunc.products.eigenpairs._smaller", lambda columns, size: True)
        return small, t(*args), args

    @pytest.mark.parametrize("fisher", ["exact", "empirical"])
    def test_gives_the_same(self, monkeypatch, fisher):
        small, large, (params, *_) = self.both(monkeypatch, fisher)
        assert small.rank == large.rank == 9
        for of in (
            lambda e: e.values,
            lambda e: e.slopes().abs(),
            lambda e: e.curvatures(),
            lambda e: e.trace(),
            lambda e: e.logdet(DAMPING),
            lambda e: e @ params,
            lambda e: e.solve(params, DAMPING),
            lambda e: e.inverse(DAMPING) @ params,
            lambda e: rows(e.vectors()).abs(),
        ):
            assert_trees_close(of(small), of(large), 1e-8)

    def test_explain_says_what_is_decomposed(self, monkeypatch):
        f = lambda w, x: x @ w  # noqa: E731
        told = invfunc.explain(eigenpairs(f, F.mse_loss))(Numbers()(2, 3), Numbers(1)(4, 2), Numbers(2)(4, 3))
        assert "a matrix [12, 6], of 3 columns of 4 samples and 6 parameters" in str(told)
        monkeypatch.setattr("invfunc.products.eigenpairs.free_on", lambda device: 100)
        with pytest.raises(ArgumentError, match=r"decomposes a symmetric matrix \[9, 9\], in .*but .* are free"):
            eigenpairs(f, F.mse_loss)(Numbers()(2, 3), Numbers(1)(3, 2), Numbers(2)(3, 3))


class TestSaved:
    @pytest.mark.parametrize("form", ["f and loss", "empirical"])
    @pytest.mark.parametrize("n", [3, 40])
    def test_are_loaded_as_they_were(self, form, n, tmp_path):
        net, loss = network("perceptron", n), LOSSES[0]
        args = net.params, net.x, loss.target(Numbers(1), n)
        f, given = (net.f, (loss,)) if form == "f and loss" else (samples_loss(net, loss), ())
        pairs = eigenpairs(f, *given, fisher="exact" if given else "empirical")(*args)
        v = tree.map_leaves(lambda p: Numbers(2)(*p.shape), net.params)
        torch.save({"pairs": pairs, "low rank": pairs.inverse(DAMPING)}, tmp_path / "a.pt")
        found = torch.load(tmp_path / "a.pt")
        again, low_rank = found["pairs"], found["low rank"]
        torch.save(again, tmp_path / "b.pt")
        for one in (again, torch.load(tmp_path / "b.pt")):
            assert repr(one) == repr(pairs)
            for of in (
                lambda e: (e.values, e.slopes(), e.curvatures(), e.trace(), e.logdet(DAMPING), e.vectors(2)),
                lambda e: (e @ v, e.solve(v, DAMPING), e.inverse(DAMPING) @ v, kronecker.solve(e, v, DAMPING)),
                lambda e: vmap(lambda k: e.solve(v, k))(torch.tensor([0.1, 1.0])),
                lambda e: e.solve(tree.map_leaves(lambda x: torch.stack([x, 2 * x]), v), DAMPING),
            ):
                assert_trees_close(of(one), of(pairs), 1e-8)
        assert_trees_close(low_rank @ v, pairs.inverse(DAMPING) @ v, 1e-8)

    @pytest.mark.quick
    def test_of_parameters_without_dims_have_products(self, tmp_path):
        def f(p, x):
            return (p["a"] * x @ p["w"])[:, None]

        params, x, y = {"a": Numbers(1)(), "w": Numbers(2)(3)}, Numbers(3)(5, 3), Numbers(4)(5, 1)
        pairs = eigenpairs(f, F.mse_loss)(params, x, y)
        torch.save(pairs, tmp_path / "pairs.pt")
        for one in (torch.load(tmp_path / "pairs.pt"), eigenpairs(f, F.mse_loss, top=4)(params, x, y)):
            assert_trees_close(one @ params, pairs @ params, 1e-9, 1e-9)
