"""`python -m invfunc`: the main job on real data, small enough to read; tests/benchmarks owns the numbers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from invfunc import additive_coupling, batch_l2_grad, chunked, diag_ggn, functional, repeated, variance
from invfunc.errors import ArgumentError
from invfunc.testing.memory import peak_memory, return_freed_memory

SAMPLES, SIDE, FILTERS = 5, 32, 10
BLOCKS, WIDTH, ROWS = 64, 32, 4096
OUTPUTS = SIDE * SIDE
TOLERANCE = 1e-3  # float32 sums in another order; a wrong result is off by much more
Params = dict[str, Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tour; `--help` says what it takes."""
    options = _parse(argv)
    try:
        from sklearn.datasets import load_digits
        from tqdm import tqdm
    except ModuleNotFoundError as missing:
        sys.exit(f"python -m invfunc: {missing.name} is missing: python -m pip install 'invfunc[notebooks]'")

    def progress(items: Iterable, title: str) -> Iterable[Any]:
        return tqdm(items, title, leave=False, disable=None)  # None: only on a terminal

    return_freed_memory()  # first: what malloc keeps for reuse would count as in use, and holes would fill
    torch.manual_seed(0)
    torch.set_num_threads(1)  # steady times, on a busy machine too
    pixels = torch.from_numpy(load_digits(return_X_y=True)[0]).float().view(-1, 1, 8, 8) / 16
    x = F.interpolate(pixels[:SAMPLES], size=SIDE, mode="bilinear").to(options.device)
    layers = nn.Conv2d(1, FILTERS, 3), nn.Sigmoid(), nn.ConvTranspose2d(FILTERS, 1, 3), nn.Flatten()
    model = nn.Sequential(*layers).to(options.device)
    f, params = functional(model)
    batch = params, x, x.flatten(1)  # an auto-encoder's target is its input
    lines = [*_statistics(f, batch, options.chunks), *_chains(options.device)]
    seconds = [_seconds(line.call) for line in progress(lines, "timing")]
    weighed = [_peak(line.call, options.device) for line in progress(lines, "weighing")]
    results, mebibytes = zip(*weighed, strict=True)
    differences = [_difference(result, line.right(results)) for result, line in zip(results, lines, strict=True)]

    n = len(options.chunks)
    headline = _headline(seconds[0], seconds[1], mebibytes[0], mebibytes[1], max(differences[: n + 1]))
    print(f"\nExact curvature (GGN diagonal) by structure, beside the plain way:\n{headline}\n")
    numbers = f"{SAMPLES} digits of {OUTPUTS} outputs, {sum(p.numel() for p in params.values())} parameters"
    print(f"{numbers}; {options.device}, one thread\n")
    print(f"{'':<44}{'seconds':>9}{'peak MiB':>11}{'difference*':>14}")
    for line, *row in zip(lines, seconds, mebibytes, differences, strict=True):
        print("{:<44}{:>9.3f}{:>11.1f}{:>13.0e}".format(line.label, *row))
    print("\n* The largest difference, relative to the largest entry. Plain ways are compared with that by structure,")
    print("  per-sample statistics with vmap(grad), and the gradient of the reversible blocks with plain autograd.")
    if not all(difference <= TOLERANCE for difference in differences):  # false for nan, too
        sys.exit("python -m invfunc: the results disagree")


class _Line(NamedTuple):
    """A line of the table, and what is right for its result, which may be the result of another line."""

    label: str
    call: Callable[[], Params]
    right: Callable[[Sequence[Params]], Params]


