"""What torch.compile made, run as it was written."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any


class Uncompiled:
    """A context in which what `torch.compile` made runs as it was written, in all threads; others go on meanwhile."""

    _lock = threading.Lock()
    _number = 0
    _before: Any = None

    def __enter__(self) -> None:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        self._dynamo = dynamo  # without it nothing has been compiled
        if dynamo is not None:
            with self._lock:
                if Uncompiled._number == 0:
                    Uncompiled._before, dynamo._stance = dynamo._stance, dynamo.DynamoStance("force_eager")
                Uncompiled._number += 1

    def __exit__(self, *error: Any) -> None:
        if self._dynamo is not None:
            with self._lock:
                Uncompiled._number -= 1
                if Uncompiled._number == 0:
                    self._dynamo._stance, Uncompiled._before = Uncompiled._before, None


def compiled_within(depth: int) -> bool:
    """Whether what runs now was compiled, and is called from further within than a depth of the stack of Python."""
    return any(
        frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        for frame in _frames()[:-depth]
    )


def here() -> int:
    """The depth of the stack of Python."""
    return len(_frames())


def _frames() -> list[types.FrameType]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
