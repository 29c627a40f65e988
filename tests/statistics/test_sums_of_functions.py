"""Sums of functions of per-sample gradients: what the laws of their row do not say."""

from typing import Any

import pytest
import torch

from invfunc import batch_grad, chunked, streamed, thresholds, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad
from tests.rows import in_blocks
from tests.strategies import Numbers

PARAMS = {"w": Numbers(1)(4, 3), "b": Numbers(2)(3), "unread": Numbers(3)(2)}
X = Numbers(4)(5, 6, 4)
FUNCTIONS = {
    "sign": torch.sign,
    "abs": torch.abs,
    "clamp": lambda g: g.clamp(-0.5, 0.5),
    "clamp that is not 0 at 0": lambda g: g.clamp(min=0.1),
    "power": lambda g: g**4,
    "count": lambda g: g > 0,
    "in place": lambda g: g.abs_().sqrt_(),
    "normed": lambda g: g / (g.norm() + 1e-3),
}


def losses(p, x):
    return (x @ p["w"] + p["b"]).tanh().sum((1, 2))


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("hooked", [0, thresholds.HOOKED], ids=["as they come", "at the end"])
def test_are_those_of_the_loop(fn, hooked, monkeypatch):
    monkeypatch.setattr(thresholds, "HOOKED", hooked)
    t = batch_grad(losses, sum_of=fn)
    rows = loop_batch_grad(losses)(PARAMS, X)
    wanted = tree.map_tensors(lambda g: torch.stack([fn(one.clone()) for one in g]).sum(0).double(), rows)
    for one in (t, in_blocks(t), chunked(t, chunk_size=2), lambda p, x: streamed(t)(p, [x[:1], x[1:]])):
        assert_trees_close(one(PARAMS, X), wanted, 1e-10)


def test_what_is_refused():
    learned: Any = torch.tensor(0.1, dtype=torch.double, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"sum_of of a tensor \(4, 3\) gives \(\)"):
        batch_grad(losses, sum_of=torch.sum)(PARAMS, X)
    for fn in (lambda g: g if g.norm() > 1 else 0 * g, torch.randn_like, lambda g: 1.0, lambda g: g.numpy()):
        with pytest.raises(ArgumentError, match="sum_of is called for all samples at once, by torch.vmap"):
            batch_grad(losses, sum_of=fn)(PARAMS, X)
    with pytest.raises(ArgumentError, match="sum_of reads a tensor that requires a gradient"):
        batch_grad(losses, sum_of=lambda g: g.clamp(max=learned))(PARAMS, X)
    with pytest.raises(ArgumentTypeError, match="sum_of has to be a function"):
        batch_grad(losses, sum_of=2)  # pyright: ignore[reportArgumentType, reportCallIssue]
