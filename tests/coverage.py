"""The site's table of layers and quantities, as today's code computes them; `python -m tests.coverage` writes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, find, settings

from invfunc import diag_ggn, diag_hessian, kfac, tree
from invfunc.core import evaluate, resort, run
from invfunc.errors import ArgumentError, SampleAxisError
from tests.forms import OTHERS
from tests.laws import OF_LOSSES, OF_MODELS, composed, squares
from tests.strategies import Case, Numbers, formed
from tests.torch_layers import LAYERS, refused

SITE = Path(__file__).parents[1] / "notebooks" / "site"
PAGE = SITE / "coverage.md"
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->\n"
FIRST = settings(
    max_examples=1,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
KINDS = ["fast", "generic", "refused"]
"""From the best to the worst."""
WIDTH = 120
TEXT = """\
Each cell says how today's code computes a quantity for a layer. **fast**: one contraction of small factors for each
parameter. **generic**: right, but slower, for at least one parameter. **refused**: an error that names the operation
or the parameter. Lines that name an operation in place of a layer have no fast rule; w is a parameter, x are data.
Cases that are not refused are tested against plain loops over the samples, with random options of the layer
(`tests/torch_layers.py`, `tests/forms.py`).
`python -m tests.coverage` writes this section.
"""


def statistics(case: Case) -> Iterator[tuple[str, Any, tuple]]:
    """The column of each statistic of a case, and the statistic with its arguments."""
    f, batch = case.f, case.inputs
    target = Numbers(1)(*f(case.params, *batch).shape)
    options: dict[str, Any] = {"in_dims": (*case.in_dims, 0)}
    for name, kind in OF_LOSSES.items():
        if kind.fewest > len(target):
            continue
        column = "gram" if name.startswith("gram") else "first order"
        yield column, kind.make(composed(f, squares), **options), (case.params, *batch, target)
    for name, kind in OF_MODELS.items():
        column = "gram" if name.startswith("NTK") else name
        yield column, kind.make(f, in_dims=case.in_dims), (case.params, *batch)
    for column, made in (
        ("diag_ggn", diag_ggn),
        ("diag_hessian", diag_hessian),
        ("kfac", partial(kfac, fisher="exact")),
    ):
        yield column, made(f, F.mse_loss, **options), (case.params, *batch, target)


def kind_of(call: Callable) -> str:
    """Way of a statistic, read off the operations and samples that are run with copies of the parameters."""
    asked: list[str] = []

    def watched(generic: Callable) -> Callable:
        return lambda *args: asked.append("generic") or generic(*args)

    with ExitStack() as stack:
        for module, name in ((run, "copied"), (resort, "_mapped"), (resort, "_looped"), (evaluate, "at_once")):
            stack.enter_context(mock.patch.object(module, name, watched(getattr(module, name))))
        try:
            call()
        except (SampleAxisError, ArgumentError):
            return "refused"
    return "generic" if asked else "fast"


def cells(case: Case) -> dict[str, str]:
    """For each column the worst way in which one of its statistics is computed."""
    found: dict[str, str] = {}
    for column, statistic, args in statistics(case):
        kind = kind_of(lambda statistic=statistic, args=args: statistic(*args))
        found[column] = max(kind, found.get(column, kind), key=KINDS.index)
    return found


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """Of each layer the first case that is drawn, which has most of its options; what is not fast; what is refused."""
    for name, strategy in LAYERS.items():
        yield name, cells(find(strategy, lambda case: True, settings=FIRST))
    for form in OTHERS:
        found = cells(find(formed(form), _spread, settings=settings(FIRST, max_examples=100)))
        if set(found.values()) != {"fast"}:
            yield form.called, found
    for name, (_, case) in refused().items():
        yield name, cells(case)


def _spread(case: Case) -> bool:
    """True if each parameter of several dimensions has several entries along two of them: it is not a vector."""
    return all(p.ndim < 2 or sum(n > 1 for n in p.shape) > 1 for p in tree.leaves(case.params))


def table() -> str:
    """The table in Markdown; neighbours that are computed alike share a line."""
    lines: list[tuple[str, dict[str, str]]] = []
    for name, found in rows():
        if lines and lines[-1][1] == found and len(_line(lines[-1][0] + ", " + name, found)) <= WIDTH:
            lines[-1] = (lines[-1][0] + ", " + name, found)
        else:
            lines.append((name, found))
    columns = list(lines[0][1])
    head = [_line("layer", {column: column for column in columns}), "|---" * (1 + len(columns)) + "|\n"]
    return "".join(head + [_line(*line) for line in lines])


def _line(name: str, cells: dict[str, str]) -> str:
    return "| " + " | ".join([name, *cells.values()]) + " |\n"


def section() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of options that are drawn
        return f"{BEGIN}# Layers and quantities\n\n{TEXT}\n{table()}{END}"


def rewritten(page: str) -> str:
    """The page with the section of today's code."""
    before, rest = page.split(BEGIN)
    return before + section() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
