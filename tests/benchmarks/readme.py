"""The four rows of numbers in README.md, beside what one would take else: `python -m tests.benchmarks --readme`."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import invfunc

from .chains import MERGED, PLAIN, Chain, Way, leaves
from .measure import ROOT, medians, peak_here, peak_in_a_process
from .peers import BACKPACK, FUNC, OURS, Call, Problem, backpack_diag_ggn, plain_gradient, transformed
from .problems import autoencoder, three_c_three_d
from .report import announce
from .tables import FIRST_ORDER

README_TABLE = "readme"
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- numbers: begin -->\n", "<!-- numbers: end -->\n"
SLICES = 64
"""Of BackPACK's outputs: its fastest of 1, 4, 16 and 64."""
DEPTH, WIDTH, SAMPLES = 64, 256, 2048

Build = Callable[[], Call]


@dataclass(frozen=True)
class Row:
    """A computation of the README's table, and the peers that compute it too."""

    title: str
    ours: Build
    peer: str
    theirs: Build


def _of(problem: Callable[[], Problem], peer: Callable[[Problem], Call]) -> Build:
    return lambda: peer(problem())


def transformer() -> Problem:
    """BERT of Hugging Face on padded sentences; where that is not installed, the encoder of torch."""
    torch.manual_seed(0)
    y = torch.randint(2, (8,))
    if importlib.util.find_spec("transformers") is None:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(64 * 256, 2)
        return Problem(nn.Sequential(*layers), F.cross_entropy, torch.randn(8, 64, 256), y)
    from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    tokens = torch.randint(1, 1000, (8, 64)) * (torch.arange(64) < torch.arange(36, 68, 4)[:, None])  # 0 is padding
    return Problem(_Padded(BertForSequenceClassification(BertConfig(**sizes)).eval()), F.cross_entropy, tokens, y)


class _Padded(nn.Module):
    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(tokens, attention_mask=(tokens != 0).long()).logits


def _chain(way: Way) -> Call:
    chain = Chain(DEPTH, WIDTH, SAMPLES, torch.device("cpu"))
    run, weights = way.build(chain.blocks), [*leaves(chain.blocks)]

    def call() -> tuple[Tensor, ...]:
        a, b = run(way.enter(chain.x), chain.blocks)
        return torch.autograd.grad((a.square().mean() + b.square().mean()), weights)

    return call


CLIPPED, NORMS = FIRST_ORDER["clipped_grad"], FIRST_ORDER["batch_l2_grad"]
ROWS = {
    "ggn": Row(
        "Exact GGN diagonal of a convolutional auto-encoder with 3072 outputs",
        _of(autoencoder, transformed(lambda p: invfunc.diag_ggn(p.f, p.loss))),
        BACKPACK,
        _of(autoencoder, backpack_diag_ggn(SLICES)),
    ),
    "clipping": Row(
        "Clipped per-sample gradients of a CNN with 0.9 million parameters, 32 images",
        _of(three_c_three_d, CLIPPED[OURS]),
        "`vmap(grad)`",
        _of(three_c_three_d, CLIPPED[FUNC]),
    ),
    "norms": Row(
        "Norms of the per-sample gradients of Hugging Face's BERT on padded sentences (4 layers of width 256)",
        _of(transformer, NORMS[OURS]),
        "`vmap(grad)`",
        _of(transformer, NORMS[FUNC]),
    ),
    "chain": Row(
        f"Gradient of {DEPTH} reversible blocks", partial(_chain, MERGED), "plain autograd", partial(_chain, PLAIN)
    ),
}


def peak(case: tuple[str, str], device: torch.device) -> int:
    """The peak of the second call, in bytes."""
    row, peer = case
    return peak_here(ROWS[row].ours() if peer == OURS else ROWS[row].theirs(), device)


def numbers(name: str, options: argparse.Namespace) -> None:
    """Measure the table, and print it; with `--readme` it is written into README.md."""
    lines = ["| | invfunc | | |", "| --- | ---: | ---: | --- |"]
    for key, row in ROWS.items():
        announce(name, row.title)
        calls, failure = {OURS: row.ours(), "gradient": plain_gradient(transformer())}, ""
        calls[OURS]()
        try:
            calls["peer"] = row.theirs()
            calls["peer"]()
        except (ImportError, RuntimeError, ValueError) as error:
            calls.pop("peer", None)
            failure = type(error).__name__
        if not failure:
            del calls["gradient"]
        seconds = medians(calls, dict.fromkeys(calls, options.repeats), options.device, partial(announce, key))
        sizes = {
            peer: math.nan if peer == "peer" and failure else peak_in_a_process(f"{name}/{key}/{peer}", options.device)
            for peer in (OURS, "peer")
        }
        theirs = f"fails ({failure})" if failure else _cell(seconds["peer"], sizes["peer"])
        beside = f"; one gradient takes {seconds['gradient']:.2g} s" if failure else ""
        lines.append(f"| {row.title} | {_cell(seconds[OURS], sizes[OURS])} | {theirs} | {row.peer}{beside} |")
    announce(name, "")
    where = f"one of {os.cpu_count()} CPU cores, PyTorch {torch.__version__.partition('+')[0]}"
    lines += ["", f"Median seconds of the process ({where}), and peak memory over what was in use before."]
    table = "\n".join(lines) + "\n"
    print(table)
    if options.readme:
        from .picture import draw  # needs matplotlib

        PAGE.write_text(written(PAGE.read_text(), table))
        draw(table)


def written(page: str, table: str) -> str:
    """The page with this table between the markers."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def _cell(seconds: float, size: float) -> str:
    return f"{seconds:.2g} s, {size / 2**20:.0f} MiB"
