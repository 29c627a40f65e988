"""kfoc: the loop of its docstring from shares that are formed, and the best product of the dense block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import kfac, kronecker, sqrt_ggn, streamed, tree
from invfunc.errors import ArgumentError
from invfunc.kronecker import Kronecker, kfoc
from invfunc.testing import assert_trees_close
from tests.networks import LOSSES, network, networks, total
from tests.rows import generic, in_blocks
from tests.strategies import Numbers

EXACT, FLOOR = 1e-9, 1e-6


def looped(shares: torch.Tensor, sweeps: int) -> torch.Tensor:
    """The product of the docstring, dense, from all shares `[V, N, *p]`."""
    shares = shares.flatten(0, 1)
    if sum(size != 1 for size in shares.shape[1:]) < 2:
        g = shares.reshape(len(shares), -1)
        return g.T @ g
    g = shares.flatten(2)
    b, a = torch.einsum("noi,npi->op", g, g), torch.einsum("noi,noj->ij", g, g)
    if sweeps == 1:
        return torch.kron(b, a) / b.trace() if b.any() else torch.kron(b, a)
    a = torch.eye(len(a)).to(a)
    for k in range(sweeps):
        if k % 2 == 0:
            b = torch.einsum("noi,ij,npj->op", g, a, g) / a.square().sum().clamp(min=1e-300)
        else:
            a = torch.einsum("noi,op,npj->ij", g, b, g) / b.square().sum().clamp(min=1e-300)
    return torch.kron(b, a)


def matrices(factors: Any) -> dict[str, Kronecker]:
    return dict(tree.named_parts(factors, Kronecker)[0])


def dense(factors: Any) -> list[torch.Tensor]:
    return [K.dense().reshape(K.shape.numel(), -1) for K in matrices(factors).values()]


drawn = given(networks(), st.sampled_from(LOSSES), st.integers(1, 4))


@pytest.mark.quick
@settings(max_examples=8)
@drawn
def test_is_the_loop_of_the_columns(net, loss, sweeps):
    """On the fast path, the generic one and in blocks, whatever reads a parameter."""
    args = net.params, net.x, loss.target(Numbers(1), net.n)
    wanted = [looped(s, sweeps) for s in tree.leaves(sqrt_ggn(net.f, loss)(*args))]
    t = kfoc(net.f, loss, fisher="exact", sweeps=sweeps)
    for path in (lambda t: t, generic, in_blocks):
        assert_trees_close(dense(path(t)(*args)), wanted, EXACT, FLOOR)


@pytest.mark.parametrize("called", ["sequence", "convolution"])
def test_comes_to_the_best_product_and_is_nearer_than_k_fac(called):
    """The error falls with each sweep; K-FAC leaves out what positions have in common."""
    net = network(called, 5)
    args = net.params, net.x, LOSSES[0].target(Numbers(1), 5)

    def f(params, x):
        return net.f(params, x).reshape(5, -1, 3).mean(1)

    by_sweeps = [matrices(kfoc(f, LOSSES[0], fisher="exact", sweeps=k)(*args)) for k in (1, 2, 3, 4, 30)]
    shares, factors = (
        dict(tree.named_leaves(sqrt_ggn(f, LOSSES[0])(*args))),
        matrices(kfac(f, LOSSES[0], fisher="exact")(*args)),
    )
    weights = [path for path, share in shares.items() if sum(size != 1 for size in share.shape[2:]) > 1]
    assert weights
    for path in weights:
        g = shares[path].flatten(0, 1).flatten(2)
        block = looped(g.flatten(1)[None], 1)
        least = torch.linalg.svdvals(torch.einsum("noi,npj->opij", g, g).flatten(2).flatten(0, 1))[1:].norm()
        errors = [(found[path].dense().reshape(block.shape) - block).norm() for found in by_sweeps]
        assert all(now <= before * (1 + EXACT) for before, now in zip(errors[:-1], errors[1:], strict=True))
        assert_trees_close(errors[-1], least, 1e-6)
        assert errors[2] < (factors[path].dense().reshape(block.shape) - block).norm()


class TestResult:
    def test_two_batches_are_not_merged_and_sweeps_are_some(self):
        f, args = (lambda w, x: x @ w), (Numbers()(4, 3), Numbers(1)(5, 4), Numbers(2)(5, 3))
        one = kfoc(f, F.mse_loss, fisher="exact")(*args)
        with pytest.raises(ArgumentError, match="merge"):
            kronecker.merge(one, one, reduction="mean")
        with pytest.raises(ArgumentError, match=r"kfoc\(sweeps=0\)"):
            kfoc(F.linear, F.mse_loss, sweeps=0)


@pytest.mark.parametrize("positions", [4, 64])
@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_positions_that_cancel_leave_the_digits_of_single_precision(sweeps, positions):
    """The factors of a share are large, the share is small: their products, added up in float32, were off by 42 %."""
    x = (Numbers()(6, 1, 128) + 1e-3 * Numbers(1)(6, positions, 128)).float()
    w, signs = Numbers(2)(128, 128).float() / 11, Numbers(3)(positions, 128).float()
    signs = signs - signs.mean(0)
    t = kfoc(lambda w, x: (F.linear(x, w) * signs.to(x)).sum((1, 2)), fisher="empirical", sweeps=sweeps)
    assert_trees_close([k.double() for k in t(w, x).factors], list(t(w.double(), x.double()).factors), 1e-3)


def test_scale_of_a_mean_over_a_data_set():
    """A mean that is given apart is that of all samples, in every sweep."""
    f, args = (lambda w, x: x @ w), (Numbers()(4, 3), Numbers(1)(5, 4), Numbers(2)(5, 3))
    loader = [(args[1][:2], args[2][:2]), (args[1][2:], args[2][2:])]
    for sweeps in (1, 2, 3):
        t = kfoc(f, F.mse_loss, fisher="exact", sweeps=sweeps)
        assert_trees_close(dense(streamed(t)(args[0], loader)), dense(t(*args)), EXACT)
    assert total(dense(t(*args))) != 0
