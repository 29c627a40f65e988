"""Drawn calls of certified transforms that are right: each prints as a line of code that makes it again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st

from invfunc import certified, chunked, together, tree
from invfunc.errors import CertificateError
from invfunc.testing import strategies
from invfunc.testing.strategies import Loss, Model, Numbers, Problem
from tests.rows import BOTH, FACTORS, LOSS, MODEL, PRODUCTS, ROWS

__all__ = ["Call", "Loss", "Model", "Problem", "drawn", "torch"]
NAMES = [name for name in PRODUCTS if "positive" not in name]
GIVEN_UP = "noise", "sketched", "predictive", "ggn_trace", "clipped_grad of each", "batch_grad summed"
CERTIFIED = {n: r for n, r in ROWS.items() if r.gives != FACTORS and not r.drawn and not n.startswith(GIVEN_UP)}


@dataclass(frozen=True)
class Call:
    """`Call(...).check()` certifies statistics of a problem, or a product."""

    problem: Problem
    names: tuple[str, ...]
    """Of the statistics, as in `ROWS`, whose results come together, or of one product."""
    form: str
    samples: tuple[int, ...] | None = None
    chunks: int | None = None
    over: str = ""
    """Axis of the chunks, if there are chunks."""
    scale: float = 1.0
    """Of the parameters: large ones saturate what is there to saturate."""
    seed: int = 0

    @cached_property
    def t(self) -> Any:
        """The statistic or product that is certified."""
        f, loss, dims = self.problem.model.f, self.problem.loss, self.problem.in_dims
        functions = {LOSS: (self.problem.f,), MODEL: (f,), BOTH: (f, loss)}[self.form]
        if self.names[0] in NAMES:
            return PRODUCTS[self.names[0]](*functions, in_dims=dims)
        options = {"in_dims": dims[:1] if self.form == MODEL else dims, "samples": self.samples}
        each = [ROWS[name].make(*functions, **options) for name in self.names]
        t = each[0] if len(each) == 1 else together(*each)
        return t if self.chunks is None else chunked(t, self.chunks, over=self.over)

    @property
    def args(self) -> tuple:
        """The arguments of the call."""
        params = tree.map_tensors(lambda p: self.scale * p, self.problem.model.params)
        batch = self.problem.batch
        if self.names[0] not in NAMES:
            return params, *(batch[:-1] if self.form == MODEL else batch)
        numbers, lead = Numbers(self.seed), [2] * self.t.lead
        return params, tree.map_tensors(lambda p: numbers(*lead, *p.shape).to(p), params), *batch

    def check(self) -> None:
        """The certified call, which gives what the call gives, and leaves torch's generator where it was."""
        before = torch.get_rng_state()
        found, plain = certified(self.t, generator=self.seed)(*self.args), self.t(*self.args)
        pairs = zip(tree.tensors(found), tree.tensors(plain), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        assert torch.equal(torch.get_rng_state(), before)

    def outcome(self) -> tuple[str, str]:
        """Outcome ("right", "alarm", "refused", perhaps "by the certificate" alone), and the message of the error."""
        try:
            self.check()
            return "right", ""
        except CertificateError as error:
            return "alarm", str(error)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).split('): ', 1)[-1]}"
        try:
            self.t(*self.args)
        except Exception:
            return "refused", said
        return "refused by the certificate", said


@st.composite
def drawn(draw: Any, dtype: torch.dtype, scale: float = 1.0) -> Call:
    """Calls in a precision, with parameters of this size."""
    few = st.sampled_from([(1, 4), (1, 40)])
    problem = draw(few.flatmap(lambda n: strategies.problems(dtype=dtype, in_dims=(0, 1), n=n)))
    own = {"scale": scale, "seed": draw(st.integers(0, 2**31))}
    if draw(st.integers(0, 5)) == 0:
        return Call(problem, (draw(st.sampled_from(NAMES)),), draw(st.sampled_from([LOSS, BOTH])), **own)
    first = draw(st.sampled_from(list(CERTIFIED)))
    form = draw(st.sampled_from(CERTIFIED[first].forms))
    others = [name for name, row in CERTIFIED.items() if form in row.forms]
    names = (first, *draw(st.one_of(st.just([]), st.lists(st.sampled_from(others), min_size=1, max_size=2))))
    chosen = st.lists(st.integers(0, problem.model.n - 1), min_size=1, max_size=5).map(tuple)
    samples = draw(st.one_of(st.none(), st.none(), chosen))
    axes = [axis for axis in CERTIFIED[first].axes if all(axis in CERTIFIED[name].axes for name in names)]
    over = draw(st.sampled_from(["", "", *axes]))
    return Call(problem, names, form, samples, draw(st.integers(1, 4)) if over else None, over, **own)
