"""What tells a process between its batches that another one has failed, for which it would compute all of them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from invfunc.evaluation.batches import Batches, Numbered, Visit

SECONDS = 0.5
"""After which it is looked for again."""


class Stopped(Exception):
    """Another process has failed, and is going to say why."""


@dataclass
class Alarm:
    """Rings in the store by which the processes of a group have met: no process waits there for another."""

    store: Any = None
    mark: str = ""
    """The same in all processes of a call, and in no other; none before it is agreed upon."""
    step: int = 0
    """How often all have told each other of a step."""

    @classmethod
    def of(cls, group: Any) -> Alarm:
        whole: Any = dist.group.WORLD
        return cls((whole if group is None else group).get_group_store())

    def ring(self) -> None:
        if self.mark:
            with suppress(RuntimeError):  # the others see that the connection is lost
                self.store.set(self._key, "")

    def heard_in(self, batches: Batches) -> Batches:
        """Batches that end where it rings."""

        def until_it_rings(visit: Visit, numbered: Numbered) -> int:
            looked = time.monotonic()

            def visited(args: tuple, n: int) -> int:
                nonlocal looked
                if time.monotonic() - looked > SECONDS:
                    looked = time.monotonic()
                    with suppress(RuntimeError):
                        if self.store.check([self._key]):
                            raise Stopped
                return visit(args, n)

            return batches(visited, numbered)

        return until_it_rings

    @property
    def _key(self) -> str:
        return f"invfunc/{self.mark}/{self.step}"
