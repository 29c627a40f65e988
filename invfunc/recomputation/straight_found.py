"""What is known of calls one after the other, so far as they need not be watched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from invfunc.recomputation.closed import Closed
from invfunc.recomputation.report import Known, Report, way
from invfunc.recomputation.straight import Flat, Read, Template


class Found(NamedTuple):
    """What is known of a call."""

    template: Template
    closed: Closed
    """What its functions close over."""
    report: Report
    xs: list[torch.Tensor]
    rest: list[torch.Tensor]
    """The tensors that it is given."""


class Finder:
    """Finds what is known of calls that nothing happens between: what a block closes over is looked at once.

    Args:
        node: whether they are nodes, and not by hooks.
    """

    def __init__(self, node: bool) -> None:
        self._node = node
        self._known: Known | None = None
        self._options: tuple = ()
        self._read: Read | None = None
        self._closed: Closed | None = None
        self._report: Report

    def find(self, block: Any, x: Flat, rest: Flat) -> Found | None:
        """What is known of a call of a block, if it need not be watched."""
        known, options = block.known, (*block.options, self._node)
        same = known is self._known and options == self._options
        if not same or self._report.block.pair is not block.pair:
            self._known, self._options, self._closed = known, options, None
            self._report = Report(block, way(block.check), None, known)
            self._read = known.straight.read(block.pair, options) if known.calls > _WATCHED else None
        found = known.straight.find(self._read, x, rest) if self._read is not None else None
        if self._read is None or found is None:
            return None
        template, xs, tensors = found
        if self._closed is None:
            self._closed = Closed(self._read, template.closed)
        return Found(template, self._closed, self._report, xs, tensors)


_WATCHED = 4
"""How many calls are watched at least: as many as compare the values of what is saved."""
