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


# Operations on a tensor `[n, a, b]` between parameters and outputs, beyond what most models do


def moved(called: str, move: Callable, output: str = "nab") -> Form:
    """A move of the outputs of a layer."""
    return Form(called, "nab", "ab", output, lambda x, w: move((x * w).sin()))


def square(z: torch.Tensor) -> torch.Tensor:
    """For each sample a symmetric matrix `[n, a, a]` that is safely invertible, with eigenvalues apart."""
    eye = torch.arange(2.0, 2 + z.shape[1]).to(z).diag()
    return z @ z.mT / 8 + eye


def wide(z: torch.Tensor) -> torch.Tensor:
    """`[n, a, 3]`"""
    return torch.cat([z[..., :1], z[..., -1:].cos(), z[..., :1] * 2 + 1], -1)


def _index(z: torch.Tensor, size: int) -> torch.Tensor:
    """For each entry along the last dimension, one of a few others."""
    return torch.arange(z.shape[-1], device=z.device) * 2 % size


def _numbered(z: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return torch.arange(z.shape[dim], device=z.device)


def _zeros(z: torch.Tensor, size: int) -> torch.Tensor:
    return torch.zeros(*z.shape[:-1], size, dtype=z.dtype, device=z.device)


def _put(z: torch.Tensor) -> torch.Tensor:
    n, last = _numbered(z)[:, None], (z[:, 0] > 0).long()
    return torch.zeros(len(z), 2, dtype=z.dtype, device=z.device).index_put((n, last), z[:, 0], accumulate=True)


def _pooled(z: torch.Tensor) -> torch.Tensor:
    """The nodes of all graphs in one dimension, added up in their graphs."""
    graphs = _numbered(z).repeat_interleave(z.shape[1])
    return torch.zeros_like(z[:, 0]).index_add(0, graphs, z.flatten(0, 1))


def _packed(z: torch.Tensor) -> torch.Tensor:
    """The entries of a mask in one dimension, worked on there, and put back."""
    mask = z > 0
    out = torch.zeros_like(z)
    out[mask] = z[mask].exp() * 2
    return out


def _assembled(z: torch.Tensor) -> torch.Tensor:
    order = _numbered(z).flip(0)
    return z[order].exp()[order] + z.flip(0).cos().flip(0)


SELECTIONS = [
    moved("z[arange, i]", lambda z: z[_numbered(z), z.argmax(1)[:, 0]], "n."),
    moved("z[arange, last]", lambda z: z[_numbered(z), -1], "n."),
    moved("z[arange, :, i]", lambda z: z[_numbered(z), :, (z[:, 0] > 0).sum(1) % z.shape[2]], "n."),
    moved("z[arange[:, None], i]", lambda z: z[_numbered(z)[:, None], z.argmax(1) * 0], "n.."),
    moved("z[range, i]", lambda z: z[range(len(z)), z.argmax(1)[:, 0]], "n."),
    moved("z.mT[arange, i, j]", lambda z: z.mT[_numbered(z), (z[:, 0] > 0).sum(1) % z.shape[2], 0], "n"),
    moved("z.T[i, j, arange]", lambda z: z.permute(2, 1, 0)[0, z.argmax(1)[:, 0], _numbered(z)], "n"),
    moved("a mask of entries", _packed),
    moved("samples in another order and back", _assembled),
    moved("cat along the samples", lambda z: torch.cat([z, z.cos()]).exp().unflatten(0, (2, -1)), ".n.."),
    moved("chunks of samples", lambda z: torch.cat([part.exp() for part in z.tensor_split(2)])),
    moved("gather along the samples", lambda z: z.gather(0, _numbered(z)[:, None, None].expand(z.shape))),
    moved("take", lambda z: z.take(torch.arange(z.numel(), device=z.device).view(z.shape)).tanh()),
    moved("index_add", lambda z: _zeros(z, 3).index_add(-1, _index(z, 3), z.exp()), "n.."),
    moved("index_add of rows", _pooled, "n."),
    moved("index_copy", lambda z: _zeros(z, 8).index_copy(2, _numbered(z, 2) * 2, z.exp()), "n.."),
    moved("index_put", _put, "n."),
    moved("index_reduce", lambda z: _zeros(z, 3).index_reduce(-1, _index(z, 3), z, "amax", include_self=False), "n.."),
    moved("index_fill", lambda z: z.index_fill(1, torch.zeros(1, dtype=torch.int64, device=z.device), 2.0)),
    moved("scatter_reduce", lambda z: _zeros(z, 3).scatter_reduce(2, _index(z, 3).expand(z.shape), z, "amax"), "n.."),
    moved("scatter", lambda z: _zeros(z, 8).scatter(2, (_numbered(z, 2) * 2).expand(z.shape), z.exp()), "n.."),
    moved("scatter_add by samples", lambda z: _zeros(z, 2).scatter_add(2, (z > 0).long(), z.exp()), "n.."),
    moved("diagonal", lambda z: (z[:, :, None] * z[:, :, :, None]).diagonal(0, -2, -1).exp(), "n.."),
    moved("diag_embed", lambda z: z.diag_embed().exp(), "n..."),
    moved("fftshift", lambda z: torch.fft.ifftshift(torch.fft.fftshift(z, 1).exp(), (1, 2)), "n.."),
    moved("rot90", lambda z: z.rot90(1, (1, 2)).exp(), "n.."),
    moved("rot90 of the samples", lambda z: z.rot90(1, (0, 1)).exp(), ".n."),
    moved("fliplr, flipud", lambda z: z.fliplr().exp().flipud().exp().flipud()),
    moved("dstack", lambda z: torch.dstack([z, z.exp()]), "n.."),
    moved("column_stack", lambda z: torch.column_stack([z[:, 0], z[:, 0, 0].exp()]), "n."),
    moved("atleast", lambda z: torch.atleast_3d(z[:, 0]).exp(), "n.."),
    moved("kron", lambda z: torch.kron(z[:, 0], torch.arange(1.0, 4)[None].to(z)), "n."),
    moved(
        "kron, from the left",
        lambda z: torch.kron(torch.arange(1.0, 3)[:, None].to(z), z[0:, 0]).view(2, -1, z.shape[2]),
        ".n.",
    ),
    moved("as_strided", lambda z: z.contiguous().clone().as_strided(z.shape, z.contiguous().stride()).exp()),
    moved("masked_scatter", lambda z: z.masked_scatter(z > 0, z[z > 0].exp())),
]
"""Entries that change their places."""
COMPUTATIONS = [
    moved("quantile", lambda z: wide(z).quantile(0.4, dim=2), "n."),
    moved("several quantiles", lambda z: wide(z).quantile(torch.tensor([0.2, 0.7]).to(z), -1), ".n."),
    moved("aminmax", lambda z: sum(z.aminmax(dim=1)), "n."),
    moved("msort", lambda z: z.transpose(0, 1).msort().exp(), ".n."),
    moved("searchsorted", lambda z: z * torch.searchsorted(z.sort(-1).values.detach(), z.detach() / 2)),
    moved("complex", lambda z: torch.complex(z, z.cos()).exp().real),
    moved("view_as_real", lambda z: torch.view_as_real(torch.complex(z, z.cos()).square()), "n..."),
    moved("fft", lambda z: torch.fft.fft(wide(z)).abs(), "n.."),
    moved("rfft2", lambda z: torch.view_as_real(torch.fft.rfft2(wide(z))).square().sum(-1), "n.."),
    moved("irfft of rfft", lambda z: torch.fft.irfft(torch.fft.rfft(wide(z), dim=-1) * 2, n=3, dim=-1).exp(), "n.."),
    moved("fftn, fftshift", lambda z: torch.fft.fftshift(torch.fft.fftn(z, dim=(1, 2)), dim=1).abs() + 1),
    moved("trapezoid", lambda z: torch.trapezoid(wide(z).exp(), dim=2), "n."),
    moved("cumulative_trapezoid", lambda z: torch.cumulative_trapezoid(wide(z).exp()), "n.."),
    moved("cross", lambda z: torch.linalg.cross(wide(z), wide(z).cos()), "n.."),
    moved("vecdot", lambda z: torch.linalg.vecdot(z, z.exp(), dim=1), "n."),
    moved("det", lambda z: torch.linalg.det(square(z)), "n"),
    moved("slogdet", lambda z: torch.linalg.slogdet(square(z)).logabsdet + torch.logdet(square(z)), "n"),
    moved("solve", lambda z: torch.linalg.solve(square(z), z.exp()), "n.."),
    moved("solve for vectors", lambda z: torch.linalg.solve(square(z), z[..., 0].exp()), "n."),
    moved("inv", lambda z: torch.linalg.inv(square(z)), "n.."),
    moved("cholesky", lambda z: torch.linalg.cholesky(square(z)), "n.."),
    moved("cholesky_solve", lambda z: torch.cholesky_solve(z, torch.linalg.cholesky(square(z))), "n.."),
    moved("solve_triangular", lambda z: torch.linalg.solve_triangular(square(z).tril(), z, upper=False), "n.."),
    moved("eigvalsh", lambda z: torch.linalg.eigvalsh(square(z)), "n."),
    moved("eigh", lambda z: torch.linalg.eigh(square(z)).eigenvectors.square(), "n.."),
    moved("svdvals", lambda z: torch.linalg.svdvals(square(z)), "n."),
    moved("svd", lambda z: torch.linalg.svd(square(z)).U.square(), "n.."),
    moved("qr", lambda z: torch.linalg.qr(square(z)).R.square(), "n.."),
    moved("pinv", lambda z: torch.linalg.pinv(square(z)), "n.."),
    moved("matrix_exp", lambda z: torch.linalg.matrix_exp(square(z) / 4), "n.."),
    moved("matrix_power", lambda z: torch.linalg.matrix_power(square(z) / 4, 3), "n.."),
    moved("matrix_norm", lambda z: torch.linalg.matrix_norm(square(z)) + F.normalize(z + 2, dim=1).sum((1, 2)), "n"),
]
"""Along some dimensions, or on matrices."""


def _spd(w: torch.Tensor) -> torch.Tensor:
    return w @ w.mT / 8 + torch.eye(len(w)).to(w)


MEETINGS = [
    Form("det of x + w", "nab", "aa", "n", lambda x, w: torch.linalg.det(square(x) + _spd(w))),
    Form(
        "logdet of x + w", "na", "aa", "na", lambda x, w: torch.logdet(x.square().diag_embed() + _spd(w))[:, None] * x
    ),
    Form("eigvalsh of x + w", "nab", "aa", "na", lambda x, w: torch.linalg.eigvalsh(square(x) + _spd(w))),
    Form(
        "matrix_exp(x w)",
        "na",
        "aa",
        "na",
        lambda x, w: (torch.linalg.matrix_exp(x[:, :, None] * w.sum(1) / 4) @ w)[:, 0],
    ),
    Form("cross(x, w)", "na", "1", "n.", lambda x, w: torch.linalg.cross(wide(x[:, None]), w.expand(1, 1, 3))[:, 0]),
    Form("vecdot(x, w)", "nab", "ab", "na", torch.linalg.vecdot),
    Form("complex(x, w)", "nab", "ab", "nab", lambda x, w: (torch.complex(x, w) * torch.complex(w, x)).imag),
    Form("rfft(x @ w)", "nab", "bb", "na.", lambda x, w: torch.fft.rfft(x @ w).abs()),
    Form("a filter in the spectrum", "nab", "b", "nab", lambda x, w: torch.fft.ifft(torch.fft.fft(x) * w).real),
    Form(
        "a complex filter",
        "nab",
        "b b",
        "nab",
        lambda x, v, w: torch.fft.ifft(torch.fft.fft(x) @ torch.complex(v, w).diag()).real,
    ),
    Form("kron(x, w)", "na", "ab", "n..", lambda x, w: torch.kron(x[:, None], w[None].contiguous())),
    Form("w[:, i, j]", "#n", "avv", "na", lambda i, w: w[:, i, i].T),
    Form("w[i] of a mask", "#na", "vd", "nd", lambda i, w: _summed(i, lambda rows: w[rows])),
    Form(
        "a layer of the entries of a mask",
        "nab",
        "ab b",
        "nab",
        lambda x, w, b: _of_positive(x, lambda z: z @ w.T @ w + b),
    ),
    Form(
        "a scale of the entries of a mask",
        "nab",
        "b b",
        "nab",
        lambda x, w, b: _of_positive(x, lambda z: F.layer_norm(z, b.shape, w, b)),
    ),
    Form(
        "x ** w of the entries of a mask",
        "nab",
        "b",
        "nab",
        lambda x, w: _of_positive(x, lambda z: (z.square() + 1) ** w),
    ),
    Form(
        "1 / x w of the entries of a mask",
        "nab",
        "b",
        "nab",
        lambda x, w: _of_positive(x, lambda z: torch.lerp(w, 1 / z, 0.3)),
    ),
    Form("index_add of x w", "nab", "b", "na.", lambda x, w: _zeros(x, 3).index_add(2, _index(x, 3), x * w, alpha=2)),
]
"""Parameters at such operations."""


def _of_positive(x: torch.Tensor, layer: Callable) -> torch.Tensor:
    """A layer of the rows whose first entry is positive."""
    mask = x[..., 0] > 0
    out = torch.zeros_like(x)
    out[mask] = layer(x[mask])
    return out


def _summed(i: torch.Tensor, rows: Callable) -> torch.Tensor:
    mask = i > 0
    found = rows(i[mask])
    samples = mask.nonzero()[:, 0]
    return torch.zeros(len(i), found.shape[-1], dtype=found.dtype, device=found.device).index_add(
        0, samples, found.exp()
    )
