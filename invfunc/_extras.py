"""Packages that belong to an extra, imported where they are used, and the progress bar that one of them draws."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any

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
