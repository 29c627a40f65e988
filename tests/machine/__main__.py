"""Build random compositions until the time is out."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine.compositions import Compositions

AT_ONCE, STEPS = 50, 12
"""Programs of a seed, and their steps."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machine", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first one; each goes for fifty programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, until, steps = options.seed, time.monotonic() + 60 * options.minutes, Counter[str]()

    class Counted(Compositions):
        def _agree(self, built):
            found = super()._agree(built)
            steps[f"of {built.depth} derivatives and vmaps"] += 1
            return found

    how = settings(
        max_examples=AT_ONCE,
        stateful_step_count=STEPS,
        derandomize=False,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    while time.monotonic() < until:
        print(f"seed {number}: {sum(steps.values())} compositions compared so far", flush=True)
        run_state_machine_as_test(seed(number)(Counted), settings=how)
        number += 1
    print(f"{sum(steps.values())} compositions, all as their loops: {dict(steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
