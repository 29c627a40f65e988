"""Graphs of operations on images `[1, C, *S]`, drawn by hypothesis, for the laws of what depends on what.

Private: receptive fields are internals, of which a user sees the number of passes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st

from tests.strategies import Numbers

Function = Callable[[torch.Tensor], torch.Tensor]
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {
    "avg": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "max": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}
LINEAR_MODES = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}
LARGEST = {1: 12, 2: 6, 3: 4}
"""Of an input's axis."""


@dataclass(frozen=True, repr=False)
class Graph:
    """Functions one after the other, with a first argument for them."""

    parts: tuple[tuple[str, Function], ...]
    x: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _, f in self.parts:
            x = f(x)
        return x

    def __repr__(self) -> str:
        return f"{' -> '.join(name for name, _ in self.parts)} of {tuple(self.x.shape)}"

    def _repr_pretty_(self, printer, cycle) -> None:
        printer.text(repr(self))


def _ints(draw, d, low, high):
    return tuple(draw(st.integers(low, high)) for _ in range(d))


def _weight(rand, *shape):
    return rand(*shape).abs() + 0.1


def _conv(draw, x, rand):
    d, c = x.ndim - 2, x.shape[1]
    kernel, stride, padding = _ints(draw, d, 1, 3), _ints(draw, d, 1, 2), _ints(draw, d, 0, 3)
    dilation, groups = _ints(draw, d, 1, 2), draw(st.sampled_from([g for g in (1, c) if c % g == 0]))
    out = groups * draw(st.integers(1, 2))
    w, b = _weight(rand, out, c // groups, *kernel), rand(out)
    return lambda x: CONVS[d](x, w.to(x), b.to(x), stride, padding, dilation, groups)


def _transposed(draw, x, rand):
    d, c = x.ndim - 2, x.shape[1]
    kernel, stride, padding = _ints(draw, d, 1, 3), _ints(draw, d, 1, 3), _ints(draw, d, 0, 2)
    dilation, groups = _ints(draw, d, 1, 2), draw(st.sampled_from([1, c]))
    more = tuple(draw(st.integers(0, max(s, gap) - 1)) for s, gap in zip(stride, dilation, strict=True))
    w = _weight(rand, c, draw(st.integers(1, 2)), *kernel)
    return lambda x: TRANSPOSED[d](x, w.to(x), None, stride, padding, more, groups, dilation)


def _pooling(kinds):
    def pool(draw, x, rand):
        d, kernel = x.ndim - 2, _ints(draw, x.ndim - 2, 1, 3)
        stride, padding = _ints(draw, d, 1, 3), tuple(draw(st.integers(0, k // 2)) for k in kernel)
        ceil, dilation = draw(st.booleans()), _ints(draw, d, 1, 2)
        if draw(st.sampled_from(kinds)) == "max":
            return lambda x: MAX_POOLS[d](x, kernel, stride, padding, dilation, ceil)
        return lambda x: AVG_POOLS[d](x, kernel, stride, padding, ceil)

    return pool


def _adaptive(kinds):
    def pool(draw, x, rand):
        f, sizes = ADAPTIVE[draw(st.sampled_from(kinds))][x.ndim - 2], _ints(draw, x.ndim - 2, 1, 5)
        return lambda x: f(x, sizes)

    return pool


def _nearest(draw, x, rand):
    mode, sizes = draw(st.sampled_from(["nearest", "nearest-exact"])), _ints(draw, x.ndim - 2, 1, 8)
    if draw(st.booleans()):
        return lambda x: F.interpolate(x, scale_factor=2, mode=mode)
    return lambda x: F.interpolate(x, sizes, mode=mode)


def _smooth(draw, x, rand):
    mode, align = draw(st.sampled_from(LINEAR_MODES[x.ndim - 2])), draw(st.booleans())
    if draw(st.booleans()):
        scale = draw(st.sampled_from([0.7, 1.6, 2.0]))
        return lambda x: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=align)
    sizes, few = _ints(draw, x.ndim - 2, 1, 8), x.ndim == 4 and draw(st.booleans())
    return lambda x: F.interpolate(x, sizes, mode=mode, align_corners=align, antialias=few)


def _pad(draw, x, rand):
    mode = draw(st.sampled_from(["constant", "circular", "replicate", "reflect"]))
    lowest = -1 if mode == "constant" else 0
    pads = [draw(st.integers(lowest, min(2, s - 1) if mode == "reflect" else 2)) for s in x.shape[:1:-1] for _ in "lr"]
    return lambda x: F.pad(x, pads, mode=mode)


def _crop(draw, x, rand):
    start, step = draw(st.integers(0, 1)), draw(st.integers(1, 2))
    return lambda x: x[..., start::step]


def _roll(draw, x, rand):
    by = draw(st.integers(-2, 2))
    return (lambda x: x.roll(by)) if draw(st.booleans()) else lambda x: x.roll((by, 1), (-1, 1))


def _cat(draw, x, rand):
    dim = draw(st.integers(1, x.ndim - 1))
    return lambda x: torch.cat([x, torch.ones_like(x), x.flip(-1)], dim)


def _skip(draw, x, rand):
    w = _weight(rand, x.shape[1], x.shape[1], *[1] * (x.ndim - 2))
    return lambda x: CONVS[x.ndim - 2](x, w.to(x)) + 2 * x.roll(1, -1)


def _assembled(draw, x, rand):
    def f(x):
        y = torch.zeros_like(x)
        y[..., ::2] = x[..., ::2]
        y[:, :1].mul_(2).add_(x.mean(1, keepdim=True))
        y[..., -1:] = 3
        y.transpose(-1, 1)[:, :1] += x.transpose(-1, 1)[:, -1:]
        return y

    return f


def _permuted(draw, x, rand):
    dims = draw(st.permutations(range(2, x.ndim)))
    return lambda x: x.permute(0, 1, *dims).contiguous().view(x.shape[0], x.shape[1], *[x.shape[d] for d in dims])


def _shuffled(draw, x, rand):
    return lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2) if x.ndim == 4 else x.repeat_interleave(2, -1)


def _picked(draw, x, rand):
    index = rand.below(x.shape[-1], draw(st.integers(1, 4)))
    form = draw(st.sampled_from(["index", "index_select", "take", "put"]))

    def put(x):
        y = x.clone()
        y[..., index.to(x.device)] = x[..., index.to(x.device)].flip(1) * 2
        return y

    return {
        "index": lambda x: x[..., index.to(x.device)],
        "index_select": lambda x: x.index_select(-1, index.to(x.device)),
        "take": lambda x: x.take_along_dim(index.to(x.device).view(*[1] * (x.ndim - 1), -1), -1),
        "put": put,
    }[form]


def _fixed(f):
    return lambda draw, x, rand: f


POSITIVE = {
    "conv": _conv,
    "transposed": _transposed,
    "avg_pool": _pooling(["avg"]),
    "adaptive_avg": _adaptive(["avg"]),
    "nearest": _nearest,
    "pad": _pad,
    "crop": _crop,
    "flip": lambda draw, x, rand: partial(torch.flip, dims=draw(st.sampled_from([(-1,), (1, -1), (2,)]))),
    "roll": _roll,
    "cat": _cat,
    "skip": _skip,
    "assembled": _assembled,
    "permuted": _permuted,
    "shuffled": _shuffled,
    "picked": _picked,
    "channels_last": _fixed(lambda x: x.to(memory_format=torch.channels_last) if x.ndim == 4 else x),
    "scaled": _fixed(lambda x: 2 * x / 3 + 1),
    "unfold": _fixed(lambda x: x.unfold(-1, min(2, x.shape[-1]), 1).mean(-1)),
    "stack": _fixed(lambda x: torch.stack([x, x.flip(-1)], 2).flatten(1, 2)),
}
"""Affine operations; with positive weights the derivative is zero where nothing is read, and only there."""
FOLDED = {
    "im2col": _fixed(
        lambda x: F.unfold(x, 2, padding=1, stride=2).unflatten(1, (x.shape[1], -1)) if x.ndim == 4 else x
    ),
    "fold": _fixed(lambda x: F.fold(F.unfold(x, 2, padding=1), x.shape[2:], 2, padding=1) if x.ndim == 4 else x),
}
SMOOTH = {"smooth": _smooth}
"""Affine, with weights that may be negative, or zero."""
NONLINEAR = {
    "square": _fixed(lambda x: x * x),
    "gelu": _fixed(lambda x: F.silu(F.gelu(x), inplace=True)),
    "relu_": _fixed(lambda x: F.relu_(x.clone())),
    "relu of a part": _fixed(lambda x: (y := x + 0, y[..., :1].relu_())[0]),
    "ratio": _fixed(lambda x: 1 / (2 + x.abs())),
    "max_pool": _pooling(["max"]),
    "adaptive_max": _adaptive(["max"]),
    "mask": _fixed(lambda x: x.masked_fill(x > 1, 0) + torch.where(x.flip(-1) > 0, 1.0, x)),
    "clamp": _fixed(lambda x: x.clamp(-1, 1)),
    "round": _fixed(lambda x: (4 * x).long() + x),
    "mul": _fixed(lambda x: x * x.mean(1, keepdim=True)),
    "glu": _fixed(lambda x: F.glu(torch.cat([x, x.roll(1, -1)], 1), 1)),
}
WIDE = {
    "linear": lambda draw, x, rand: _linear(rand(3, x.shape[-1]), rand(3)),
    "matmul": lambda draw, x, rand: _matmul(rand(x.shape[-2], 2)),
    "einsum": lambda draw, x, rand: _einsum(rand(2, x.shape[1])),
    "flat": lambda draw, x, rand: _flat(rand(math.prod(x.shape[1:]), 2)),
    "outer": _fixed(lambda x: x.flatten(1).mT @ x.flatten(1)),
    "self-product": _fixed(lambda x: x @ x.mT.contiguous()),
    "layer_norm": _fixed(lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": _fixed(lambda x: F.rms_norm(x, x.shape[-1:])),
    "group_norm": _fixed(lambda x: F.group_norm(x, x.shape[1], torch.ones_like(x[0, :, *[0] * (x.ndim - 2)]))),
    "batch_norm": lambda draw, x, rand: _batch_norm(draw(st.booleans())),
    "instance_norm": _fixed(lambda x: F.instance_norm(x) if x[0, 0].numel() > 1 else x),
    "softmax": lambda draw, x, rand: partial(F.softmax, dim=draw(st.integers(1, x.ndim - 1))),
    "logsumexp": lambda draw, x, rand: partial(torch.logsumexp, dim=draw(st.integers(1, x.ndim - 1))),
    "normalize": _fixed(lambda x: F.normalize(x, dim=1)),
    "cumsum": lambda draw, x, rand: partial(torch.cumsum, dim=draw(st.integers(-x.ndim + 1, -1))),
    "sort": _fixed(lambda x: x.sort(-1).values + x.sort(-1).indices),
    "topk": _fixed(lambda x: x.topk(1, 1).values),
    "max": _fixed(lambda x: x.max(1).values + x.argmax(1) + x.max()),
    "var": _fixed(lambda x: x.var((1, -1), correction=0)),
    "std": _fixed(lambda x: x.std(correction=0) + x),
    "attention": _fixed(lambda x: _attention(x)),
    "gather by itself": _fixed(lambda x: x.gather(-1, x.argsort(-1))),
    "index by itself": _fixed(lambda x: x.flatten()[x.flatten().argsort()]),
    "scatter": _fixed(lambda x: x.scatter_add(-1, x.long().abs() % x.shape[-1], x)),
    "embedding": _fixed(
        lambda x: F.embedding((4 * x).long().abs() % 5, torch.arange(10.0, device=x.device).view(5, 2))
    ),
    "complex": _fixed(lambda x: torch.view_as_real(torch.complex(x, x.flip(-1)) ** 2)),
    "bits": _fixed(lambda x: x.clone().view(torch.int32) + 1),
    "fft": _fixed(lambda x: torch.fft.fft(x).abs()),
    "out=": _fixed(lambda x: torch.add(x, x.flip(-1), out=torch.empty(0, dtype=x.dtype, device=x.device))),
    "expanded": _fixed(lambda x: x[..., :1].expand(x.shape) + x.amax(-1, keepdim=True)),
    "masked put": _fixed(lambda x: (y := x.clone(), y.__setitem__(y > 0.5, 7.0))[0]),
    "padded twice": _fixed(lambda x: F.pad(x, (3, -1)).tril()),
}
"""Mix whole axes, or everything; the result need not be an image."""


def _linear(w, b):
    return lambda x: F.linear(x, w.to(x), b.to(x))


def _matmul(w):
    return lambda x: x.mT.contiguous() @ w.to(x)


def _einsum(w):
    return lambda x: torch.einsum("nc...,dc->nd...", x, w.to(x))


def _flat(w):
    return lambda x: torch.addmm(x.flatten(1)[:, :1], x.flatten(1), w.to(x))


def _batch_norm(training):
    def f(x):
        mean, var = torch.zeros(x.shape[1]).to(x), torch.ones(x.shape[1]).to(x)
        y = F.batch_norm(x, mean, var, training=training and x[0, 0].numel() > 1)
        return y + mean.sum()

    return f


def _attention(x):
    q = x.flatten(2).mT[:, None]
    return F.scaled_dot_product_attention(q, q.roll(1, 2), q * 2)


@st.composite
def graphs(draw, ops, last=None, most=4) -> Graph:
    """A few of these operations, and perhaps one of the `last` behind them."""
    d, rand = draw(st.integers(1, 3)), Numbers(draw(st.integers(0, 99)))
    shape = [1, draw(st.integers(1, 2)), *(draw(st.integers(1, LARGEST[d])) for _ in range(d))]
    x = first = rand(*shape).abs() + 0.1
    names = draw(st.lists(st.sampled_from(sorted(ops)), min_size=1, max_size=most))
    chosen = [(name, ops[name]) for name in names]
    if last is not None and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(last)))
        chosen.append((name, last[name]))
    parts = []
    for name, make in chosen:
        f = make(draw, x, rand)
        try:
            x = f(x)
        except (RuntimeError, ValueError):  # a window larger than its image and the like
            assume(False)
        assume(0 < x.numel() <= 2000 and x.isfinite().all())  # a window may lie in the padding
        parts.append((name, f))
    return Graph(tuple(parts), first)
