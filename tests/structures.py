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

from invfunc import outputs, thresholds
from tests.criteria import ELEMENTWISE, REDUCTIONS, Criterion, said
from tests.modules import of_module
from tests.strategies import Case, Numbers

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


ELEMENTS = [name for name in ELEMENTWISE if name not in ("poisson_nll_loss of rates", "smooth_l1_loss, l1")]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda z: z,
    "halved": lambda z: z / 2,
    "weighted": lambda z: z * torch.linspace(1, 2, z.shape[-1]).to(z),
    "shifted": lambda z: 1 - z,
    "cropped": lambda z: z[..., 1:-1] if z.ndim > 2 and z.shape[-1] > 2 else z,
    "every second": lambda z: z[..., ::2],
    "flipped": lambda z: z.flip(-1),
    "turned": lambda z: z.movedim(-1, 2) if z.ndim > 2 else z,
    "pooled": lambda z: z.unfold(-1, 2, 1).mean(-1) if z.ndim > 2 and z.shape[-1] > 1 else z,
    "copied": lambda z: torch.cat([z, z], -1) if z.ndim > 2 else z,
}
MERGED = ["classes along 1", "classes last", "pixels as samples", "all as classes"]


@st.composite
def cross_entropies_of(draw, shape: tuple[int, ...]) -> Criterion:
    """For each pixel, or one for each sample."""
    merged, layout = draw(st.sampled_from(MERGED)), draw(st.sampled_from(list(LAYOUTS)))
    reduction = draw(st.sampled_from(list(REDUCTIONS)))

    def arranged(z: torch.Tensor) -> torch.Tensor:
        z = LAYOUTS[layout](z)
        if merged == "classes last":
            return z.movedim(-1, 1)
        if merged == "pixels as samples":
            return z.movedim(1, -1).flatten(0, -2)
        return z.flatten(1) if merged == "all as classes" else z

    rand, arrangement = Numbers(2), arranged(torch.zeros(shape)).shape
    classes, options = arrangement[1], dict[str, Any](reduction=said(reduction))
    target = rand.below(classes, arrangement[0], *arrangement[2:])
    if draw(st.booleans()):
        options["weight"] = rand(classes).exp()
    if draw(st.booleans()):
        options["label_smoothing"] = 0.3
    if draw(st.booleans()):
        target = rand(*arrangement).softmax(1)
    elif classes > 1 and draw(st.booleans()):
        options["ignore_index"] = 1
        target.view(-1)[0] = 0

    def loss(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {k: v.to(z) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        losses = F.cross_entropy(arranged(z), target.flatten(0, 1 if split else 0), **given)
        return REDUCTIONS[reduction](losses.unflatten(0, (len(z), -1)) if split and losses.ndim else losses)

    split = merged == "pixels as samples"
    target = target.unflatten(0, (shape[0], -1)) if split else target
    return Criterion(f"cross_entropy, {merged}, {layout}, {reduction}, {sorted(options)}", loss, shape[1:], target)


@st.composite
def elementwise_of(draw, shape: tuple[int, ...]) -> Criterion:
    """For each entry."""
    layout, name = draw(st.sampled_from(list(LAYOUTS))), draw(st.sampled_from(ELEMENTS))
    reduction = draw(st.sampled_from([r for r in REDUCTIONS if r != "none, exp"]))
    rand, (call, made, options) = Numbers(3), ELEMENTWISE[name]
    arrangement = LAYOUTS[layout](torch.zeros(shape)).shape
    target = made(rand(*arrangement))
    options = {
        key: value(rand(*(arrangement if key == "weight" else arrangement[1:]))) if callable(value) else value
        for key, value in options.items()
    }

    def loss(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {k: v.to(z) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return REDUCTIONS[reduction](call(LAYOUTS[layout](z), target, reduction=said(reduction), **given))

    return Criterion(f"{name}, {layout}, {reduction}", loss, shape[1:], target)


GENERAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "log cosh": lambda z, y: (z - y).cosh().log().sum(),
    "distance of samples": lambda z, y: ((z - y).square().flatten(1).sum(1) + 1).sqrt(),
    "distance of pixels": lambda z, y: ((z - y).square().sum(1) + 1).sqrt().mean(),
    "log-sum-exp of pixels": lambda z, y: z.logsumexp(1).sum() - (z * y).sum(),
    "differences": lambda z, y: (z.diff(dim=-1) - y.diff(dim=-1)).square().sum() + z.square().mean(),
    "square of a sum": lambda z, y: (z - y).flatten(1).sum(1).square().mean(),
    "two losses": lambda z, y: F.cross_entropy(z, y.softmax(1)) + 0.5 * F.mse_loss(z, y),
    "two losses of parts": lambda z, y: F.mse_loss(z[..., :1], y[..., :1]) + F.huber_loss(3 * z, y, reduction="sum"),
    "product of losses": lambda z, y: (1 + F.mse_loss(z, y, reduction="none").flatten(1).sum(1)).square().sum() / 9,
}


@st.composite
def general_of(draw, shape: tuple[int, ...]) -> Criterion:
    """Nothing is known about them but that they are convex; their outputs are marked."""
    called = draw(st.sampled_from(list(GENERAL)))
    return Criterion(called, lambda z, y: GENERAL[called](outputs(z), y), shape[1:], Numbers(4)(*shape))


def criteria_of(shape: tuple[int, ...]) -> Any:
    """Losses of outputs of this shape, with targets for them."""
    assert math.prod(shape)
    return cross_entropies_of(shape) | elementwise_of(shape) | general_of(shape)


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
