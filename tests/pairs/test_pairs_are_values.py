"""Pairs and blocks are copied, pickled and saved with what they evaluate; modules are parts as they are."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

WIDTH = 4


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


@dataclass(frozen=True, repr=False)
class Drawn:
    """A pair with a state and parameters, and whether it has an inverse by itself and a volume."""

    pair: Invertible
    x: Any
    params: Any
    invertible: bool = True

    def __repr__(self) -> str:
        return repr(self.pair)


def halves(rand: Numbers) -> Any:
    return rand(3, WIDTH), rand(3, WIDTH)


def weight(rand: Numbers) -> torch.Tensor:
    return rand(WIDTH, WIDTH) / 2


def weights(rand: Numbers) -> Any:
    return weight(rand), weight(rand)


def modules(rand: Numbers) -> list[nn.Module]:
    found = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH).double())]
    with torch.no_grad():
        for module in found:
            for p in module.parameters():
                p.copy_(rand(*p.shape) / 2)
    return found


PAIRS = {
    "additive": lambda r: Drawn(additive_coupling(layer, layer), halves(r), weights(r)),
    "additive, split": lambda r: Drawn(additive_coupling(layer, layer, split_dim=-1), r(3, 2 * WIDTH), weights(r)),
    "exact": lambda r: Drawn(additive_coupling(layer, layer, exact=Grid(20)), Grid(20).enter(halves(r)), weights(r)),
    "bdia": lambda r: Drawn(
        bdia(layer, Grid(20, torch.float64)), Grid(20, torch.float64).enter(halves(r)), (True, weight(r)), False
    ),
    "affine": lambda r: Drawn(affine_coupling(two_layers, two_layers, log_scale=torch.sin), halves(r), weights(r)),
    "momentum": lambda r: Drawn(momentum(layer, 0.7), halves(r), weight(r)),
    "leapfrog": lambda r: Drawn(leapfrog(layer, 0.3), halves(r), weight(r)),
    "reversible_step": lambda r: Drawn(
        reversible_step(runge_kutta(field, "heun"), 0.7), halves(r), (0.0, 0.5, weight(r))
    ),
    "fixed_point": lambda r: Drawn(fixed_point(layer, 0.3), halves(r), weight(r)),
    "functions": lambda r: Drawn(Invertible(stretch, unstretch), r(3, WIDTH), weight(r)),
    "modules": lambda r: Drawn(additive_coupling(*modules(r)), halves(r), None),
    "methods": lambda r: Drawn(additive_coupling(modules(r)[0].forward, modules(r)[1].forward), halves(r), None),
    "linear": lambda r: Drawn(layers.linear(), r(3, WIDTH), (weight(r), r(WIDTH))),
    "orthogonal_linear": lambda r: Drawn(layers.orthogonal_linear(), r(3, WIDTH), weight(r)),
    "conv1x1": lambda r: Drawn(layers.conv1x1(), r(2, WIDTH, 3), weight(r)),
    "patch_conv": lambda r: Drawn(layers.patch_conv(), r(2, 1, 4, 2), weight(r).view(WIDTH, 1, 2, 2)),
    "batch_norm": lambda r: Drawn(layers.batch_norm(1e-3), r(5, WIDTH), (1 + r(WIDTH) / 4, r(WIDTH)), False),
    "batch_norm, given": lambda r: Drawn(
        layers.batch_norm(statistics=(r(WIDTH), 1 + r(WIDTH).square())), r(5, WIDTH), None
    ),
    "leaky_relu": lambda r: Drawn(layers.leaky_relu(0.3), r(3, WIDTH), None),
    "flatten": lambda r: Drawn(layers.flatten(1, 2), r(3, 2, 2), None, False),
    "unflatten": lambda r: Drawn(layers.unflatten(1, (2, -1)), r(3, WIDTH), None),
    "haar": lambda r: Drawn(layers.haar(), r(2, 1, 4, 2), None),
    "pad": lambda r: Drawn(layers.pad((1, 2), 0.5), r(2, 3), None, False),
    "identity": lambda r: Drawn(layers.identity(), r(2, 3), None),
}


def changed(drawn: Drawn, how: str) -> Drawn:
    """The same in something that is made of pairs."""
    pair, params = drawn.pair, drawn.params
    if how == "inverted" and drawn.invertible:
        return Drawn(invert(pair), pair(drawn.x, *given_to(params)), params)
    if how == "with log_det" and drawn.invertible and pair.log_det is not None:
        n = len(tree.tensors(drawn.x)[0])
        return Drawn(with_log_det(pair), (drawn.x, torch.zeros(n, dtype=torch.float64)), params)
    if how == "chain" and drawn.invertible:
        return Drawn(chain(pair, invert(pair), layers.identity(), anchor_every=2), drawn.x, [params, params, None])
    if how == "repeated" and drawn.invertible and "flatten" not in repr(pair) and "pixel" not in repr(pair):
        moves = "haar" in repr(pair) or "patch" in repr(pair)
        return drawn if moves else Drawn(repeated(pair), drawn.x, [params, params])
    return drawn


def given_to(params: Any) -> tuple:
    return () if params is None else (params,)


@st.composite
def pairs(draw: Any) -> Drawn:
    found = PAIRS[draw(st.sampled_from(list(PAIRS)))](Numbers(draw(st.integers(0, 3))))
    for how in draw(st.lists(st.sampled_from(["inverted", "with log_det", "chain", "repeated"]), max_size=2)):
        found = changed(found, how)
    return found


def told(pair: Invertible, x: Any, params: Any) -> dict[str, Any]:
    """Value, way back, volume, and gradients of the checkpointed function in all that it reads."""
    own = [p for fn in (*pair.shared, pair.forward) for p in held_by(fn)]
    leaves = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, params))
    g = invertible_checkpoint(pair)
    y = g(leaves[0], *given_to(leaves[1]))
    loss = sum((t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y) if t.requires_grad)
    inputs = [*tree.tensors(leaves), *own]
    found = {"y": y, "gradients": torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)}
    if not pair.hidden:
        found["x"] = pair.inverse(*pair.shared, tree.map_tensors(torch.Tensor.detach, y), *given_to(params))
    if pair.log_det is not None:
        found["log_det"] = pair.log_det(*pair.shared, x, *given_to(params))
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


class TestCopies:
    @pytest.mark.parametrize("copied", [pickled, copy.deepcopy, saved])
    @settings(max_examples=20)
    @given(drawn=pairs())
    def test_are_equal_in_all_that_a_pair_does(self, copied, drawn):
        for whole in (drawn.pair, invertible_checkpoint(drawn.pair, preserve_rng_state=False)):
            again = copied(whole)
            assert repr(again) == repr(whole)
            pair = getattr(again, "pair", again)
            found, wanted = (told(p, drawn.x, drawn.params) for p in (pair, drawn.pair))
            for name in wanted:
                assert_trees_close(tree.tensors(found[name]), tree.tensors(wanted[name]), 0)
