"""Programs as in `stated`, of what is done to sums over the samples, and of losses, which are such sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.stated_common import constants, rows


def _weighed(t: torch.Tensor) -> torch.Tensor:
    """A sum in which each entry counts otherwise."""
    return (t * torch.arange(1.0, 1 + t.numel()).to(t).view(t.shape)).sum()


def _parts(parts: Any) -> torch.Tensor:
    return sum((_weighed(part) * (1 + i) for i, part in enumerate(parts)), torch.zeros(()))


def _first(t: torch.Tensor, *size: int) -> torch.Tensor:
    """The index 0, as often as asked for."""
    return torch.zeros(size, dtype=torch.int64, device=t.device)


def _written(x: torch.Tensor, value: torch.Tensor, row: int) -> torch.Tensor:
    x[row] = value
    return x


def _counted(x: torch.Tensor) -> torch.Tensor:
    """The place of each entry of an image."""
    return torch.arange(x.numel(), device=x.device).view(x.shape)


def _running(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return constants(t, t.shape[1]), constants(t, t.shape[1]).exp()


TOTALS: dict[str, Callable] = {
    "add": lambda t: t + t,
    "sub": lambda t: 1 - t.sub(t.exp().detach()),
    "subtract": lambda t: torch.subtract(t, 2 * t),
    "neg": lambda t: torch.negative(-t),
    "positive": torch.positive,
    "mul": lambda t: t * torch.arange(t.shape[1]).to(t),
    "multiply": lambda t: torch.multiply(t, 3),
    "div": lambda t: t / 3,
    "divide": lambda t: torch.divide(t, 3),
    "true_divide": lambda t: torch.true_divide(t, 3),
    "matmul": lambda t: t @ constants(t, t.shape[1], 2),
    "rmatmul": lambda t: t.__rmatmul__(constants(t, 2, t.shape[0])),
    "mm": lambda t: torch.mm(constants(t, 2, t.shape[0]), t),
    "bmm": lambda t: torch.bmm(t[None], constants(t, 1, t.shape[1], 2)),
    "mv": lambda t: torch.mv(t, constants(t, t.shape[1])),
    "dot": lambda t: torch.dot(t[0], constants(t, t.shape[1])),
    "vdot": lambda t: torch.vdot(constants(t, t.shape[1]), t[0]),
    "inner": lambda t: torch.inner(t, constants(t, t.shape[1])),
    "outer": lambda t: torch.outer(t[0], constants(t, 2)),
    "einsum": lambda t: torch.einsum("ab,bc->ca", t, constants(t, t.shape[1], 2)),
    "tensordot": lambda t: torch.tensordot(t, constants(t, t.shape[1], 2), 1),
    "linear": lambda t: F.linear(t, constants(t, 2, t.shape[1]), constants(t, 2)),
    "kron": lambda t: torch.kron(t, constants(t, 2, 1)),
    "sum": lambda t: t.sum(1),
    "mean": lambda t: t.mean(0),
    "trace": lambda t: t.trace(),
    "stack": lambda t: torch.stack([t, 2 * t], 1),
    "cat": lambda t: torch.cat([t, torch.concat([t, torch.concatenate([t, t])])]),
    "hstack": lambda t: torch.hstack([t, torch.vstack([t, t])[: t.shape[0]]]),
    "dstack": lambda t: torch.dstack([t, torch.column_stack([t, t])[:, : t.shape[1]]]),
    "casts": lambda t: t.to(torch.float32) + t.half() + t.bfloat16() + t.float() + t.double() + t.type(torch.float32),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.mT.contiguous(),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(0),
    "reshape": lambda t: t.reshape(-1).view(t.shape).view_as(t).reshape_as(t),
    "flatten": lambda t: t.flatten().unflatten(0, t.shape).ravel(),
    "expand": lambda t: t[None].expand(2, *t.shape),
    "expand_as": lambda t: t.expand_as(constants(t, 2, *t.shape)),
    "broadcast_to": lambda t: torch.broadcast_to(t, (2, *t.shape)),
    "getitem": lambda t: t[..., [0, -1]],
    "detach": lambda t: t + t.exp().detach() + (2 * t).detach_(),
    "permute": lambda t: t.permute(1, 0),
    "transpose": lambda t: t.transpose(0, 1).swapaxes(0, 1).swapdims(0, 1),
    "t": lambda t: t.t().T.mT.H.mH.adjoint(),
    "movedim": lambda t: t.movedim(0, 1).moveaxis(0, 1),
    "unbind": lambda t: _parts(t.unbind()),
    "iter": lambda t: _parts(list(t)),
    "chunk": lambda t: _parts(t.chunk(2) + torch.unsafe_chunk(t, 2)),
    "split": lambda t: _parts(t.split(1) + torch.unsafe_split(t, 1) + t.split_with_sizes([1, t.shape[1] - 1], 1)),
    "tensor_split": lambda t: _parts(t.tensor_split(2) + t.hsplit([1]) + t.vsplit([1]) + t[None].dsplit([1])),
    "narrow": lambda t: t.narrow(0, 0, 1),
    "select": lambda t: t.select(0, 0),
    "repeat": lambda t: t.repeat(2, 1).tile(1, 2).repeat_interleave(2, 0),
    "index_select": lambda t: t.index_select(1, _first(t, 2)),
    "flip": lambda t: t.flip(0).fliplr().flipud().rot90().roll(1, 0),
    "fft_fftshift": lambda t: torch.fft.ifftshift(torch.fft.fftshift(t, 0)[:, :2], 1),
    "diagonal": lambda t: t.diagonal(),
    "tril": lambda t: t.tril() + 2 * t.triu(),
    "cumsum": lambda t: t.cumsum(1),
    "diff": lambda t: t.diff(dim=1),
    "atleast": lambda t: torch.atleast_3d(torch.atleast_2d(torch.atleast_1d(t[0]))),
    "gather": lambda t: t.gather(0, _first(t, 2, t.shape[1])),
    "take": lambda t: t.take(_first(t, 2)),
    "take_along_dim": lambda t: t.take_along_dim(_first(t, 1, 1), 0),
    "masked_select": lambda t: t.masked_select(torch.ones_like(t, dtype=torch.bool)),
    "masked_fill": lambda t: t.masked_fill(torch.ones_like(t, dtype=torch.bool).triu(), 2.0),
    "where": lambda t: torch.where(torch.ones_like(t, dtype=torch.bool).triu(), t, 3.0),
    "pad": lambda t: F.pad(t, (1, 0), value=2.0),
    "pad_sequence": lambda t: pad_sequence([t[0], t[1, :1]], padding_value=2.0),
    "index_add": lambda t: torch.zeros_like(t).index_add(0, _first(t, t.shape[0]), t),
    "scatter_add": lambda t: torch.zeros_like(t).scatter_add(0, _first(t, *t.shape), t),
    "index_put": lambda t: t.index_put((_first(t, 1),), 2 * t[:1]),
    "setitem": lambda t: _written(torch.zeros_like(t), t[0], 0),
    "fill": lambda t: torch.fill(t, t[0, 0]) + t.real.cpu().type_as(t),
    "select_scatter": lambda t: t.select_scatter(t[0], 0, 0).slice_scatter(t[:, :1], 1, 0, 1),
    "diag": lambda t: torch.diag(t[0]) + torch.diag_embed(t[0]).diagonal_scatter(t[0]),
    "linalg_diagonal": lambda t: torch.linalg.diagonal(t[None]),
    "block_diag": lambda t: torch.block_diag(t, 2 * t),
    "meshgrid": lambda t: _parts(torch.meshgrid(t[0], t[:, 0], indexing="ij")),
    "cartesian_prod": lambda t: torch.cartesian_prod(t[0], t[:, 0]),
    "row_stack": lambda t: torch.row_stack([t, t]),
    "lerp": lambda t: t.lerp(2 * t, 0.3),
    "addmm": lambda t: torch.addmm(t, t.detach(), constants(t, t.shape[1], t.shape[1])),
    "addmv": lambda t: torch.addmv(constants(t, t.shape[0]), t, constants(t, t.shape[1])),
    "baddbmm": lambda t: torch.baddbmm(t[None], constants(t, 1, t.shape[0], 1), constants(t, 1, 1, t.shape[1])),
    "bilinear": lambda t: F.bilinear(t, constants(t, t.shape[0], 2), constants(t, 2, t.shape[1], 2)),
    "convolutions": lambda t: _parts(
        [
            convolve(t.view(1, 1, *[1] * (d - 2), *(t.shape if d > 1 else (-1,))), constants(t, 1, 1, *[1] * d))
            for d in (1, 2, 3)
            for convolve in (getattr(F, f"conv{d}d"), getattr(F, f"conv_transpose{d}d"))
        ]
    ),
    "pools": lambda t: _parts(
        [
            getattr(F, f"{kind}avg_pool{d}d")(t.view(1, 1, *[1] * (d - 2), *(t.shape if d > 1 else (-1,))), 1)
            for d in (1, 2, 3)
            for kind in ("", "adaptive_")
        ]
    ),
    "max_unpool": lambda t: _parts(
        [F.max_unpool2d(x, _counted(x), 1) for x in (t[None, None],)]
        + [F.max_unpool3d(x, _counted(x), 1) for x in (t[None, None, None],)]
    ),
    "interpolate": lambda t: F.interpolate(t[None], scale_factor=2),
    "grid_sample": lambda t: F.grid_sample(
        t[None, None], constants(t, 1, 2, 2, 2).cos(), align_corners=False, padding_mode="border"
    ),
    "shuffles": lambda t: _parts(
        [
            F.pixel_unshuffle(F.pixel_shuffle(t.reshape(-1)[:4].view(1, 4, 1, 1), 2), 2),
            F.channel_shuffle(t.reshape(-1)[:4].view(1, 4, 1, 1), 2),
        ]
    ),
    "unfold": lambda t: t.unfold(1, 2, 1),
    "embedding": lambda t: torch.embedding(t, _first(t, 2)),
    "batch_norm": lambda t: (
        F.batch_norm(t, *_running(t)) + torch.native_batch_norm(t, None, None, *_running(t), False, 0.1, 1e-5)[0]
    ),
    "kl_div": lambda t: F.kl_div(t, constants(t, *t.shape).exp(), reduction="sum") + F.nll_loss(t, _first(t, len(t))),
}
"""What is linear in a sum over the samples, `[a, b]`, to anything."""


def of_total(move: Callable) -> Callable:
    """A scalar loss that does it to a sum over the samples."""
    return lambda w, x: _weighed(move((x * w).sin().sum(0)))


def _target(z: torch.Tensor) -> torch.Tensor:
    return z.detach().cos()


def _signs(z: torch.Tensor) -> torch.Tensor:
    """1 and -1, one for each row."""
    return 2.0 * (z.detach()[..., 0] > 0).to(z) - 1


LOSSES: dict[str, Callable] = {
    "mse_loss": lambda z, **how: F.mse_loss(z, _target(z), **how),
    "l1_loss": lambda z, **how: F.l1_loss(z, _target(z), **how),
    "smooth_l1_loss": lambda z, **how: F.smooth_l1_loss(z, _target(z), **how),
    "huber_loss": lambda z, **how: F.huber_loss(3 * z, _target(z), **how),
    "binary_cross_entropy": lambda z, **how: F.binary_cross_entropy(z.sigmoid(), _target(z).square(), **how),
    "binary_cross_entropy_with_logits": lambda z, **how: F.binary_cross_entropy_with_logits(
        z, _target(z).square(), **how
    ),
    "kl_div": lambda z, **how: F.kl_div(z.log_softmax(2), _target(z).softmax(2), **how),
    "poisson_nll_loss": lambda z, **how: F.poisson_nll_loss(z, _target(z).exp(), **how),
    "soft_margin_loss": lambda z, **how: F.soft_margin_loss(z, _signs(z)[..., None].expand(z.shape), **how),
    "gaussian_nll_loss": lambda z, **how: F.gaussian_nll_loss(z, _target(z), z.exp(), **how),
    "margin_ranking_loss": lambda z, **how: F.margin_ranking_loss(z[..., 0], z[..., 1].exp(), _signs(z), 3.0, **how),
    "hinge_embedding_loss": lambda z, **how: F.hinge_embedding_loss(z[..., 0], _signs(z), 3.0, **how),
    "triplet_margin_loss": lambda z, **how: F.triplet_margin_loss(z, z.exp(), z.cos(), 3.0, **how),
    "cosine_embedding_loss": lambda z, **how: F.cosine_embedding_loss(rows(z), rows(z).exp(), _signs(rows(z)), **how),
    "multi_margin_loss": lambda z, **how: F.multi_margin_loss(rows(z), rows(z).detach().argmin(1), **how),
    "multilabel_margin_loss": lambda z, **how: F.multilabel_margin_loss(rows(z), rows(z).detach().argsort(), **how),
    "multilabel_soft_margin_loss": lambda z, **how: F.multilabel_soft_margin_loss(rows(z), _target(rows(z)), **how),
    "cross_entropy": lambda z, **how: F.cross_entropy(z, z.detach().argmin(1), **how),
    "cross_entropy of likelihoods": lambda z, **how: F.cross_entropy(z, _target(z).softmax(1), **how),
    "nll_loss": lambda z, **how: F.nll_loss(z.log_softmax(1), z.detach().argmin(1), **how),
}
"""Losses of `[n, a, b]` outputs."""
SUMS: dict[str, Callable] = {
    "dot": lambda z: torch.dot(z[:, 0, 0], z[:, 0, 1].exp()),
    "vdot": lambda z: torch.vdot(z[:, 0, 0], z[:, 0, 1].exp()),
    "sum": lambda z: z.exp().sum(),
    "einsum": lambda z: torch.einsum("nab,nab->", z, z.exp()),
    "tensordot": lambda z: torch.tensordot(z, z.exp(), 3),
}
"""What sums over the samples by itself."""


def _of_unique(y: torch.Tensor) -> torch.Tensor:
    _, inverse, counts = torch.unique(y, return_inverse=True, return_counts=True)
    return counts[inverse].double()


CLASSES = 3
WEIGHTS: dict[str, Callable] = {
    "bincount": lambda x, y: 1 / torch.bincount(y)[y].to(x.dtype),
    "bincount of all classes": lambda x, y: (len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES)))[y].to(x.dtype),
    "histc": lambda x, y: torch.histc(y.to(x.dtype), CLASSES, 0, CLASSES - 1)[y],
    "unique": lambda x, y: torch.unique(y, return_counts=True)[1][y].to(x.dtype),
    "inverse": lambda x, y: _of_unique(y),
    "cov": lambda x, y: (x @ torch.cov(x.T)).square().sum(1),
    "corrcoef": lambda x, y: (x @ torch.corrcoef(x.T)).square().sum(1),
}
"""Weights of samples by what is counted in the data of all of them."""


def weighted(weights: Callable) -> Callable:
    """A loss with such weights."""

    def loss(p: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(x @ p, y, reduction="none") * weights(x, y)).mean()

    return loss
