"""Python calls of the package in one warm call of a statistic of a small model, which are most of its time."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc

PACKAGE = str(Path(invfunc.__file__).parent)
FIGURES = {
    "variance": (invfunc.variance, 397, 27, 22),
    "batch_l2_grad": (invfunc.batch_l2_grad, 383, 26, 22),
    "diag_ggn": (invfunc.diag_ggn, 465, 33, 22),
    "kfac": (lambda f: invfunc.kfac(f, mc_samples=1, generator=torch.Generator()), 933, 40, 27),
}
"""At most so many calls, files and nested calls: what stands today.

Wanted are 300, 20 and 14 of `variance`, and 400 calls of the others of columns.
"""


def cost(t, *args):
    """The calls of the package, in how many files, and how deep they are nested."""
    calls, files, depth, most = Counter(), set(), 0, 0

    def watch(frame, event, arg):
        nonlocal depth, most
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and event in ("call", "return"):
            depth += 1 if event == "call" else -1
            most = max(most, depth)
            if event == "call":
                calls[file, frame.f_code.co_name] += 1
                files.add(file)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        t(*args)
    finally:
        sys.setprofile(before)
    return calls.total(), len(files), most


@pytest.mark.quick
@pytest.mark.parametrize("name", FIGURES)
def test_a_warm_call_is_short(name):
    make, *most = FIGURES[name]
    torch.manual_seed(0)
    f, params = invfunc.functional(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    t, args = make(lambda p, x, y: F.cross_entropy(f(p, x), y)), (params, torch.randn(5, 8), torch.randint(3, (5,)))
    t(*args), t(*args)
    found = cost(t, *args)
    assert all(x <= y for x, y in zip(found, most, strict=True)), found
