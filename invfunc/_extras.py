"""Packages that belong to an extra, and what they draw: progress bars, and results as a notebook shows them."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from operator import length_hint
from typing import Any

import torch

from invfunc.errors import MissingExtraError


def extra(module: str, name: str = "", package: str = "") -> Any:
    """A module of the extra of this name, or of a package that is of no extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        how = f"'invfunc[{name}]'." if name else f"{package}; it is of no extra, as it brings torchvision."
        raise MissingExtraError(f"the package {missing.name} is missing: python -m pip install {how}") from None


def _bar(title: str, total: int | None, unit: str) -> Any:
    """A progress bar on a terminal or in a notebook; of tqdm's `disable`, None is for a terminal only."""
    shown = False if hasattr(builtins, "__IPYTHON__") else None
    return extra("tqdm", "progress").tqdm(desc=title, total=total, unit=unit, disable=shown)


@contextmanager
def told_of_parts(title: str, parts: Any, unit: str = "batch") -> Iterator[Callable[[int, int], None]]:
    """A function that is told after each part how many are done, and how many samples this one has; it shows that
    under a title, if there is one: how many a second, and the time that is left where the parts are counted."""
    if not title:
        yield lambda done, samples: None
        return
    n = 0
    with _bar(title, length_hint(parts, 0) or None, unit) as bar:

        def tell(done: int, samples: int) -> None:
            nonlocal n
            n += samples
            if not bar.disable:
                bar.set_postfix_str(f"{n / max(bar.format_dict['elapsed'], 1e-9):.3g} samples/s", refresh=False)
                bar.update(done - bar.n)

        yield tell


class Ticks:
    """Counts the pullbacks that are done, for a progress bar if there is one."""

    def __init__(self, bar: Any = None, samples: int = 0) -> None:
        """Of so many samples in all, each counted as often as the function runs on it."""
        self._bar, self._samples, self._seen, self._expected = bar, samples, 0, 0

    def reach(self, n: int) -> None:
        """A run of so many samples begins."""
        self._seen += n

    def expect(self, count: int) -> None:
        """So many pullbacks of this run follow; the other samples will have as many."""
        self._expected += count
        if self._bar is not None:
            self._bar.total = max(self._expected, round(self._expected * self._samples / max(1, self._seen)))

    def done(self) -> None:
        if self._bar is not None:
            self._bar.update()


@contextmanager
def ticking(title: str, samples: int) -> Iterator[Ticks]:
    """Counts pullbacks, and shows how many are done under a title, if there is one."""
    if not title:
        yield Ticks()
        return
    with _bar(title, None, "pass") as bar:
        yield Ticks(bar, samples)


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
