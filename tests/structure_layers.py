"""Layers of drawn shapes for networks with structure: local ones, narrow ones, and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

LARGEST = 250
"""Entries of one sample in any layer."""
FEW = st.sampled_from([2, 1, 3])


class Step(nn.Module):
    """A function without parameters, which reads as it is called."""

    def __init__(self, called: str, call: Callable):
        super().__init__()
        self.called, self.call = called, call

    def extra_repr(self) -> str:
        return self.called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def cropped(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The corner that both have; a smaller one is padded."""
    short = [max(0, b - a) for a, b in zip(x.shape[2:], like.shape[2:], strict=True)]
    x = F.pad(x, [n for s in reversed(short) for n in (0, s)])
    return x[(..., *(slice(s) for s in like.shape[2:]))]


def _written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., 1:] += y[..., :-1].mean(1, keepdim=True)
    return x


JOINS: dict[str, Callable] = {
    "x + y": lambda x, y: x + y.mean(1, keepdim=True),
    "cat(x, y)": lambda x, y: torch.cat([x, y], 1),
    "x * tanh(y)": lambda x, y: x * y[:, :1].tanh(),
    "max(x, y)": lambda x, y: torch.maximum(x, y[:, -1:]),
    "x[..., 1:] += y": _written,
    "where(x > y)": lambda x, y: torch.where(x > y[:, :1], x, 2 * x),
    "stack(x, y)": lambda x, y: torch.stack([x, y[:, :1].expand_as(x)], 2).flatten(1, 2),
}


class Join(nn.Module):
    """A layer, and its inputs joined to its outputs."""

    def __init__(self, inner: nn.Module, how: str):
        super().__init__()
        self.inner, self.how = inner, how

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return JOINS[self.how](x, cropped(self.inner(x), x))