def _statistics(f: Callable, batch: tuple[Params, Tensor, Tensor], chunks: Sequence[int]) -> list[_Line]:
    """Curvature in several ways, and two statistics of per-sample gradients."""

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f(params, x), y)

    def of_one(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return loss(params, x[None], y[None]) / SAMPLES

    def plainly(statistic: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Params]], Params]:
        gradients = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))
        return lambda _: {name: statistic(g) for name, g in gradients(*batch).items()}

    dense = diag_ggn(f, F.mse_loss, method="dense")
    plain = [(f"  the plain way, in {n} chunk{'s' * (n > 1)} of the outputs", chunked(dense, n)) for n in chunks]
    lines = [
        _Line(label, partial(t, *batch), lambda results: results[0])
        for label, t in [("exact curvature (GGN diagonal), by structure", diag_ggn(f, F.mse_loss)), *plain]
    ]
    variances, norms = plainly(lambda g: g.var(0, correction=0)), plainly(lambda g: g.flatten(1).square().sum(1))
    lines.append(_Line("variance of the per-sample gradients", partial(variance(loss), *batch), variances))
    lines.append(_Line("squared norms of the per-sample gradients", partial(batch_l2_grad(loss), *batch), norms))
    return lines


def _chains(device: torch.device) -> list[_Line]:
    """The gradient of a deep reversible network, whose memory is that of one block, and by plain autograd."""
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(BLOCKS, WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(device) for _ in "FG"]
    state = tuple(torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in "ab")

    def part(b: Tensor, p: Tensor) -> Tensor:
        return torch.tanh(b @ p) / BLOCKS

    def plain(state: tuple[Tensor, ...], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        a, b = state
        for p, q in zip(*weights, strict=True):
            a = a + part(b, p)
            b = b + part(a, q)
        return a, b

    def gradient(net: Callable[..., tuple[Tensor, Tensor]]) -> Params:
        own = tuple(w.clone().requires_grad_() for w in weights)
        a, b = net(state, own)
        return dict(zip("FG", torch.autograd.grad((a * b).sum(), own), strict=True))

    reversible = repeated(additive_coupling(part, part))
    return [
        _Line(f"gradient of {BLOCKS} reversible blocks", partial(gradient, reversible), lambda results: results[-1]),
        _Line("  the same by plain autograd", partial(gradient, plain), lambda results: results[-1]),
    ]


def _headline(ours: float, plain: float, mebibytes: float, most: float, apart: float) -> str:
    """The first lines, in words."""
    time = f"{plain / ours:.0f} times faster" if plain >= 1.5 * ours else f"{ours / plain:.1f} times the time"
    memory = f"{most / mebibytes:.0f} times less memory" if most >= 1.5 * mebibytes else "as much memory"
    same = f"the same numbers (to {apart:.0e})" if apart <= TOLERANCE else "OTHER NUMBERS"
    return ", ".join([time, *[memory] * (mebibytes == mebibytes), same])


def _on_cpu(call: Callable[[], Params]) -> Params:
    return {name: tensor.cpu() for name, tensor in call().items()}  # which waits for the device


def _seconds(call: Callable[[], Params]) -> float:
    times: list[float] = []  # the first call plans the contractions and warms the allocator
    while len(times) < 3 and sum(times) < 1:
        start = time.perf_counter()
        _on_cpu(call)
        times.append(time.perf_counter() - start)
    return min(times)


def _peak(call: Callable[[], Params], device: torch.device) -> tuple[Params, float]:
    """One run's result, and its peak in MiB."""
    try:
        result, peak = peak_memory(lambda: _on_cpu(call), device=device)
        return result, peak / 2**20
    except ArgumentError:  # no meter for this device or system; the rest of the table still holds
        return _on_cpu(call), float("nan")


def _difference(result: Params, expected: Params) -> float:
    pairs = [(result[name], tensor.cpu()) for name, tensor in expected.items()]
    return max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m invfunc",
        description="Takes the exact GGN diagonal of the reconstruction error of a convolutional auto-encoder, on "
        "handwritten digits, by structure and the plain way, two statistics of its per-sample "
        "gradients, and the gradient of a deep reversible network. Prints what each costs, and if they agree.",
    )
    add, ways = parser.add_argument, "how many chunks the outputs are divided into the plain way, default: 1 4 16 64"
    add("--device", type=torch.device, default="cpu", help="torch device, default: %(default)s")
    add("--chunks", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help=ways)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
