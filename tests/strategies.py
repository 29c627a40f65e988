"""Cases of the laws: hypothesis draws the structure, a seeded generator the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from invfunc.testing.models import Numbers, seeded
from tests.forms import Form

__all__ = ["ALWAYS", "FROM_1D", "FROM_2D", "SIZES", "Case", "Numbers", "Reading", "seeded"]
SIZES = st.integers(1, 4)


@dataclass(frozen=True, repr=False)
class Case:
    """A model function `f(params, *inputs) -> [N, ...]` with arguments for it."""

    called: str
    f: Callable
    params: Any
    inputs: tuple
    in_dims: tuple

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x in self.inputs]
        return f"{self.called}, inputs {shapes} with samples along {self.in_dims}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Text that hypothesis shows."""
        printer.text(repr(self))


# Readings: the ways in which an operation gets its tensor from the parameters


@dataclass(frozen=True)
class Reading:
    """`read(leaves)` is a tensor of the shape that was asked for."""

    called: str
    leaves: Any
    read: Callable[[Any], torch.Tensor]


def _grown(shape: tuple[int, ...], by: int = 2) -> list[int]:
    return [s + by for s in shape]


def _middle(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(1, 1 + s) for s in shape)


def _assembled(p: torch.Tensor) -> torch.Tensor:
    q = torch.zeros_like(p)
    q[:1] = p[:1]
    q[1:] = 2 * p[1:]
    return q


_Reading = Callable[[tuple[int, ...], Numbers], tuple[Any, Callable[[Any], torch.Tensor]]]
ALWAYS: dict[str, _Reading] = {
    "p": lambda s, rand: (rand(*s), lambda p: p),
    "p.view": lambda s, rand: (rand(math.prod(s)), lambda p: p.view(s)),
    "p.reshape": lambda s, rand: (rand(math.prod(s), 1).mT.contiguous(), lambda p: p.reshape(s)),
    "p[1]": lambda s, rand: (rand(3, *s), lambda p: p[1]),
    "p.unbind()[2]": lambda s, rand: (rand(3, *s), lambda p: p.unbind()[2]),
    "p.select(-1)": lambda s, rand: (rand(*s, 2), lambda p: p.select(-1, 1)),
    "p[..., None, :].squeeze": lambda s, rand: (rand(*s, 1), lambda p: p[..., None, :].squeeze(-1).squeeze(-1)),
    "softplus(p)": lambda s, rand: (rand(*s), F.softplus),
    "mask * p": lambda s, rand: (rand(*s), lambda p: torch.ones_like(p).tril() * p if p.ndim > 1 else 2 * p),
    "p + q": lambda s, rand: ({"p": rand(*s), "q": rand(*s)}, lambda t: t["p"] + t["q"]),
}
FROM_1D: dict[str, _Reading] = {
    "p.T": lambda s, rand: (rand(*s[::-1]), lambda p: p.permute(*reversed(range(p.ndim)))),
    "p.movedim": lambda s, rand: (rand(*s[1:], s[0]), lambda p: p.movedim(-1, 0)),
    "p[1:-1, ...]": lambda s, rand: (rand(*_grown(s)), lambda p: p[_middle(s)]),
    "p[::2]": lambda s, rand: (rand(2 * s[0], *s[1:]), lambda p: p[::2]),
    "p.narrow": lambda s, rand: (rand(*s[:-1], s[-1] + 1), lambda p: p.narrow(-1, 1, s[-1])),
    "p.chunk(2)[1]": lambda s, rand: (rand(2 * s[0], *s[1:]), lambda p: p.chunk(2)[1]),
    "p.split(-1)[0]": lambda s, rand: (rand(*s[:-1], 2 * s[-1]), lambda p: p.split(s[-1], -1)[0]),
    "p.expand": lambda s, rand: (rand(*s[:-1], 1), lambda p: p.expand(s)),
    "p[index]": lambda s, rand: (rand(2, *s[1:]), lambda p: p[[i % 2 for i in range(s[0])]]),
    "q[...] = p": lambda s, rand: (rand(*s), _assembled),
    "cat(p, q)": lambda s, rand: ([rand(1, *s[1:]), rand(*s)], lambda t: torch.cat(t)[: s[0]]),
    "weight_norm(v, g)": lambda s, rand: (
        {"v": rand(*s), "g": rand(s[0], *[1] * (len(s) - 1))},
        lambda t: t["v"] * (t["g"] / (1 + t["v"].square().sum(tuple(range(1, t["v"].ndim)), keepdim=True)).sqrt()),
    ),
}
FROM_2D: dict[str, _Reading] = {
    "p.mT": lambda s, rand: (rand(*s[:-2], s[-1], s[-2]), lambda p: p.mT),
    "p.transpose": lambda s, rand: (rand(*s[:-2], s[-1], s[-2]), lambda p: torch.transpose(p, -1, -2)),
    "p.unflatten.flatten": lambda s, rand: (
        rand(s[0] * s[1], *s[2:]),
        lambda p: p.unflatten(0, (s[0], s[1])).flatten(0, 1).unflatten(0, s[:2]),
    ),
    "w + b @ a": lambda s, rand: (
        {"w": rand(*s), "b": rand(*s[:-1], 1), "a": rand(1, s[-1])},
        lambda t: t["w"] + t["b"] @ t["a"],
    ),
}