class PerPixel(nn.Module):
    """A scale for each channel and a shift for each pixel."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.ones(shape[0], *[1] * (len(shape) - 1))),
            nn.Parameter(torch.ones(shape[1:])),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Pixels(nn.Module):
    """A layer of sequences of features, over the pixels of an image."""

    def __init__(self, inner: nn.Module, across: bool = False):
        super().__init__()
        self.inner, self.across = inner, across

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2) if self.across else x.flatten(2).mT
        y = self.inner(flat)
        return (y if self.across else y.mT).unflatten(2, x.shape[2:])


class Attention(nn.MultiheadAttention):
    """Self-attention, by either of its kernels."""

    def __init__(self, width: int, weights: bool):
        super().__init__(width, 1, batch_first=True)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x, need_weights=self.weights)[0]


def of_kind(kind: str, d: int) -> Any:
    return getattr(nn, f"{kind}{d}d")


def each(draw, low: int, high: int, d: int) -> tuple[int, ...]:
    """A number for each axis."""
    return tuple(draw(st.integers(low, high)) for _ in range(d))


def convolution(draw, c: int, *size: int) -> nn.Module:
    d, groups = len(size), draw(st.sampled_from([1, c]))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    options = {"stride": each(draw, 1, 2, d), "dilation": each(draw, 1, 2, d), "padding": each(draw, 0, 2, d)}
    kernel, out, bias = each(draw, 1, 3, d), groups * draw(FEW), draw(st.booleans())
    conv = of_kind("Conv", d)(c, out, kernel, groups=groups, bias=bias, padding_mode=mode, **options)
    return nn.Sequential(conv, nn.ReLU(inplace=True)) if draw(st.booleans()) else conv


def transposed(draw, c: int, *size: int) -> nn.Module:
    d, groups = len(size), draw(st.sampled_from([1, c]))
    stride, dilation = each(draw, 1, 3, d), each(draw, 1, 2, d)
    more = tuple(draw(st.integers(0, max(s, t) - 1)) for s, t in zip(stride, dilation, strict=True))
    options = {"stride": stride, "dilation": dilation, "padding": each(draw, 0, 1, d), "output_padding": more}
    return of_kind("ConvTranspose", d)(c, groups * draw(FEW), each(draw, 1, 3, d), groups=groups, **options)


def pool(draw, c: int, *size: int) -> nn.Module:
    d, kernel, stride = len(size), draw(st.integers(2, 3)), draw(FEW)
    options = {"stride": stride, "padding": draw(st.integers(0, 1)), "ceil_mode": draw(st.booleans())}
    kinds = [
        lambda: of_kind("MaxPool", d)(kernel, dilation=draw(FEW), **options),
        lambda: of_kind("AvgPool", d)(kernel, count_include_pad=draw(st.booleans()), **options),
        lambda: of_kind("AdaptiveAvgPool", d)(each(draw, 1, 4, d)),
        lambda: of_kind("AdaptiveMaxPool", d)(each(draw, 1, 4, d)),
    ]
    return draw(st.sampled_from(kinds))()


def upsampling(draw, c: int, *size: int) -> nn.Module:
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    modes = ["nearest", "nearest-exact", linear] + ["bicubic"] * (len(size) == 2)
    mode, to = draw(st.sampled_from(modes)), tuple(s + draw(st.integers(0, 3)) for s in size)
    return nn.Upsample(to, mode=mode, align_corners=None if "nearest" in mode else draw(st.booleans()))


def movement(draw, c: int, *size: int) -> nn.Module:
    d = len(size)
    last = draw(st.integers(1, d))
    shift, pads = draw(st.integers(-2, 2)), draw(st.lists(st.integers(-1, 2), min_size=2 * last, max_size=2 * last))
    sizes, by = list(size), draw(st.permutations(range(d)))
    moves: dict[str, Callable] = {
        f"pad {pads}": lambda x: F.pad(x, pads),
        f"circular pad {shift}": lambda x: F.pad(x, [abs(shift), 1] + [0, 1] * (d - 1), mode="circular"),
        f"crop along {-last}": lambda x: x.narrow(-last, 1, sizes[-last] - 1),
        "every second": lambda x: x[..., draw_from::2],
        f"flip {-last}": lambda x: x.flip(-last),
        f"roll {shift} along {-last}": lambda x: x.roll(shift, -last),
        f"permute {by}": lambda x: x.permute(0, 1, *(2 + i for i in by)),
        "halves swapped": lambda x: torch.cat(x.split((sizes[-1] + 1) // 2, -1)[::-1], -1),
        "shuffle": lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
        "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "repeat": lambda x: x.repeat_interleave(2, -last),
        "tile": lambda x: x.repeat(1, 1, *[2] * d),
        "index": lambda x: x[..., torch.arange(sizes[-1] - 1, -1, -2)],
        "rows": lambda x: torch.stack(x.unbind(-1)[::-1], -1),
        "flat and back": lambda x: x.flatten(2).contiguous().unflatten(2, x.shape[2:]),
    }
    draw_from = draw(st.integers(0, 1))
    known = [name for name in moves if d == 2 or not name.startswith("pixel")]  # of images; else the batch is a channel
    called = draw(st.sampled_from(known))
    return Step(called, moves[called])


def activation(draw, c: int, *size: int) -> nn.Module:
    dead = Step("relu(x - 1)", lambda x: F.relu(x - 1))
    masked = Step("masked", lambda x: x.masked_fill(x < 0, 0.1))
    written = Step("relu_(x + 0)", lambda x: F.relu_(x + 0))
    return draw(st.sampled_from([nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Hardtanh(), written, masked, dead]))


def norm(draw, c: int, *size: int) -> nn.Module:
    kinds = [
        lambda: nn.GroupNorm(draw(st.sampled_from([1, c])), c),
        lambda: of_kind("BatchNorm", len(size))(c).eval(),
        lambda: of_kind("InstanceNorm", len(size))(c, affine=True),
        lambda: nn.LayerNorm([c, *size]),
        lambda: Pixels(nn.LayerNorm(c)),
        lambda: PerPixel((c, *size)),
    ]
    return draw(st.sampled_from(kinds))()


def mixing(draw, c: int, *size: int) -> nn.Module:
    """Over all pixels, or over the channels of each."""
    p = math.prod(size)
    kinds = [
        lambda: Pixels(nn.Linear(p, p), across=True),
        lambda: Pixels(nn.Linear(c, draw(FEW))),
        lambda: Pixels(Attention(c, draw(st.booleans()))),
        lambda: Step("softmax of channels", lambda x: x.softmax(1)),
        lambda: Step("softmax along", lambda x: x.softmax(-1)),
        lambda: Step("cumsum", lambda x: x.cumsum(-1)),
        lambda: Step("less its mean", lambda x: x - x.mean(-1, keepdim=True)),
        lambda: Step("sorted", lambda x: x.sort(-1).values),
        lambda: Step("the largest", lambda x: x + x.amax(1, keepdim=True)),
    ]
    return draw(st.sampled_from(kinds))()


def bottleneck(draw, c: int, *size: int) -> nn.Module:
    p, width = c * math.prod(size), draw(st.integers(1, 3))
    middle = draw(st.sampled_from([nn.Tanh(), nn.Identity(), nn.ReLU()]))
    back = nn.Unflatten(1, (c, *size))
    return nn.Sequential(nn.Flatten(), nn.Linear(p, width), middle, nn.Linear(width, p), back)


def joined(draw, c: int, *size: int) -> nn.Module:
    return Join(chain(draw, (c, *size), draw(FEW))[0], draw(st.sampled_from(list(JOINS))))


def twice(draw, c: int, *size: int) -> nn.Module:
    """One layer at two places."""
    layer = of_kind("Conv", len(size))(c, c, 3, padding=1)
    return nn.Sequential(layer, nn.Tanh(), layer)


def normed(draw, c: int, *size: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(of_kind("Conv", len(size))(c, draw(FEW), 2, padding=1))


LOCAL = [convolution, convolution, transposed, pool, upsampling, movement, activation, norm, joined]
PIECES = [*LOCAL, mixing, bottleneck, twice, normed]


def shape_after(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """None if the layer does not fit; a window of max_pool that is all padding breaks torch 2.13."""
    try:
        with torch.no_grad():
            found = module(torch.zeros(1, *shape))
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    fits = found.ndim == len(shape) + 1 and 0 < found.numel() <= LARGEST and bool(found.isfinite().all())
    return tuple(found.shape[1:]) if fits else None


def chain(draw, shape: tuple[int, ...], n: int, pieces: list = LOCAL) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A convolution and up to n more layers that fit."""
    width = min(draw(FEW), LARGEST // math.prod(shape[1:]))
    layers, shape = [of_kind("Conv", len(shape) - 1)(shape[0], width, 3, padding=1)], (width, *shape[1:])
    for kind in draw(st.lists(st.sampled_from(pieces), max_size=n)):
        layer = kind(draw, *shape)
        after = shape_after(layer, shape)
        if after is not None:
            layers, shape = [*layers, layer], after
    return nn.Sequential(*layers), shape
