"""The tables: their problems, their rows, and what is to be reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import invfunc

from .first_order import FIRST_ORDER, PHYSICAL
from .peers import BACKPACK, FUNC, OURS, Peer, Problem, backpack_diag_ggn, plain_gradient, transformed, vmap_jacrev
from .problems import all_cnn_c, autoencoder, dense, gpt, lstm, resnet_18, three_c_three_d, tiny, tokens, transformer
from .second_order import SECOND_ORDER

Case = tuple[str, str]  # row, peer
Numbers = Mapping[Case, float]
"""Seconds or bytes of each case, NaN where the peer fails."""
Base = Callable[[Numbers, str], float | None]
"""What the numbers of a row are multiples of."""

GRADIENT: Case = ("one plain gradient", "torch")
FEW = 3
"""How many calls of a slow row are timed."""


@dataclass(frozen=True)
class Goal:
    """Ours is to be at most so many times a base."""

    most: float
    base: Base


@dataclass(frozen=True)
class Row:
    """One statistic, how each peer computes it, and what ours is to reach."""

    name: str
    peers: dict[str, Peer]
    time: Goal | None = None
    memory: Goal | None = None
    slow: bool = False
    """Whether a few calls have to do."""


@dataclass(frozen=True)
class Table:
    """Rows of one problem; their times are told as multiples of `unit`, which is called `unit_name`."""

    title: str
    problem: Callable[[], Problem]
    rows: list[Row]
    legend: str
    unit: Base
    unit_name: str
    memory: bool = True
    """Whether memory is worth a process for each case."""
    rounds: int = 1
    """Of calls, for each round that is asked for: short calls take more of them."""

    def repeats(self, asked: int) -> dict[str, int]:
        """How many calls of each row are timed."""
        slow = {row.name: min(asked, FEW) for row in self.rows if row.slow}
        return {row: asked * self.rounds for row, _ in self.peers()} | slow

    def peers(self) -> dict[Case, Peer]:
        """Each peer by its row's name and its own."""
        peers = {(row.name, name): peer for row in self.rows for name, peer in row.peers.items()}
        return {GRADIENT: plain_gradient} | peers


def of_gradient(numbers: Numbers, row: str) -> float | None:
    """One plain gradient."""
    return numbers.get(GRADIENT)


def of_backpack(numbers: Numbers, row: str) -> float | None:
    """BackPACK in the same row."""
    return numbers.get((row, BACKPACK))


def of_func(numbers: Numbers, row: str) -> float | None:
    """`vmap(grad)` in the same row."""
    return numbers.get((row, FUNC))


def of_ours(*rows: str) -> Base:
    """Ours in other rows, together."""
    return lambda numbers, row: sum(numbers.get((other, OURS), math.nan) for other in rows)


def of_our_best(numbers: Numbers, row: str) -> float | None:
    """The fastest other row of ours."""
    return min(number for (name, peer), number in numbers.items() if peer == OURS and name != row)


def of_a_second(numbers: Numbers, row: str) -> float:
    """Seconds as they are."""
    return 1.0


def of_a_millisecond(numbers: Numbers, row: str) -> float:
    """Seconds as milliseconds."""
    return 1e-3


def _chunked_row(n: int) -> Row:
    peers = {
        OURS: transformed(lambda p: invfunc.chunked(invfunc.diag_ggn(p.f, p.loss, method="dense"), n)),
        BACKPACK: backpack_diag_ggn(n),
        FUNC: vmap_jacrev(n),
    }
    return Row(f"chunks={n}", peers, Goal(0.8, of_backpack), memory=Goal(1, of_backpack))


def _without_func(name: str) -> dict[str, Peer]:
    """The peers of a row, without one that would take very long."""
    return {peer: build for peer, build in SECOND_ORDER[name].items() if peer != FUNC}


