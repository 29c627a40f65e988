"""A function of an image `[1, 2, 4, 4]` for operations of aten that the graphs of `tests/graphs.py` do not reach."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor], torch.Tensor]


def _line(x: torch.Tensor) -> torch.Tensor:
    """`[1, 2, 16]`"""
    return x.flatten(2)


def _volume(x: torch.Tensor) -> torch.Tensor:
    """`[1, 2, 2, 4, 4]`"""
    return torch.stack([x, x.flip(-1)], 2)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x[0, 0]


def _filled(fill: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """A part that is filled with what depends on nothing."""

    def of(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        y = x.clone()
        fill(y[..., 0])
        return y

    return of


def _with_bits(of: Function) -> Function:
    return lambda x: of(x > 1).to(x) + 0 * x


LINEAR: dict[str, Function] = {
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(_line(x), 3),
    "avg_pool1d": lambda x: F.avg_pool1d(_line(x), 3, 2, 1),
    "channel_shuffle": lambda x: F.channel_shuffle(torch.cat([x, x.flip(2)], 1), 2),
    "concat": lambda x: torch.concat([x, x.flip(-1)], 2),
    "concatenate": lambda x: torch.concatenate([x, x.flip(-1)], 1),
    "contiguous": lambda x: x.mT.contiguous(),
    "neg": lambda x: -x,
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "positive": torch.positive,
    "replication_pad1d": lambda x: F.pad(_line(x), (2, 1), "replicate"),
    "rsub": lambda x: torch.rsub(x, x.flip(-1)),
    "sub": lambda x: x - 2 * x.flip(-1),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0].flip(1), 1, 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[..., :2], -1, 1, 3),
    "triu": lambda x: x.triu(),
    "upsample_nearest2d": lambda x: F.interpolate(x, (3, 7)),
    "zero": _filled(torch.Tensor.zero_),
    "addmv": lambda x: torch.addmv(_matrix(x)[0], _matrix(x), torch.ones(4).to(x)),
    "baddbmm": lambda x: torch.baddbmm(x[0], x[0], torch.ones(2, 4, 4).to(x), beta=2),
    "dot": lambda x: x.flatten().dot(torch.arange(32.0).to(x)),
    "mv": lambda x: torch.mv(_matrix(x), torch.arange(4.0).to(x)),
    "linear": lambda x: F.linear(x, torch.ones(3, 4).to(x), torch.ones(3).to(x)),
    "lerp": lambda x: torch.lerp(x, x.flip(-1), torch.linspace(0, 1, 4).to(x)),
    "avg_pool3d": lambda x: F.avg_pool3d(_volume(x), 2, 1),
    "reflection_pad1d": lambda x: F.pad(_line(x), (2, 1), "reflect"),
    "reflection_pad2d": lambda x: F.pad(x, (2, 1, 0, 1), "reflect"),
    "reflection_pad3d": lambda x: F.pad(_volume(x), (2, 1, 0, 1, 1, 0), "reflect"),
    "replication_pad2d": lambda x: F.pad(x, (2, 1, 0, 1), "replicate"),
    "replication_pad3d": lambda x: F.pad(_volume(x), (2, 1, 0, 1, 1, 0), "replicate"),
    "_upsample_nearest_exact3d": lambda x: F.interpolate(_volume(x), (3, 5, 2), mode="nearest-exact"),
    "_upsample_nearest_exact1d": lambda x: F.interpolate(_line(x), 5, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda x: F.interpolate(x, (3, 5), mode="nearest-exact"),
    "upsample_linear1d": lambda x: F.interpolate(_line(x), 5, mode="linear"),
    "upsample_bilinear2d": lambda x: F.interpolate(x, (3, 5), mode="bilinear"),
    "upsample_bicubic2d": lambda x: F.interpolate(x, (3, 5), mode="bicubic"),
    "upsample_trilinear3d": lambda x: F.interpolate(_volume(x), (3, 5, 2), mode="trilinear"),
    "im2col": lambda x: F.unfold(x, 2, padding=1),
    "col2im": lambda x: F.fold(x.flatten(2), (3, 9), (1, 2), stride=(2, 1)),
    "_upsample_bilinear2d_aa": lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": lambda x: F.interpolate(x, (3, 2), mode="bicubic", antialias=True),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()) * 2),
}
"""Affine, and seen to be so."""
OTHERS: dict[str, Function] = {
    "_addmm_activation": lambda x: torch.ops.aten._addmm_activation(_matrix(x)[0], _matrix(x), torch.ones(4, 4).to(x)),
    "_fused_rms_norm": lambda x: torch.ops.aten._fused_rms_norm(x, [4], torch.ones(4).to(x), 0.1)[0],
    "_prelu_kernel": lambda x: F.prelu(x - 1, torch.tensor([0.5]).to(x)),
    "_log_softmax": lambda x: x.log_softmax(-1),
    "_transformer_encoder_layer_fwd": lambda x: _encoder(x),
    "_native_multi_head_attention": lambda x: _attention(x),
    "_scaled_dot_product_flash_attention_for_cpu": lambda x: F.scaled_dot_product_attention(x, x.flip(2), 2 * x),
    "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 1)),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(_line(x), 3),
    "max_pool1d": lambda x: F.max_pool1d(_line(x), 3, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool3d": lambda x: F.max_pool3d(_volume(x), (1, 2, 2)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(_volume(x), (1, 2, 3)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(_volume(x), (1, 2, 3)),
    "all, any": _with_bits(lambda b: b.all(-1, keepdim=True) | b.any(-2, keepdim=True)),
    "bitwise_not": _with_bits(torch.bitwise_not),
    "logical_not": _with_bits(torch.logical_not),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "amin": lambda x: x.amin(-1),
    "aminmax": lambda x: sum(x.aminmax(dim=-1), torch.zeros(()).to(x)),
    "argmin": lambda x: x.argmin(-1) + x.argmax(-1) + x.sum(-1),
    "argsort": lambda x: x.argsort(-1) + x,
    "bernoulli": lambda x: torch.bernoulli((x > 1).to(x)) + x,
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.flip(-1).sigmoid(), reduction="none"),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.flip(-1), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(-1), reduction="none"),
    "l1_loss": lambda x: F.l1_loss(x, x.flip(-1), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(-1), reduction="none"),
    "huber_loss": lambda x: F.huber_loss(x, x.flip(-1), reduction="none"),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.flip(-1), reduction="none"),
    "a mean of losses": lambda x: F.mse_loss(x, x.flip(-1)) + F.soft_margin_loss(x, x) + F.huber_loss(x, x.exp()),
    "count_nonzero": lambda x: (x > 1).count_nonzero(-1) + x.sum(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "cummin": lambda x: x.cummin(-2).values,
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "hardswish": lambda x: F.hardswish(x),
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "log_sigmoid_forward": lambda x: F.logsigmoid(x),
    "log_softmax": lambda x: x.log_softmax(1),
    "softmax": lambda x: x.softmax(1),
    "median": lambda x: x.median(-1).values,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "min": lambda x: x.min(-1).values + x.min(),
    "mode": lambda x: (x * 4).round().mode(-1).values,
    "msort": lambda x: torch.msort(x[0, 0]),
    "nan_to_num": lambda x: x.nan_to_num(),
    "norm": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [-1]) + torch.norm(x, 3, -1),
    "nansum": lambda x: x.nansum(1),
    "prod": lambda x: x.prod(-1),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, dim=-1)),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, dim=(1, 2))),
    "uniform": _filled(torch.Tensor.uniform_),
    "normal": _filled(torch.Tensor.normal_),
    "bernoulli in place": _filled(torch.Tensor.bernoulli_),
    "exponential": _filled(torch.Tensor.exponential_),
    "random": _filled(torch.Tensor.random_),
    "cauchy": _filled(torch.Tensor.cauchy_),
    "geometric": _filled(lambda y: y.geometric_(0.5)),
    "log_normal": _filled(torch.Tensor.log_normal_),
}


def _encoder(x: torch.Tensor) -> torch.Tensor:
    """The fast path of torch in eval mode."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 3, batch_first=True).eval().to(x)
    with torch.no_grad():
        return layer(x[0])


def _attention(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval().to(x)
    with torch.no_grad():
        return layer(y := x[0], y, y, need_weights=False)[0]


_OTHER_DEVICES = (
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_fused_attention_overrideable cudnn_batch_norm miopen_batch_norm _fused_dropout"
)
_DRAWING = "native_dropout rrelu_with_noise normal poisson"
ELSEWHERE = {
    **dict.fromkeys(_OTHER_DEVICES.split(), "a kernel of other devices"),
    **dict.fromkeys(_DRAWING.split(), "it draws: another run is another"),
    "_native_batch_norm_legit": "a form of native_batch_norm that compilers make",
    "lift_fresh_copy": "a form of clone that tracers make",
    "_upsample_lanczos2d_aa": "torch's Python has no way to it",
}
"""What has rules that are not run here, and why."""
