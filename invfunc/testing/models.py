"""Numbers, small models and losses, and small invertible functions, each said in a line of code,
which is how it prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import layers, tree
from invfunc.errors import ArgumentError
from invfunc.pairs.pair import Invertible


class Numbers:
    """Float64 numbers that are float32 numbers too, so that one oracle serves both."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).double()

    def below(self, high: int, *shape: int) -> torch.Tensor:
        """Integers from 0 on."""
        return torch.randint(high, shape, generator=self.generator)


def seeded(seed: int = 0, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator."""
    return torch.Generator(device).manual_seed(seed)


def moved(tensors: Any, dtype: torch.dtype, device: str | torch.device) -> Any:
    """Numbers in another precision and place; integers stay integers."""
    return tree.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tensors)


def option(call: str, kind: str, name: str, known: dict[str, Callable]) -> Callable:
    """One of those that there are."""
    if name not in known:
        raise ArgumentError(f"{call}({name!r}): there is no {kind} {name!r}; there are {', '.join(map(repr, known))}.")
    return known[name]


CLASSES = 3
"""Outputs of a sample."""
Built = tuple[Callable, Any, Any]
"""`f(params, x) -> [N, CLASSES]`, its parameters and its input."""


def affine(rand: Numbers, n: int) -> Built:
    """One line of functional code."""
    params = {"weight": rand(4, CLASSES), "bias": rand(CLASSES)}
    return lambda p, x: x @ p["weight"] + p["bias"], params, rand(n, 4)


def perceptron(rand: Numbers, n: int) -> Built:
    """Three dense layers, the last one without a bias."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in p[:-1]:
            x = F.linear(x, weight, bias).tanh()
        return F.linear(x, *p[-1])

    return f, [(rand(4, 2), rand(4)), (rand(2, 4), rand(2)), (rand(CLASSES, 2),)], rand(n, 2)


def convolution(rand: Numbers, n: int) -> Built:
    """A convolution with a stride below a head."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, p["conv"]["weight"], p["conv"]["bias"], stride=2, padding=1).sigmoid()
        return x.flatten(1) @ p["head"]

    conv = {"weight": rand(2, 1, 3, 3), "bias": rand(2)}
    return f, {"conv": conv, "head": rand(8, CLASSES)}, rand(n, 1, 4, 4)


def tied(rand: Numbers, n: int) -> Built:
    """One weight that is read three times."""
    return lambda p, x: (x @ p).tanh() @ p.T + p[:, 0], rand(CLASSES, 2), rand(n, CLASSES)


def derived(rand: Numbers, n: int) -> Built:
    """Weights that are computed from parameters."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ (p["w"] + p["b"] @ p["a"]) * F.softplus(p["scale"])

    return f, {"w": rand(3, CLASSES), "b": rand(3, 1), "a": rand(1, CLASSES), "scale": rand(CLASSES)}, rand(n, 3)


def generic(rand: Numbers, n: int) -> Built:
    """Words, a norm, a parameter of no dimension, and a tree of inputs."""

    def f(p: Any, x: dict) -> torch.Tensor:
        z = F.embedding(x["tokens"], p["table"]).mean(1) + x["more"][0] / (1 + p["scale"].square())
        return F.layer_norm(z, (CLASSES,), p["norm"])

    x = {"tokens": rand.below(4, n, 2), "more": [rand(n, CLASSES)], "note": "a note without samples"}
    return f, {"table": rand(4, CLASSES), "norm": rand(CLASSES), "scale": rand()}, x


def module(rand: Numbers, n: int) -> Built:
    """A module of torch."""
    layers = [nn.Conv1d(1, 2, 2), nn.Flatten(), nn.ReLU(), nn.Linear(4, CLASSES)]
    f, params = invfunc.functional(nn.Sequential(*layers).double())
    return f, {name: rand(*p.shape) for name, p in params.items()}, rand(n, 1, 3)


def sequence(rand: Numbers, n: int) -> Built:
    """A layer on each of two steps: `[N, 2, CLASSES]`."""
    return lambda p, x: (x @ p["w"] + p["b"]).tanh(), {"w": rand(2, CLASSES), "b": rand(CLASSES)}, rand(n, 2, 2)


def attention(rand: Numbers, n: int) -> Built:
    """One head over three tokens, with a skip connection and a norm."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ p[name] for name in "qkv")
        x = F.layer_norm(x + F.scaled_dot_product_attention(q, k, v) @ p["o"], (2,), p["norm"])
        return x.mean(1) @ p["head"]

    params = {name: rand(2, 2) for name in "qkvo"} | {"norm": rand(2), "head": rand(2, CLASSES)}
    return f, params, rand(n, 3, 2)


def recurrent(rand: Numbers, n: int) -> Built:
    """A weight that is read at each of three steps."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), 2)
        for step in x.unbind(1):
            h = (step @ p["in"] + h @ p["back"] + p["bias"]).tanh()
        return h @ p["out"]

    params = {"in": rand(2, 2), "back": rand(2, 2), "bias": rand(2), "out": rand(2, CLASSES)}
    return f, params, rand(n, 3, 2)


def graph(rand: Numbers, n: int) -> Built:
    """Messages along the edges of a graph of three nodes, twice."""

    def f(p: Any, x: dict) -> torch.Tensor:
        h, edges = x["nodes"], x["edges"].softmax(2)
        for layer in p["layers"]:
            h = (h @ layer["self"] + edges @ h @ layer["others"]).tanh()
        return h.sum(1) @ p["head"]

    layers = [{"self": rand(2, 2), "others": rand(2, 2)} for _ in range(2)]
    return f, {"layers": layers, "head": rand(2, CLASSES)}, {"nodes": rand(n, 3, 2), "edges": rand(n, 3, 3)}


FAMILIES: dict[str, Callable[[Numbers, int], Built]] = {
    "affine": affine,
    "perceptron": perceptron,
    "convolution": convolution,
    "tied": tied,
    "derived": derived,
    "generic": generic,
    "module": module,
    "sequence": sequence,
    "attention": attention,
    "recurrent": recurrent,
    "graph": graph,
}


@dataclass(frozen=True)
class Model:
    """A model function `f(params, x) -> [n, CLASSES]` of a family, with arguments for it.

    >>> model = Model("perceptron", n=3)
    >>> model.f(model.params, model.x).shape
    torch.Size([3, 3])
    """

    family: str
    """One of `FAMILIES`."""
    n: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    in_dim: int = 0
    """The axis of x that counts the samples."""

    @cached_property
    def _built(self) -> Built:
        f, params, x = option("Model", "family", self.family, FAMILIES)(Numbers(self.seed), self.n)
        return f, *moved((params, x), self.dtype, self.device)

    def f(self, params: Any, x: Any) -> torch.Tensor:
        """The function."""
        return self._built[0](params, tree.map_tensors(lambda t: t.movedim(self.in_dim, 0), x))

    @property
    def params(self) -> Any:
        """The parameters."""
        return self._built[1]

    @cached_property
    def x(self) -> Any:
        """The input, a tensor or a tree."""
        return tree.map_tensors(lambda t: t.movedim(0, self.in_dim), self._built[2])


def _nll(z: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.nll_loss(z.log_softmax(1), target, reduction=reduction)


def _log_cosh(z: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    losses = (invfunc.outputs(z) - target).cosh().log()
    return losses if reduction == "none" else getattr(losses, reduction)()


def _classes(rand: Numbers, *shape: int) -> torch.Tensor:
    return rand.below(shape[1], shape[0], *shape[2:])


LOSS_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse_loss": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "nll_loss": _nll,
    "log cosh of outputs": _log_cosh,
}
TARGETS: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": _classes,
    "mse_loss": lambda rand, *shape: rand(*shape),
    "bce": lambda rand, *shape: rand(*shape).sigmoid(),
    "nll_loss": _classes,
    "log cosh of outputs": lambda rand, *shape: rand(*shape),
}


@dataclass(frozen=True)
class Loss:
    """`loss(outputs, target)` with its scale: `scale` times the "mean" or "sum", or for "none" the `[N]` losses.

    >>> Loss("mse_loss", "none", scale=2.0)(torch.ones(2, 3), torch.zeros(2, 3))
    tensor([6., 6.])
    """

    called: str
    """One of `LOSS_FUNCTIONS`."""
    reduction: str = "mean"
    scale: float = 1.0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = option("Loss", "loss", self.called, LOSS_FUNCTIONS)(outputs, target, reduction=self.reduction)
        if losses.ndim:
            losses = losses.reshape(len(losses), -1).sum(1)
        return losses if self.scale == 1 else self.scale * losses

    def target(self, outputs: torch.Tensor, seed: int = 1) -> torch.Tensor:
        """Targets for outputs of a shape."""
        found = option("Loss", "loss", self.called, TARGETS)(Numbers(seed), *outputs.shape)
        return moved(found, outputs.dtype, outputs.device)


@dataclass(frozen=True)
class Problem:
    """A model with its loss: `laws.check(*problem.args, **problem.options)`.

    >>> problem = Problem(Model("affine", n=4), Loss("mse_loss"))
    >>> problem.f(problem.model.params, *problem.batch).shape
    torch.Size([])
    """

    model: Model
    loss: Loss

    @cached_property
    def target(self) -> torch.Tensor:
        """The target of the loss."""
        with torch.no_grad():
            return self.loss.target(self.model.f(self.model.params, self.model.x))

    @property
    def batch(self) -> tuple:
        """The input and the target."""
        return self.model.x, self.target

    @property
    def in_dims(self) -> tuple[int, int]:
        """The sample axes of the batch."""
        return self.model.in_dim, 0

    def f(self, params: Any, x: Any, target: torch.Tensor) -> torch.Tensor:
        """The loss function, a scalar or `[N]`."""
        return self.loss(self.model.f(params, x), target)

    @property
    def args(self) -> tuple:
        """The arguments of `laws.check`, beside the options."""
        return self.model.f, self.model.params, *self.batch

    @property
    def options(self) -> dict[str, Any]:
        """The loss, and where the samples are."""
        return {"loss": self.loss, "in_dims": self.in_dims}


BuiltPair = tuple[Invertible, Any, tuple]
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


def affine_coupling(rand: Numbers, n: int, width: int) -> BuiltPair:
    """A coupling of two parts of different width, with scales."""
    params = zip(_crossed(rand, width), _crossed(rand, width), strict=True)
    return invfunc.affine_coupling(_both, _both), _halves(rand, n, width), (tuple(params),)


def couplings(make: Callable, count: int) -> Callable:
    """So many additive ones, one after the other."""

    def built(rand: Numbers, n: int, width: int) -> BuiltPair:
        params = [_crossed(rand, width) for _ in range(count)]
        return make(invfunc.additive_coupling(layer, layer)), _halves(rand, n, width), (params,)

    return built


def residual(make: Callable, number: float) -> Callable:
    """A residual network of two states."""

    def built(rand: Numbers, n: int, width: int) -> BuiltPair:
        return make(layer, number), (rand(n, width), rand(n, width)), (_weights(rand, width, width),)

    return built


def reversible_step(rand: Numbers, n: int, width: int) -> BuiltPair:
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


def squash(rand: Numbers, n: int, width: int) -> BuiltPair:
    """Two functions of one tensor, number by number."""

    def f(x: torch.Tensor, p: Any) -> torch.Tensor:
        return (x * p["s"].exp() + p["c"]).asinh()

    def f_inv(y: torch.Tensor, p: Any) -> torch.Tensor:
        return (y.sinh() - p["c"]) * (-p["s"]).exp()

    def log_det(x: torch.Tensor, p: Any) -> torch.Tensor:
        z = x * p["s"].exp() + p["c"]
        return (p["s"] - z.square().add(1).log() / 2).sum(1)

    return Invertible(f, f_inv, log_det=log_det), rand(n, width), ({"s": rand(width) / 4, "c": rand(width) / 2},)


def batch_norm(rand: Numbers, n: int, width: int) -> BuiltPair:
    """A layer that mixes samples, and hides their statistics."""
    return layers.batch_norm(), rand(n + 1, width), ((1 + rand(width) / 4, rand(width)),)


PAIRS: dict[str, Callable[[Numbers, int, int], BuiltPair]] = {
    "leaky_relu": lambda rand, n, width: (layers.leaky_relu(), rand(n, width), ()),
    "squash": squash,
    "additive": lambda rand, n, width: (
        invfunc.additive_coupling(layer, layer),
        _halves(rand, n, width),
        (_crossed(rand, width),),
    ),
    "affine": affine_coupling,
    "momentum": residual(invfunc.pairs.momentum, 0.7),
    "leapfrog": residual(invfunc.pairs.leapfrog, 0.6),
    "reversible_step": reversible_step,
    "fixed_point": residual(invfunc.pairs.fixed_point, 0.4),
    "batch_norm": batch_norm,
    "chain": couplings(lambda pair: invfunc.chain(pair, pair), 2),
    "repeated": couplings(invfunc.repeated, 3),
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
    def _built(self) -> BuiltPair:
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
