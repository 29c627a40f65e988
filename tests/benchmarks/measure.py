"""Seconds from interleaved calls in this process, peak memory from a process a case."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

import invfunc
from invfunc.testing import peak_memory, return_freed_memory

from .peers import Call, Result

Key = TypeVar("Key")

ROOT = Path(__file__).resolve().parents[2]


def medians(
    calls: Mapping[Key, Call], repeats: Mapping[Key, int], device: torch.device, announce: Callable[[str], None]
) -> dict[Key, float]:
    """The median seconds of each call over its number of rounds of all of them, so that a slow moment hits all.

    Each round has an order of its own: the first large call after small ones pays for fresh pages. On a CPU the
    seconds are those of this process, on its one thread, whatever else the machine does.
    """
    shuffle = random.Random(0).sample
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    rounds = max(repeats.values())
    for repeat in range(rounds):
        announce(f"round {repeat + 1} of {rounds}")
        taking_part = [key for key in calls if repeat < repeats[key]]
        for key in shuffle(taking_part, len(taking_part)):
            seconds[key].append(once(calls[key], device))
    return {key: statistics.median(times) for key, times in seconds.items()}


def once(call: Call, device: torch.device) -> float:
    """The seconds of one call: of this process on a CPU, until all that it began has ended on a GPU."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def peak_in_a_process(case: str, device: torch.device) -> float:
    """The peak memory of a case in bytes, from a fresh process; NaN, and its last words, if that fails."""
    command = [sys.executable, "-m", __package__, "--memory-case", case, "--device", str(device)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        print(f"memory of {case}: {words[-1]}", file=sys.stderr)
        return math.nan
    return int(done.stdout)


def peak_here(call: Call, device: torch.device) -> int:
    """The peak memory of the second call, in bytes: the first loads libraries and plans contractions."""
    return_freed_memory()
    call()
    return peak_memory(call, device=device)[1]


def difference(result: Result, reference: Result) -> float:
    """The largest difference of two results, relative to the largest entry of the reference's leaf."""
    leaves = [(leaf - other).abs().max() / other.abs().max() for leaf, other in _pairs(result, reference)]
    return torch.stack(leaves).max().item()


def _pairs(result: Result, reference: Result) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The leaves of two results, those of dicts by their names, and factors one by one."""
    if isinstance(result, invfunc.kronecker.Kronecker):
        result = result.factors
    if isinstance(result, torch.Tensor):
        yield result, reference
    else:
        for key in result if isinstance(result, dict) else range(len(result)):
            yield from _pairs(result[key], reference[key])
