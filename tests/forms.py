"""Operations whose structure is a label for each dimension: products, element by element, without a rule, tied.

Private to the tests: single operations that rules are written for; `invfunc.testing.strategies` draws whole models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


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
    Form("einsum with a constant for each sample", "ni", "io", "no", lambda x, w: _weighted(x, w)),
    _einsum("ni,oj->no", "ni", "oj", "no"),
]


def _weighted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ni,io,n->no", x, w, torch.linspace(1, 2, len(x), dtype=x.dtype, device=x.device))


ELEMENTWISE = [
    Form("x + w", "nab", "ab", "nab", lambda x, w: x + w),
    Form("w + x", "nab", "1b", "nab", lambda x, w: w + x),
    Form("x (one entry) + w", "n1", "ab", "n", lambda x, w: (x.unsqueeze(-1) + w).sum((1, 2))),
    Form("add(x, w, alpha)", "anb", "b", "anb", lambda x, w: torch.add(x, w, alpha=-0.5)),
    Form("x - w", "nab", "", "nab", lambda x, w: x - w),
    Form("sub(w, x, alpha)", "nab", "a1", "nab", lambda x, w: torch.sub(w, x, alpha=2)),
    Form("sub(x, w, alpha)", "nab", "a1", "nab", lambda x, w: torch.sub(x, w, alpha=2)),
    Form("rsub(x, w)", "na", "a", "na", lambda x, w: torch.rsub(x, w, alpha=3)),
    Form("x * w", "nab", "ab", "nab", lambda x, w: x * w),
    Form("w * x", "nab", "", "nab", lambda x, w: w * x),
    Form("mul(w, x), broadcast both ways", "n1b", "a1", "nab", lambda x, w: torch.mul(w, x)),
    Form("x * w * v", "nab", "b a1", "nab", lambda x, w, v: x * w * v),
    Form("x * w for each sample", "na", "n1", "na", lambda x, w: x * w),
    Form("x + w for each sample", "an", "n", "an", lambda x, w: x + w),
    Form("constant + w, then x", "na", "a", "na", lambda x, w: x.tanh() * (w + 1)),
    Form("x.add_(w)", "nab", "b", "nab", lambda x, w: (2 * x).add_(w)),
    Form("x *= w", "nab", "ab", "nab", lambda x, w: (2 * x).mul_(w).sin_()),
    Form("x += w x", "na", "a", "na", lambda x, w: (x + w).add_(w * x)),
    Form("x / w", "na", "a", "na", lambda x, w: x / (w.square() + 1)),
    Form("w / x", "na", "a", "na", lambda x, w: w / (x.square() + 1)),
]
OTHERS = [
    Form("layer_norm", "nabc", "bc bc", "nabc", lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
    Form("layer_norm, time first", "tnc", "c", "tnc", lambda x, w: F.layer_norm(x, w.shape, w)),
    Form("rms_norm", "nac", "c", "nac", lambda x, w: F.rms_norm(x, w.shape, w)),
    Form("batch_norm in eval mode", "nca", "c c", "nca", lambda x, w, b: F.batch_norm(x, *_running(x), w, b)),
    Form("instance_norm", "ncab", "c c", "ncab", lambda x, w, b: _with_room(F.instance_norm, x, None, None, w, b)),
    Form("group_norm", "nca", "c c", "nca", lambda x, w, b: _with_room(F.group_norm, x, 1, w, b)),
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
    Form("cat with w", "na", "b", "n", lambda x, w: torch.cat([x, w.expand(len(x), -1)], 1).square().sum(1)),
]


def _moved(called: str, move: Callable, output: str = "nab") -> Form:
    """A form that moves the entries of a tensor `[n, a, b]` between the parameters and the outputs."""
    return Form(called, "nab", "ab", output, lambda x, w: move((x * w).sin()))


def _written(z: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    z[index] = value
    return z


def _beside(z: torch.Tensor) -> torch.Tensor:
    """`[n, a, b]` into `[n, a, b + 2]`: room for what needs more than one entry."""
    return F.pad(z, (1, 1), value=0.5)


MOVES = [
    _moved("transpose", lambda z: z.transpose(0, 1), "anb"),
    _moved("permute", lambda z: z.permute(2, 0, 1), "bna"),
    _moved("movedim", lambda z: torch.movedim(z, 0, -1), "abn"),
    _moved("swapaxes", lambda z: z.swapaxes(0, 2), "ban"),
    _moved("mT", lambda z: z.mT, "nba"),
    _moved("T of a slice", lambda z: z[:, 0].T, "bn"),
    _moved("unsqueeze, squeeze", lambda z: z.unsqueeze(0).unsqueeze(-1).sin().squeeze(-1).squeeze(0)),
    _moved("flatten", lambda z: z.flatten(1), "n."),
    _moved("samples merged with others", lambda z: z.flatten(0, 1).tanh().view(z.shape)),
    _moved(
        "others merged with samples",
        lambda z: z.mT.transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (-1, len(z))),
        "bna",
    ),
    _moved("all in one dimension", lambda z: z.permute(1, 0, 2).reshape(-1).tanh().view(z.shape[1], len(z), -1), "anb"),
    _moved("a dimension of one", lambda z: z.reshape(1, len(z), 1, -1).tanh()[0, :, 0], "n."),
    _moved("expand", lambda z: z[:, None].expand(-1, 2, -1, -1), "n.."),
    _moved("repeat", lambda z: z.repeat(1, 2, 3), "n.."),
    _moved("samples repeated", lambda z: z.repeat(2, 1, 1).tanh().unflatten(0, (2, -1)), ".n.."),
    _moved("samples repeated one by one", lambda z: z.repeat_interleave(2, 0).tanh().unflatten(0, (-1, 2)), "n.."),
    _moved("repeat_interleave", lambda z: z.repeat_interleave(2, dim=-1), "n.."),
    _moved("chunk, cat", lambda z: torch.cat(z.chunk(2, 1)[::-1], 1), "n.."),
    _moved("split, stack", lambda z: torch.stack(z.split(1, -1), 0), ".n.."),
    _moved("unbind, stack", lambda z: torch.stack(z.unbind(1), -1), "n.."),
    _moved("for each step", lambda z: torch.stack([y * i for i, y in enumerate(z.transpose(0, 1))]), "an."),
    _moved("hstack", lambda z: torch.hstack([z, z.cos()]), "n.."),
    _moved("cat with a constant", lambda z: torch.cat([z, torch.ones_like(z[:, :1])], 1), "n.."),
    _moved("narrow", lambda z: z.narrow(1, 0, 1), "n.."),
    _moved("select", lambda z: z.select(2, -1), "n."),
    _moved("strided, negative, None", lambda z: z[:, ::2, None, -1], "n.."),
    _moved("ellipsis", lambda z: z[..., 0], "n."),
    _moved("time first, last step", lambda z: z.transpose(0, 1)[-1], "n."),
    _moved("list index", lambda z: z[:, [0, -1]], "n.."),
    _moved("index tensor", lambda z: z[..., torch.zeros(3, dtype=torch.int64, device=z.device)], "n.."),
    _moved("two index tensors", lambda z: z[:, [0, -1, 0], [-1, 0, 0]], "n."),
    _moved("index_select", lambda z: z.index_select(1, torch.zeros(2, dtype=torch.int64, device=z.device)), "n.."),
    _moved("gather by samples", lambda z: z.gather(1, z.detach().argsort(1)), "n.."),
    _moved("take_along_dim", lambda z: torch.take_along_dim(z, z.argmax(-1, keepdim=True), -1), "n.."),
    _moved("written in place", lambda z: _written(z.clone(), (slice(None), 0), z[:, -1].cos())),
    _moved("written into zeros", lambda z: _written(torch.zeros_like(z), (..., -1), z[..., 0])),
    _moved("added in place", lambda z: z.add_(0.5).mul_(2).relu_()),
    _moved("a view changed in place", lambda z: _written(z, (slice(None), 0), z[:, 0] * 2)),
    _moved("sum", lambda z: z.sum(1), "n."),
    _moved("sum of several", lambda z: z.transpose(0, 1).sum((0, -1)), "n"),
    _moved("mean, keepdim", lambda z: z - z.mean(-1, keepdim=True) / 2),
    _moved("amax", lambda z: z.amax(dim=(1, 2)), "n"),
    _moved("max", lambda z: z.max(1).values + z.min(dim=1)[0], "n."),
    _moved("median", lambda z: z.median(-1).values, "n."),
    _moved("logsumexp", lambda z: z.logsumexp(dim=(1, 2)), "n"),
    _moved("norm", lambda z: (z + 2).norm(dim=-1) + torch.linalg.vector_norm(z + 2, 2, dim=-1), "n."),
    _moved("var", lambda z: _beside(z).var(-1) + _beside(z).std(2), "n."),
    _moved("prod", lambda z: (z + 2).prod(1), "n."),
    _moved("softmax", lambda z: z.softmax(-1) + F.log_softmax(_beside(z), 1)[..., 1:-1]),
    _moved("cumsum", lambda z: z.cumsum(1).cumprod(2)),
    _moved("flip, roll", lambda z: z.flip(1).roll(1, -1)),
    _moved("sort", lambda z: z.sort(dim=1, descending=True).values),
    _moved("topk", lambda z: z.topk(1, -1).values, "n.."),
    _moved("glu", lambda z: F.glu(torch.cat([z, z.cos()], -1))),
    _moved("diff", lambda z: _beside(z).diff(dim=-1), "n.."),
    _moved("triu", lambda z: z.triu()),
    _moved("normalize", lambda z: F.normalize(z + 2, dim=-1)),
    _moved("max_pool1d", lambda z: F.max_pool1d(_beside(z), 2), "n.."),
    _moved("avg_pool2d", lambda z: F.avg_pool2d(_beside(z)[:, None], (1, 2), padding=(0, 1)), "n..."),
    _moved("adaptive_avg_pool1d", lambda z: F.adaptive_avg_pool1d(_beside(z), 2), "n.."),
    _moved("adaptive_max_pool2d", lambda z: F.adaptive_max_pool2d(_beside(z)[:, None], 1), "n..."),
    _moved("pad", lambda z: F.pad(_beside(z), (1, 1), "circular"), "n.."),
    _moved("interpolate", lambda z: F.interpolate(z, scale_factor=2, mode="linear"), "n.."),
    _moved("pixel_shuffle", lambda z: F.pixel_shuffle(z[:, None].expand(-1, 4, -1, -1) * 1, 2), "n..."),
    _moved("unfold", lambda z: F.unfold(_beside(z)[:, None], (1, 2)), "n.."),
    _moved("Tensor.unfold", lambda z: _beside(z).unfold(2, 2, 1), "n..."),
    _moved("attention", lambda z: F.scaled_dot_product_attention(z, z.cos(), z)),
    _moved("attention over steps", lambda z: F.scaled_dot_product_attention(z[:, None], z[:, None], z[:, None])[:, 0]),
    _moved("z @ z.mT", lambda z: z @ z.mT, "n.."),
    _moved("a product of samples", lambda z: torch.einsum("nab,ncb->nac", z, z.cos()), "n.."),
    _moved("baddbmm of samples", lambda z: torch.baddbmm(z[:, :, :1], z, z.mT, beta=2), "n.."),
    _moved("dropout in eval mode", lambda z: F.dropout(z, 0.5, False)),
    _moved("masked_fill", lambda z: z.masked_fill(z > 0, 0.5)),
    _moved("where with constants", lambda z: torch.where(z.detach() > 0, z, -2 * z)),
    _moved("clamp", lambda z: z.clamp(-0.5, 0.5)),
    _moved(
        "a constant for each sample",
        lambda z: z * torch.linspace(1, 2, len(z), dtype=z.dtype, device=z.device)[:, None, None],
    ),
    _moved("to double and back", lambda z: z.double().sin().to(z.dtype)),
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
    Form(
        "linear, then layer_norm, with one vector",
        "ni",
        "ii i",
        "ni",
        lambda x, w, b: F.layer_norm(x @ w + b, b.shape, b, eps=1),
    ),
]


def _running(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    channels = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return channels - 1, channels + 0.5


def _with_room(norm: Callable, x: torch.Tensor, *options: Any) -> torch.Tensor:
    """With a second row, where torch refuses to normalise a single number."""
    return norm(torch.cat([x, 2 * x + 1], 2), *options)[:, :, : x.shape[2]]


def _twice_convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.conv1d(x, w, padding="same").tanh(), w, padding="same")
