"""A small statistic with its plans, and what they say and did, for the tests of plans."""

import warnings

import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, tree
from invfunc.testing.oracles import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-12


def given(seed=0, n=4):
    rand = Numbers(seed)
    return rand(3), rand(n, 3)


def of(f):
    """A statistic of a function of `(params, x)`, as it is, and by plans."""
    return invfunc.variance(f), compiled(invfunc.variance(f))


def same(c, t, *args, **kwargs):
    assert_trees_close(c(*args, **kwargs), t(*args, **kwargs), EXACT)


def hits(c):
    return sum(entry.hits for entry in c.calls.entries.values())


def whys(c):
    return [entry.why for entry in c.calls.entries.values() if entry.why]


def quietly(call, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", invfunc.InvFuncWarning)
        return call(*args)


def loss(w, x):
    return (x @ w).square()


def dropping(w, x):
    return (F.dropout(x, 0.5) @ w).square()


def other(args, k):
    """Arguments of the same shapes with other numbers; indices stay what they are."""
    return tree.map_tensors(lambda x: x * (1 + 0.1 * k) + 0.03 * k if x.is_floating_point() else x.roll(k, 0), args)


def outcome(call, args):
    """The result of a call, and where it leaves torch's generator."""
    torch.manual_seed(1)
    try:
        result = call(*args)
    except invfunc.InvFuncError as error:
        result = type(error).__name__
    return result, torch.get_rng_state()
