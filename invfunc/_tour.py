"""`python -m invfunc`: the main job on real data, small enough to read; tests/benchmarks owns the numbers."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from invfunc import batch_grad, chunked, diag_ggn, functional, variance
from invfunc.errors import ArgumentError
from invfunc.testing.memory import peak_memory, return_freed_memory

SAMPLES, SIDE, FILTERS, STEPS = 5, 32, 10, 60
OUTPUTS = SIDE * SIDE
TOLERANCE = 1e-3  # float32 sums in another order; a wrong result is off by much more
Params = dict[str, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tour; `--help` says what it takes."""
    options = _parse(argv)
    try:
        from sklearn.datasets import load_digits
        from tqdm import tqdm

        from invfunc._tour_picture import save_picture
    except ModuleNotFoundError as missing:
        sys.exit(f"python -m invfunc: {missing.name} is missing: python -m pip install 'invfunc[notebooks]'")

    def progress(items: Iterable, title: str) -> Iterable[Any]:
        return tqdm(items, title, leave=False, disable=None)  # None: only on a terminal

    torch.manual_seed(0)
    torch.set_num_threads(1)  # steady times, on a busy machine too
    pixels = torch.from_numpy(load_digits(return_X_y=True)[0]).float().view(-1, 1, 8, 8) / 16
    digits = F.interpolate(pixels, size=SIDE, mode="bilinear").to(options.device)
    layers = nn.Conv2d(1, FILTERS, 3), nn.Sigmoid(), nn.ConvTranspose2d(FILTERS, 1, 3), nn.Flatten()
    model = nn.Sequential(*layers).to(options.device)
    before, after = _train(model, digits, progress(range(STEPS), "training"))
    print(f"Auto-encoder of {len(digits)} digits: loss {before:.3f} -> {after:.4f} in {STEPS} steps.")

    f, params = functional(model)
    x = digits[:SAMPLES]
    batch = params, x, x.flatten(1)  # an auto-encoder's target is its input

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f(params, x), y)

    dense = diag_ggn(f, F.mse_loss, method="dense")
    transforms = {
        "GGN diagonal, by itself": diag_ggn(f, F.mse_loss),
        **{f"GGN diagonal, dense, {n} pass{'es' * (n > 1)}": chunked(dense, n) for n in options.chunks},
        "gradient variance": variance(loss),
    }
    seconds = [_seconds(t, batch) for t in progress(transforms.values(), "timing")]
    return_freed_memory()  # only now: it makes allocations slower
    weighed = [_peak(t, batch) for t in progress(transforms.values(), "weighing")]
    results, mebibytes = zip(*weighed, strict=True)
    plain = {name: share.var(0, correction=0) for name, share in batch_grad(loss)(*batch).items()}
    expected = [results[0]] * (len(results) - 1) + [plain]
    differences = [_difference(result, wanted) for result, wanted in zip(results, expected, strict=True)]

    print(f"N = {SAMPLES}, {OUTPUTS} outputs, {sum(p.numel() for p in params.values())} parameters.\n")
    print(f"{f'on {options.device}, one thread':<34}{'seconds':>9}{'MiB over base':>16}{'difference*':>14}")
    for row in zip(transforms, seconds, mebibytes, differences, strict=True):
        print("{:<34}{:>9.3f}{:>16.1f}{:>13.0e}".format(*row))
    print("\n* from the first row (the variance: from torch.var of batch_grad), over a leaf's largest entry")
    images = torch.stack([x[:, 0], f(params, x).unflatten(1, (SIDE, SIDE))]).cpu()
    costs = {"seconds": seconds[:-1], "peak memory over base [MiB]": mebibytes[:-1]}
    save_picture(options.output, images, results[0], results[-1], options.chunks, costs)
    print(f"picture: {options.output}")
    if not all(difference <= TOLERANCE for difference in differences):  # false for nan, too
        sys.exit("python -m invfunc: the results disagree")


def _train(model: nn.Module, digits: Tensor, steps: Iterable) -> tuple[float, float]:
    """Train for some steps and return the first and the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in steps:
        x = digits[torch.randint(len(digits), (32,)).to(digits.device)]
        loss = F.mse_loss(model(x), x.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def _run(transform: Callable[..., Params], batch: tuple) -> Params:
    return {name: leaf.cpu() for name, leaf in transform(*batch).items()}  # cpu() waits for the device


def _seconds(transform: Callable[..., Params], batch: tuple) -> float:
    _run(transform, batch)  # plans the contractions and warms the allocator
    times = []
    for _ in range(3):
        start = time.perf_counter()
        _run(transform, batch)
        times.append(time.perf_counter() - start)
    return median(times)


def _peak(transform: Callable[..., Params], batch: tuple) -> tuple[Params, float]:
    """One run's result, and its peak in MiB."""
    try:
        result, peak = peak_memory(lambda: _run(transform, batch), device=batch[1].device)
        return result, peak / 2**20
    except ArgumentError:  # no meter for this device or system; the rest of the table still holds
        return _run(transform, batch), float("nan")


def _difference(result: Params, expected: Params) -> float:
    pairs = [(result[name], leaf.cpu()) for name, leaf in expected.items()]
    return max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage in front


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m invfunc",
        description="Trains a small convolutional auto-encoder on handwritten digits, then takes the exact "
        "GGN diagonal of its reconstruction error, as the library does by itself and in exact numbers of "
        "passes, and the variance of its per-sample gradients. Prints what each costs, and if they agree.",
    )
    add = parser.add_argument
    add("--device", type=_device, default="cpu", help="torch device, default: %(default)s")
    add(
        "--chunks",
        type=_passes,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="numbers of passes, default: 1 4 16 64",
    )
    add(
        "--output",
        type=_picture,
        default="invfunc-tour.png",
        metavar="PNG",
        help="picture, default: %(default)s",
    )
    options = parser.parse_args(argv)
    options.chunks = sorted(set(options.chunks))
    return options


def _passes(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= OUTPUTS):
        raise argparse.ArgumentTypeError(f"a number of passes from 1 to {OUTPUTS} is wanted, not {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        torch.zeros(1, device=text).item()  # some names parse, but are absent here or hold no data ("meta")
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"torch cannot compute on {text!r} here") from None
    return torch.device(text)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"a name that ends in .png is wanted, not {text!r}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return path
