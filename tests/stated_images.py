"""Programs as in `stated`, of what computes on images: pools, convolutions, resizing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.moves import wide
from tests.stated_common import constants, of


def _image(z: torch.Tensor) -> torch.Tensor:
    """`[n, 1, a + 2, b + 2]`"""
    return F.pad(z, (1, 1, 1, 1), value=0.5)[:, None]


def _volume(z: torch.Tensor) -> torch.Tensor:
    """`[n, 1, 2, a + 2, b + 2]`"""
    return torch.stack([_image(z), _image(z).cos()], 2)


def _filled(z: torch.Tensor, *shape: int) -> torch.Tensor:
    """A constant that is the same for each sample."""
    return torch.full((len(z), *shape), 0.3, dtype=z.dtype, device=z.device)


def _pooled(pool: Callable, image: Callable) -> Callable:
    """With the places of the maxima, which have the samples too."""

    def of(z: torch.Tensor) -> torch.Tensor:
        found, places = pool(image(z))
        return found.exp() * (1 + places.to(z))

    return of


def _line(z: torch.Tensor) -> torch.Tensor:
    return _image(z)[:, 0]


SPATIAL = of(
    "n..",
    {
        "max_pool1d_with_indices": _pooled(lambda z: F.max_pool1d(z, 2, return_indices=True), _line),
        "max_pool2d_with_indices": _pooled(lambda z: F.max_pool2d(z, 2, return_indices=True), _image),
        "max_pool3d_with_indices": _pooled(lambda z: F.max_pool3d(z, 2, return_indices=True), _volume),
        "max_pool3d": lambda z: F.max_pool3d(_volume(z), 2).exp(),
        "avg_pool1d": lambda z: F.avg_pool1d(_line(z), 2).exp(),
        "avg_pool3d": lambda z: F.avg_pool3d(_volume(z), 2).exp(),
        "lp_pool1d": lambda z: F.lp_pool1d(_line(z) + 2, 3, 2),
        "lp_pool2d": lambda z: F.lp_pool2d(_image(z) + 2, 3, 2),
        "lp_pool3d": lambda z: F.lp_pool3d(_volume(z) + 2, 3, 2),
        "adaptive_avg_pool3d": lambda z: F.adaptive_avg_pool3d(_volume(z), (1, 2, 2)).exp(),
        "adaptive_max_pool1d": lambda z: F.adaptive_max_pool1d(_line(z), 2).exp(),
        "adaptive_max_pool3d": lambda z: F.adaptive_max_pool3d(_volume(z), 2).exp(),
        "adaptive_max_pool1d_with_indices": _pooled(lambda z: F.adaptive_max_pool1d(z, 2, True), _line),
        "adaptive_max_pool2d_with_indices": _pooled(lambda z: F.adaptive_max_pool2d(z, 2, True), _image),
        "adaptive_max_pool3d_with_indices": _pooled(lambda z: F.adaptive_max_pool3d(z, 2, True), _volume),
        "fractional_max_pool2d": lambda z: F.fractional_max_pool2d(
            _image(z), 2, 2, _random_samples=_filled(z, 1, 2)
        ).exp(),
        "fractional_max_pool3d": lambda z: F.fractional_max_pool3d(
            _volume(z), (1, 2, 2), (1, 2, 2), _random_samples=_filled(z, 1, 3)
        ).exp(),
        "fractional_max_pool2d_with_indices": _pooled(
            lambda x: F.fractional_max_pool2d(x, 2, 2, None, True, _filled(x, 1, 2)), _image
        ),
        "fractional_max_pool3d_with_indices": _pooled(
            lambda x: F.fractional_max_pool3d(x, (1, 2, 2), (1, 2, 2), None, True, _filled(x, 1, 3)), _volume
        ),
        "conv1d": lambda z: F.conv1d(_line(z), constants(z, 2, z.shape[1] + 2, 2)).exp(),
        "conv2d": lambda z: F.conv2d(_image(z), constants(z, 2, 1, 2, 2)).exp(),
        "conv3d": lambda z: F.conv3d(_volume(z), constants(z, 2, 1, 2, 2, 2)).exp(),
        "conv_transpose1d": lambda z: F.conv_transpose1d(z, constants(z, z.shape[1], 2, 2)).exp(),
        "conv_transpose2d": lambda z: F.conv_transpose2d(z[:, None], constants(z, 1, 2, 2, 2)).exp(),
        "conv_transpose3d": lambda z: F.conv_transpose3d(_volume(z), constants(z, 1, 2, 1, 2, 2)).exp(),
        "one_hot": lambda z: (F.one_hot((z > 0).long(), 2) * z[..., None]).exp(),
        "native_group_norm": lambda z: torch.native_group_norm(
            z.repeat(1, 1, 2), None, None, len(z), z.shape[1], 2 * z.shape[2], 1, 0.1
        )[0],
        "local_response_norm": lambda z: F.local_response_norm(z, 2),
        "interpolate": lambda z: F.interpolate(z, scale_factor=2, mode="linear").exp(),
        "upsample": lambda z: F.upsample(z[:, None], scale_factor=2, mode="bilinear").exp(),
        "grid_sample": lambda z: F.grid_sample(
            _image(z), constants(z, 1, 2, 2, 2).expand(len(z), -1, -1, -1), align_corners=False
        ).exp(),
        "grid_sample at places of samples": lambda z: F.grid_sample(
            _image(z), z[:, None, :, :1].expand(-1, 2, -1, 2) / 2, align_corners=False
        ),
        "affine_grid": lambda z: F.affine_grid(wide(z[:, :1]).expand(-1, 2, -1), [len(z), 1, 2, 3], False).exp(),
        "im2col": lambda z: F.unfold(_image(z), 2).exp(),
        "batch_norm": lambda z: F.batch_norm(z, _filled(z[0]), 1 + _filled(z[0])).exp(),
        "native_batch_norm": lambda z: torch.native_batch_norm(
            z, None, None, _filled(z[0]), 1 + _filled(z[0]), False, 0.1, 0.1
        )[0].exp(),
    },
)


UNPOOLED = of(
    "n..",
    {
        "max_unpool1d": lambda z: F.max_unpool1d(*F.max_pool1d(_longer(z), 2, return_indices=True), [2]).exp(),
        "max_unpool2d": lambda z: F.max_unpool2d(*F.max_pool2d(_even(z), 2, return_indices=True), [2, 2]).exp(),
        "max_unpool3d": lambda z: F.max_unpool3d(
            *F.max_pool3d(_even(z)[:, None], 2, return_indices=True), [2, 2, 2]
        ).exp(),
    },
)


def _longer(z: torch.Tensor) -> torch.Tensor:
    """`[n, a, 2 b]`"""
    return torch.cat([z, z.cos()], 2)


def _even(z: torch.Tensor) -> torch.Tensor:
    """`[n, 2, 2 a, 2 b]`"""
    y = torch.cat([_longer(z), _longer(z).cos()], 1)
    return torch.stack([y, y.exp()], 1)