@st.composite
def readings(draw, shape: tuple[int, ...], rand: Numbers) -> Reading:
    """A tensor of a shape from parameters: themselves, as a view, or as something computed from them."""
    ways = ALWAYS | (FROM_1D if shape else {}) | (FROM_2D if len(shape) > 1 else {})
    called = draw(st.sampled_from(list(ways)))
    leaves, read = ways[called](tuple(shape), rand)
    return Reading(called, leaves, read)


def _case(called: str, operation: Callable, inputs: list, dims: list[int], reads: list[Reading], out: int) -> Case:
    """`operation(*inputs, *tensors of parameters)` with its samples brought to the front."""

    def f(params: Any, *xs: torch.Tensor) -> torch.Tensor:
        return operation(*xs, *(r.read(p) for r, p in zip(reads, params, strict=True))).movedim(out, 0)

    shown = ", ".join(r.called for r in reads)
    return Case(f"{called} of {shown}", f, [r.leaves for r in reads], tuple(inputs), tuple(dims))


# Cases: operations with drawn shapes and options


@st.composite
def linears(draw) -> Case:
    """F.linear with up to three more dimensions, a bias or none, and a weight of one or two dimensions."""
    rand, n, width = Numbers(), draw(SIZES), draw(SIZES)
    more, out = draw(st.lists(SIZES, max_size=3)), draw(st.lists(SIZES, max_size=1))
    at = draw(st.integers(0, len(more)))
    reads = [draw(readings((*out, width), rand))]
    if out and draw(st.booleans()):  # torch takes no bias with a weight of one dimension
        reads.append(draw(readings(tuple(out), rand)))
    return _case("F.linear", F.linear, [rand(*more[:at], n, *more[at:], width)], [at], reads, at)


@st.composite
def matmuls(draw) -> Case:
    """`@` with the parameter on either side, vectors, and batch dimensions that broadcast."""
    rand, n, left = Numbers(), draw(SIZES), draw(st.booleans())
    batch = draw(st.lists(SIZES, max_size=2))
    row, inner, column = (draw(SIZES) for _ in range(3))
    x_core = [inner, column] if left else [row, inner]
    w_core = [row, inner] if left else [inner, column]
    if draw(st.booleans()):
        w_core = [inner]
    x_batch = batch[len(batch) - draw(st.integers(0, len(batch))) :]
    ones = [draw(st.booleans()) for _ in batch]
    w_batch = [1 if one else b for one, b in zip(ones, batch, strict=True)] if len(w_core) > 1 else []
    w_batch = w_batch[len(w_batch) - draw(st.integers(0, len(w_batch))) :]
    shape = [*x_batch, *x_core]
    at = draw(st.sampled_from([*range(-len(shape), -2), -1 if left else -2]))
    shape[at] = n
    if -len(w_batch) <= at + 2 < 0:  # along the samples the parameter has one entry
        w_batch[at + 2] = 1
    read = draw(readings((*w_batch, *w_core), rand))
    out = at if at == -1 else at + 2 - len(w_core)
    product = draw(st.sampled_from([torch.matmul, lambda a, b: a @ b, lambda a, b: b.__rmatmul__(a)]))
    operation = (lambda x, w: product(w, x)) if left else product
    return _case("w @ x" if left else "x @ w", operation, [rand(*shape)], [at], [read], out)


