"""Covariances of outputs against the whole Jacobian and the whole covariance of the parameters."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, kronecker, predictive_covariance, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import Kronecker, LowRank
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from tests.networks import LOSSES, networks
from tests.rows import generic, in_blocks
from tests.strategies import Numbers

EXACT = 1e-10


def inverses(factors, damping):
    return tree.unflatten(
        [k and k.inverse(damping) for _, k in tree.named_parts(factors, Kronecker)[0]],
        tree.named_parts(factors, Kronecker)[1],
    )


def dense(f, factors, damping, *args):
    """`J (K + damping)^-1 J^T` of each sample."""
    jacobian = invfunc.batch_jacobian(f)(*args)
    solved = kronecker.solve(factors, jacobian, damping)
    parts = []
    for j, s, p in zip(*map(tree.tensors, (jacobian, solved, args[0])), strict=True):
        j, s = (x.reshape(*x.shape[:2], p.numel()) for x in (j, s))
        parts.append(torch.einsum("ncp,ndp->ncd", j, s))
    return sum(parts)


FACTORS = [invfunc.kfac, invfunc.ekfac]


class TestFactors:
    @settings(max_examples=10)
    @given(net=networks(), loss=st.sampled_from(LOSSES), joint=st.booleans(), made=st.sampled_from(FACTORS))
    def test_equal_the_whole_jacobian_with_the_solved_one(self, net, loss, joint, made):
        options = {"joint": joint, "unsupported": "diagonal", "fisher": "exact"}
        factors = made(net.f, loss, **options)(net.params, net.x, loss.target(Numbers(1), net.n))
        wanted = dense(net.f, factors, 0.1, net.params, net.x)
        t = predictive_covariance(net.f, inverses(factors, 0.1))
        assert_trees_close(t(net.params, net.x), wanted, EXACT, EXACT)
        assert_trees_close(in_blocks(t)(net.params, net.x), wanted, EXACT, EXACT)
        if not joint:
            assert_trees_close(generic(t)(net.params, net.x), wanted, EXACT, EXACT)

    def test_form_no_jacobian(self):
        """Of 64 samples with 10 outputs it would have 640 MiB."""
        w, x = torch.randn(512, 512), torch.randn(64, 512)
        covariance = Kronecker((torch.eye(512), torch.eye(512)), ((0,), (1,)), w.shape)
        for s in (covariance, torch.ones(512, 512)):
            t = predictive_covariance(lambda w, x: torch.tanh(x @ w)[:, :10], s)
            t(w, x)
            assert peak_memory(lambda t=t: t(w, x))[1] < 80 * 2**20


class TestLowRank:
    """Of a matrix over all parameters at once."""

    @settings(max_examples=8)
    @given(net=networks(sequences=True), k=st.integers(1, 4))
    def test_equals_the_whole_jacobian_with_the_whole_matrix(self, net, k):
        u = tree.map_leaves(lambda p: Numbers(p.numel())(k, *p.shape), net.params)
        given, rows = LowRank(u, Numbers(2)(k).square(), 0.3), jacobian(net)
        flat = torch.cat([x.reshape(k, -1) for x in tree.tensors(u)], 1)
        whole = (flat.T * given.weights) @ flat + 0.3 * torch.eye(flat.shape[1]).double()
        t, wanted = predictive_covariance(net.f, given), rows @ whole @ rows.mT
        for each in (t, in_blocks(t), generic(t), chunked(t, 2), chunked(t, 2, over="params")):
            found = each(net.params, net.x)
            assert_trees_close(found.reshape(wanted.shape), wanted, EXACT, EXACT)

    def test_refuses_other_shapes(self):
        params, x = {"w": torch.ones(3, 2)}, torch.ones(4, 3)

        def f(p, x):
            return x @ p["w"]

        with pytest.raises(ArgumentError, match=r"LowRank\(rank 2 of 2, scale=0.0\) has no entry for params\['w'\]"):
            predictive_covariance(f, LowRank({"b": torch.ones(2, 2)}))(params, x)
        with pytest.raises(
            ArgumentError, match=r"vectors\['w'\] has shape \[3, 2\], but for params\['w'\] of shape \[3, 2\]"
        ):
            predictive_covariance(f, LowRank({"w": torch.ones(3, 2)}))(params, x)


def jacobian(net):
    """`[N, C, P]`"""
    found = invfunc.batch_jacobian(net.f)(net.params, net.x)
    pairs = zip(tree.tensors(found), tree.tensors(net.params), strict=True)
    return torch.cat([j.reshape(net.n, -1, p.numel()) for j, p in pairs], 2)


def test_refusals():
    def f(p, x):
        return x @ p["w"]

    params, x = {"w": torch.ones(3, 2)}, torch.ones(4, 3)
    with pytest.raises(ArgumentError, match=r"predictive_covariance\(f, -1.0\): a variance has to be 0 or more"):
        predictive_covariance(f, -1.0)
    with pytest.raises(ArgumentTypeError, match=r"covariance\['w'\] is of type str"):
        predictive_covariance(f, {"w": "wide"})
    with pytest.raises(ArgumentError, match=r"covariance has no entry for params\['w'\]"):
        predictive_covariance(f, {"b": torch.ones(2)})(params, x)
    with pytest.raises(ArgumentError, match=r"covariance\['w'\] has shape \[2\], but params\['w'\] has \[3, 2\]"):
        predictive_covariance(f, {"w": torch.ones(2)})(params, x)
    with pytest.raises(ArgumentError, match=r"f returns 2 tensors"):
        predictive_covariance(lambda p, x: (f(p, x), f(p, x)), 1.0)(params, x)
    layer, own = invfunc.functional(torch.nn.Linear(3, 2))
    joint = invfunc.kfac(layer, F.mse_loss, joint=True, fisher="exact")(own, x, torch.ones(4, 2))
    with pytest.raises(ArgumentError, match=r"is joint with a bias \(joint=True\)"):
        predictive_covariance(lambda p, x: x @ p["weight"].T, joint)({"weight": torch.ones(2, 3)}, x)


class TestDense:
    """Of a matrix `[P, P]` over all parameters."""

    @settings(max_examples=8)
    @given(net=networks(sequences=True))
    def test_equals_the_whole_jacobian_with_it(self, net):
        rows = jacobian(net)
        root = Numbers(1)(rows.shape[-1], rows.shape[-1])
        t, wanted = predictive_covariance(net.f, root @ root.T), rows @ (root @ root.T) @ rows.mT
        loader = [(net.x,)]
        for each in (t, in_blocks(t), generic(t), chunked(t, 2), chunked(t, 2, over="params")):
            assert_trees_close(each(net.params, net.x).reshape(wanted.shape), wanted, EXACT, EXACT)
        found = invfunc.streamed(t)(net.params, loader)
        assert_trees_close(found.reshape(wanted.shape), wanted, EXACT, EXACT)
