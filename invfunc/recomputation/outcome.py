"""What a function gave the first time, which it has to give again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost
from invfunc._torch.precision import doubled
from invfunc.errors import ReplayError
from invfunc.recomputation.outside import bare
from invfunc.recomputation.probe import Probe
from invfunc.recomputation.report import CHANGES, HELPS, Report
from invfunc.recomputation.rounding import largest

Means = list[tuple[float, float]]
"""The mean, and the mean of magnitudes, of the entries of each tensor of a result."""


class Outcome:
    """A result y, of which only some numbers are kept.

    Args:
        y: it.
        report: how a difference is told, and whether all entries have a part in what is kept (its `tolerance`).
        kept: whether x is kept, so that the same y is to be expected from it.
        alone: whether what autograd saves is not compared.
    """

    def __init__(self, y: Any, report: Report, kept: bool, alone: bool) -> None:
        self._report, self._kept = report, kept
        self._means = None if report.tolerance is None else means(y)
        probed = alone and self._means is None and report.check != "off"
        self._probe = Probe(_plain(y)) if probed else None

    def compare(self, y: Any, exact: bool, dtypes: list[torch.dtype], again: Callable[[], Any]) -> None:
        """Tell, if another evaluation gave something else, perhaps at the `exact` x; `again` is one more of them."""
        if self._means is not None:
            self._compare_means(self._means, y, again)
        if self._probe is not None and exact:
            error = largest(self._probe.errors(_plain(y)))
            if not isinstance(error, torch.Tensor):  # that of a device would make everybody wait
                self._report.result(error, dtypes)

    def _compare_means(self, then: Means, y: Any, again: Callable[[], Any]) -> None:
        came = means(y)
        assert self._report.tolerance is not None
        for (total, size), (now, _) in zip(then, came, strict=True):
            if abs(now - total) <= self._report.tolerance * size:
                continue
            with torch.no_grad():
                repeats = means(again()) == came
            text = (
                f"evaluated again, the function gives another result: the mean of its entries is {now:.8g}, not "
                f"{total:.8g}. "
            )
            if not repeats:
                text += CHANGES
            elif self._kept:
                text += "Something that it reads has been changed since."
            else:
                text += (
                    "It makes the rounding errors of x large, which comes from the inverse (`drift`), or something "
                    f"that it reads has been changed since. {HELPS}"
                )
            raise ReplayError(text)


def without_graph(y: Any) -> Any:
    """A result without the graph of layers that the function has made itself, which would keep what they compute."""
    return tree.map_tensors(lambda t: t.detach() if bare(t).requires_grad else t, y)


def means(y: Any) -> Means:
    """The means of the tensors of a result, over all entries of any vmap: one may be without a batch the first time."""
    wide = [doubled(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t) for t in _plain(y)]
    return [(t.mean().item(), t.abs().mean().item()) for t in wide if t.numel()]


def _plain(y: Any) -> list[torch.Tensor]:
    return [innermost(t.detach()) for t in tree.tensors(y)]
