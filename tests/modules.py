"""Whole models with drawn structure: modules as people write them, and plain functions of trees of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from invfunc import functional
from tests.core.programs import MODULES
from tests.strategies import SIZES, Case, Numbers

WIDTHS = st.integers(1, 3)


def of_module(called: str, module: nn.Module, *inputs: torch.Tensor, at: int = 0) -> Case:
    """A module with samples along axis `at` of its inputs and outputs, and with parameters and buffers that say more
    than the initial ones; the buffers follow the parameters to their precision and device."""
    rand = Numbers(3)
    model, params = functional(module)
    buffers = {name: (rand(*b.shape) / 2).exp() if b.is_floating_point() else b for name, b in module.named_buffers()}

    def f(params: dict[str, torch.Tensor], *xs: torch.Tensor) -> torch.Tensor:
        like = next(iter(params.values()))
        frozen = {n: b.to(like.device, like.dtype if b.is_floating_point() else b.dtype) for n, b in buffers.items()}
        return model({**frozen, **params}, *xs).movedim(at, 0)

    numbers = {name: rand(*p.shape) * 0.7 for name, p in params.items()}
    return Case(called, f, numbers, inputs, (at,) * len(inputs))


def _activation(draw) -> nn.Module:
    kinds = [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.SiLU(inplace=True)]
    return draw(st.sampled_from(kinds))


class Rectified(nn.Linear):
    """A subclass of nn.Linear that does more, with F.relu and a constant of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the rectified one, but for one."""
        return 2 * F.relu(super().forward(x)) - 1


@st.composite
def perceptrons(draw) -> Case:
    """Linear layers, plain, subclassed, weight-normed or one used twice, with activations that may write in place."""
    widths = draw(st.lists(WIDTHS, min_size=2, max_size=4))
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        kind = draw(st.sampled_from(["plain", "subclass", "weight_norm"]))
        layer = Rectified(a, b) if kind == "subclass" else nn.Linear(a, b, bias=draw(st.booleans()))
        layers += [nn.utils.parametrizations.weight_norm(layer) if kind == "weight_norm" else layer]
        layers += [_activation(draw)] * (i < len(widths) - 2)
    if draw(st.booleans()):
        twice = nn.Linear(widths[-1], widths[-1])
        layers += [twice, nn.Sigmoid(), twice]
    shape = [draw(SIZES), *draw(st.lists(WIDTHS, max_size=1)), widths[0]]
    return of_module(str(nn.Sequential(*layers)), nn.Sequential(*layers), Numbers()(*shape))


@st.composite
def convolutionals(draw) -> Case:
    """Convolutions with padding modes and groups, pooling, a transposed convolution, a linear head."""
    modes, groups = st.sampled_from(["zeros", "reflect", "replicate", "circular"]), draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["same", 1, 0]))
    first = nn.Conv2d(2, 2 * groups, 3, padding=padding, padding_mode=draw(modes), groups=groups)
    pools = [nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2), nn.Identity()]
    middle = [first, _activation(draw), draw(st.sampled_from(pools))]
    if draw(st.booleans()):
        middle += [nn.ConvTranspose2d(2 * groups, 1, 2, stride=2, output_padding=1), nn.Sigmoid()]
    x = Numbers()(draw(SIZES), 2, 4, 5)
    features = nn.Sequential(*middle)(x.float()).flatten(1).shape[1]
    module = nn.Sequential(*middle, nn.Flatten(), nn.Linear(features, draw(WIDTHS)))
    return of_module(str(module), module, x)


@st.composite
def ordinary(draw) -> Case:
    """The models of `tests/core/programs.py`."""
    called, n = draw(st.sampled_from(list(MODULES))), draw(SIZES)
    make, shape, tokens = MODULES[called]
    x = Numbers().below(tokens, n, *shape) if tokens else Numbers()(n, *shape)
    return of_module(called, make().eval(), x)


@st.composite
def transformers(draw) -> Case:
    """An encoder layer with the samples first or the time first, also where both are equally long."""
    first, norm_first, training = (draw(st.booleans()) for _ in range(3))
    activation = draw(st.sampled_from(["relu", "gelu"]))
    options = {"dropout": 0.0, "activation": activation, "batch_first": first, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(4, 2, 3, **options).train(training)
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), 4)
    return of_module(f"transformer, {options}, train({training})", layer, Numbers()(*shape), at=1 - first)


class Language(nn.Module):
    """Embeddings, a recurrence by hand, and the embedding again as the head."""

    def __init__(self, time_first: bool, learned: bool):
        super().__init__()
        self.embedding, self.step, self.memory = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.start = nn.Parameter(torch.zeros(3)) if learned else None
        self.time_first = time_first

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each token."""
        x = self.embedding(tokens)
        steps = x.unbind(0) if self.time_first else [x[:, t] for t in range(x.shape[1])]
        h = torch.zeros_like(steps[0]) if self.start is None else self.start.expand(steps[0].shape[0], 3)
        states = []
        for step in steps:
            h = torch.tanh(self.step(step) + self.memory(h))
            states.append(h)
        return self.head(torch.stack(states, 0 if self.time_first else 1))


@st.composite
def languages(draw) -> Case:
    """Tied weights, and time first with as many steps as samples."""
    first, n, steps = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = Numbers().below(4, *((steps, n) if first else (n, steps)))
    called = f"language model, time {'first' if first else 'second'}"
    return of_module(called, Language(first, draw(st.booleans())), tokens, at=int(first))


@st.composite
def plain_functions(draw) -> Case:
    """Matmuls by hand, with samples and steps in one dimension, and parameters in any tree."""
    rand, n, steps, width = Numbers(), draw(SIZES), draw(SIZES), draw(WIDTHS)
    first, second, bias = rand(width, 3), rand(2, width), rand(width)
    trees: dict[str, tuple[Any, Callable]] = {
        "list": ([first, bias, second], lambda p: p),
        "tuple": ((first, (bias, second)), lambda p: (p[0], *p[1])),
        "nested dict": (
            {"in": {"w": first, "b": bias}, "out": [second]},
            lambda p: (p["in"]["w"], p["in"]["b"], p["out"][0]),
        ),
    }
    called = draw(st.sampled_from(list(trees)))
    params, read = trees[called]

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        w, b, v = read(params)
        flat = x.reshape(-1, 3)
        hidden = torch.relu_(flat @ w.T + b)
        return (hidden @ v.t()).view(*x.shape[:2], -1).movedim(at, 0)

    at = draw(st.integers(0, 1))
    x = rand(*((n, steps, 3) if at == 0 else (steps, n, 3)))
    return Case(f"plain function of a {called}", f, params, (x,), (at,))


MODELS = {
    "perceptron": perceptrons(),
    "convolutional": convolutionals(),
    "ordinary": ordinary(),
    "transformer": transformers(),
    "language": languages(),
    "plain function": plain_functions(),
}
