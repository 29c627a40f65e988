"""Ordinary programs: models as they are written in training scripts, each with its parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import invfunc

N = 5
CLASSES = 3


class Program(NamedTuple):
    """A model function `f(params, x)` with arguments for it, and targets for its outputs."""

    f: Callable
    params: Any
    x: torch.Tensor
    y: torch.Tensor


class ResNet(nn.Module):
    """Two convolutions with batch norm, whose input is added in place, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.stem(x))
        z = self.relu(self.norm1(self.conv1(x)))
        z = self.norm2(self.conv2(z))
        z += x
        return self.head(self.relu(z).mean((2, 3)))


class Gpt(nn.Module):
    """Tokens and positions, a causal block, and a head that is the table of tokens."""

    def __init__(self, tokens: int = 7, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.tokens(i) + self.positions(torch.arange(i.shape[1], device=i.device))
        q, k, v = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(self.first(x)).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(z)
        x = x + self.mlp(self.second(x))
        return self.head(x).transpose(1, 2)  # classes in dim 1


class Last(nn.Module):
    """The last output of a recurrent net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x)[0][:, -1])


class Masked(nn.Module):
    """A layer of a transformer, which does not look at the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[:, -1] = True
        return self.head(self.layer(x, src_key_padding_mask=mask)[:, :-1].mean(1))


class ClassToken(nn.Module):
    """A vision transformer: patches, a token for the class that is the same in all samples, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 8, 3, stride=3)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.layer(x)[:, 0])


def residual() -> nn.Module:
    """A stack of norms with residuals."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)])
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in self.norms])
            self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + self.scale * F.silu(layer(norm(x)))
            return self.head(x)

    return Residual()


def cnn() -> nn.Module:
    """Convolutions with batch norm, pooling and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, CLASSES)),
    )


def mlp() -> nn.Module:
    """Linear layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def bag() -> nn.Module:
    """Means of rows of a table."""
    return nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, CLASSES))


def table() -> nn.Module:
    """Rows of a table with padding."""
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(16, CLASSES))


def deconvolution() -> nn.Module:
    """A convolution that enlarges, as of decoders."""
    enlarged = nn.ConvTranspose2d(2, 3, 2, 2), nn.PReLU(3), nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(*enlarged, nn.Flatten(), nn.Linear(12, CLASSES))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (mlp, (4,), 0),
    "CNN": (cnn, (2, 6, 6), 0),
    "ResNet": (ResNet, (2, 4, 4), 0),
    "encoder with a mask": (Masked, (4, 8), 0),
    "vision transformer": (ClassToken, (2, 6, 6), 0),
    "GPT with a tied head": (Gpt, (5,), 7),
    "LSTM": (lambda: Last(nn.LSTM(3, 4, batch_first=True)), (3, 3), 0),
    "GRU": (lambda: Last(nn.GRU(3, 4, batch_first=True)), (3, 3), 0),
    "embedding bag": (bag, (4,), 7),
    "table with padding": (table, (4,), 7),
    "norms and residuals": (residual, (8,), 0),
    "decoder": (deconvolution, (2, 3, 3), 0),
}


def of_module(name: str, n: int = N, dtype: torch.dtype = torch.float64) -> Program:
    """A module in eval mode as a function of its parameters, with class labels; the same numbers in any precision."""
    torch.manual_seed(0)
    make, shape, tokens = MODULES[name]
    module = make().eval()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean, norm.running_var = torch.randn(4), 1 + torch.rand(4)
    f, params = invfunc.functional(module.to(dtype))
    x = torch.randint(tokens, (n, *shape)) if tokens else torch.randn(n, *shape).to(dtype)
    y = torch.randint(CLASSES, (n, 5) if name.startswith("GPT") else (n,))
    return Program(f, params, x, y)


def losses(f: Callable) -> Callable:
    """`[N]` losses of a model."""
    return lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none").reshape(len(x), -1).sum(1)
