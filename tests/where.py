"""The site's table of where the samples and the parameters may be; `python -m tests.where` writes it."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import invfunc
from invfunc import InvFuncError, InvFuncWarning, compiled, distributed, streamed, tree
from invfunc.testing import assert_trees_close
from tests.coverage import SITE, WIDTH
from tests.data_sets.test_streamed import EXACT, FLOOR, dense, linear, losses
from tests.many_processes import PRODUCTS, alone, full
from tests.rows import BOTH, LOSS, MODEL, ROWS
from tests.strategies import Numbers

PAGE = SITE / "where.md"
BEGIN, END = "<!-- where: begin -->\n", "<!-- where: end -->\n"
TEXT = """\
Each cell says what today's code does with samples in several batches (`streamed`), with samples in several processes
(`distributed`), and with sharded parameters (`DTensor`, as `fully_shard` makes them), also `compiled`. **right**: as
for all samples in one process. **in parts**: right, and sharded as the parameters are. **refused**: an error.
`tests/data_sets/test_distributed.py` tests that in 2 and 4 processes.
`python -m tests.where` writes this section.
"""
COLUMNS = ["one process", "streamed", "distributed", "sharded parameters", "compiled, sharded parameters"]
OTHERS = ["eigenpairs", "linearize"]
"""Names that return neither a statistic nor a product, but an object or several functions."""


def of_a_name(name: str) -> tuple[Callable, tuple, tuple]:
    """A statistic or product, which draws the same each time that it is made, its functions, and its samples."""
    rand = Numbers(1)
    x, y = rand(6, 4), torch.arange(6) % 3
    if name == "linearize":
        return invfunc.linearize, (linear,), (x,)
    if name in [*PRODUCTS, *OTHERS]:
        return PRODUCTS.get(name) or getattr(invfunc, name), (linear, F.cross_entropy), (x, y)
    row = ROWS[name]
    functions = {BOTH: (linear, F.cross_entropy), MODEL: (linear,), LOSS: (losses,)}[row.form]
    return row.make, functions, (x,) if row.form == MODEL else (x, y)


def cells(name: str) -> list[str]:
    of, functions, samples = of_a_name(name)
    make = partial(of, *functions)
    rand = Numbers(2)
    params = {"w": rand(4, 3), "b": rand(3)}
    parts = {key: distribute_tensor(p, init_device_mesh("cpu", (1,)), [Shard(0)]) for key, p in params.items()}
    lead = [tree.map_tensors(lambda p: p[(None,) * make().lead], params)] if name in PRODUCTS else []
    halves = [tuple(x[:2] for x in samples), tuple(x[2:] for x in samples)]
    loop, wanted = getattr(ROWS.get(name), "loop", None), make()(params, *lead, *samples)
    first = _said(lambda: wanted, loop and loop(*functions)(params, *samples))
    found = [_said(lambda: streamed(make())(params, *lead, halves), wanted if not _draws(name) else None)]
    if _draws(name):  # other columns than without it
        wanted = streamed(make())(params, *lead, [samples])
    for own, given in ((make, params), (make, parts), (lambda: compiled(make()), parts)):
        found.append(_said(lambda own=own, given=given: distributed(own())(given, *lead, *samples), wanted))
    return [first, *(x.partition(":")[0] if x in found[:k] else x for k, x in enumerate(found))]


def _draws(name: str) -> bool:
    return name in ROWS and ROWS[name].drawn


def _said(call: Callable, wanted: Any) -> str:
    try:
        found = call()
    except InvFuncError as error:
        return f"refused: {str(error).partition(': ')[2].rstrip('.')}"
    if wanted is not None:
        assert_trees_close(dense(full(found)), dense(wanted), EXACT, FLOOR)
    return "in parts" if any(isinstance(x, DTensor) for x in tree.tensors((found,))) else "right"


def section() -> str:
    """In Markdown; what is done alike shares a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore", InvFuncWarning)  # of what has no plan, and runs without
        for name in [*ROWS, *PRODUCTS, *OTHERS]:
            lines.setdefault(tuple(cells(name)), []).append(f"`{name}`")
    rows = [["statistic or product", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    rows += [[", ".join(names), *found] for found, names in lines.items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{BEGIN}# One batch, many batches, many processes\n\n{textwrap.fill(TEXT, WIDTH)}\n\n{table}{END}"


def rewritten(page: str) -> str:
    """The page with the section of today's code."""
    before, rest = page.split(BEGIN)
    return before + section() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
