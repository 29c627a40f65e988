"""The tables: their problems, their rows, and what is to be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import invfunc

from .first_order import FIRST_ORDER
from .peers import (
    BACKPACK,
    OURS,
    VMAP,
    Peer,
    Problem,
    backpack,
    backpack_diag_ggn,
    plain_gradient,
    transformed,
    vmap_jacrev,
)
from .problems import autoencoder, lstm, three_c_three_d, tiny, transformer

Case = tuple[str, str]  # row, peer
Numbers = Mapping[Case, float]
"""Seconds or bytes of each case, NaN where the peer fails."""
Base = Callable[[Numbers, str], float | None]
"""What the numbers of a row are multiples of."""

GRADIENT: Case = ("one plain gradient", "torch")


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
        VMAP: vmap_jacrev(n),
    }
    return Row(f"chunks={n}", peers, Goal(0.8, of_backpack), memory=Goal(1, of_backpack))


def _diag_ggn(vmap: bool = True) -> dict[str, Peer]:
    peers = {OURS: transformed(lambda p: invfunc.diag_ggn(p.f, p.loss)), BACKPACK: backpack("DiagGGNExact")}
    return peers | ({VMAP: vmap_jacrev()} if vmap else {})


def _first_order(limits: dict[str, float], memory: Goal | None = None) -> list[Row]:
    """Rows whose times are multiples of one plain gradient."""
    return [Row(name, FIRST_ORDER[name], Goal(most, of_gradient), memory) for name, most in limits.items()]


BEHIND = 5
"""How many milliseconds a statistic of shares may be slower than `vmap(grad)`."""

TABLES = {
    "autoencoder": Table(
        "the exact GGN diagonal of BackPACK's tutorial auto-encoder, 3x32x32, N = 5, 3072 outputs",
        autoencoder,
        [Row("by-itself", _diag_ggn(vmap=False), Goal(1.1, of_our_best)), *[_chunked_row(n) for n in (1, 4, 16, 64)]],
        "to reach: ours over BackPACK in as many chunks; by itself: over the best of ours in chunks",
        of_a_second,
        "s",
    ),
    "3c3d": Table(
        "statistics of 3c3d, 3x32x32, N = 32, cross entropy over 10 classes",
        three_c_three_d,
        [
            *_first_order(
                {
                    "batch_l2_grad": 1.7,
                    "sum_grad_squared": 1.7,
                    "variance": 2.0,
                    "grad_and_variance": 2.0,
                    "batch_grad": 2.2,
                    "clipped_grad": 2.8,
                }
            ),
            Row("diag_ggn", _diag_ggn(), Goal(7.5, of_gradient)),
        ],
        "to reach: ours over one plain gradient",
        of_gradient,
        "gradients",
    ),
    "transformer": Table(
        "a classifier of 4 layers nn.TransformerEncoder, d = 128, 4 heads, 64 positions, N = 16",
        transformer,
        _first_order({"sum_grad_squared": 2.5, "batch_l2_grad": 2.0}, memory=Goal(1.5, of_gradient)),
        "to reach: ours over one plain gradient, in time and in memory",
        of_gradient,
        "gradients",
    ),
    "lstm": Table(
        "a classifier of the last state of an LSTM, 64 -> 64, 32 steps, N = 16",
        lstm,
        [Row(name, FIRST_ORDER[name]) for name in ("sum_grad_squared", "batch_l2_grad")],
        "nothing to reach; the gradient runs the fused LSTM, all others its steps",
        of_gradient,
        "gradients",
        memory=False,
    ),
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
