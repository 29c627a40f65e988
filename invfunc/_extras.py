"""Packages that belong to an extra, imported where they are used, and the progress bar that one of them draws."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from invfunc.errors import MissingExtraError


def extra(module: str, name: str) -> Any:
    """A module of the extra of this name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"the package {missing.name} is missing: python -m pip install 'invfunc[{name}]'."
        ) from None


@contextmanager
def told_of_batches(title: str, batches: Any) -> Iterator[Callable[[int, int], None]]:
    """A function that is told after each batch how many are done, and how many samples this one has; it shows that
    under a title, if there is one: how many a second, and the time that is left where the batches are counted."""
    if not title:
        yield lambda done, samples: None
        return
    everywhere = False if hasattr(builtins, "__IPYTHON__") else None  # a notebook; None: only on a terminal
    total, n = length_hint(batches, 0) or None, 0
    with extra("tqdm", "notebooks").tqdm(desc=title, total=total, unit="batch", disable=everywhere) as bar:

        def tell(done: int, samples: int) -> None:
            nonlocal n
            n += samples
            if not bar.disable:
                bar.set_postfix_str(f"{n / max(bar.format_dict['elapsed'], 1e-9):.3g} samples/s", refresh=False)
                bar.update(done - bar.n)

        yield tell
