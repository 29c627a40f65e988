"""What libraries load when they are first used, loaded beforehand, so that no call takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from invfunc._torch.functorch import dispatched, transforming
from invfunc.budget.beside import SLACK
from invfunc.budget.fingerprint import fingerprint
from invfunc.budget.footprint import footprint, warmed
from invfunc.functional.functional import functional
from invfunc.statistics.diag_ggn import diag_ggn
from invfunc.statistics.variance import variance

SIDE, CHANNELS, CLASSES = 8, 16, 3


_OF_LAPACK: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(torch.linalg.eigh, torch.linalg.svd, torch.linalg.qr, torch.linalg.inv, torch.linalg.cholesky),
    *(torch.linalg.eigvals, torch.linalg.matrix_exp),
)


class _Tour(nn.Module):
    """The layers that people use most, one after the other, on very small images."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(2, CHANNELS, 3, stride=2, padding=1)
        self.even = nn.BatchNorm2d(CHANNELS).eval()
        self.wide = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2)
        self.grouped = nn.GroupNorm(2, CHANNELS)
        self.attention = nn.TransformerEncoderLayer(CHANNELS, 2, CHANNELS, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.wide(self.even(self.narrow(x)).relu()))
        x = F.interpolate(F.max_pool2d(x.sigmoid(), 2), scale_factor=2.0)
        return self.head(self.attention(F.avg_pool2d(x, 2).flatten(2).mT).mean(1).tanh())


def loaded() -> None:
    """Have the libraries load what a search and a call take of them: code, tables, buffers; once in a process."""
    if not (transforming() or dispatched()):
        _toured()


@cache
def _toured() -> None:
    warmed()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        f, params = functional(_Tour().float())
        args = params, torch.rand(2, 2, SIDE, SIDE, dtype=torch.float32), torch.arange(2)
        loss = partial(_loss, f)
        fingerprint(loss, args, {}, [])
        for matrix in (torch.eye(SIDE, dtype=torch.float32), torch.eye(SIDE, dtype=torch.float64)):
            for work in _OF_LAPACK:
                work(matrix)
        for t in (variance(loss), diag_ggn(f, F.cross_entropy)):
            t(*args)
            footprint(t, args, {}, [])
            footprint(t, args, {}, [], SLACK)  # what ends early is undone through the frames of libraries


def _loss(f: Callable, params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(f(params, x), y)
