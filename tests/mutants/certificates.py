"""Which planted faults `certified` finds on drawn problems alone, with no other test."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from tests.mutants.fault import ROOT, Fault, Say

NUMERIC = (
    "linear_algebra/contract.py",
    "evaluation",
    "loss",
    "core",
    "operations",
    "plan.py",
    "products",
)
NUMERIC += ("arguments/problem.py", "reductions", "structure")
"""Where numbers of statistics are computed."""
WITHOUT = (
    "core/kfra.py",
    "core/factors.py",
    "core/explained.py",
    "core/refusals.py",
    "products/estimate",
    "products/linear_operator.py",
    "products/positive.py",
)
WITHOUT += ("reductions/eigenbasis.py", "reductions/kronecker_factors.py", "reductions/nearest.py")
WITHOUT += ("evaluation/checkpoint.py", "evaluation/sweep.py", "evaluation/weights.py", "products/streamed.py")
WITHOUT += ("evaluation/sweep.py", "evaluation/processes.py", "reductions/exchange.py")
"""What is in there, but of no result that `certified` takes: K-factors, estimates, products that are made positive,
data sets, and several processes."""
OF_FACTORS, OF_STREAMS = "on the way of K-factors alone", "on the way of data sets alone"
OF_PROCESSES = "on the way of several processes alone"
LESS = "what it loses is less than rounding may be"
ALIKE = "both ways have it alike"
GUARD = "a check of what is right without it"
MAPS = "certificates are of products, not of their derivatives or of vmap over them"
UNSEEN = {
    "half of a symmetric product is not mirrored": OF_FACTORS,
    "long sums of products are doubled": OF_FACTORS,
    "products as the gradient of a convolution are doubled": OF_FACTORS,
    "columns of a square root grow as the loss does": OF_STREAMS,
    "each batch draws what the first one drew": OF_STREAMS,
    "the generator gives the same key again": OF_STREAMS,
    "the means of the processes are taken for the same": OF_PROCESSES,
    "bfloat16 is not widened": LESS,
    "autocast is not what it was where an operation runs again": LESS,
    "targets are drawn with too few columns in the scale": ALIKE,
    "classes are drawn from the first of them alone": ALIKE,
    "a sure prediction has noise": ALIKE,
    "a batch norm of one sample keeps torch's wrong derivative": ALIKE,
    "a negative sample counts from one place behind the last": ALIKE,
    "a map within vmap takes its vectors along the first axis": MAPS,
    "the derivative of a map is the map": MAPS,
    "the tangent of a map is that of its transpose": MAPS,
    "a loss that is not convex is not told": "an error that is missing",
    "columns of several outputs are split at their samples": "there is no result",
}
"""Faults in files of such results that change no number which could be compared, and why."""
LOOKS, EXAMPLES, SECONDS = 6, 4000, 60
"""How often each kind is looked at for whether it runs a fault; how many calls of those that do are certified, at most,
and the time of the processor for that."""
SOUND = Fault("no fault at all", "linear_algebra/contract.py", "def contract(", "def contract(", "")
"""What is not to be found: where it is, the drawn functions give false alarms, and no count says anything."""


def numeric(fault: Fault) -> bool:
    """Whether a fault is in the numeric path, of results that `certified` takes."""
    other = fault.file.startswith(WITHOUT) or fault.name in UNSEEN
    return fault.file.startswith(NUMERIC) and not other


At = tuple[str, str]
"""A kind of function and a group of statistics or products."""


def drawn_calls() -> dict[At, Any]:
    """What there is to draw."""
    from tests.mutants.drawn import GROUPS, calls
    from tests.mutants.worlds import KINDS

    return {(kind, group): calls(KINDS[kind], group) for kind in KINDS for group in GROUPS}


def runners(faults: Sequence[Fault]) -> dict[str, list[At]]:
    """What runs the lines of each fault (by its name), in some of a few examples of each kind."""
    lines = {fault.name: {(fault.file, line) for line in fault.lines()} for fault in faults}
    wanted = set().union(*lines.values())
    ran: dict[At, set[tuple[str, int]]] = {}
    for at, drawn in drawn_calls().items():
        ran[at] = _lines(drawn, wanted)
    return {name: [at for at, found in ran.items() if found & own] for name, own in lines.items()}


def _lines(drawn: Any, wanted: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Which of these lines are run by what is drawn."""
    found: set[tuple[str, int]] = set()

    @cache
    def file_of(code: CodeType) -> str:
        """The file of a function that has such a line; empty for others."""
        file = code.co_filename.removeprefix(f"{ROOT / 'invfunc'}/")
        return file if any((file, line) in wanted for *_, line in code.co_lines()) else ""

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return within if file_of(frame.f_code) else None

    def within(frame: FrameType, event: str, arg: Any) -> Any:
        found.add((file_of(frame.f_code), frame.f_lineno))
        return within

    @_examples(LOOKS)
    @given(drawn)
    def look(call: Any) -> None:
        sys.settrace(called)
        try:
            _called(call, certify=True)
        finally:
            sys.settrace(None)

    try:
        look()
    except Unsatisfiable:  # there is no such statistic of this kind of function
        pass
    return found & wanted


def search(fault: Fault, say: Say, among: dict[str, list[At]]) -> tuple[str, str]:
    """Certify what is drawn of the kinds that run a fault, until a result is wrong."""
    from invfunc.errors import CertificateError

    every = drawn_calls()
    taken = among.get(fault.name, list(every))
    if not taken:
        return "survived", "nothing that is drawn runs it"
    until, tried = time.process_time() + SECONDS, 0

    @_examples(EXAMPLES)
    @given(st.data())
    def look(data: Any) -> None:
        nonlocal tried
        at = data.draw(st.sampled_from(taken))
        call = data.draw(every[at])
        if time.process_time() > until:
            raise TimeoutError
        tried += 1
        say(", ".join(at))
        _called(call, certify=True)

    try:
        look()
    except CertificateError as error:
        return "found", str(error)[:100]
    except TimeoutError:
        pass
    return "survived", f"{tried} calls of {len(taken)} kinds"


def _examples(most: int) -> Callable[[Any], Any]:
    """So many of what is drawn, always the same."""
    every = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=most,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=every,
    )


def _called(call: Callable[[bool], Any], certify: bool) -> None:
    """What fails otherwise is told to the user as it is, but not by a certificate."""
    from invfunc.errors import CertificateError

    try:
        call(certify)
    except CertificateError:
        raise
    except Exception:
        return
