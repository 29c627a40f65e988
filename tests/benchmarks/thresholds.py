"""Where the ways on the two sides of each threshold of `invfunc/thresholds.py` cross on the present device."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any
from unittest import mock

from invfunc import thresholds
from invfunc.linear_algebra import autocorrelation
from invfunc.linear_algebra.autocorrelation import patches
from invfunc.linear_algebra.contract import outer

from .crossings import BESTS, CROSSINGS, Best, Crossing, Settings, displacing, first, normal
from .measure import medians
from .peers import Call
from .report import Cells, announce, print_table

THRESHOLDS = "thresholds"
LIMITS = {
    "of time": "TRIED_PASSES",
    "of memory": "SHARES KEPT_READ FACTORED MOVED HESSIAN",
    "of rounding": "CANCELS DISPLACED_DTYPES TOTAL_DTYPES",
    "of what is looked at": "CHECKED",
    "of the ways above, which have the others as estimates": "ORDERS GRADIENT_DTYPES GRADIENT_ON GRADIENT_BLOCKS "
    "MIRRORED_BLOCKS MIRRORED_ON ADDED_ON HUGE_ON APART_ON ELSEWHERE "
    "DISPLACED_ON TOTAL_ON ASSEMBLE CALL SLICES PAYS LOOK LOOK_ENTRY LOOKS LOOK_ON CLASS COLUMN SHARED "
    "TAKEN NEAR FACTORED_COST NARROWER NARROWEST",
}


def _at(settings: Settings, call: Call) -> Call:
    """A call with some thresholds at other values; decisions that are kept were made in the first one."""

    def run() -> Any:
        before = {name: getattr(thresholds, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(thresholds, name, value)
            return call()
        finally:
            for name, value in before.items():
                setattr(thresholds, name, value)

    return run


def measured(name: str, options: argparse.Namespace) -> None:
    """Print for each threshold what is stated and where its ways cross here."""
    lines = []
    for crossing in CROSSINGS:
        if not crossing.everywhere and options.device.type not in getattr(thresholds, crossing.on or ""):
            continue
        announce(name, crossing.name)
        lines.append(_crossed(crossing, options))
    print(
        f"{name}: seconds of the way below over those of the way from it on; {options.device}, one thread, median of "
        f"{options.repeats} calls"
    )
    print_table(lines)
    print()
    print_table([_best(best, options) for best in BESTS])
    print()
    print_table([_exact(options)])
    for kind, names in LIMITS.items():
        print(f"Not measured, limits {kind}: {', '.join(f'{n} {getattr(thresholds, n)}' for n in names.split())}")


def _crossed(crossing: Crossing, options: argparse.Namespace) -> Cells:
    calls: dict[tuple[int, str], Call] = {}
    for size in crossing.sizes:
        for way in ("near", "far"):
            calls[size, way] = _at(crossing.way(way, options.device), crossing.make(size, way, options.device))
            calls[size, way]()
    times = medians(calls, dict.fromkeys(calls, options.repeats), options.device, partial(announce, crossing.name))
    ratios = {size: times[size, "near"] / times[size, "far"] for size in crossing.sizes}
    return {
        "threshold": crossing.name,
        "stated": crossing.stated(options.device),
        "here": first(crossing.sizes, lambda size: ratios[size] > 1),
        "of": crossing.unit,
        "near / far": ", ".join(f"{size}: {ratio:.2f}" for size, ratio in ratios.items()),
    }


def _best(best: Best, options: argparse.Namespace) -> Cells:
    stated = best.stated(options.device)
    values, call = [*best.values, stated], best.make(options.device)
    calls = {value: _at(best.at(value, options.device), call) for value in values}
    call()
    times = medians(calls, dict.fromkeys(calls, options.repeats), options.device, partial(announce, best.name))
    least = min(times, key=times.__getitem__)
    return {
        "threshold": best.name,
        "stated": str(stated),
        "fastest here": str(least),
        "of": best.unit,
        "seconds / those of the fastest": ", ".join(f"{v}: {times[v] / times[least]:.2f}" for v in sorted(times)),
    }


def _exact(options: argparse.Namespace) -> Cells:
    """How far sums over so many positions at once are off in float32."""
    x, problem = normal(64, 4, 32, 32, device=options.device).abs(), ((3, 3), [(1, 1)] * 2, (1, 1))
    read = patches(x.double(), problem[0], (1, 1), *problem[1:])
    wanted, found = outer(read), {}
    for at in (1024, 4096, 16384, 65536):
        with mock.patch.object(autocorrelation, "_cost", displacing(autocorrelation._cost)):
            gram = _at(
                {"EXACT": at, "DISPLACED_ON": (x.device.type,)}, partial(autocorrelation.patches_gram, x, *problem)
            )()
        found[at] = ((gram.double() - wanted).abs().max() / wanted.abs().max()).item()
    each = ", ".join(f"{at}: {error:.0e}" for at, error in found.items())
    return {"threshold": "EXACT", "stated": str(thresholds.EXACT), "here": "-", "of": "relative error", "each": each}
