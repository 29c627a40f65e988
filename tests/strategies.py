"""What the laws are tested on: hypothesis draws the structure, a seeded generator the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from invfunc import tree

SIZES = st.integers(1, 4)


class Numbers:
    """Float64 numbers that are float32 numbers too, so that one oracle serves both."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).double()

    def below(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator)


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
    "mask * p": lambda s, rand: (rand(*s), lambda p, mask=(rand(*s) > 0): mask.to(p) * p),
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
    if draw(st.booleans()):
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
    if x_batch and draw(st.booleans()):
        x_core = [inner]
    ones = [draw(st.booleans()) for _ in batch]
    w_batch = [1 if one else b for one, b in zip(ones, batch, strict=True)] if len(w_core) > 1 else []
    w_batch = w_batch[len(w_batch) - draw(st.integers(0, len(w_batch))) :]
    rows = [-1 if left else -2] if len(x_core) == 2 else []
    shape = [*x_batch, *x_core]
    at = draw(st.sampled_from([*range(-len(shape), -len(x_core)), *rows]))
    shape[at] = n
    if at not in rows:  # the samples are along a batch dimension: the parameter has one entry there, or none
        back = at + len(x_core)
        if -back <= len(w_batch):
            w_batch[back] = 1
    z_core = len(x_core) + len(w_core) - 2
    read = draw(readings((*w_batch, *w_core), rand))
    product = draw(st.sampled_from([torch.matmul, lambda a, b: a @ b, lambda a, b: b.__rmatmul__(a)]))
    operation = (lambda x, w: product(w, x)) if left else product
    return _case("w @ x" if left else "x @ w", operation, [rand(*shape)], [at], [read], at + len(x_core) - z_core)


