"""Networks whose outputs see few of their entries, or all of them through few, or only look so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from invfunc import thresholds
from tests.modules import of_module
from tests.strategies import Case, Numbers
from tests.structure_layers import FEW, LARGEST, PIECES, Attention, Join, bottleneck, chain, of_kind

BATCHES = st.sampled_from([2, 1, 3])


@contextmanager
def always() -> Iterator[None]:
    """The structure is used wherever it can be, however small the network."""
    with mock.patch.multiple(thresholds, CLASS=0.0, COLUMN=0.0, FEW=0, PAYS=math.inf):
        yield


def images(draw, d: int) -> tuple[int, ...]:
    """Channels and sizes."""
    sizes = st.sampled_from({1: [16, 9, 24, 11], 2: [8, 5, 7, 6], 3: [4, 3, 5, 2]}[d])
    return draw(FEW), *(draw(sizes) for _ in range(d))


def of_images(draw, module: nn.Module, shape: tuple[int, ...]) -> Case:
    return of_module(str(module), module, Numbers(draw(st.integers(0, 3)))(draw(BATCHES), *shape))


@st.composite
def local(draw, d: int) -> Case:
    """Whose outputs see few pixels each."""
    shape = images(draw, d)
    return of_images(draw, chain(draw, shape, 4)[0], shape)


@st.composite
def mixed(draw) -> Case:
    """Local layers, narrow ones, and others among them; many classes for each pixel."""
    shape = images(draw, draw(st.integers(1, 2)))
    module, (c, *size) = chain(draw, shape, 4, PIECES)
    if draw(st.booleans()):
        module.append(of_kind("Conv", len(size))(c, min(6, LARGEST // math.prod(size)), 1))
    return of_images(draw, module, shape)


@st.composite
def unets(draw) -> Case:
    shape = images(draw, d := draw(st.integers(1, 2)))

    def level(c: int, depth: int) -> nn.Module:
        conv, out = of_kind("Conv", d), draw(FEW)
        inside = level(out, depth - 1) if depth else conv(out, 2, 1)
        down = draw(st.sampled_from([of_kind("MaxPool", d)(2, ceil_mode=True), conv(out, out, 2, 2, 1)]))
        up = draw(st.sampled_from([nn.Upsample(scale_factor=2), of_kind("ConvTranspose", d)(2, 2, 2, 2)]))
        joined = Join(nn.Sequential(down, inside, up), "cat(x, y)")
        return nn.Sequential(conv(c, out, 3, padding=1), nn.ReLU(), joined, nn.ReLU(), conv(out + 2, 2, 3, padding=1))

    return of_images(draw, level(shape[0], draw(st.integers(0, 1))), shape)


@st.composite
def autoencoders(draw) -> Case:
    """Convolutions, a flat code, convolutions."""
    shape = images(draw, draw(st.integers(1, 2)))
    module, (c, *size) = chain(draw, shape, 3)
    return of_images(draw, nn.Sequential(module, bottleneck(draw, c, *size), chain(draw, (c, *size), 3)[0]), shape)


class Reads(nn.Module):
    """Of `[N, T]` tokens or `[N, T, 3]` numbers: a body along the steps, and a head at each of them or at the first."""

    def __init__(self, body: str, tokens: bool, classes: int, first: bool):
        super().__init__()
        self.table, self.token = nn.Embedding(5, 3) if tokens else None, nn.Parameter(torch.ones(3)) if first else None
        self.body = BODIES[body]()
        self.head = nn.Linear(3, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, classes, T]`, or `[N, classes]`."""
        x = x if self.table is None else self.table(x)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), 1, 3), x], 1)
        x = self.body(x)
        return self.head(x.tanh()).movedim(-1, 1) if self.token is None else self.head(x[:, 0])


class Recurrent(nn.Module):
    """A cell by hand, whose state is as wide as its inputs."""

    def __init__(self, narrow: int):
        super().__init__()
        self.down, self.up, self.memory = nn.Linear(3, narrow), nn.Linear(narrow, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, states = x[:, 0] * 0, []
        for step in x.unbind(1):
            h = (self.up(self.down(step)) + self.memory(h)).tanh()
            states.append(h)
        return torch.stack(states, 1)


class First(nn.Module):
    """The first of what a layer returns."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Shifted(nn.Module):
    """Each step sees itself and the one before."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(3, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(F.pad(x.mT, (1, 0))).mT


BODIES: dict[str, Callable[[], nn.Module]] = {
    "steps by themselves": lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
    "narrow steps": lambda: nn.Sequential(nn.Linear(3, 2), nn.GELU(), nn.Linear(2, 3)),
    "attention": lambda: Attention(3, False),
    "encoder": lambda: nn.TransformerEncoderLayer(3, 1, 2, dropout=0.0, batch_first=True).eval(),
    "cell by hand": lambda: Recurrent(1),
    "LSTM": lambda: First(nn.LSTM(3, 3, batch_first=True)),
    "GRU": lambda: First(nn.GRU(3, 3, batch_first=True)),
    "convolution": Shifted,
}


@st.composite
def sequences(draw) -> Case:
    """Many classes for each step, or for a sequence."""
    body, tokens, first = draw(st.sampled_from(list(BODIES))), draw(st.booleans()), draw(st.booleans())
    module, rand = Reads(body, tokens, draw(st.sampled_from([5, 2, 9, 4])), first), Numbers(draw(st.integers(0, 3)))
    n, steps = draw(BATCHES), draw(st.sampled_from([3, 1, 5]))
    return of_module(f"{body}, {module}", module, rand.below(5, n, steps) if tokens else rand(n, steps, 3))


ACTIVATIONS: dict[str, Callable] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "dead": lambda x: F.relu(x - 1.5),
    "none": lambda x: x,
    "relu_": lambda x: torch.relu_(x),
}
WIRINGS: dict[str, Callable] = {
    "chain": lambda x, h, p: h,
    "around": lambda x, h, p: h + x.mean(1, keepdim=True),
    "scaled": lambda x, h, p: h * p["scale"],
    "beside": lambda x, h, p: (
        torch.cat([h, p["side"].expand(len(h), 1)], 1) @ torch.ones(h.shape[1] + 1, h.shape[1]).to(h)
    ),
}


