"""Certify results that are right, of drawn problems, and count the alarms."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.alarms.calls import Call, drawn

DTYPES = ("float64", "float32", "float16", "bfloat16")
AT_ONCE = 250
"""Calls that hypothesis draws by one seed."""


def outcomes(
    dtype: str, number: int, first: int, scale: float = 1.0, calls: int = AT_ONCE
) -> list[tuple[Call, str, str]]:
    """What comes of a block of calls in a precision, which has a seed of its own."""
    done = list[tuple[Call, str, str]]()

    @seed(f"{first}, {dtype}, {number}")
    @settings(
        max_examples=calls,
        phases=[Phase.generate],
        derandomize=False,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn(getattr(torch, dtype), scale))
    def look(call: Call) -> None:
        done.append((call, *call.outcome()))

    look()
    return done


def counted(done: Iterable[tuple[Call, str, str]]) -> tuple[Counter[str], Counter[str]]:
    """How often each outcome was, and each reason of a refusal; an alarm is printed with the call."""
    came, reasons = Counter[str](), Counter[str]()
    for call, what, said in done:
        came[what] += 1
        if what == "alarm":
            print(f"{said}\n    {call}.check()", flush=True)
        elif said:
            reasons[f"{what}: {said[:90]}"] += 1
    return came, reasons


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.alarms", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help=f"in each precision, rounded up to some {AT_ONCE}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="one of the precisions; else all")
    parser.add_argument("--scale", type=float, default=1, help="of the parameters; large ones saturate a softmax")
    parser.add_argument("--part", default="1/1", help="which part of all calls, as 1/4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    numbers = range(-(-options.calls // AT_ONCE))[part - 1 :: parts]
    rows, why = [], Counter[str]()
    for dtype in options.dtype or DTYPES:
        started = time.perf_counter()
        blocks = (outcomes(dtype, number, options.seed, options.scale) for number in numbers)
        came, reasons = counted(outcome for block in blocks for outcome in block)
        rows.append((dtype, came, time.perf_counter() - started))
        why += reasons
        print(f"{dtype}: {dict(came)}", flush=True)
    print(f"\n{'precision':10} {'calls':>6} {'alarms':>6} {'refused':>8} {'by the certificate':>19} {'seconds':>8}")
    for dtype, came, seconds in rows:
        refused, alone = came["refused"], came["refused by the certificate"]
        print(f"{dtype:10} {came.total():6} {came['alarm']:6} {refused:8} {alone:19} {seconds:8.0f}")
    print("", *(f"{count:6} {reason}" for reason, count in why.most_common()), sep="\n")
    print("\nan alarm is seen again by its line, behind `from tests.alarms.calls import *`")
    return int(any(came["alarm"] for _, came, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
