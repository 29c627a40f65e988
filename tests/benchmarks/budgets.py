"""The table of memory budgets: what is promised, and what a process takes."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from . import budget_case
from .budget_case import BY_HAND, CASES, Taken
from .report import announce, mebibytes, number, print_as_they_come, verdict

MEMORY_BUDGET = "memory-budget"
BUDGETS = {"1.1 x least": 1.1, "2 x least": 2.0, "plenty": 1e3}
USED = 0.6
"""The part of a promise that is used at least where the work is larger than it."""
BEHIND = 1.15
"""How many times as long as the fastest chunks that were found by hand a call takes at most."""
FEWEST = 2
"""How many numbers of chunks of an axis are timed: the fewest that fit."""
SPREAD = ("variance", "clipped_grad", "diag_ggn drawn", "ekfac", "diag_ggn", "diag_hessian")
"""Statistics of the table without `--part`: one of each way to compute."""


def budgets(name: str, options: argparse.Namespace) -> None:
    """Print the table."""
    cases = [case for case in CASES if case[1] in SPREAD and case[0] != "residual"]
    if options.part is not None:
        cases = CASES[options.part[0] - 1 :: options.part[1]]
    print(f"{name}: MiB over what was in use before the call; a process for each budget of a case, one thread")
    lines = print_as_they_come(line for case in cases for line in _lines(name, case, options.limit))
    announce(name, "")
    exceeded = sum("NO" in line["within"] for line in lines)
    print(f"{exceeded} of {len(lines)} take more than was promised")
    print(
        "first: by the first call in a process, with its search, which takes `s to choose`; later: by those after it\n"
    )


HEADS = (
    *("", "budget", "MiB", "chunks", "predicted", "first", "later", "within", "used", "s to choose", "s"),
    *("over best by hand", "that"),
)


def _lines(name: str, case: tuple[str, str], limit: int) -> Iterator[dict[str, str]]:
    """The rows of a statistic of a model."""
    announce(name, " ".join(case))
    try:
        fewer, least = _asked(limit, budget_case.least, *case)
        for kind, factor in BUDGETS.items():
            budget = int(factor * least)
            found: Taken = _asked(limit, budget_case.taken, *case, budget)
            line = dict.fromkeys(HEADS, "-") | {"": " ".join(case) + fewer, "budget": kind, "MiB": mebibytes(budget)}
            line |= _cells(found, budget)
            whole = "in one piece" in found.why
            if case in BY_HAND and not whole and (chunks := _fitting(case, budget, limit)):
                ratio, best = _asked(limit, budget_case.behind, *case, budget, chunks)
                line |= {"over best by hand": verdict(ratio, BEHIND), "that": best}
            yield line
            if whole:  # and would be with more
                return
    except Exception as error:
        told = f"not done in {limit} s" if isinstance(error, multiprocessing.TimeoutError) else str(error)
        print(f"{' '.join(case)}: {told}")


def _cells(found: Taken, budget: int) -> dict[str, str]:
    """What was promised, and what was taken."""
    chunks, _, predicted = found.why.partition(", at most ")
    promised, used = float(predicted.split("MiB")[0]) * 2**20, max(found.first, found.later) / budget
    after = chunks.removeprefix("in ").replace(" chunks of", "")
    line = {"chunks": after if after == found.chunks else f"{found.chunks}, then {after}"}
    line |= {"predicted": mebibytes(promised), "first": mebibytes(found.first), "later": mebibytes(found.later)}
    line["within"] = verdict(max(found.first / budget, found.later / min(budget, promised)), 1)
    if "in one piece" not in found.why:
        line["used"] = number(used) + (" NO" if used < USED else "")
    return line | {"s to choose": number(found.choosing), "s": number(found.seconds)}


def _fitting(case: tuple[str, str], budget: int, limit: int) -> list[tuple[str, int]]:
    """The fewest chunks of each axis of which a first call takes no more than the budget."""
    found = []
    for axis in _asked(limit, budget_case.by_hand, *case):
        fitting = (c for c in axis if _asked(limit, budget_case.first_by_hand, *case, *c) <= budget)
        found += islice(fitting, FEWEST)
    return found


def _asked(limit: int, question: Callable[..., Any], *of: Any) -> Any:
    """The answer of a process of its own, if it comes in time: forked from one that has imported the questions and has
    done nothing else, so that pages of libraries are as new to it as to any first call."""
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload([budget_case.__name__])
    with fresh.Pool(1) as pool:
        return pool.apply_async(question, of).get(limit)
