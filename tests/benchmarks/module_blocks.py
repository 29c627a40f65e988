"""The table of blocks as people train them: couplings of modules, with dropout and batch norm in train mode."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import invfunc

from .measure import medians, once
from .report import announce, number, over, print_table

MODULE_BLOCKS = "module_blocks"
DEPTH, ROWS = 16, 32
KINDS = ["linear", "dropout", "batch norm", "both"]
WIDTHS = 32, 128
STAGE = 6, 64, 32, 16
"""Blocks, rows, channels and pixels of a stage of a RevNet."""


def _part(kind: str, width: int) -> nn.Module:
    norm = [nn.BatchNorm1d(width)] if kind in ("batch norm", "both") else []
    drop = [nn.Dropout(0.1)] if kind in ("dropout", "both") else []
    return nn.Sequential(nn.Linear(width, width), *norm, nn.Tanh(), *drop)


def _residual(channels: int) -> nn.Module:
    layers = [(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
    return nn.Sequential(*layers[0], *layers[1])


def _ways(parts: list[tuple[nn.Module, nn.Module]], x: torch.Tensor) -> dict[str, Callable[[], None]]:
    """The ways to run couplings of parts, forwards and backwards."""
    plain = [invfunc.additive_coupling(f, g, split_dim=1) for f, g in parts]
    blocks = [invfunc.invertible_checkpoint(pair) for pair in plain]
    kept = [lambda h, pair=pair: checkpoint(pair, h, use_reentrant=False) for pair in plain]
    found = {"plain": plain, "torch's checkpoint": kept, "blocks": blocks, "chain": [invfunc.chain(*blocks)]}
    if importlib.util.find_spec("memcnn"):
        import memcnn

        wrapped = (memcnn.AdditiveCoupling(f, g, split_dim=1) for f, g in parts)
        found["memcnn"] = [memcnn.InvertibleModuleWrapper(one, keep_input=False) for one in wrapped]
    weights = [p for pair in parts for module in pair for p in module.parameters()]

    def call(blocks: list[Callable]) -> None:
        for p in weights:
            p.grad = None
        h = x.clone().requires_grad_() * 1
        for block in blocks:
            h = block(h)
        h.square().mean().backward()

    return {name: (lambda blocks=blocks: call(blocks)) for name, blocks in found.items()}


def module_blocks(name: str, options: argparse.Namespace) -> None:
    """Print the time of blocks over that of plain couplings, and of the first call over that of a later one."""
    device, lines = options.device, []
    cases = [(f"{kind}, width {width}", kind, width) for width in WIDTHS for kind in KINDS]
    for title, kind, width in [*cases, ("a stage of a RevNet", "", 0)]:
        torch.manual_seed(0)
        depth, rows, channels, pixels = STAGE
        if width:
            x, parts = (
                torch.randn(ROWS, width),
                [(_part(kind, width // 2), _part(kind, width // 2)) for _ in range(DEPTH)],
            )
        else:
            half = channels // 2
            x, parts = (
                torch.randn(rows, channels, pixels, pixels),
                [(_residual(half), _residual(half)) for _ in range(depth)],
            )
        for module in (module for pair in parts for module in pair):
            module.to(device)
        calls = _ways(parts, x.to(device))
        first = {key: once(call, device) for key, call in calls.items()}
        for call in [*calls.values()] * 2:
            call()
        seconds = medians(calls, dict.fromkeys(calls, options.repeats), device, lambda text: announce(name, text))
        line = {"": title, "plain, ms": number(1e3 * seconds["plain"])}
        line |= {key: number(over(second, seconds["plain"])) for key, second in seconds.items() if key != "plain"}
        lines.append(line | {"first call": number(first["blocks"] / seconds["blocks"])})
    announce(name, "")
    print(
        f"{name}: additive couplings of modules in train mode, over plain; {device}, one thread, median of "
        f"{options.repeats} calls"
    )
    print_table(lines)
    print("first call: of a block, over a later one\n")
