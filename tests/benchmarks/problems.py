"""Problems of the benchmarks: small models with batches, the same in each run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .peers import Problem


def autoencoder() -> Problem:
    """The auto-encoder of BackPACK's retain_graph tutorial."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Sigmoid())
    decoder = nn.Sequential(nn.ConvTranspose2d(10, 3, 3), nn.Flatten())
    x = torch.rand(5, 3, 32, 32)
    return Problem(nn.Sequential(encoder, decoder), F.mse_loss, x, x.flatten(1))


def three_c_three_d() -> Problem:
    """DeepOBS's 3c3d: three convolutions and three dense layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for convolution in (nn.Conv2d(3, 64, 5), nn.Conv2d(64, 96, 3), nn.Conv2d(96, 128, 3, padding=1)):
        layers += [convolution, nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
    return Problem(nn.Sequential(*layers), F.cross_entropy, torch.rand(32, 3, 32, 32), torch.randint(10, (32,)))


def tiny() -> Problem:
    """A net so small that a call costs what its Python costs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 2))
    return Problem(model, F.cross_entropy, torch.randn(8, 10), torch.randint(2, (8,)))


def resnet_18() -> Problem:
    """ResNet-18 for small images (11 M parameters), whose batch norms use what they have gathered."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Residual(channels, width, stride), _Residual(width, width, 1)]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).eval()
    return Problem(model, F.cross_entropy, torch.rand(16, 3, 32, 32), torch.randint(10, (16,)))


def gpt(samples: int = 8) -> Problem:
    """A small GPT that finds the next of 1000 words at each of 128 places: four layers of 256 numbers, 8 heads."""
    torch.manual_seed(0)
    words = torch.randint(1000, (samples, 129))
    return Problem(_GPT(1000, 128), F.cross_entropy, words[:, :-1], words[:, 1:])


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        first, second = ((channels, width, stride), (width, width, 1))
        self.a, self.b = (nn.Conv2d(c, w, 3, s, padding=1, bias=False) for c, w, s in (first, second))
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = channels == width and stride == 1
        short = nn.Conv2d(channels, width, 1, stride, bias=False)
        self.short = nn.Identity() if same else nn.Sequential(short, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.short(x) + self.second(self.b(self.first(self.a(x)).relu()))).relu()


class _GPT(nn.Module):
    def __init__(self, words: int, places: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, 256), nn.Embedding(places, 256)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(256, 8, 1024, **options)
        self.layers = nn.TransformerEncoder(layer, 4, nn.LayerNorm(256), enable_nested_tensor=False)
        self.head = nn.Linear(256, words, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(places), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layers(h, mask=self.mask, is_causal=True)).mT
