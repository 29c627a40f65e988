"""Transforms around products, and around exact GGNs by structure.

Private: the public laws put them around statistics. A product has a vector too, and the GGN by structure is compared
with that by all columns.
"""

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from invfunc import tree
from tests.networks import NETWORKS, total
from tests.strategies import Numbers


def steps(n, like):
    """n points around a tree."""
    rand = Numbers(5)
    return tree.map_leaves(lambda x: x + 0.3 * rand(n, *x.shape), like)


def sets(n, *batch):
    """n data sets: the samples of each in another order, shifted."""
    shifts = [0.1 * i for i in range(n)]
    moved = [[x.roll(i, 0) + (d if x.is_floating_point() else 0) for i, d in enumerate(shifts)] for x in batch]
    return [torch.stack(x) for x in moved]


def over_sets(t):
    return lambda p, *batch: vmap(t, (None, 0, 0))(p, *sets(2, *batch))


def last(batch):
    return [x.movedim(0, -1) for x in batch]


def tangent(like):
    return tree.map_leaves(lambda x: Numbers(6)(*x.shape), like)


def differentiated(t, args, wanted, twice=False):
    """By torch.autograd."""
    args = list(args)
    for i in wanted:
        args[i] = tree.map_leaves(lambda x: x.clone().requires_grad_(), args[i])
    leaves = [x for i in wanted for x in tree.leaves(args[i])]
    nothing = 0 * total(leaves)  # a result may be constant
    found = torch.autograd.grad(total(t(*args)) + nothing, leaves, create_graph=True, materialize_grads=True)
    if twice:
        found = torch.autograd.grad(total(found, 8) + nothing, leaves, materialize_grads=True)
    assert all(x.grad is None for x in leaves)
    return list(found)


def slope(t):
    return grad(lambda p, x, y: total(t(p, x, y)))


COMPOSITIONS = {
    "itself": lambda t, p, x, y: t(p, x, y),
    "grad": lambda t, p, x, y: slope(t)(p, x, y),
    "grad in the inputs": lambda t, p, x, y: grad(lambda x: total(t(p, x, y)))(x),
    "jvp": lambda t, p, x, y: jvp(lambda p: t(p, x, y), (p,), (tangent(p),)),
    "jvp in the inputs": lambda t, p, x, y: jvp(lambda x: t(p, x, y), (x,), (tangent(x),)),
    "vjp": lambda t, p, x, y: vjp(lambda p: total(t(p, x, y)), p)[1](torch.tensor(2.0).double()),
    "vmap over params": lambda t, p, x, y: vmap(t, in_dims=(0, None, None))(steps(2, p), x, y),
    "vmap over data sets": lambda t, p, x, y: over_sets(t)(p, x, y),
    "vmap over both": lambda t, p, x, y: vmap(t)(steps(2, p), *sets(2, x, y)),
    "vmap of vmap": lambda t, p, x, y: vmap(vmap(t, (0, None, None)), (None, 0, 0))(steps(3, p), *sets(2, x, y)),
    "vmap over the last axis": lambda t, p, x, y: vmap(t, (None, -1, -1), 1)(p, *last(sets(2, x, y))),
    "vmap of grad": lambda t, p, x, y: vmap(slope(t), (0, None, None))(steps(2, p), x, y),
    "grad of vmap": lambda t, p, x, y: grad(lambda p: total(vmap(t, (0, None, None))(p, x, y)))(steps(2, p)),
    "grad of vmap over data sets": lambda t, p, x, y: slope(lambda p, *b: vmap(t, (None, 0, 0))(p, *sets(2, *b)))(
        p, x, y
    ),
    "grad of grad": lambda t, p, x, y: grad(lambda p: total(slope(t)(p, x, y), 8))(p),
    "jvp of grad": lambda t, p, x, y: jvp(lambda p: slope(t)(p, x, y), (p,), (tangent(p),)),
    "jacrev": lambda t, p, x, y: jacrev(lambda p: total(t(p, x, y)).reshape(1, 1))(p),
    "jacfwd": lambda t, p, x, y: jacfwd(lambda c: total(t(p, c * x, y)))(torch.ones(2, 1).double().mean()),
    "autograd": lambda t, p, x, y: differentiated(t, (p, x, y), [0]),
    "autograd in the inputs": lambda t, p, x, y: differentiated(t, (p, x, y), [1]),
    "autograd in both": lambda t, p, x, y: differentiated(t, (p, x, y), [0, 1]),
    "autograd twice": lambda t, p, x, y: differentiated(t, (p, x, y), [0], twice=True),
    "autograd of vmap": lambda t, p, x, y: differentiated(vmap(t, (0, None, None)), (steps(2, p), x, y), [0]),
    "no_grad": lambda t, p, x, y: torch.no_grad()(t)(p, x, y),
    "grad in no_grad": lambda t, p, x, y: torch.no_grad()(slope(t))(p, x, y),
    "inference_mode": lambda t, p, x, y: torch.inference_mode()(t)(p, x, y),
    "inference tensors": lambda t, p, x, y: inferring(t, p, x, y),
}
SMOOTH = [name for name in NETWORKS if name != "generic"]  # the inputs of that one are a tree with integers


def inferring(t, *args):
    with torch.inference_mode():
        return t(*tree.map_leaves(torch.clone, args))