@st.composite
def convolutions(draw, d: int, transposed: bool = False) -> Case:
    """conv*d and conv_transpose*d with their options; "same" and the padding modes are those of nn.Conv*d."""
    rand, n, small = Numbers(), draw(st.integers(1, 3)), 1 if d == 3 else 2

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(d))

    groups, kernel, dilation = draw(st.integers(1, 2)), each(1, 1 + small), each(1, 2)
    c_in, c_out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    span = [a * (k - 1) + 1 for a, k in zip(dilation, kernel, strict=True)]
    stride, padding, extra = each(1, 2), each(0, small), each(0, small)
    mode = "zeros"
    if transposed:
        size = [1 + e + p for e, p in zip(extra, padding, strict=True)]
        options: dict[str, Any] = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation}
        options["output_padding"] = tuple(min(e, max(s, a) - 1) for e, s, a in zip(extra, stride, dilation, strict=True))
        kind, shape = getattr(F, f"conv_transpose{d}d"), (c_in, c_out // groups, *kernel)
    else:
        how = draw(st.sampled_from(["numbers", "one number", "valid", "same", "module"]))
        padding = {"one number": padding[0], "valid": "valid", "same": "same"}.get(how, padding)
        stride = (1,) * d if how == "same" else stride[0] if how == "one number" else stride
        size = [s + e for s, e in zip(span, extra, strict=True)]
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        kind, shape = getattr(F, f"conv{d}d"), (c_out, c_in // groups, *kernel)
        if how == "module":
            mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
            options["padding"] = draw(st.sampled_from(["same", tuple(min(p, 1) for p in padding)]))
            options["stride"] = (1,) * d if options["padding"] == "same" else stride
            size = [max(s, 3) for s in size]
    reads = [draw(readings(shape, rand))]
    if draw(st.booleans()):
        reads.append(draw(readings((c_out,), rand)))

    def operation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if mode == "zeros":
            return kind(x, weight, bias, **options)
        module = getattr(nn, f"Conv{d}d")(
            c_in, c_out, kernel, bias=bias is not None, padding_mode=mode, dtype=x.dtype, device=x.device, **options
        )
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(module, given, x)

    steps, where = draw(st.tuples(SIZES, st.sampled_from(["alone", "samples first", "time first"])))
    name = f"{'conv_transpose' if transposed else 'conv'}{d}d {options} {mode} {where}"
    if where == "alone":
        return _case(name, operation, [rand(n, c_in, *size)], [0], reads, 0)
    first = where == "samples first"

    def merged(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return operation(x.flatten(0, 1), *given).unflatten(0, x.shape[:2])

    lead = [n, steps] if first else [steps, n]
    return _case(name, merged, [rand(*lead, c_in, *size)], [1 - first], reads, 1 - first)


# Forms: operations whose structure is a label for each dimension


@dataclass(frozen=True)
class Form:
    """An operation of sample tensors and tensors of parameters, by the labels of their dimensions (n: samples, 1: one).

    `v` labels the values of an integer input, which is written `#labels`.
    """

    called: str
    inputs: str
    params: str
    output: str
    operation: Callable

    def __str__(self) -> str:
        return self.called


def _einsum(equation: str, inputs: str, params: str, output: str, order: str = "xw") -> Form:
    def operation(*operands: torch.Tensor) -> torch.Tensor:
        waiting = {"x": list(operands[: len(inputs.split())]), "w": list(operands[len(inputs.split()) :])}
        return torch.einsum(equation, *(waiting[kind].pop(0) for kind in order))

    return Form(f"einsum({equation})", inputs, params, output, operation)


PRODUCTS = [
    Form("mm(x, w)", "ni", "io", "no", torch.mm),
    Form("mm(w, x)", "in", "oi", "on", lambda x, w: torch.mm(w, x)),
    Form("bmm(x, w)", "bni", "bio", "bno", torch.bmm),
    Form("bmm(w, x)", "bin", "boi", "bon", lambda x, w: w.bmm(x)),
    Form("mv(x, w)", "ni", "i", "n", torch.mv),
    Form("addmm(b, x, w)", "ni", "o io", "no", lambda x, b, w: torch.addmm(b, x, w)),
    Form("addmm(b, x, w, alpha, beta)", "ni", "1o io", "no", lambda x, b, w: b.addmm(x, w, alpha=0.5, beta=-2)),
    Form("addmm(x, y, w, alpha, beta)", "no ni", "io", "no", lambda x, y, w: torch.addmm(x, y, w, alpha=3, beta=0.5)),
    Form("addmm(b, w, x)", "in", "o1 oi", "on", lambda x, b, w: torch.addmm(b, w, x, alpha=2)),
    Form("addmv(b, x, w)", "ni", "1 i", "n", lambda x, b, w: torch.addmv(b, x, w, alpha=0.5, beta=3)),
    Form("baddbmm(b, x, w)", "bni", "b1o bio", "bno", lambda x, b, w: torch.baddbmm(b, x, w, alpha=2, beta=0.5)),
    Form("x.baddbmm(y, w)", "bno bni", "bio", "bno", lambda x, y, w: x.baddbmm(y, w, beta=2)),
    Form("tensordot(x, w, 1)", "nai", "io", "nao", lambda x, w: torch.tensordot(x, w, 1)),
    Form("tensordot(x, w, pairs)", "nai", "oia", "no", lambda x, w: torch.tensordot(x, w, dims=([1, 2], [2, 1]))),
    Form("tensordot(w, x, pairs)", "ian", "oi", "oan", lambda x, w: torch.tensordot(w, x, dims=([-1], [0]))),
    Form("tensordot(x, w, 0)", "na", "o", "nao", lambda x, w: torch.tensordot(x, w, 0)),
    Form("inner(x, w)", "nai", "oi", "nao", torch.inner),
    Form("inner(w, x)", "ani", "oi", "oan", lambda x, w: torch.inner(w, x)),
    Form("outer(x, w)", "n", "o", "no", torch.outer),
    Form("outer(w, x)", "n", "o", "on", lambda x, w: torch.outer(w, x)),
    Form("F.bilinear", "nai naj", "oij o", "nao", F.bilinear),
    Form("x.T @ w.T and back", "ni", "oi", "no", lambda x, w: (w @ x.T).T),
    Form("x @ w for each sample", "ni", "nio", "no", lambda x, w: (x.unsqueeze(1) @ w).squeeze(1)),
    _einsum("ni,oi->no", "ni", "oi", "no"),
    _einsum("oi,ni->no", "ni", "oi", "no", "wx"),
    _einsum("n i, i o", "ni", "io", "no"),
    _einsum("bi,ai", "ni", "oi", "on"),
    _einsum("NI,OI->ON", "ni", "oi", "on"),
    _einsum("...i,oi->...o", "nai", "oi", "nao"),
    _einsum("...i,...i->...", "nai", "ai", "na"),
    _einsum("i...,oi", "ian", "oi", "ano"),
    _einsum("nhd,hde->nhe", "nhd", "hde", "nhe"),
    _einsum("hde,tnhd->tnhe", "tnhd", "hde", "tnhe", "wx"),
    _einsum("nti,ij,ntj->nt", "nti ntj", "ij", "nt", "xwx"),
    _einsum("ni,io,o,op->np", "ni", "io o op", "np", "xwww"),
    _einsum("ni,oi->n", "ni", "oi", "n"),
    _einsum("ni,oj->no", "ni", "oj", "no"),
]
ELEMENTWISE = [
    Form("x + w", "nab", "ab", "nab", lambda x, w: x + w),
    Form("w + x", "nab", "1b", "nab", lambda x, w: w + x),
    Form("x (one entry) + w", "n1", "ab", "n", lambda x, w: (x.unsqueeze(-1) + w).sum((1, 2))),
    Form("add(x, w, alpha)", "anb", "b", "anb", lambda x, w: torch.add(x, w, alpha=-0.5)),
    Form("x - w", "nab", "", "nab", lambda x, w: x - w),
    Form("sub(w, x, alpha)", "nab", "a1", "nab", lambda x, w: torch.sub(w, x, alpha=2)),
    Form("rsub(x, w)", "na", "a", "na", lambda x, w: torch.rsub(x, w, alpha=3)),
    Form("x * w", "nab", "ab", "nab", lambda x, w: x * w),
    Form("w * x", "nab", "", "nab", lambda x, w: w * x),
    Form("mul(w, x), broadcast both ways", "n1b", "a1", "nab", lambda x, w: torch.mul(w, x)),
    Form("x * w * v", "nab", "b a1", "nab", lambda x, w, v: x * w * v),
    Form("x * w for each sample", "na", "n1", "na", lambda x, w: x * w),
    Form("x + w for each sample", "an", "n", "an", lambda x, w: x + w),
    Form("constant + w, then x", "na", "a", "na", lambda x, w: x.tanh() * (w + 1)),
    Form("x.add_(w)", "nab", "b", "nab", lambda x, w: (2 * x).add_(w)),
    Form("x *= w", "nab", "ab", "nab", lambda x, w: (2 * x).mul_(w).tanh_()),
    Form("x += w x", "na", "a", "na", lambda x, w: (x + w).add_(w * x)),
    Form("x / w", "na", "a", "na", lambda x, w: x / (w.square() + 1)),
    Form("w / x", "na", "a", "na", lambda x, w: w / (x.square() + 1)),
]
GENERIC = [
    Form("layer_norm", "nabc", "bc bc", "nabc", lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
    Form("layer_norm, time first", "tnc", "c", "tnc", lambda x, w: F.layer_norm(x, w.shape, w)),
    Form("rms_norm", "nac", "c", "nac", lambda x, w: F.rms_norm(x, w.shape, w)),
    Form("batch_norm in eval mode", "nca", "c c", "nca", lambda x, w, b: F.batch_norm(x, *_running(x), w, b)),
    Form("instance_norm", "ncab", "c c", "ncab", lambda x, w, b: _with_room(F.instance_norm, x, weight=w, bias=b)),
    Form("group_norm", "nca", "c c", "nca", lambda x, w, b: F.group_norm(x, 1, w, b)),
    Form("prelu", "ncab", "c", "ncab", F.prelu),
    Form("prelu, one slope", "nab", "1", "nab", F.prelu),
    Form("where", "nab", "b", "nab", lambda x, w: torch.where(x > 0, x, w * x)),
    Form("where of w", "nab", "ab", "nab", lambda x, w: torch.where(x > 0, w, w.square())),
    Form("maximum", "nab", "ab", "nab", torch.maximum),
    Form("clamp", "nab", "b", "nab", lambda x, w: x.clamp(min=w)),
    Form("lerp", "nab nab", "b", "nab", torch.lerp),
    Form("addcmul", "nab nab", "ab", "nab", lambda x, y, w: torch.addcmul(x, y, w, value=0.5)),
    Form("x ** w", "na", "a", "na", lambda x, w: (x.square() + 1) ** w),
    Form("embedding", "#na", "vd", "nad", F.embedding),
    Form("embedding, padding_idx", "#an", "vd", "and", lambda i, w: F.embedding(i, w, padding_idx=0)),
    Form("w[index of samples]", "#na", "vd", "nad", lambda i, w: w[i]),
    Form("embedding + position", "#na", "vd ad", "nad", lambda i, w, p: F.embedding(i, w) + p),
    Form("cdist", "nad", "bd", "nab", torch.cdist),
    Form("cat with w", "na", "b", "n", lambda x, w: torch.cat([x, w.expand(len(x), -1)], 1).square().sum(1)),
]
TIED = [
    Form("x @ w @ w.T", "ni", "io", "ni", lambda x, w: (x @ w).tanh() @ w.T),
    Form("x @ w + w[0]", "ni", "io", "no", lambda x, w: x @ w + w[0]),
    Form("linear(linear)", "nai", "ii", "nai", lambda x, w: F.linear(F.linear(x, w).sigmoid(), w)),
    Form("einsum with w twice", "ni", "ij", "n", lambda x, w: torch.einsum("ni,ij,kj->nk", x, w, w).sum(1)),
    Form("linear with weight and bias from w", "ni", "oi", "no", lambda x, w: F.linear(x, w, w.sum(1))),
    Form("embedding and its transpose", "#na", "vd", "nav", lambda i, w: F.embedding(i, w).tanh() @ w.T),
    Form("disjoint slices", "ni", "io", "no", lambda x, w: x[:, :1] @ w[:1] + (x[:, 1:] @ w[1:]).tanh()),
    Form("overlapping slices", "ni", "io", "no", lambda x, w: x[:, 1:] @ w[1:] + x @ w),
    Form("a shared convolution", "nca", "cck", "nca", lambda x, w: _twice_convolved(x, w)),
    Form("a scale used twice", "na", "a", "na", lambda x, w: (x * w).sin() * w),
    Form("x * w * w", "na", "a", "na", lambda x, w: x * w * w),
    Form("linear, then layer_norm, with one vector", "ni", "ii i", "ni", lambda x, w, b: F.layer_norm(x @ w + b, b.shape, b)),
]
FORMS = {"products": PRODUCTS, "elementwise": ELEMENTWISE, "generic": GENERIC, "tied": TIED}


def _running(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    channels = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return channels - 1, channels + 0.5


def _with_room(norm: Callable, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """With a second row, where torch refuses to normalise a single number."""
    return norm(torch.cat([x, 2 * x + 1], 2), **options)[:, :, : x.shape[2]]


def _twice_convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.conv1d(x, w, padding="same").tanh(), w, padding="same")


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


def moved(tensors: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Numbers in another precision and place; integers stay integers."""
    return tree.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tensors)
