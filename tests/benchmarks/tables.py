"""The tables: their problems, their rows, and what is to be reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import invfunc

from .peers import (
    BACKPACK,
    OURS,
    VMAP,
    Peer,
    Problem,
    backpack,
    backpack_diag_ggn,
    plain_gradient,
    transformed,
    vmap_grad,
    vmap_jacrev,
)

Times = dict[tuple[str, str], float]  # (row, peer) -> seconds
UNIT = ("one plain gradient", "torch")


@dataclass(frozen=True)
class Row:
    """One statistic, how each peer computes it, and the ratios that ours is to reach."""

    name: str
    peers: dict[str, Peer]
    time: float
    base: Callable[[Times, Row], float | None]  # the seconds that `time` is a multiple of
    memory: float | None = None  # a multiple of BackPACK's


@dataclass(frozen=True)
class Table:
    """Rows of one problem; with a `unit` their times are multiples of it, else seconds."""

    title: str
    problem: Callable[[], Problem]
    rows: list[Row]
    legend: str
    unit: Peer | None = None

    def peers(self) -> dict[tuple[str, str], Peer]:
        """Each peer by its row's name and its own."""
        unit = {UNIT: self.unit} if self.unit else {}
        return unit | {(row.name, name): peer for row in self.rows for name, peer in row.peers.items()}


def of_gradient(times: Times, row: Row) -> float | None:
    """One plain gradient."""
    return times[UNIT]


def of_backpack(times: Times, row: Row) -> float | None:
    """BackPACK in the same row."""
    return times.get((row.name, BACKPACK))


def of_our_best(times: Times, row: Row) -> float | None:
    """The fastest other row of ours."""
    return min(t for (name, peer), t in times.items() if peer == OURS and name != row.name)


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
    layers += [
        nn.Flatten(),
        nn.Linear(1152, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ]
    return Problem(nn.Sequential(*layers), F.cross_entropy, torch.rand(32, 3, 32, 32), torch.randint(10, (32,)))


def _chunked_row(n: int) -> Row:
    peers = {
        OURS: transformed(lambda p: invfunc.chunked(invfunc.diag_ggn(p.f, p.loss, method="dense"), n)),
        BACKPACK: backpack_diag_ggn(n),
        VMAP: vmap_jacrev(n),
    }
    return Row(f"chunks={n}", peers, 0.8, of_backpack, memory=1)


TABLES = {
    "autoencoder": Table(
        "the exact GGN diagonal of BackPACK's tutorial auto-encoder, 3x32x32, N = 5, 3072 outputs",
        autoencoder,
        [
            Row(
                "by-itself",
                {
                    OURS: transformed(lambda p: invfunc.diag_ggn(p.f, p.loss)),
                    BACKPACK: backpack("DiagGGNExact"),
                },
                1.1,
                of_our_best,
            ),
            *[_chunked_row(n) for n in (1, 4, 16, 64)],
        ],
        "to reach: ours over BackPACK in as many chunks; by itself: over the best of ours in chunks",
    ),
    "3c3d": Table(
        "statistics of 3c3d, 3x32x32, N = 32, cross entropy over 10 classes",
        three_c_three_d,
        [
            Row(
                "sum_grad_squared",
                {
                    OURS: transformed(lambda p: invfunc.sum_grad_squared(p.loss_fn)),
                    BACKPACK: backpack("SumGradSquared"),
                    VMAP: vmap_grad(lambda share: share.square().sum(0)),
                },
                1.9,
                of_gradient,
            ),
            Row(
                "variance",
                {
                    OURS: transformed(lambda p: invfunc.variance(p.loss_fn)),
                    BACKPACK: backpack("Variance"),
                    VMAP: vmap_grad(lambda share: share.var(0, correction=0)),
                },
                2.2,
                of_gradient,
            ),
            Row(
                "batch_grad",
                {
                    OURS: transformed(lambda p: invfunc.batch_grad(p.loss_fn)),
                    BACKPACK: backpack("BatchGrad"),
                    VMAP: vmap_grad(lambda share: share),
                },
                2.5,
                of_gradient,
            ),
            Row(
                "diag_ggn",
                {
                    OURS: transformed(lambda p: invfunc.diag_ggn(p.f, p.loss)),
                    BACKPACK: backpack("DiagGGNExact"),
                    VMAP: vmap_jacrev(),
                },
                7.5,
                of_gradient,
            ),
        ],
        "to reach: ours over one plain gradient",
        unit=plain_gradient,
    ),
}