def _rows(limits: dict[str, float], memory: Goal | None = None) -> list[Row]:
    """Rows whose times are multiples of one plain gradient."""
    peers = FIRST_ORDER | SECOND_ORDER
    return [Row(name, peers[name], Goal(most, of_gradient), memory) for name, most in limits.items()]


def _exact_row(name: str, time: Goal) -> Row:
    """A row of All-CNN-C with a pullback for each of 99 columns."""
    return Row(name, _without_func(name), time, Goal(1, of_backpack), slow=True)


_BESIDE = "batch_grad", "sum_grad_squared", "clipped_grad"


def _large_rows(limits: dict[str, float]) -> list[Row]:
    """Rows of a network of the size that people train, with the peers beside some of them."""
    rows = _rows(limits, Goal(1, of_func))
    return [row if row.name in _BESIDE else Row(row.name, {OURS: row.peers[OURS]}, row.time) for row in rows]


def _gpt_table(samples: int) -> Table:
    limits = {"batch_l2_grad": 1.1, "sum_grad_squared": 1.15, "variance": 1.25, "grad_and_variance": 1.25}
    limits |= {"clipped_grad": 1.3, "diag_ggn_mc": 1.25, "kfac": 1.8, "batch_grad": 1.25}
    return Table(
        f"statistics of a GPT of 4 layers, d = 256, 128 places, 1000 words, N = {samples}",
        partial(gpt, samples),
        _large_rows(limits),
        "to reach: ours over one plain gradient, memory: over vmap(grad)'s",
        of_gradient,
        "gradients",
    )


BEHIND = 5
"""How many milliseconds a statistic of shares may be slower than `vmap(grad)`."""

HESSIAN_LIMIT = Goal(1.2, of_ours("diag_ggn"))
QUICK = [
    *_rows({"diag_ggn_mc": 1.8, "kfac": 2, "kfac_expand": 2, "hvp": 4, "ggnvp": 3.5}),
    Row("ekfac", SECOND_ORDER["ekfac"]),
]
"""Curvature for a few plain gradients: one drawn target, or the product with one vector."""

