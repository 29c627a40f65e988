"""The picture of the tour: the data, what was computed, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: a file is drawn, there need not be a display
from matplotlib.ticker import NullLocator
from torch import Tensor

BLUE, LIGHT_BLUE, ORANGE, BROWN = "#2f6db3", "#7fb2e5", "#d9772b", "#7a3f10"


def save_picture(
    path: Path,
    headline: str,
    images: Tensor,
    ggn: Mapping[str, Tensor],
    noise: Mapping[str, Tensor],
    chunks: Sequence[int],
    costs: Mapping[str, Sequence[float]],
) -> None:
    """Draw images [2, N, H, W], two statistics of each parameter, and costs (by structure, then per chunks)."""
    figure = Figure(figsize=(10, 6.8), layout="constrained")
    figure.suptitle(headline, fontsize=13, weight="bold")
    panels: Any = figure.subfigures(2, 2, wspace=0.05, hspace=0.05)  # Any: an array, not typed as one
    (digits, cloud), lower = panels

    digits.suptitle("digits, and what the auto-encoder makes of them", fontsize=11)
    for axis, image in zip(digits.subplots(*images.shape[:2]).flat, images.flatten(0, 1), strict=True):
        axis.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        axis.set_axis_off()

    cloud.suptitle("curvature and gradient noise of each parameter", fontsize=11)
    axis = cloud.subplots()
    for name, color in zip(ggn, (BLUE, LIGHT_BLUE, ORANGE, BROWN), strict=True):
        axis.loglog(ggn[name].flatten(), noise[name].flatten(), "o", ms=4, mew=0, color=color, label=name)
    axis.set_xlabel("GGN diagonal")
    axis.set_ylabel("gradient variance")
    axis.legend(frameon=False, fontsize=8, handletextpad=0.1)

    for panel, (title, (structured, *dense)), color in zip(lower, costs.items(), (BLUE, ORANGE), strict=True):
        panel.suptitle(title, fontsize=11)
        axis = panel.subplots()
        axis.plot(chunks, dense, "o-", color=color, label="the plain way")
        axis.axhline(structured, color="0.4", ls="--", lw=1, label="by structure")
        axis.set_xscale("log", base=2)
        axis.set_xticks(chunks, [str(n) for n in chunks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(bottom=0)
        axis.set_xlabel("chunks of the outputs")
        axis.legend(frameon=False, fontsize=8)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
