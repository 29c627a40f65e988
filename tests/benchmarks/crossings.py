"""Calls of several sizes around each threshold, and what forces the ways on its two sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight

from invfunc import diag_ggn, explain, thresholds
from invfunc.core.norms import narrow_norms
from invfunc.linear_algebra import autocorrelation
from invfunc.linear_algebra.autocorrelation import patches
from invfunc.linear_algebra.contract import Term, contract, outer, squares_directly, twice

from .peers import Call

FAR = 2**60
Settings = dict[str, Any]
Make = Callable[[int, str, torch.device], Call]
"""From a size and the name of a way ("near" below the threshold, "far" from it on) to a call."""


@dataclass(frozen=True)
class Crossing:
    """A threshold, a call of several sizes around it, and what forces the way below it and the one from it on."""

    name: str
    unit: str
    sizes: Sequence[int]
    make: Make
    near: Settings = field(default_factory=dict)
    far: Settings = field(default_factory=dict)
    taken: Callable[[int], bool] | None = None
    """Whether the way from it on is taken at a size, where that follows from an estimate of costs."""
    on: str | None = None
    """The threshold that lists the devices on which there are two ways, if not all have them."""
    everywhere: bool = True
    """Whether the other devices could have them."""

    def stated(self, device: torch.device) -> str:
        """The present value, or the first size from which the estimate takes the other way."""
        if self.on is not None and device.type not in getattr(thresholds, self.on):
            return "never"
        return str(getattr(thresholds, self.name)) if self.taken is None else first(self.sizes, self.taken)

    def way(self, way: str, device: torch.device) -> Settings:
        """What forces a way on a device."""
        both = {self.on: (device.type,)} if self.on is not None else {}
        return both | (self.near if way == "near" else self.far)


@dataclass(frozen=True)
class Best:
    """A threshold that is a size, a call, and values of it."""

    name: str
    unit: str
    values: Sequence[int]
    make: Callable[[torch.device], Call]
    other: Settings = field(default_factory=dict)

    def stated(self, device: torch.device) -> int:
        """The present value."""
        value = getattr(thresholds, self.name)
        return value.get(device.type, thresholds.ELSEWHERE) if isinstance(value, dict) else value

    def at(self, value: int, device: torch.device) -> Settings:
        """The thresholds with this value."""
        return {self.name: {device.type: value} if self.name == "CACHE" else value, **self.other}


def first(sizes: Sequence[int], far: Callable[[int], bool]) -> str:
    """From which of the sizes on all are far."""
    near = [i for i, size in enumerate(sizes) if not far(size)]
    if not near:
        return f"<= {sizes[0]}"
    return f"> {sizes[-1]}" if near[-1] + 1 == len(sizes) else str(sizes[near[-1] + 1])


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


# What is timed


def _norms(dtype: torch.dtype) -> Make:
    """The squared norms of the per-sample gradients of a matrix 128 x 128 that is used at so many positions."""

    def make(size: int, way: str, device: torch.device) -> Call:
        terms = [(labels, normal(16, 128, size, device=device, dtype=dtype)) for labels in ("Nop", "Nip")]
        if way == "far":
            return lambda: contract(terms, "Noi").square_().flatten(1).sum(1)
        return lambda: contract(twice(_wide(terms), _wide(terms), "oi"), "N")

    return make


def _wide(terms: list[Term]) -> list[Term]:
    return [(labels, x.double()) for labels, x in terms]


def _formed(dtype: torch.dtype, size: int) -> bool:
    terms = [(labels, torch.empty(16, 128, size, dtype=dtype, device="meta")) for labels in ("Nop", "Nip")]
    return not squares_directly(terms, "oi", "Noi", "N")


def _narrow(size: int, way: str, device: torch.device) -> Call:
    x, y = normal(2048, 512, device=device), normal(size, 512, device=device)
    a, b, c = "kir" if way == "near" else "ljs"  # labels of its own, since decisions are kept
    return lambda: contract([(a + c, x), (b + c, y)], a + b)


def _gram(shape: Callable[[int], tuple[int, int, int]], dtype: torch.dtype = torch.float32) -> Make:
    def make(size: int, way: str, device: torch.device) -> Call:
        x = normal(*shape(size), device=device, dtype=dtype)
        return lambda: outer(x)

    return make


def _huge(size: int, way: str, device: torch.device) -> Call:
    x, y = normal(64, size // 4 // 64 // 256, device=device), normal(64, 256, device=device)
    return lambda: contract([("No", x), ("Ni", y)], "Noi")


def _convolutions(n: int, device: torch.device, classes: int = 10, columns: int | None = None) -> Call:
    """The exact diagonal of a net with two convolutions of 16 x 16 pixels."""
    shapes = {"a": (8, 3, 3, 3), "b": (8, 8, 3, 3), "head": (classes, 2048)}
    params = {name: normal(*shape, device=device) / 10 for name, shape in shapes.items()}
    x, y = normal(n, 3, 16, 16, device=device), torch.zeros(n, dtype=torch.long, device=device)

    def f(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(F.conv2d(x, p["a"], padding=1).relu(), p["b"], padding=1).relu()
        return x.flatten(1) @ p["head"].mT

    statistic = diag_ggn(f, F.cross_entropy, method="dense")
    return lambda: statistic(params, x, y)


def _apart(size: int, way: str, device: torch.device) -> Call:
    return _convolutions(size // 2048, device)


def _displaced(size: int, way: str, device: torch.device) -> Call:
    x, options = normal(32, size, 16, 16, device=device), ((3, 3), [(1, 1)] * 2, (1, 1))
    if way == "near":
        return lambda: outer(patches(x, options[0], (1, 1), *options[1:]))

    def call() -> torch.Tensor | None:
        with mock.patch.object(autocorrelation, "_cost", displacing(autocorrelation._cost)):
            return autocorrelation.patches_gram(x, *options)

    return call


def displacing(cost: Callable) -> Callable:
    """The costs, with displacements for the whole problem, and the cheaper way for what they leave out."""
    return lambda shape, kernel, *rest: (0.0, True) if len(kernel) == 2 else cost(shape, kernel, *rest)


def _displaces(size: int) -> bool:
    return autocorrelation.patches_gram(torch.zeros(32, size, 16, 16), (3, 3), [(1, 1)] * 2, (1, 1)) is not None


_ROWS = 256


def _totalled(size: int, way: str, device: torch.device) -> Call:
    """The sum of the per-sample gradients of a convolution with 3 x 3 entries."""
    side, shape = round(math.sqrt(size / 16)), (_ROWS, 64, 3, 3)
    x, sent = normal(16, 64, side, side, device=device), normal(16, _ROWS, side, side, device=device)
    if way == "far":
        return lambda: conv2d_weight(x, shape, sent, padding=1)
    options = (3, 3), (1, 1), [(1, 1)] * 2, (1, 1)
    return lambda: contract([("Nop", sent.flatten(2)), ("Nip", patches(x, *options))], "oi")


def _alone(size: int, way: str, device: torch.device) -> Call:
    """The per-sample gradients of a convolution with 3 x 3 entries of images 16 x 16, of so many multiplications."""
    channels = round(math.sqrt(size / 9 / 256))
    x, sent = normal(16, channels, 16, 16, device=device), normal(16, channels, 16, 16, device=device)
    if way == "far":
        pairs = [*zip(x.split(1), sent.split(1), strict=True)]
        return lambda: torch.stack([conv2d_weight(x, (channels, channels, 3, 3), s, padding=1) for x, s in pairs])
    options = (3, 3), (1, 1), [(1, 1)] * 2, (1, 1)
    return lambda: contract([("Nop", sent.flatten(2)), ("Nip", patches(x, *options))], "Noi")


def _halved(size: int, way: str, device: torch.device) -> Call:
    """The squared norms of the per-sample gradients of a matrix 1024 x 256, as those of a GPT, at so many positions."""
    terms = [("Npo", normal(4, size, 1024, device=device)), ("Npi", normal(4, size, 256, device=device))]
    return lambda: narrow_norms(terms, "oi")


def _auto_encoder(size: int, way: str, device: torch.device) -> Call:
    statistic, args = _encoded(size, way, device)
    return lambda: statistic(*args)


def _shortens(size: int) -> bool:
    statistic, args = _encoded(size, "far", torch.device("cpu"))
    return bool(explain(statistic)(*args).parts)


def _encoded(size: int, way: str, device: torch.device) -> tuple[Any, tuple]:
    """The exact diagonal of a convolutional auto-encoder of so many columns."""
    side = max(2, round(math.sqrt(size) / 2) * 2)
    shapes = {"a": (4, 1, 3, 3), "b": (4, 4, 3, 3), "c": (4, 1, 2, 2)}
    params = {name: normal(*shape, device=device) / 3 for name, shape in shapes.items()}
    x = normal(16, 1, side, side, device=device)

    def f(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(F.conv2d(x, p["a"], padding=1, stride=2).sigmoid(), p["b"], padding=1).sigmoid()
        return F.conv_transpose2d(x, p["c"], stride=2)

    return diag_ggn(f, F.mse_loss, method="dense" if way == "near" else "auto"), (params, x, x)


_POSITIONS = [8, 16, 24, 32, 48, 64, 96, 128]
_COPY = {"GRADIENT_ON": (), "ADDED_NUMBERS": FAR}
_AS_GRADIENT = {"GRADIENT_NUMBERS": FAR, "GRADIENT_SAMPLES": 0, "MIRRORED_POSITIONS": 0, "MIRRORED_ON": ("cpu", "cuda")}
_ALWAYS = {"FEW": 0, "PAYS": math.inf, "LOOK": 0.0, "LOOK_ENTRY": 0.0}

CROSSINGS = [
    Crossing("NARROW", "columns", [16, 27, 64, 96, 128, 192, 256, 512], _narrow, {"NARROW": FAR}, {"NARROW": 0}),
    Crossing(
        "GRADIENT_SAMPLES",
        "samples, of 2^19 numbers",
        [2, 4, 8, 16, 32, 64, 128],
        _gram(lambda b: (b, 128, 2**12 // b)),
        _COPY,
        _AS_GRADIENT,
        on="GRADIENT_ON",
    ),
    Crossing(
        "GRADIENT_NUMBERS",
        "numbers, 32 samples, 144 rows",
        [2**k for k in range(16, 25)],
        _gram(lambda size: (32, 144, size // 32 // 144)),
        _AS_GRADIENT,
        _COPY,
        on="GRADIENT_ON",
    ),
    Crossing(
        "GRADIENT_ROWS",
        "rows, 64 samples",
        [32, 64, 128, 192, 256, 384, 512],
        _gram(lambda k: (64, k, 64)),
        _AS_GRADIENT | {"GRADIENT_ROWS": FAR},
        _AS_GRADIENT | {"GRADIENT_ROWS": 0},
        on="GRADIENT_ON",
    ),
    Crossing(
        "HALVED",
        "positions",
        [16, 32, 64, 96, 128, 192, 256],
        _halved,
        {"HALVED": FAR},
        {"HALVED": 0},
        on="GHOST_ON",
    ),
    Crossing(
        "MIRRORED_POSITIONS",
        "samples, 288 rows, float64",
        [16, 32, 64, 128, 256, 512, 1024],
        _gram(lambda b: (b, 288, 1), torch.float64),
        _COPY | {"MIRRORED_POSITIONS": FAR},
        _COPY | {"MIRRORED_POSITIONS": 0},
        on="MIRRORED_ON",
    ),
    Crossing(
        "MIRRORED_ROWS",
        "half the rows, 1024 samples, float64",
        [24, 48, 72, 96, 144, 192, 288],
        _gram(lambda k: (1024, 2 * k, 1), torch.float64),
        _COPY | {"MIRRORED_ROWS": FAR},
        _COPY | {"MIRRORED_ROWS": 1, "MIRRORED_BLOCKS": 2},
        on="MIRRORED_ON",
    ),
    Crossing(
        "ADDED_POSITIONS",
        "positions, of 2^21 numbers, 64 rows",
        [4, 16, 64, 128, 256, 512, 1024],
        _gram(lambda r: (2**15 // r, 64, r)),
        _COPY,
        {"GRADIENT_ON": (), "ADDED_NUMBERS": 0, "ADDED_POSITIONS": 0},
        on="ADDED_ON",
    ),
    Crossing(
        "ADDED_NUMBERS",
        "numbers, 1024 positions, 64 rows",
        [2**k for k in range(16, 25)],
        _gram(lambda size: (size // 2**16, 64, 1024)),
        _COPY,
        {"GRADIENT_ON": (), "ADDED_NUMBERS": 0, "ADDED_POSITIONS": 0},
        on="ADDED_ON",
    ),
    Crossing(
        "HUGE_PAGES",
        "bytes",
        [2**k for k in range(22, 29)],
        _huge,
        {"HUGE_PAGES": FAR},
        {"HUGE_PAGES": 0},
        on="HUGE_ON",
        everywhere=False,
    ),
    Crossing(
        "APART",
        "numbers of a column, 10 classes",
        [2**k for k in range(12, 21)],
        _apart,
        {"APART": FAR},
        {"APART": 0},
        on="APART_ON",
    ),
    Crossing(
        "FORMED",
        "positions, float64",
        _POSITIONS,
        _norms(torch.float64),
        taken=partial(_formed, torch.float64),
    ),
    Crossing(
        "DOUBLE",
        "positions, float32",
        _POSITIONS,
        _norms(torch.float32),
        taken=partial(_formed, torch.float32),
    ),
    Crossing(
        "TOTAL_POSITIONS",
        f"positions of 16 samples, {_ROWS} rows",
        [64, 256, 1024, 4096, 16384],
        _totalled,
        taken=lambda size: size >= thresholds.TOTAL_POSITIONS * _ROWS,
        on="TOTAL_ON",
    ),
    Crossing("ALONE", "multiplications of one sample", [2**k for k in range(17, 26)], _alone, on="TOTAL_ON"),
    Crossing("UNFOLD", "channels", [4, 8, 12, 16, 24, 32, 64], _displaced, taken=_displaces, on="DISPLACED_ON"),
    Crossing("FEW", "columns", [4, 16, 36, 64, 144, 256, 576, 1296, 2304], _auto_encoder, far=_ALWAYS, taken=_shortens),
]


BESTS = [
    Best("CACHE", "numbers, 128 samples", [2**k for k in range(17, 25)], partial(_convolutions, 128)),
    Best(
        "TOGETHER",
        "numbers, 256 columns",
        [2**k for k in range(13, 23)],
        partial(_auto_encoder, 256, "far"),
        _ALWAYS,
    ),
]
