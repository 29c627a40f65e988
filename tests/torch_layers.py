"""One strategy for each kind of layer, with every option drawn; what hypothesis draws first has most of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests import layer_cases as cases
from tests import strategies
from tests.layer_cases import BATCH, DIMENSIONS, STEPS, YES, Called, case, sides, values
from tests.strategies import Case, Numbers

# Layers without parameters, after one that has some

ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.RReLU]
ACTIVATIONS += [nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Mish, nn.Softplus, nn.Sigmoid, nn.LogSigmoid, nn.Tanh]
# Hardsigmoid has a law of its own, in test_twice_differentiable: the slope of torch is 1/6 in float32 for each dtype.
ACTIVATIONS += [nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink]
ACTIVATIONS += [lambda: nn.Threshold(0.1, 2.0), nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Identity]
ACTIVATIONS += [lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(-1), lambda: nn.Softmin(1), lambda: nn.ReLU(inplace=True)]
POOLS = {
    1: [nn.MaxPool1d(2), nn.AvgPool1d(2, 1, 1), nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2), nn.LPPool1d(2, 2)],
    2: [nn.MaxPool2d(2, 1, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((1, None)), nn.AdaptiveMaxPool2d(1)],
    3: [nn.MaxPool3d(2, 1), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d((1, 2, 1)), nn.AdaptiveMaxPool3d(1)],
}
SHAPES = {
    1: [nn.Flatten(), nn.Unflatten(1, (2, 2)), nn.ReflectionPad1d(1), nn.Upsample(scale_factor=2, mode="linear")],
    2: [nn.ZeroPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1), nn.PixelShuffle(2), nn.PixelUnshuffle(2)],
    3: [nn.Flatten(2), nn.ConstantPad3d(1, 0.5), nn.ReflectionPad3d(1), nn.Upsample(scale_factor=2)],
}
SHAPES[2] += [nn.ChannelShuffle(2), nn.Unfold(2), nn.UpsamplingBilinear2d(scale_factor=2), nn.Dropout2d()]


@st.composite
def activations(draw) -> Case:
    """All of them, each with a weight of its own, in eval mode."""
    linear, kinds = nn.Linear(2, 3, bias=draw(YES)), [kind() for kind in ACTIVATIONS]

    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        z = m[0](x)
        return torch.stack([activation(z + 0) * i for i, activation in enumerate(m[1:], 1)]).mean(0)

    return case(Called(nn.Sequential(linear, *kinds), call).eval(), draw(values(Numbers(), draw(BATCH), 2, 2)))


@st.composite
def without_parameters(draw, kinds: dict[int, list[nn.Module]]) -> Case:
    """All layers of a dimension, side by side after a convolution; each entry counts another weight."""
    d = draw(st.sampled_from([2, 1, 3]))
    convolution = getattr(nn, f"Conv{d}d")(1, 4, 1)

    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        found = [layer(m[0](x)).flatten(1) for layer in m[1:]]
        places = [torch.arange(y.shape[1], device=y.device) % 7 + 1 for y in found]
        return torch.cat([(y * i).sin().sum(1, keepdim=True) for y, i in zip(found, places, strict=True)], 1)

    module = Called(nn.Sequential(convolution, *kinds[d]), call).eval()
    return case(module, draw(values(Numbers(), draw(BATCH), 1, *[2] * (d - 1), 4)))


# Parameters that are computed, and parameters that are used more than once


class Derived(nn.Module):
    """A parametrization: a mask, or a term of rank one."""

    def __init__(self, shape: torch.Size, low_rank: bool):
        super().__init__()
        self.low_rank = low_rank
        self.register_buffer("mask", torch.ones(shape, dtype=torch.bool).tril())
        if low_rank:
            self.b, self.a = nn.Parameter(torch.ones(shape[0], 1)), nn.Parameter(torch.ones(1, shape[1]))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a if self.low_rank else weight.where(self.get_buffer("mask"), 0)


DERIVED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "softplus(w) as the weight": lambda m: parametrize.register_parametrization(m, "weight", nn.Softplus()),
    "mask * w as the weight": lambda m: parametrize.register_parametrization(
        m, "weight", Derived(m.weight.shape, False)
    ),
    "w + b @ a as the weight": lambda m: parametrize.register_parametrization(
        m, "weight", Derived(m.weight.shape, True)
    ),
}
TIED: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "a module called twice": (lambda: nn.Linear(2, 2), lambda m, x: m(m(x).tanh())),
    "one weight on other shapes": (lambda: nn.Linear(2, 2), lambda m, x: m(x.sum(1))[:, None] * m(x).tanh()),
    "an auto-encoder's weight": (lambda: nn.Linear(2, 3), lambda m, x: F.linear(m(x).sigmoid(), m.weight.mT)),
    "an embedding as the head": (lambda: nn.Embedding(3, 2, 0), lambda m, i: F.linear(m(i).tanh(), m.weight)),
}


@st.composite
def derived(draw, called: str) -> Case:
    made = DERIVED[called](nn.Linear(3, draw(st.integers(2, 3)), bias=draw(YES))).eval()
    return case(made, draw(values(Numbers(), draw(BATCH), *sides(draw), 3)))


@st.composite
def tied(draw, called: str) -> Case:
    make, call = TIED[called]
    module, shape = make(), (draw(BATCH), draw(STEPS))
    tokens = isinstance(module, nn.Embedding)
    return case(Called(module, call), Numbers().below(3, *shape) if tokens else draw(values(Numbers(), *shape, 2)))


LAYERS: dict[str, SearchStrategy[Case]] = {
    "Linear": cases.linears(),
    "Bilinear": cases.bilinears(),
    "Conv1-3d": DIMENSIONS.flatmap(strategies.convolutions),
    "ConvTranspose1-3d": DIMENSIONS.flatmap(strategies.transposed_convolutions),
    "Embedding": cases.embeddings(),
    "EmbeddingBag": cases.bags(),
    "LayerNorm": cases.layer_norms(nn.LayerNorm),
    "RMSNorm": cases.layer_norms(nn.RMSNorm),
    "GroupNorm": cases.group_norms(),
    "InstanceNorm1-3d": cases.channel_norms("InstanceNorm"),
    "BatchNorm1-3d in eval mode": cases.channel_norms("BatchNorm"),
    "PReLU": cases.prelus(),
    "MultiheadAttention": cases.attentions(),
    "TransformerEncoderLayer": cases.transformer_layers(nn.TransformerEncoderLayer),
    "TransformerDecoderLayer": cases.transformer_layers(nn.TransformerDecoderLayer),
    **{kind.__name__: cases.recurrences(kind) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    **{kind.__name__: cases.cells(kind) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)},
    "activations, dropout in eval mode": activations(),
    "pooling": without_parameters(POOLS),
    "padding, reshaping, upsampling": without_parameters(SHAPES),
    **{name: derived(name) for name in DERIVED},
    **{name: tied(name) for name in TIED},
}


# What is refused, and the operation that the error names


def refused() -> dict[str, tuple[str, Case]]:
    rand = Numbers()
    tokens, bag, x = rand.below(3, 4, 2), nn.EmbeddingBag, rand(3, 2)
    apart = Called(bag(3, 2), lambda m, i, offsets: m(i, offsets))
    return {
        "Embedding(scale_grad_by_freq)": ("embedding", case(nn.Embedding(3, 2, scale_grad_by_freq=True), tokens)),
        "Embedding(max_norm)": ("embedding", case(nn.Embedding(3, 2, max_norm=0.1), tokens)),
        "EmbeddingBag(scale_grad_by_freq)": ("embedding_bag", case(bag(3, 2, scale_grad_by_freq=True), tokens)),
        "EmbeddingBag(max_norm)": ("embedding_bag", case(bag(3, 2, max_norm=0.1), tokens)),
        "EmbeddingBag with offsets": ("embedding_bag", case(apart, tokens.flatten(), torch.arange(4), dims=(None, 0))),
        "BatchNorm in train mode": ("batch_norm", case(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(), x)),
        "products of samples": ("matmul", case(Called(nn.Linear(2, 2), lambda m, x: m(x) @ m(x).T), x)),
    }
