"""The table of memory budgets: what is promised, and what a process takes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from . import budget_case
from .budget_case import CASES
from .measure import ROOT
from .report import announce, mebibytes, number, print_table, verdict

MEMORY_BUDGET = "memory-budget"
BUDGETS = {"1.1 x least": 1.1, "2 x least": 2.0, "plenty": 1e3}
USED = 0.6
"""The part of a promise that is used at least where the work is larger than it."""
BEHIND = 1.15
"""How many times as long as the fastest chunks that were found by hand a call takes at most."""
SPREAD = ("variance", "clipped_grad", "diag_ggn drawn", "ekfac", "diag_ggn", "diag_hessian")
"""Statistics of the table without `--part`: one of each way to compute."""


def budgets(name: str, options: argparse.Namespace) -> None:
    """Print the table."""
    cases = [case for case in CASES if case[1] in SPREAD and case[0] != "residual"]
    if options.part is not None:
        cases = CASES[options.part[0] - 1 :: options.part[1]]
    print(f"{name}: MiB over what was in use before the call; a process for each budget of a case, one thread")
    lines = [line for case in cases for line in _lines(name, case, options.limit)]
    announce(name, "")
    if not lines:
        return
    print_table(lines)
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
    told = _measured(case, [], limit)
    if told is None:
        return
    fewer, least = told
    for kind, factor in BUDGETS.items():
        budget = int(factor * least)
        if (told := _measured(case, [str(budget)], limit)) is None:
            continue
        line = dict.fromkeys(HEADS, "-") | {"": " ".join(case) + fewer, "budget": kind, "MiB": mebibytes(budget)}
        if isinstance(told[1], int):
            yield line | {"chunks": f"asks for {mebibytes(told[1])} MiB"}
            continue
        why, at_first, first, later, choice, run, behind, best = told[1]
        chunks, _, predicted = why.partition(", at most ")
        promised, used = float(predicted.split("MiB")[0]) * 2**20, max(first, later) / budget
        spelled = " and ".join(f"{n} {axis}" for axis, n in at_first.items()) or "one piece"
        after = chunks.removeprefix("in ").replace(" chunks of", "")
        line |= {"chunks": spelled if after == spelled else f"{spelled}, then {after}"}
        line["predicted"] = mebibytes(promised)
        line |= {"first": mebibytes(first), "later": mebibytes(later)}
        line["within"] = verdict(max(first / budget, later / min(budget, promised)), 1)
        whole = "in one piece" in why
        if not whole:
            line["used"] = number(used) + (" NO" if used < USED else "")
        line |= {"s to choose": number(choice), "s": number(run)}
        if behind is not None:
            line |= {"over best by hand": verdict(behind, BEHIND), "that": best}
        yield line
        if whole:  # and would be with more
            return


def _measured(case: tuple[str, str], budget: list[str], limit: int) -> Any:
    """What a process of its own says, if it does in time."""
    command = [sys.executable, "-m", budget_case.__name__, *case, *budget]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(case)}: not done in {limit} s")
        return None
    if done.returncode:
        print(f"{' '.join(case)}: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])
