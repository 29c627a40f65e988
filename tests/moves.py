"""Operations on a tensor `[n, a, b]` between parameters and outputs, beyond what most models do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.forms import Form


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