@st.composite
def convolutions(draw, d: int) -> Case:
    """conv*d with its options; "same" and the padding modes are those of nn.Conv*d."""
    most = 1 if d == 3 else 2
    groups, kernel, dilation = draw(st.integers(1, 2)), _each(draw, d, 1, 1 + most), _each(draw, d, 1, 2)
    stride, pads, extra = _each(draw, d, 1, 2), _each(draw, d, 0, most), _each(draw, d, 0, most)
    how = draw(st.sampled_from(["numbers", "one number", "valid", "same", "reflect", "replicate", "circular"]))
    span = [a * (k - 1) + 1 for a, k in zip(dilation, kernel, strict=True)]
    size = [max(s - 2 * p, 1) + e for s, p, e in zip(span, pads, extra, strict=True)]
    padding: Any = pads
    if how == "one number":
        stride, padding, size = stride[0], pads[0], [s + e for s, e in zip(span, extra, strict=True)]
    elif how == "valid":
        padding, size = how, [s + e for s, e in zip(span, extra, strict=True)]
    elif how == "same":
        stride, padding = (1,) * d, how
    elif how in ("reflect", "replicate", "circular"):
        same = draw(st.booleans())  # torch pads by less than the size
        stride, padding = ((1,) * d, "same") if same else (stride, pads)
        size = [max(s, 1 + s if same else 1 + p) for s, p in zip(span, pads, strict=True)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    c_in, c_out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    mode = how if how in ("reflect", "replicate", "circular") else "zeros"

    def operation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if mode == "zeros":
            return getattr(F, f"conv{d}d")(x, weight, bias, **options)
        kind, like = getattr(nn, f"Conv{d}d"), {"dtype": x.dtype, "device": x.device}
        module = kind(c_in, c_out, kernel, bias=bias is not None, padding_mode=mode, **like, **options)
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(module, given, x)

    name = f"conv{d}d, {options}, {mode}"
    return _convolved(draw, name, operation, (c_out, c_in // groups, *kernel), c_out, [c_in, *size])


@st.composite
def transposed_convolutions(draw, d: int) -> Case:
    """conv_transpose*d with its options."""
    most = 1 if d == 3 else 2
    groups, kernel, dilation = draw(st.integers(1, 2)), _each(draw, d, 1, 1 + most), _each(draw, d, 1, 2)
    stride, padding, extra = _each(draw, d, 1, 2), _each(draw, d, 0, most), _each(draw, d, 0, 1)
    if one := draw(st.booleans()):  # one number for all dimensions
        dilation, stride, padding, extra = (option[:1] * d for option in (dilation, stride, padding, extra))
    output_padding = tuple(min(e, max(s, a) - 1) for e, s, a in zip(extra, stride, dilation, strict=True))
    room = [2 * p - a * (k - 1) for p, a, k in zip(padding, dilation, kernel, strict=True)]
    size = [1 + e + max(-(-r // s), 0) for e, r, s in zip(_each(draw, d, 0, 1), room, stride, strict=True)]
    options: dict[str, Any] = {"stride": stride, "padding": padding, "output_padding": output_padding}
    options = {name: option[0] if one else option for name, option in (options | {"dilation": dilation}).items()}
    options["groups"] = groups
    c_in, c_out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))

    def operation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return getattr(F, f"conv_transpose{d}d")(x, weight, bias, **options)

    name = f"conv_transpose{d}d, {options}"
    return _convolved(draw, name, operation, (c_in, c_out // groups, *kernel), c_out, [c_in, *size])


def _each(draw, d: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(d))


def _convolved(draw, name: str, operation: Callable, weight: tuple[int, ...], bias: int, one: list[int]) -> Case:
    """The samples alone along the batch dimension, or merged there with others, before them or behind."""
    rand, n, steps = Numbers(), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    reads = [draw(readings(weight, rand))]
    if draw(st.booleans()):
        reads.append(draw(readings((bias,), rand)))
    lead, at = draw(st.sampled_from([([n], 0), ([n, steps], 0), ([steps, n], 1)]))

    def merged(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return operation(x.flatten(0, 1), *given).unflatten(0, x.shape[:2])

    case = _case(name, operation if len(lead) == 1 else merged, [rand(*lead, *one)], [at], reads, at)
    assume(case.f(case.params, *case.inputs).numel() <= 150)  # the oracle takes a backward pass for each
    return case


@st.composite
def formed(draw, form: Form) -> Case:
    """A form with a size for each label, and a reading for each tensor of parameters."""
    rand, operands = Numbers(), (form.inputs + " " + form.params).split()
    labels = sorted(set("".join(operands)) - {"#", "1"})
    sizes = {c: draw(SIZES) for c in labels} | {"1": 1}
    inputs, dims, reads = [], [], []
    for labels in form.inputs.split():
        shape = [sizes[c] for c in labels.strip("#")]
        inputs.append(rand.below(sizes["v"], *shape) if labels[0] == "#" else rand(*shape))
        dims.append(labels.strip("#").index("n"))
    for labels in form.params.split(" ") if form.params else [""]:
        reads.append(draw(readings(tuple(sizes[c] for c in labels), rand)))
    return _case(form.called, form.operation, inputs, dims, reads, form.output.index("n"))
