"""K-factors of samples with different numbers of positions, some perhaps with none, against their definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import kfac
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import in_blocks
from tests.reductions.test_kfac import FLOOR, SHARINGS
from tests.strategies import Numbers

EXACT, READ, K = 1e-10, 2, 3
PICK = {
    "a mask": lambda x, there: x[there],
    "indices": lambda x, there: x[there.nonzero(as_tuple=True)],
    "a flat list": lambda x, there: x.flatten(0, 1)[there.flatten().nonzero()[:, 0]],
}
APPLY = {
    "linear": lambda p, rows: F.linear(rows, p["w"], p["b"]),
    "product": lambda p, rows: F.linear(rows, p["w"]) + p["b"],
    "column": lambda p, rows: F.linear(F.pad(rows, (0, 1), value=1.0), p["wb"]),
}
"""A layer; in the last, its bias is a column of its weight."""


def model(pick, layer):
    """The sum, for each sample, of what a layer makes of its positions."""

    def f(p, x, there):
        rows, owner = PICK[pick](x, there), there.nonzero()[:, 0]
        return x.new_zeros(len(x), K).index_add(0, owner, APPLY[layer](p, rows).tanh())

    return f


def looped(w, b, x, there, sharing):
    """`B (x) A` of the weight and of the weight with its bias, sample by sample."""
    n, samples = len(x), [a[own] for a, own in zip(x, there, strict=True)]
    B, A, with_positions = x.new_zeros(K, K), x.new_zeros(READ + 1, READ + 1), 0
    for a in samples:
        if not len(a):
            continue
        sent = (2 / (n * K)) ** 0.5 * torch.diag_embed(1 - F.linear(a, w, b).tanh().square())  # [R, V, K]
        read = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        with_positions += 1
        B += (sent.mT @ sent).sum(0) if sharing == "expand" else sent.sum(0).T @ sent.sum(0)
        A += torch.outer(read.mean(0), read.mean(0)) if sharing == "reduce" else read.T @ read
    A /= {"expand": there.sum(), "reduce": with_positions, "backpack": n}[sharing]
    return (B, A[:-1, :-1]), (B, A)


@pytest.mark.parametrize("pick", PICK)
@pytest.mark.parametrize("sharing", SHARINGS)
@given(lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda found: sum(map(bool, found)) > 1))
def test_are_of_the_positions_that_are_there(pick, sharing, lengths):
    """Also those of a bias that is one more input, which is 1 where there is a position. Other numbers of positions for
    each sample have no factors where positions are summed first, or with a bias."""
    rand, steps = Numbers(), max(lengths)
    x, y, w, b = rand(len(lengths), steps, READ), rand(len(lengths), K), rand(K, READ), rand(K)
    there = torch.arange(steps) < torch.tensor(lengths)[:, None]
    apart, joint = looped(w, b, x, there, sharing)
    for layer in APPLY:
        p = {"wb": torch.cat([w, b[:, None]], 1)} if layer == "column" else {"w": w, "b": b}
        for together in (False, True):
            wanted = joint if layer == "column" or (together and layer == "linear") else apart
            t = kfac(model(pick, layer), F.mse_loss, weight_sharing=sharing, joint=together, fisher="exact")
            for of in (t, in_blocks(t)):
                try:
                    found = of(p, x, there, y)
                except ArgumentError as error:
                    assert len({*lengths}) > 1 and (sharing != "expand" or together)
                    assert "samples have different numbers of rows" in str(error) or "picked or permuted" in str(error)
                    continue
                assert_trees_close(found["wb" if layer == "column" else "w"].factors, wanted, EXACT, FLOOR)
