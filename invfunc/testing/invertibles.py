"""Small invertible functions, each said in a line of code, which is how it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import invfunc
from invfunc import layers
from invfunc.pairs.pair import Invertible
from invfunc.testing.values import Numbers, moved, option

Built = tuple[Invertible, Any, tuple]
"""A pair, its x and its further arguments."""


def layer(b: torch.Tensor, p: Any) -> torch.Tensor:
    """A layer of a perceptron."""
    return torch.tanh(b @ p["w"] + p["b"])


def _both(b: torch.Tensor, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer(b, p[0]), layer(b, p[1])


def _weights(rand: Numbers, inner: int, outer: int) -> dict[str, torch.Tensor]:
    return {"w": rand(inner, outer) / inner**0.5, "b": rand(outer) / 2}


def _halves(rand: Numbers, n: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(n, width), rand(n, width + 1)


def _crossed(rand: Numbers, width: int) -> tuple[Any, Any]:
    return _weights(rand, width + 1, width), _weights(rand, width, width + 1)


def additive(rand: Numbers, n: int, width: int) -> Built:
    """A coupling of two parts of different width."""
    return invfunc.additive_coupling(layer, layer), _halves(rand, n, width), (_crossed(rand, width),)


def affine(rand: Numbers, n: int, width: int) -> Built:
    """The same with a scale."""
    params = zip(_crossed(rand, width), _crossed(rand, width), strict=True)
    return invfunc.affine_coupling(_both, _both), _halves(rand, n, width), (tuple(params),)


def momentum(rand: Numbers, n: int, width: int) -> Built:
    """A residual network with momentum."""
    x = rand(n, width), rand(n, width)
    return invfunc.pairs.momentum(layer, 0.7), x, (_weights(rand, width, width),)


def leapfrog(rand: Numbers, n: int, width: int) -> Built:
    """A residual network of second order."""
    x = rand(n, width), rand(n, width)
    return invfunc.pairs.leapfrog(layer, 0.6), x, (_weights(rand, width, width),)


def reversible_step(rand: Numbers, n: int, width: int) -> Built:
    """A step of a solver, from one time to another, of a field that changes in time."""

    def field(x: torch.Tensor, t: torch.Tensor, p: Any) -> torch.Tensor:
        return layer(x, p) - t * x

    x = rand(n, width), rand(n, width)
    ends = rand() / 2, rand() / 2
    return (
        invfunc.pairs.reversible_step(invfunc.pairs.runge_kutta(field, "heun"), 0.8),
        x,
        (ends, _weights(rand, width, width)),
    )


def fixed_point(rand: Numbers, n: int, width: int) -> Built:
    """A step towards a fixed point."""
    x = rand(n, width), rand(n, width)
    return invfunc.pairs.fixed_point(layer, 0.4), x, (_weights(rand, width, width),)


def squash(rand: Numbers, n: int, width: int) -> Built:
    """Two functions of one tensor, number by number."""

    def f(x: torch.Tensor, p: Any) -> torch.Tensor:
        return (x * p["s"].exp() + p["c"]).asinh()

    def f_inv(y: torch.Tensor, p: Any) -> torch.Tensor:
        return (y.sinh() - p["c"]) * (-p["s"]).exp()

    def log_det(x: torch.Tensor, p: Any) -> torch.Tensor:
        z = x * p["s"].exp() + p["c"]
        return (p["s"] - z.square().add(1).log() / 2).sum(1)

    return Invertible(f, f_inv, log_det=log_det), rand(n, width), ({"s": rand(width) / 4, "c": rand(width) / 2},)


def leaky_relu(rand: Numbers, n: int, width: int) -> Built:
    """A layer without parameters."""
    return layers.leaky_relu(), rand(n, width), ()


def batch_norm(rand: Numbers, n: int, width: int) -> Built:
    """A layer that mixes samples, and hides their statistics."""
    return layers.batch_norm(), rand(n + 1, width), ((1 + rand(width) / 4, rand(width)),)


def chain(rand: Numbers, n: int, width: int) -> Built:
    """Couplings one after the other."""
    pair = invfunc.additive_coupling(layer, layer)
    return invfunc.chain(pair, pair), _halves(rand, n, width), ([_crossed(rand, width) for _ in range(2)],)


def repeated(rand: Numbers, n: int, width: int) -> Built:
    """One coupling, three times."""
    pair = invfunc.additive_coupling(layer, layer)
    return invfunc.repeated(pair), _halves(rand, n, width), ([_crossed(rand, width) for _ in range(3)],)


PAIRS: dict[str, Callable[[Numbers, int, int], Built]] = {
    "leaky_relu": leaky_relu,
    "squash": squash,
    "additive": additive,
    "affine": affine,
    "momentum": momentum,
    "leapfrog": leapfrog,
    "reversible_step": reversible_step,
    "fixed_point": fixed_point,
    "batch_norm": batch_norm,
    "chain": chain,
    "repeated": repeated,
}


@dataclass(frozen=True)
class Pair:
    """An invertible function with arguments for it: `laws.check_pair(p.pair, p.x, *p.args)`.

    >>> p = Pair("leaky_relu")
    >>> p.pair(p.x, *p.args).shape
    torch.Size([2, 2])
    """

    called: str
    """One of `PAIRS`."""
    n: int = 2
    width: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @cached_property
    def _built(self) -> Built:
        pair, x, args = option("Pair", "pair", self.called, PAIRS)(Numbers(self.seed), self.n, self.width)
        return pair, *moved((x, args), self.dtype, self.device)

    @property
    def pair(self) -> Invertible:
        """The function with its inverse."""
        return self._built[0]

    @property
    def x(self) -> Any:
        """The state."""
        return self._built[1]

    @property
    def args(self) -> tuple:
        """The further arguments."""
        return self._built[2]
