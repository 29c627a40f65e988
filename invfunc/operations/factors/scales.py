"""Shares of what scales or shifts other tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc.contract import Term
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Part, Recipe, Site


def scale(site: Site, output: str, factor: Callable[[Part], torch.Tensor], reads: tuple[torch.Tensor, ...]) -> Recipe:
    """`G[output] = sum cotangent * factor` over all other dimensions."""
    labels = LETTERS[: site.call.out.ndim]

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        return [("VN" + labels, cotangent), ("N" + labels, factor(part))]

    return Recipe(output, build, reads=reads, work=site.call.out.numel() // site.call.n)


def shift(site: Site, output: str) -> Recipe:
    """`G[output] = sum cotangent` over all other dimensions."""
    labels = LETTERS[: site.call.out.ndim]
    return Recipe(output, lambda cotangent, part: [("VN" + labels, cotangent)])
