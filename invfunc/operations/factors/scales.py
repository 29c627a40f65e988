"""Shares of what scales or shifts other tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Part, Recipe, Site


def scale(site: Site, output: str, factor: Callable[[Part], torch.Tensor], reads: tuple[torch.Tensor, ...]) -> Recipe:
    """`G[output] = sum cotangent * factor` over all other dimensions."""
    labels = LETTERS[: site.call.out.ndim]
    work = site.call.out.numel() // site.call.n
    return Recipe(output, labels, read=lambda part: [("N" + labels, factor(part))], reads=reads, work=work)


def shift(site: Site, output: str) -> Recipe:
    """`G[output] = sum cotangent` over all other dimensions."""
    return Recipe(output, LETTERS[: site.call.out.ndim])
