"""Squares per token: a copy of each parameter for each place that reads it, in all modes, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import sum_grad_squared, thresholds, tree
from invfunc.errors import ArgumentError
from invfunc.invertible.checkpoint import invertible_checkpoint
from invfunc.testing.oracles import assert_trees_close
from tests.rows import in_blocks
from tests.strategies import Numbers

EXACT = 1e-10
N, TOKENS, WORDS, WIDTH, OUT = 5, 6, 7, 4, 3
PARAMS = {
    "words": Numbers(1)(WORDS, WIDTH),
    "places": Numbers(2)(9, WIDTH),
    "scale": Numbers(3)(WIDTH),
    "shift": Numbers(4)(WIDTH),
    "weight": Numbers(5)(OUT, WIDTH),
    "bias": Numbers(6)(OUT),
    "mix": Numbers(7)(OUT, OUT),
}


def batch(n=N):
    return Numbers(8).below(WORDS, n, TOKENS), Numbers(9)(n, TOKENS, OUT)


def losses(p, x, y):
    """Words at places, a norm, a linear layer, a product with positions that see each other."""
    h = F.layer_norm(F.embedding(x, p["words"]) + p["places"][: x.shape[1]], (WIDTH,), p["scale"], p["shift"])
    z = F.linear(h, p["weight"], p["bias"]).tanh() @ p["mix"]
    return (z.cumsum(1) - y).square().sum((1, 2))


def of_copies(copies, x, y):
    """The same with a copy of each parameter for each token, `[N, T, *p]`; places are read once by a sample."""
    words = copies["words"].gather(2, x[..., None, None].expand(*x.shape, 1, WIDTH)).squeeze(2)
    h = F.layer_norm(words + copies["places"][:, 0, :TOKENS], (WIDTH,)) * copies["scale"] + copies["shift"]
    z = torch.einsum("ntk,ntok->nto", h, copies["weight"]) + copies["bias"]
    z = torch.einsum("nto,ntoq->ntq", z.tanh(), copies["mix"])
    return (z.cumsum(1) - y).square().sum((1, 2))


def oracle(params, x, y):
    copies = {
        name: p.expand(len(x), 1 if name == "places" else TOKENS, *p.shape).clone().requires_grad_()
        if not p.requires_grad
        else p.expand(len(x), 1 if name == "places" else TOKENS, *p.shape)
        for name, p in params.items()
    }
    graph = any(p.requires_grad for p in params.values())
    found = torch.autograd.grad(of_copies(copies, x, y).sum(), [*copies.values()], create_graph=graph)
    return {name: g.square().sum((0, 1)) for name, g in zip(copies, found, strict=True)}


def halves(t):
    return invfunc.streamed(t)(PARAMS, [tuple(x[:2] for x in batch()), tuple(x[2:] for x in batch())])


MODES = {
    "at once": lambda t: t(PARAMS, *batch()),
    "in blocks": lambda t: in_blocks(t)(PARAMS, *batch()),
    "chunks of samples": lambda t: invfunc.chunked(t, chunk_size=2)(PARAMS, *batch()),
    "chunks of parameters": lambda t: invfunc.chunked(t, 3, over="params")(PARAMS, *batch()),
    "streamed": halves,
    "distributed": lambda t: invfunc.distributed(t)(PARAMS, *batch()),
    "compiled": lambda t: invfunc.compiled(t)(PARAMS, *batch()),
    "padded": lambda t: invfunc.compiled(t, pad=(8,))(PARAMS, *batch()),
    "together": lambda t: invfunc.together(invfunc.variance(losses), t)(PARAMS, *batch())[1],
    "vmap": lambda t: tree.map_tensors(
        lambda x: x[1], torch.func.vmap(t, (None, 0, 0))(PARAMS, *(torch.stack([x, x]) for x in batch()))
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hooked", [0, thresholds.HOOKED], ids=["as they come", "at the end"])
def test_are_those_of_copies(mode, hooked, monkeypatch):
    monkeypatch.setattr(thresholds, "HOOKED", hooked)
    assert_trees_close(MODES[mode](sum_grad_squared(losses, per="token")), oracle(PARAMS, *batch()), EXACT)


def test_of_chosen_samples_and_of_a_mean():
    found = sum_grad_squared(losses, per="token", samples=[3, 0])(PARAMS, *batch())
    assert_trees_close(found, oracle(PARAMS, *(x[[3, 0]] for x in batch())), EXACT)
    found = sum_grad_squared(lambda *args: losses(*args).mean(), per="token")(PARAMS, *batch())
    assert_trees_close(found, tree.map_tensors(lambda x: x / N**2, oracle(PARAMS, *batch())), EXACT)


@pytest.mark.parametrize("by", ["autograd", "torch.func"])
def test_have_the_derivative_of_the_loop(by):
    def total(of, params):
        return torch.stack([x.cos().sum() for x in tree.tensors(of(params, *batch()))]).sum()

    given = tree.map_tensors(lambda p: p.clone().requires_grad_(), PARAMS)
    wanted = torch.autograd.grad(total(oracle, given), [*given.values()])
    t = sum_grad_squared(losses, per="token")
    if by == "autograd":
        found = torch.autograd.grad(total(t, given), [*given.values()])
    else:
        found = torch.func.grad(lambda p: total(t, p))(PARAMS).values()
    assert_trees_close([*found], [*wanted], 10 * EXACT)  # cosines of large numbers


def test_a_parameter_that_is_read_twice_has_the_places_of_both():
    w, x = Numbers(1)(4, 4), Numbers(2)(N, TOKENS, 4)

    def f(first, second, x):
        return ((x @ first).tanh() @ second).square().sum((1, 2))

    apart = sum_grad_squared(f, per="token", argnums=(0, 1), in_dims=0)(w, w, x)
    assert_trees_close(sum_grad_squared(lambda w, x: f(w, w, x), per="token")(w, x), sum(apart), EXACT)


def test_go_through_reversible_blocks():
    params, x = [(Numbers(k)(3, 3), Numbers(9)(3)) for k in range(3)], Numbers(5)(N, TOKENS, 6)

    def f(params, x, wrap=lambda block: block):
        block = wrap(invfunc.additive_coupling(*[lambda b, p: F.linear(b, *p).tanh()] * 2))
        state = x.chunk(2, -1)
        for p in params:
            state = block(state, (p, p))
        return torch.cat(state, -1).square().sum((1, 2))

    t = sum_grad_squared(lambda params, x: f(params, x, invertible_checkpoint), per="token")
    assert_trees_close(t(params, x), sum_grad_squared(f, per="token")(params, x), 1e-8)


def test_what_is_refused():
    w, x = Numbers(1)(4, 4), Numbers(2)(N, TOKENS, 4)
    per: Any = "word"
    with pytest.raises(ArgumentError, match="per is one of 'sample', 'token'"):
        sum_grad_squared(losses, per=per)
    with pytest.raises(ArgumentError, match=r"computed from params and read at several places"):
        sum_grad_squared(lambda w, x: (x @ (w / w.norm())).square().sum((1, 2)), per="token")(w, x)
    with pytest.raises(ArgumentError, match="whose places are known .* reads a parameter"):
        sum_grad_squared(lambda w, x: (x @ w).square().sum() + w.square().sum(), per="token")(w, x)
    with pytest.raises(ArgumentError, match="whose places are known .*`inner` reads"):
        sum_grad_squared(lambda w, x: torch.inner(x, w).sin().sum((1, 2)), per="token")(w, x)