TABLES = {
    "autoencoder": Table(
        "the exact GGN diagonal of BackPACK's tutorial auto-encoder, 3x32x32, N = 5, 3072 outputs",
        autoencoder,
        [
            Row("by-itself", _without_func("diag_ggn"), Goal(1.1, of_our_best)),
            *[_chunked_row(n) for n in (1, 4, 16, 64)],
        ],
        "to reach: ours over BackPACK in as many chunks; by itself: over the best of ours in chunks",
        of_a_second,
        "s",
    ),
    "physical": Table(
        "3c3d, 3x32x32, N = 32, in 16 chunks of samples",
        three_c_three_d,
        [
            Row(name, peers, Goal(1.1, lambda numbers, row: numbers.get((row, "loop"))))
            for name, peers in PHYSICAL.items()
        ],
        "to reach: ours over the sum of the calls on the chunks",
        of_gradient,
        "gradients",
    ),
    "3c3d": Table(
        "statistics of 3c3d, 3x32x32, N = 32, cross entropy over 10 classes",
        three_c_three_d,
        [
            *_rows(
                {
                    "batch_l2_grad": 1.25,
                    "sum_grad_squared": 1.25,
                    "variance": 1.4,
                    "grad_and_variance": 1.4,
                    "batch_grad": 2.2,
                    "clipped_grad": 1.6,
                }
            ),
            *QUICK,
            *_rows({"diag_ggn": 6.3, "batch_diag_ggn": 7.5}, memory=Goal(1, of_backpack)),
            Row("diag_hessian", SECOND_ORDER["diag_hessian"], HESSIAN_LIMIT, Goal(1, of_backpack)),
            *_rows({"kflr": 4.5, "kflr_expand": 4.5}),
            *[
                Row(f"{name}_and_variance", SECOND_ORDER[f"{name}_and_variance"], Goal(1, of_ours(name, "variance")))
                for name in ("diag_ggn", "diag_ggn_mc")
            ],
        ],
        "to reach: ours over one plain gradient; diag_hessian: over our diag_ggn, ..._and_variance: over ours one by "
        "one, memory: over BackPACK's",
        of_gradient,
        "gradients",
    ),
    "all-cnn-c": Table(
        "curvature of All-CNN-C, 3x32x32, N = 8, cross entropy over 100 classes",
        all_cnn_c,
        [
            *_rows({"diag_ggn_mc": 1.8, "hvp": 4, "ggnvp": 3.5}),
            Row("kfac", SECOND_ORDER["kfac"], Goal(1, of_backpack)),  # the A of its inputs alone are three gradients
            Row("kfac_expand", SECOND_ORDER["kfac_expand"]),
            Row("ekfac", SECOND_ORDER["ekfac"]),
            *[_exact_row(name, Goal(1, of_backpack)) for name in ("diag_ggn", "batch_diag_ggn", "kflr")],
            _exact_row("diag_hessian", HESSIAN_LIMIT),
        ],
        "to reach: ours over one plain gradient; kfac and exact rows: over BackPACK, diag_hessian over our diag_ggn",
        of_gradient,
        "gradients",
    ),
    "tokens": Table(
        "curvature of the transformer with a class for each of 64 positions, N = 16, cross entropy over 10 classes",
        tokens,
        QUICK,
        "to reach: ours over one plain gradient; exact rows are left out: 576 columns a sample take half a minute; "
        "BackPACK's extensions know no attention, layer norm or new module; products: peers without fused attention",
        of_gradient,
        "gradients",
    ),
    "dense": Table(
        "eight layers 512 -> 512 between two others, N = 8: sums that need no more than one parameter's quantity",
        dense,
        [
            row
            for name in ("diag_hessian", "batch_diag_ggn")
            for row in (
                Row(name, _without_func(name)),
                Row(f"reduced_{name}", SECOND_ORDER[f"reduced_{name}"], memory=Goal(0.5, of_ours(name))),
            )
        ],
        "to reach: reduced over not reduced, both ours",
        of_gradient,
        "gradients",
    ),
    "transformer": Table(
        "a classifier of 4 layers nn.TransformerEncoder, d = 128, 4 heads, 64 positions, N = 16",
        transformer,
        _rows({"sum_grad_squared": 2.5, "batch_l2_grad": 2.0}, memory=Goal(1.5, of_gradient)),
        "to reach: ours over one plain gradient, in time and in memory",
        of_gradient,
        "gradients",
    ),
    "lstm": Table(
        "a classifier of the last state of an LSTM, 64 -> 64, 32 steps, N = 16",
        lstm,
        _rows({"sum_grad_squared": 4, "batch_l2_grad": 4}, Goal(1, of_func)),
        "to reach: ours over one plain gradient, which runs the fused LSTM, memory: over vmap(grad)'s",
        of_gradient,
        "gradients",
    ),
    "resnet-18": Table(
        "statistics of ResNet-18 with 11 million parameters, 3x32x32, N = 16, batch norms in eval mode",
        resnet_18,
        _large_rows(
            {
                "batch_l2_grad": 1.2,
                "sum_grad_squared": 1.5,
                "variance": 1.7,
                "grad_and_variance": 1.7,
                "clipped_grad": 1.5,
                "diag_ggn_mc": 1.6,
                "kfac": 2.2,
                "batch_grad": 1.6,
            },
        ),
        "to reach: ours over one plain gradient, memory: over vmap(grad)'s",
        of_gradient,
        "gradients",
    ),
    "gpt": _gpt_table(8),
    "gpt-32": _gpt_table(32),
    "tiny": Table(
        "what a call costs at least: a net of 10-10-2, N = 8",
        tiny,
        [Row(name, peers, Goal(3, of_a_millisecond)) for name, peers in FIRST_ORDER.items()],
        "to reach: milliseconds a call",
        of_a_millisecond,
        "ms",
        memory=False,
        rounds=10,
    ),
}
