"""The table of CUDA graphs: milliseconds and peak memory of statistics as they are, and captured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

import invfunc
from invfunc.testing import peak_memory

from .measure import medians
from .peers import Problem, by_leaf, plain_gradient, vmap_grad
from .problems import gpt, resnet_18, three_c_three_d
from .report import announce, mebibytes, number, print_table

GRAPHS = "graphs"


def _of(make: Callable[[], Problem], samples: int) -> Callable[[], Problem]:
    """A problem of images with so many samples."""

    def made() -> Problem:
        problem = make()
        x = torch.rand(samples, *problem.x.shape[1:])
        return Problem(problem.model, problem.loss, x, torch.randint(10, (samples,)))

    return made


PROBLEMS = {
    "3c3d, N = 128": _of(three_c_three_d, 128),
    "ResNet-18, N = 16": resnet_18,
    "ResNet-18, N = 128": _of(resnet_18, 128),
    "GPT, N = 8": gpt,
    "GPT, N = 32": partial(gpt, 32),
}
STATISTICS: dict[str, Callable[[Problem], Callable]] = {
    "batch_l2_grad": lambda p: invfunc.batch_l2_grad(p.loss_fn),
    "variance": lambda p: invfunc.variance(p.loss_fn),
    "clipped_grad": lambda p: invfunc.clipped_grad(p.loss_fn, 1.0),
}
OF_FEW_OUTPUTS: dict[str, Callable[[Problem], Callable]] = {
    "kfac_exact": lambda p: invfunc.kfac(p.f, p.loss, fisher="exact"),
    "diag_ggn": lambda p: invfunc.diag_ggn(p.f, p.loss),
}


def graphs(name: str, options: argparse.Namespace) -> None:
    """Measure the table and print it."""
    if options.device.type != "cuda":
        print(f"{name}: CUDA graphs want a CUDA device (--device cuda)\n")
        return
    for called, make in PROBLEMS.items():
        problem = make().to(options.device)
        args = problem.params, problem.x, problem.y
        calls = {"gradient": plain_gradient(problem)}
        for row, statistic in (STATISTICS | OF_FEW_OUTPUTS if "3c3d" in called else STATISTICS).items():
            announce(name, f"{called}: {row}")
            calls[row] = partial(statistic(problem), *args)
            calls[f"{row}, captured"] = partial(invfunc.compiled(statistic(problem), backend="cudagraphs"), *args)
        calls["vmap(grad), squared"] = vmap_grad(by_leaf(lambda each: each.square().sum(0)))(problem)
        for _ in range(3):  # in which graphs are captured
            for call in calls.values():
                call()
        times = medians(calls, dict.fromkeys(calls, options.repeats), options.device, partial(announce, name))
        lines = []
        for row, call in calls.items():
            of_gradient = number(times[row] / times["gradient"])
            peak = mebibytes(peak_memory(call, device=options.device)[1])
            lines.append({"": row, "ms": number(times[row] * 1e3), "gradients": of_gradient, "MiB": peak})
        announce(name, "")
        print(f"{name}: {called}; {options.device}, median of {options.repeats} rounds")
        print_table(lines)
    print("MiB: over what is in use before; a graph keeps the memory of its operations between calls\n")
