"""README's picture: which states of a network are in memory, and the memory of its table's rows."""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import invfunc

from .measure import ROOT

PICTURE = ROOT / "notebooks" / "site" / "_static" / "first.png"
BLUE, LIGHT, ORANGE, GREY = "#2f6db3", "#7fb2e5", "#d9772b", "#c9c9c9"
SHORT = "exact curvature,\nauto-encoder", "clipping,\na CNN", "norms per sample,\nBERT", "64 reversible\nblocks"


def alive(block: Any, weights: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """For each state between the blocks, True if it is in memory after a forward pass."""
    state = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    seen = [weakref.ref(state)]
    for params in weights:
        state = block(state, params)
        seen.append(weakref.ref(state))
    return [ref() is not None for ref in seen]


def rows_of(table: str) -> list[tuple[float, float | None, str]]:
    """MiB of each row of the table, of ours and of the other one, and what that is called."""
    row = r"^\| .*? \| [^|]*?(\d+) MiB \| (?:[^|]*?(\d+) MiB|fails.*?) \| (.*?)(?:;.*?)? \|$"
    rows = re.findall(row, table, re.MULTILINE)
    return [(float(ours), float(theirs) if theirs else None, peer.replace("`", "")) for ours, theirs, peer in rows]


def draw(table: str) -> None:
    """Write the picture of a table of numbers."""
    figure = Figure(figsize=(10, 3.1), layout="constrained", facecolor="white")
    states, bars = figure.subplots(1, 2, width_ratios=(1, 1.05))
    _states(states)
    _bars(bars, rows_of(table))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def _states(axis: Any) -> None:
    def part(b: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(b @ weight)

    def plain(x: Tensor, params: tuple[Tensor, Tensor]) -> Tensor:
        a, b = x.chunk(2, 1)
        a = a + part(b, params[0])
        return torch.cat([a, b + part(a, params[1])], 1)

    weights = [(torch.zeros(16, 16).requires_grad_(), torch.zeros(16, 16).requires_grad_()) for _ in range(4)]
    block = invfunc.invertible_checkpoint(invfunc.additive_coupling(part, part, split_dim=1))
    there, back = {"arrowstyle": "->", "lw": 1.2}, {"arrowstyle": "->", "color": ORANGE, "lw": 1.2, "ls": "--"}
    back["connectionstyle"] = "arc3,rad=-0.45"
    for y, title, states in ((0, "plain", alive(plain, weights)), (-1, "invertible", alive(block, weights))):
        axis.text(-0.45, y, title, ha="right", va="center", fontsize=11)
        for i, held in enumerate(states):
            box = {"boxstyle": "square,pad=0.45", "fc": LIGHT if held else "white", "ec": BLUE if held else GREY}
            axis.text(i, y, f"$x_{i}$", ha="center", va="center", fontsize=12, bbox=box)
            if i:
                axis.annotate("", (i - 0.27, y), (i - 0.73, y), arrowprops=there)
            if i and not states[i - 1]:
                axis.annotate("", (i - 0.9, y - 0.24), (i - 0.1, y - 0.24), arrowprops=back)
    axis.set_title("What is in memory after a forward pass (filled)", fontsize=11)
    axis.set(xlim=(-1.7, 4.4), ylim=(-1.7, 0.5))
    axis.set_axis_off()


def _bars(axis: Any, rows: list[tuple[float, float | None, str]]) -> None:
    largest = max(max(ours, theirs or 0) for ours, theirs, _ in rows)
    for i, (ours, theirs, peer) in enumerate(rows):
        for size, place, color, name in ((ours, i - 0.19, BLUE, "invfunc"), (theirs, i + 0.19, GREY, peer)):
            axis.barh(place, size or 0, height=0.36, color=color)
            told = f"{name}: {size:.0f} MiB" if size else f"{name} fails"
            axis.text((size or 0) + 0.01 * largest, place, told, va="center", fontsize=8)
    axis.set_xlim(0, 1.45 * largest)
    axis.set_yticks(range(len(rows)), SHORT, fontsize=8)
    axis.invert_yaxis()
    axis.set_title("Peak memory of the same numbers", fontsize=11)
    axis.set_xlabel("MiB", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
