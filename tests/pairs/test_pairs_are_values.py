"""Pairs and blocks are copied, pickled and saved with what they evaluate; modules are parts as they are."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    invert,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
    with_log_det,
)
from invfunc.pairs import Grid, bdia, fixed_point, leapfrog, momentum, reversible_step, runge_kutta
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

WIDTH, DOUBLE = 4, Grid(20, torch.float64)


# What is drawn: functions that can be found by their name, as pickle wants


def layer(b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(b @ p)


def field(x: torch.Tensor, t: float, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p) + t


def two_layers(b: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(b @ p), torch.sin(b @ p)


def stretch(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (x @ torch.linalg.matrix_exp(p)).asinh()


def unstretch(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return y.sinh() @ torch.linalg.matrix_exp(-p)


def halves(rand: Numbers) -> Any:
    return rand(3, WIDTH), rand(3, WIDTH)


def weight(rand: Numbers) -> torch.Tensor:
    return rand(WIDTH, WIDTH) / 2


def weights(rand: Numbers) -> Any:
    return weight(rand), weight(rand)


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double(), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()]


AFFINE = affine_coupling(two_layers, two_layers, log_scale=torch.sin)
PAIRS: dict[str, Callable[[Numbers], tuple]] = {
    "additive, split": lambda r: (additive_coupling(layer, layer, split_dim=-1), r(3, 2 * WIDTH), weights(r)),
    "exact": lambda r: (additive_coupling(layer, layer, exact=Grid(20)), Grid(20).enter(halves(r)), weights(r)),
    "bdia": lambda r: (bdia(layer, DOUBLE), DOUBLE.enter(halves(r)), (True, weight(r))),
    "affine": lambda r: (AFFINE, halves(r), weights(r)),
    "momentum": lambda r: (momentum(layer, 0.7), halves(r), weight(r)),
    "leapfrog": lambda r: (leapfrog(layer, 0.3), halves(r), weight(r)),
    "reversible_step": lambda r: (reversible_step(runge_kutta(field, "heun"), 0.7), halves(r), (0.0, 0.5, weight(r))),
    "one copy": lambda r: (reversible_step(runge_kutta(field, "ees25"), None), r(3, WIDTH), (0.0, 0.01, weight(r))),
    "fixed_point": lambda r: (fixed_point(layer, 0.3), halves(r), weight(r)),
    "functions": lambda r: (Invertible(stretch, unstretch), r(3, WIDTH), weight(r)),
    "modules": lambda r: (additive_coupling(*modules()), halves(r), None),
    "methods": lambda r: (additive_coupling(*[m.forward for m in modules()]), halves(r), None),
    "linear": lambda r: (layers.linear(), r(3, WIDTH), (weight(r), r(WIDTH))),
    "patch_conv": lambda r: (layers.patch_conv(), r(2, 1, 4, 2), weight(r).view(WIDTH, 1, 2, 2)),
    "batch_norm": lambda r: (layers.batch_norm(1e-3), r(5, WIDTH), (1 + r(WIDTH) / 4, r(WIDTH))),
    "pad": lambda r: (layers.pad((1, 2), 0.5), r(2, 3), None),
    "inverted": lambda r: (invert(layers.haar()), r(2, 4, 2, 1), None),
    "with log_det": lambda r: (with_log_det(AFFINE), (halves(r), r(3)), weights(r)),
    "chain": lambda r: (
        chain(AFFINE, invert(AFFINE), layers.identity(), anchor_every=2),
        halves(r),
        [*[weights(r)] * 2, None],
    ),
    "repeated": lambda r: (with_log_det(repeated(AFFINE)), (halves(r), r(3)), [weights(r)] * 2),
}


def told(pair: Invertible, x: Any, params: Any) -> dict[str, Any]:
    """Value, way back, volume, and gradients of the checkpointed function in all that it reads."""
    given = () if params is None else (params,)
    own = [p for fn in (*pair.shared, pair.forward) for p in held_by(fn)]
    leaves = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, given))
    y = invertible_checkpoint(pair)(leaves[0], *leaves[1])
    loss = sum((t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y) if t.requires_grad)
    inputs = [*tree.tensors(leaves), *own]
    found = {"y": y, "gradients": torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)}
    if not pair.hidden:
        found["x"] = pair.inverse(*pair.shared, tree.map_tensors(torch.Tensor.detach, y), *given)
    if pair.log_det is not None:
        found["log_det"] = pair.log_det(*pair.shared, x, *given)
    return found


def held_by(fn: Any) -> list[torch.Tensor]:
    module = getattr(fn, "module", None) or getattr(getattr(fn, "fn", None), "module", None)
    module = module or getattr(fn, "__self__", None)
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy, saved])
@pytest.mark.parametrize("name", PAIRS)
def test_copies_are_equal_in_all_that_a_pair_does(name, copied):
    pair, x, params = PAIRS[name](Numbers())
    wanted = told(pair, x, params)
    for whole in (pair, invertible_checkpoint(pair, preserve_rng_state=False)):
        again = copied(whole)
        assert repr(again) == repr(whole)
        found = told(getattr(again, "pair", again), x, params)
        for key in wanted:
            assert_trees_close(tree.tensors(found[key]), tree.tensors(wanted[key]), 0)
