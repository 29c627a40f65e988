"""The tables: their problems, and the statistics that are rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import invfunc

from .first_order import FIRST_ORDER
from .peers import BACKPACK, FUNC, OURS, Peer, Problem, backpack_diag_ggn, plain_gradient, transformed, vmap_jacrev
from .problems import autoencoder, gpt, lstm, resnet_18, three_c_three_d, tiny, transformer
from .second_order import SECOND_ORDER

Case = tuple[str, str]
"""A row and a peer."""
Rows = dict[str, dict[str, Peer]]
"""Each peer by its name, for each row by its own."""
GRADIENT: Case = ("one plain gradient", "torch")


@dataclass(frozen=True)
class Table:
    """Rows of one problem."""

    title: str
    problem: Callable[[], Problem]
    rows: Rows
    rounds: int = 1
    """Of calls, for each round that is asked for: short calls take more of them."""

    def peers(self) -> dict[Case, Peer]:
        """Each peer by its row's name and its own."""
        return {GRADIENT: plain_gradient} | {
            (row, name): p for row, peers in self.rows.items() for name, p in peers.items()
        }


def _rows(*names: str, without: Iterable[str] = ()) -> Rows:
    """Statistics by their names, without peers that would take very long."""
    every = FIRST_ORDER | SECOND_ORDER
    return {name: {peer: build for peer, build in every[name].items() if peer not in without} for name in names}


def _in_chunks(n: int) -> dict[str, Peer]:
    ours = transformed(lambda p: invfunc.chunked(invfunc.diag_ggn(p.f, p.loss, method="dense"), n))
    return {OURS: ours, BACKPACK: backpack_diag_ggn(n), FUNC: vmap_jacrev(n)}


_SHARES = "batch_l2_grad", "sum_grad_squared", "variance", "grad_and_variance", "clipped_grad", "batch_grad"
_DRAWN = "diag_ggn_mc", "kfac"
_QUICK = *_DRAWN, "kfac_expand", "ekfac", "hvp", "ggnvp"
_EXACT = "diag_ggn", "diag_ggn_of_each", "diag_hessian", "kfac_exact"

TABLES = {
    "autoencoder": Table(
        "the exact GGN diagonal of BackPACK's tutorial auto-encoder, 3x32x32, N = 5, 3072 outputs",
        autoencoder,
        {"by itself": _rows("diag_ggn", without=[FUNC])["diag_ggn"]}
        | {f"chunks={n}": _in_chunks(n) for n in (1, 4, 16, 64)},
    ),
    "3c3d": Table(
        "statistics of 3c3d, 3x32x32, N = 32, cross entropy over 10 classes",
        three_c_three_d,
        _rows(*_SHARES, *_QUICK, *_EXACT, "kfac_exact_expand", "diag_ggn_and_variance", "diag_ggn_mc_and_variance"),
    ),
    "transformer": Table(
        "a classifier of 4 layers nn.TransformerEncoder, d = 128, 4 heads, 64 positions, N = 16",
        transformer,
        _rows("sum_grad_squared", "batch_l2_grad"),
    ),
    "lstm": Table(
        "a classifier of the last state of an LSTM, 64 -> 64, 32 steps, N = 16",
        lstm,
        _rows("sum_grad_squared", "batch_l2_grad"),
    ),
    "resnet-18": Table(
        "statistics of ResNet-18 with 11 million parameters, 3x32x32, N = 16, batch norms in eval mode",
        resnet_18,
        _rows(*_SHARES, *_DRAWN),
    ),
    **{
        f"gpt-{samples}": Table(
            f"statistics of a GPT of 4 layers, d = 256, 128 places, 1000 words, N = {samples}",
            partial(gpt, samples),
            _rows(*_SHARES, *_DRAWN),
        )
        for samples in (8, 32)
    },
    "tiny": Table("calls of a net of 10-10-2, N = 8, which cost what their Python costs", tiny, FIRST_ORDER, rounds=10),
}