@st.composite
def perceptrons(draw) -> Case:
    """Narrow in the middle; a way around it, a parameter on both of its sides, or the same weight on both."""
    rand, n = Numbers(draw(st.integers(0, 3))), draw(BATCHES)
    outer, inner, code = draw(st.sampled_from([8, 3, 12])), draw(st.integers(2, 5)), draw(FEW)
    act, wiring, tied = (draw(st.sampled_from(list(names))) for names in (ACTIVATIONS, WIRINGS, ["", "tied", "half"]))
    widths = [outer, inner, code, inner, outer]
    weights = [rand(b, a) * 0.7 for a, b in zip(widths[:-1], widths[1:], strict=True)]
    params = {"layers": weights[: {"": 4, "tied": 2, "half": 3}[tied]], "biases": [rand(w) for w in widths[1:]]}
    params |= {"scale": 1 + 0.1 * rand(1), "side": rand(1)}

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        missing = 4 - len(p["layers"])
        layers = [*p["layers"], *(w.mT for w in p["layers"][:missing][::-1])]
        for i, (w, b) in enumerate(zip(layers, p["biases"], strict=True)):
            h = F.linear(x, w, b)
            x = h if i == 3 else WIRINGS[wiring](x, ACTIVATIONS[act](h), p)
        return x

    return Case(f"{widths}, {act}, {wiring}, {tied}", f, params, (rand(n, outer),), (0,))


def _from(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Other pixels for each sample."""
    index = (torch.arange(x.shape[-1], device=x.device) + by.long()[:, None]) % x.shape[-1]
    return x.gather(-1, index[:, None].expand_as(x))


def _zeroed(h: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    h[where.expand_as(h)] = 0
    return h


MOVED: dict[str, Callable] = {
    "gather by x": lambda h, x: _from(h, 3 * x[:, 0, 0].abs()),
    "where x": lambda h, x: torch.where(x > 0, h, F.pad(h, (1, -1))),
    "choice of x": lambda h, x: torch.where((x.sum((1, 2)) > 0)[:, None, None], h, F.pad(h, (-2, 2))),
    "product with x": lambda h, x: h @ (x.mT @ x),
    "kernels of x": lambda h, x: F.conv1d(
        h.flatten(0, 1)[None], x[:, :, :3].repeat_interleave(2, 0), padding=1, groups=2 * len(x)
    ).unflatten(1, (-1, 2))[0],
    "samples": lambda h, x: F.grid_sample(h[:, :, None], torch.stack([x, 0 * x], -1).tanh(), align_corners=False)[
        :, :, 0
    ],
    "sorted by x": lambda h, x: h.gather(-1, x.argsort(-1).expand_as(h)),
    "masked by x": lambda h, x: h.clone().masked_fill_(x > 0.5, 0.1),
    "mask of x": lambda h, x: _zeroed(h.clone(), x > 0.5),
    "length": lambda h, x: h.roll(len(x), -1),
    "branch of one": lambda h, x: h.roll(1, -1) if len(x) == 1 else h,
    "fft": lambda h, x: torch.fft.irfft(torch.fft.rfft(h) * 0.5, h.shape[-1]),
    "top": lambda h, x: h.topk(h.shape[-1], -1).values,
    "scatter": lambda h, x: torch.zeros_like(h).scatter(-1, x.argsort(-1).expand_as(h), h),
    "einsum": lambda h, x: torch.einsum("nct,nks->ncs", h, x),
    "unfolded": lambda h, x: h.unfold(-1, 2, 1).sum(-1),
    "strided": lambda h, x: h.contiguous().as_strided(h.shape, h.contiguous().stride()).flip(-1),
    "numpy-like": lambda h, x: torch.stack([h[..., (3 * t) % h.shape[-1]] for t in range(h.shape[-1])], -1),
}


@st.composite
def by_data(draw) -> Case:
    """Convolutions along some pixels around something whose structure is that of the data, or is no one's."""
    rand, n, called = Numbers(draw(st.integers(0, 3))), draw(BATCHES), draw(st.sampled_from(list(MOVED)))
    params = {"first": rand(2, 1, 3), "second": rand(draw(FEW), 2, 2), "scale": rand(2, 1)}

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.conv1d(x, p["first"], padding=1)
        return F.conv1d(MOVED[called](h.tanh(), x) * p["scale"], p["second"])

    return Case(called, f, params, (rand(n, 1, draw(st.sampled_from([12, 6, 16]))),), (0,))


NETWORKS = {
    "1d": local(1),
    "2d": local(2),
    "3d": local(3),
    "mixed": mixed(),
    "u-net": unets(),
    "auto-encoder": autoencoders(),
    "sequence": sequences(),
    "perceptron": perceptrons(),
    "by data": by_data(),
}
