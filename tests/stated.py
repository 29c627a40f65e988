"""A program for each function of torch of which the library states something, beyond those of `forms` and `moves`.

Each is done to a tensor `[n, a, b]` on its way from the parameters to the outputs; see `tests/test_stated.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.moves import square, wide
from tests.stated_common import constants, of, rows
from tests.stated_images import SPATIAL, UNPOOLED


def _mask(z: torch.Tensor) -> torch.Tensor:
    return z > 0


def _ints(z: torch.Tensor) -> torch.Tensor:
    return (8 * z).round().long()


def _counted(of: Callable) -> Callable:
    """Integers or masks that a function gives, as numbers beside the tensor that they came from."""
    return lambda z: (z.exp() * (1 + of(z).to(z))).flatten(1)


def _flags(of: Callable) -> Callable:
    """The same of a function that keeps one entry along the last dimension."""
    return lambda z: z.exp() * (1 + of(z).to(z))[..., None]


POINTWISE = of(
    "nab",
    {
        "absolute": lambda z: z.absolute() * z,
        "angle": lambda z: torch.complex(z.exp(), z).angle(),
        "bernoulli": lambda z: z.exp() * torch.bernoulli(torch.ones_like(z) + 0 * z.detach()),
        "bfloat16": lambda z: z.bfloat16().to(z.dtype).exp(),
        "half": lambda z: z.half().to(z.dtype).exp(),
        "float": lambda z: z.float().to(z.dtype).exp(),
        "type": lambda z: z.type(torch.float32).type(z.dtype).exp(),
        "type_as": lambda z: z.float().type_as(z).type_as(z).exp(),
        "cpu": lambda z: z.cpu().exp().to(z.device),
        "clip": lambda z: z.clip(-0.5, 0.5) * z,
        "complex and conj": lambda z: (torch.complex(z, z.cos()).conj() * torch.complex(z.exp(), z)).real,
        "conj_physical": lambda z: torch.conj_physical(torch.complex(z, z.cos())).imag * z,
        "get:real, get:imag": lambda z: (c := torch.complex(z, z.cos()).exp(), c.real * c.imag)[1],
        "get:real of real numbers": lambda z: z.real.exp(),
        "real, imag": lambda z: (c := torch.complex(z, z.cos()).exp(), torch.real(c) * torch.imag(c))[1],
        "resolve_conj, resolve_neg": lambda z: (
            c := torch.complex(z, z.cos()).exp().conj(),
            c.resolve_conj().real * c.imag.resolve_neg(),
        )[1],
        "polar": lambda z: torch.polar(z.exp(), z).real,
        "copy": lambda z: torch.zeros_like(z).copy_(z).exp(),
        "divide": lambda z: torch.divide(z, z.exp()),
        "true_divide": lambda z: torch.true_divide(z, z.exp()),
        "multiply": lambda z: torch.multiply(z, z.exp()),
        "subtract": lambda z: torch.subtract(z.exp(), z, alpha=2),
        "negative": lambda z: torch.negative(z).exp(),
        "neg": lambda z: torch.neg(z).exp(),
        "positive": lambda z: torch.positive(z).exp(),
        "rpow": lambda z: 2**z,
        "minimum": lambda z: torch.minimum(z, z.cos()) * z,
        "fmin, fmax": lambda z: torch.fmin(z, z.cos()) * torch.fmax(z, z.square()),
        "nan_to_num": lambda z: (z + torch.where(z > 0.9, torch.nan, 0)).nan_to_num(0.5).exp(),
        "relu6": lambda z: F.relu6(3 * z) * z,
        "hardsigmoid": lambda z: F.hardsigmoid(3 * z) * z,
        "special_expit": lambda z: torch.special.expit(z),
        "fill": lambda z: z.exp() + torch.fill(z, 2.0),
        "requires_grad": lambda z: z.requires_grad_().exp(),
        "dropout1d": lambda z: F.dropout1d(z, 0.5, False).exp(),
        "dropout3d": lambda z: F.dropout3d(z[:, None, None], 0.5, False)[:, 0, 0].exp(),
        "feature_dropout": lambda z: torch.feature_dropout(z, 0.5, False).exp(),
        "detach": lambda z: z * z.detach().exp(),
        "get:data": lambda z: z * z.data.exp(),
        "detach in place": lambda z: z * z.exp().detach_(),
        "floor, ceil": lambda z: z * (z.floor() + z.ceil()),
        "round, trunc, fix": lambda z: z * ((3 * z).round() + (3 * z).trunc() + torch.fix(2 * z)),
        "sign, sgn": lambda z: z * (z.sign() + torch.sgn(z)),
        "floor_divide": lambda z: z * torch.floor_divide(z.detach(), 0.3),
        "zeros_like, ones_like": lambda z: z.exp() + torch.zeros_like(z) + 2 * torch.ones_like(z) + z.new_zeros(1),
    },
) + of(
    "n.",
    {
        "greater, less": _counted(lambda z: torch.greater(z, 0.1).long() + torch.less(z, -0.1)),
        "greater_equal, less_equal": _counted(lambda z: torch.greater_equal(z, 0.1).long() + torch.less_equal(z, -0.1)),
        "not_equal, isclose": _counted(lambda z: torch.not_equal(z, z.abs()).long() + torch.isclose(z, z.abs())),
        "int": _counted(lambda z: (8 * z).int()),
        "bool": _counted(lambda z: z.relu().bool()),
        "and, or, xor": _counted(lambda z: (_mask(z) & (z < 0.5)) | (_mask(z) ^ (z > 0.2))),
        "invert": _counted(lambda z: ~_mask(z)),
        "shifts": _counted(lambda z: (_ints(z) << 2) + (_ints(z) >> 1)),
    },
)
VIEWS = of(
    "n..",
    {
        "adjoint": lambda z: torch.adjoint(z).exp(),
        "get:mH": lambda z: z.mH.exp(),
        "broadcast_to": lambda z: torch.broadcast_to(z[:, None], (len(z), 2, *z.shape[1:])).exp(),
        "dsplit": lambda z: torch.cat([part.exp() for part in torch.dsplit(z, [1])], 2),
        "hsplit": lambda z: torch.cat([part.exp() for part in torch.hsplit(z, [1])], 1),
        "vsplit": lambda z: torch.cat([part.exp() for part in torch.vsplit(z.mT.transpose(0, 1), [1])]).transpose(0, 1),
        "moveaxis": lambda z: torch.moveaxis(z, 2, 1).exp(),
        "swapdims": lambda z: torch.swapdims(z, 2, 1).exp(),
        "ravel": lambda z: z.ravel().exp().view(len(z), -1),
        "view_as": lambda z: z.contiguous().view_as(torch.empty(len(z), *z.mT.shape[1:])).exp(),
        "reshape_as": lambda z: z.mT.reshape_as(z).exp(),
        "split_with_sizes": lambda z: torch.cat([part.exp() for part in z.split_with_sizes([1, z.shape[1] - 1], 1)], 1),
        "unsafe_chunk": lambda z: torch.cat([part.exp() for part in torch.unsafe_chunk(z, 2, 1)], 1),
        "unsafe_split": lambda z: torch.cat([part.exp() for part in torch.unsafe_split(z, 1, 1)], 1),
        "tile": lambda z: torch.tile(z, (2, 1)).exp(),
        "t, get:H": lambda z: torch.stack([rows(z).t().exp().t(), rows(z).H.exp().H], 1),
        "masked_select": lambda z: torch.zeros_like(z).masked_scatter(z > 0, z.masked_select(z > 0).exp()),
        "argwhere": lambda z: _put(z, *torch.argwhere(z > 0).T),
        "nonzero": lambda z: _put(z, *(z > 0).nonzero(as_tuple=True)),
        "atleast": lambda z: torch.stack([torch.atleast_1d(z[:, 0]), torch.atleast_2d(z[:, 0]).exp()], 2),
        "cat": lambda z: torch.concat([torch.concatenate([z, z.exp()], 1), z.mT.cos().mT], axis=1).exp(),
        "block_diag": lambda z: torch.block_diag(rows(z), rows(z).exp()).unflatten(0, (2, -1)).transpose(0, 1),
        "cartesian_prod": lambda z: torch.cartesian_prod(z[:, 0, 0], constants(z, 2)).exp().unflatten(0, (-1, 2)),
        "meshgrid": lambda z: torch.stack(torch.meshgrid(z[:, 0, 0], constants(z, 2), indexing="ij"), -1).exp(),
        "diagonal_scatter": lambda z: torch.diagonal_scatter(wide(z).mT, z[:, 0, :1].exp() * _ones(z), 0, 1, 2)[
            ..., :1
        ],
        "linalg_diagonal": lambda z: torch.linalg.diagonal(z[:, :, None] * z[:, :, :, None]).exp(),
        "select_scatter": lambda z: torch.select_scatter(z, z[:, 0].exp(), 1, 0),
        "slice_scatter": lambda z: torch.slice_scatter(z, z[:, :, :1].exp(), 2, 0, 1),
        "fold": lambda z: F.fold(z.repeat(1, 1, 2).flatten(1).view(len(z), 2, -1), (1, z[0].numel() + 1), (1, 2)).exp(),
    },
) + of(
    ".n.",
    {
        "vstack": lambda z: torch.vstack([z.transpose(0, 1), z.transpose(0, 1).exp()]),
        "row_stack": lambda z: torch.row_stack([z.transpose(0, 1), z.transpose(0, 1).exp()]),
        "diag": lambda z: z[:, 0, 0].diag().sum(1).exp()[None],
    },
)


def _put(z: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """The entries at an index, worked on, and put back."""
    return torch.zeros_like(z).index_put(index, z[index].exp())


def _ones(z: torch.Tensor) -> torch.Tensor:
    """`[a]`, at most 3."""
    return torch.ones(min(z.shape[1], 3), dtype=z.dtype, device=z.device)


REDUCTIONS = of(
    "n.",
    {
        "all, any": _flags(lambda z: (z > 0).all(2).long() + (z > 0).any(2)),
        "argmin, argmax": _flags(lambda z: z.argmin(2) + 2 * z.argmax(2)),
        "count_nonzero": _flags(lambda z: (z > 0).count_nonzero(2)),
        "mode": lambda z: z.mode(1).values.exp(),
        "amin": lambda z: z.amin(1).exp(),
        "cummax, cummin": lambda z: z.cummax(1).values.exp() * z.cummin(2).values,
        "kthvalue": lambda z: z.kthvalue(2, 2).values.exp(),
        "linalg_norm": lambda z: torch.linalg.norm(z + 2, 3, dim=1),
        "logcumsumexp": lambda z: z.logcumsumexp(1),
        "nansum": lambda z: z.nansum(1).exp(),
        "nanmean": lambda z: z.nanmean(2, keepdim=True).exp(),
        "nanmedian": lambda z: wide(z).nanmedian(2).values.exp(),
        "std_mean": lambda z: sum(torch.std_mean(wide(z), dim=2)),
        "var_mean": lambda z: torch.stack(torch.var_mean(wide(z), dim=(1, 2)), 1).exp(),
        "nanquantile": lambda z: wide(z).nanquantile(0.4, dim=2, keepdim=True).exp(),
        "cosine_similarity": lambda z: F.cosine_similarity(z + 2, z.exp(), 2),
        "pairwise_distance": lambda z: F.pairwise_distance(z, z.exp(), keepdim=True),
        "cross": lambda z: torch.cross(wide(z), wide(z).exp(), 2).square().sum(2),
        "bucketize": _counted(lambda z: torch.bucketize(z.detach(), constants(z, 3))),
    },
)


def _lu(z: torch.Tensor) -> Any:
    return torch.linalg.lu_factor(square(z))


def _signal(z: torch.Tensor) -> torch.Tensor:
    """`[n, 6]`"""
    return torch.cat([wide(z)[:, 0], wide(z)[:, 0].exp()], 1)


def _reflectors(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.mT[:, :, :1] + 2, z[:, :1, 0].cos()


MATRICES = of(
    "n..",
    {
        "det": lambda z: torch.det(square(z))[:, None],
        "slogdet": lambda z: torch.slogdet(square(z))[1][:, None],
        "inverse": lambda z: torch.inverse(square(z)),
        "pinverse": lambda z: torch.pinverse(square(z)),
        "cholesky": lambda z: torch.cholesky(square(z)),
        "cholesky_inverse": lambda z: torch.cholesky_inverse(torch.linalg.cholesky(square(z))),
        "triangular_solve": lambda z: torch.triangular_solve(z, square(z).triu())[0],
        "svd": lambda z: torch.svd(square(z))[1],
        "qr": lambda z: torch.qr(square(z))[1].square(),
        "matrix_exp": lambda z: torch.matrix_exp(square(z) / 4),
        "matrix_power": lambda z: torch.matrix_power(square(z) / 4, 2),
        "linalg_cholesky_ex": lambda z: torch.linalg.cholesky_ex(square(z))[0],
        "linalg_inv_ex": lambda z: torch.linalg.inv_ex(square(z))[0],
        "linalg_solve_ex": lambda z: torch.linalg.solve_ex(square(z), z.exp())[0],
        "linalg_eig": lambda z: torch.linalg.eig(square(z))[0].abs().sum(1, keepdim=True),
        "linalg_eigvals": lambda z: torch.linalg.eigvals(square(z)).abs().sum(1, keepdim=True),
        "linalg_lu": lambda z: torch.linalg.lu(square(z))[2],
        "linalg_lu_factor": lambda z: torch.linalg.lu_factor(square(z))[0],
        "linalg_lu_factor_ex": lambda z: torch.linalg.lu_factor_ex(square(z))[0],
        "lu_unpack": lambda z: torch.lu_unpack(*_lu(z))[2],
        "linalg_lu_solve": lambda z: torch.linalg.lu_solve(*_lu(z), z.exp()),
        "lu_solve": lambda z: torch.lu_solve(z.exp(), *_lu(z)),
        "linalg_ldl_factor": lambda z: z * torch.linalg.ldl_factor(square(z).detach())[0].sum((1, 2), keepdim=True),
        "linalg_ldl_factor_ex": lambda z: z * torch.linalg.ldl_factor_ex(square(z).detach())[0].sum((1, 2), True),
        "linalg_ldl_solve": lambda z: (
            z.exp() * torch.linalg.ldl_solve(*torch.linalg.ldl_factor(square(z).detach()), z.detach())
        ),
        "linalg_lstsq": lambda z: torch.linalg.lstsq(square(z), z.exp())[0],
        "linalg_matrix_rank": lambda z: z.exp() * torch.linalg.matrix_rank(square(z))[:, None, None],
        "linalg_cond": lambda z: torch.linalg.cond(square(z))[:, None],
        "linalg_householder_product": lambda z: torch.linalg.householder_product(*_reflectors(z)),
        "linalg_vander": lambda z: torch.linalg.vander(z),
        "stft": lambda z: torch.view_as_real(torch.stft(_signal(z), 4, return_complex=True, window=_ones4(z))),
        "istft": lambda z: torch.istft(
            torch.stft(_signal(z), 4, return_complex=True, window=_ones4(z)) * 2, 4, window=_ones4(z)
        ).exp(),
        "view_as_complex": lambda z: torch.view_as_complex(torch.stack([z, z.cos()], -1)).exp().abs(),
        "renorm": lambda z: torch.renorm(z + 2, 2, 0, 1.0),
        "gradient": lambda z: torch.gradient(wide(z).exp(), dim=2)[0],
        "trapz": lambda z: torch.trapz(wide(z).exp()),
        "fft2, ifft2": lambda z: torch.fft.ifft2(torch.fft.fft2(z).exp()).abs(),
        "irfft2": lambda z: torch.fft.irfft2(torch.fft.rfft2(z), s=(2, 2)).exp(),
        "rfftn, irfftn": lambda z: torch.fft.irfftn(torch.fft.rfftn(z, dim=(1, 2)), s=(2, 2), dim=(1, 2)).exp(),
        "ifftn, ifftshift": lambda z: torch.fft.ifftshift(torch.fft.ifftn(z, s=(2, 2)), 1).abs().square(),
        "hfft, ihfft": lambda z: torch.fft.hfft(torch.fft.ihfft(wide(z)).exp(), 4),
        "hfft2, ihfft2": lambda z: torch.fft.hfft2(torch.fft.ihfft2(wide(z)).exp(), (2, 2)),
        "hfftn, ihfftn": lambda z: torch.fft.hfftn(torch.fft.ihfftn(wide(z), dim=(1, 2)).exp(), (2, 2), (1, 2)),
    },
)


def _ones4(z: torch.Tensor) -> torch.Tensor:
    return torch.ones(4, dtype=z.dtype, device=z.device)


PRODUCTS = of(
    "n.",
    {
        "rmatmul": lambda z: z.exp().__rmatmul__(constants(z, 2, z.shape[1])),
        "einsum": lambda z: torch.einsum("nab,ncb->nac", z, z.exp()),
    },
)
PROGRAMS = POINTWISE + VIEWS + REDUCTIONS + SPATIAL + MATRICES + PRODUCTS + UNPOOLED


NOT_MET = {
    "cuda": "it needs a device",
    **dict.fromkeys(("constant_pad_nd", "convolution", "index"), "torch itself calls it, and so do few"),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm"), "it needs a device"),
}
"""Names in tables of which no program here makes a call, and why."""
MIXING: dict[str, Callable] = {
    "gradient": lambda z: torch.gradient(wide(z))[2],
    "cross": lambda z: torch.cross(z.transpose(0, 1)[:, :3], z.exp().transpose(0, 1)[:, :3], dim=1),
    "fft_fftn": lambda z: torch.fft.fftn(z).abs(),
    "fft_rfftn": lambda z: torch.fft.rfftn(z).abs(),
    "quantile": lambda z: z.quantile(0.5),
    "nanquantile": lambda z: z.nanquantile(0.5, dim=0),
    "aminmax": lambda z: z.aminmax().max,
    "renorm": lambda z: torch.renorm(z, 2, 1, 0.1),
    "trapezoid": lambda z: torch.trapezoid(z, dim=0),
    "det": lambda z: torch.linalg.det(z[:, 0, :1] + torch.eye(len(z)).to(z)),
    "cosine_similarity": lambda z: F.cosine_similarity(z, z.exp(), 0),
    "max_unpool2d": lambda z: F.max_unpool2d(
        _tall(z), torch.arange(2 * len(z)).view(-1, 2).expand(_tall(z).shape), [1, 1]
    ),
}
"""What computes across the samples, by the function that does."""


def _tall(z: torch.Tensor) -> torch.Tensor:
    """`[1, a b, n, 2]`"""
    return torch.stack([z.flatten(1).T, z.flatten(1).T.exp()], 2)[None]


OF_DATA = {"linalg_ldl_factor", "linalg_ldl_factor_ex", "argmin, argmax"}
"""Read what is detached, or give numbers without a derivative: of all samples together these are constants."""
