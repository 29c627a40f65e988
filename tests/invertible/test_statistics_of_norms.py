"""Statistics of couplings of modules with norms and dropout, as blocks, are those of the plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc as i
from invfunc.testing import assert_trees_close
from tests.invertible.test_composition import turned

WIDTH, ROWS, CLASSES = 8, 5, 3


class FixedDropout(nn.Module):
    """Dropout whose mask was drawn once."""

    mask: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(width) < 0.7) / 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


def batch_norm(width: int) -> nn.Module:
    """A batch norm in eval mode that has seen something."""
    norm = nn.BatchNorm1d(width)
    norm(3 * torch.randn(16, width) + 1)
    return norm.eval()


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "layer norm": nn.LayerNorm,
    "group norm": lambda width: nn.GroupNorm(2, width),
    "batch norm in eval": batch_norm,
    "dropout with a fixed draw": FixedDropout,
}
STATISTICS: dict[str, Callable[[Callable, Callable, Callable], Callable]] = {
    "batch_grad": lambda f, loss, losses: i.batch_grad(loss),
    "batch_l2_grad": lambda f, loss, losses: i.batch_l2_grad(loss),
    "sum_grad_squared": lambda f, loss, losses: i.sum_grad_squared(loss),
    "variance": lambda f, loss, losses: i.variance(loss),
    "clipped_grad": lambda f, loss, losses: i.clipped_grad(losses, max_norm=0.5),
    "diag_ggn, exact": lambda f, loss, losses: i.diag_ggn(f, F.cross_entropy),
    "diag_ggn, drawn": lambda f, loss, losses: i.diag_ggn(
        f, F.cross_entropy, mc_samples=2, generator=torch.Generator().manual_seed(3)
    ),
    "kfac": lambda f, loss, losses: i.kfac(f, F.cross_entropy, generator=torch.Generator().manual_seed(3)),
    "exact kfac": lambda f, loss, losses: i.kfac(f, F.cross_entropy, fisher="exact"),
    "hvp": lambda f, loss, losses: lambda p, *batch: i.hvp(loss)(p, turned(p), *batch),
    "ggnvp": lambda f, loss, losses: lambda p, *batch: i.ggnvp(f, F.cross_entropy)(p, turned(p), *batch),
}
WAYS: dict[str, Callable[[list], Callable]] = {
    "blocks": lambda pairs: nn.Sequential(*(i.invertible_checkpoint(pair).module() for pair in pairs)),
    "chain": lambda pairs: i.chain(*pairs).module(),
}


def network(layer: str, split: bool, way: Callable[[list], Callable]) -> nn.Module:
    """A stem, couplings of modules, and a head."""
    torch.manual_seed(0)
    half, made = WIDTH // 2, LAYERS[layer]

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(half, half), made(half), nn.Tanh(), nn.Linear(half, half))

    pairs = [i.additive_coupling(part(), part(), split_dim=1 if split else None) for _ in range(3)]
    middle = way(pairs)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.middle, self.head = nn.Linear(4, WIDTH), middle, nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.stem(x)
            return self.head(self.middle(h) if split else torch.cat(self.middle(h.chunk(2, 1)), 1))

    return Network().double()


def found(statistic: str, layer: str, split: bool, way: Callable[[list], Callable]) -> Any:
    """A statistic of the network."""
    f, params = i.functional(network(layer, split, way))
    rand = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 4, generator=rand).double(), torch.randint(0, CLASSES, (ROWS,), generator=rand)

    def of_loss(reduction: str) -> Callable:
        return lambda params, x, y: F.cross_entropy(f(params, x), y, reduction=reduction)

    return STATISTICS[statistic](f, of_loss("mean"), of_loss("none"))(params, x, y)


def plain(pairs: list) -> nn.Module:
    """The same couplings, without saving memory."""
    return nn.Sequential(*(pair.module() for pair in pairs))


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("layer", LAYERS)
def test_equal_those_of_the_plain_function(layer, statistic):
    for split in (False, True):
        wanted = found(statistic, layer, split, plain)
        for way in WAYS.values():
            assert_trees_close(found(statistic, layer, split, way), wanted, 1e-9, 1e-9)
