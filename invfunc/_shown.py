"""Results as a notebook shows them: a table in HTML, or a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import torch

from invfunc._extras import extra


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], *below: str) -> str:
    """Rows under a head, with a title above and lines below."""

    def row(cells: Iterable[Any], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(_spelled(x))}</{kind}>" for x in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    found = f"<thead>{row(head, 'th')}</thead><tbody>{body}</tbody>" if body else ""
    lines = "".join(f"<br>{escape(line)}" for line in below if line)
    return f"<div><strong>{escape(title)}</strong><table>{found}</table>{lines.removeprefix('<br>')}</div>"


def kind(tensors: Sequence[Any]) -> str:
    """The dtype and the device of the first of some tensors for a `repr`, as far as they are not the usual ones."""
    dtypes = [x.dtype for x in tensors[:1] if getattr(x, "dtype", None) not in (None, torch.get_default_dtype())]
    devices = [x.device for x in tensors[:1] if getattr(x, "device", torch.device("cpu")).type != "cpu"]
    return "".join([f", dtype={dtype}" for dtype in dtypes] + [f", device='{device}'" for device in devices])


def _spelled(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def axes(ax: Any, height: float = 2.5) -> Any:
    """Axes of matplotlib, as given or of a new figure."""
    if ax is not None:
        return ax
    return extra("matplotlib.pyplot", "notebooks").subplots(figsize=(6, height), layout="constrained")[1]
