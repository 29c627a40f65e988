"""Which planted faults `certified` finds on drawn problems alone, with no other test."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.mutants.fault import Fault, Say

NUMERIC = ("contract.py", "evaluation", "loss", "operations", "passes", "per_sample", "plan.py", "products")
NUMERIC += ("recording/problem.py", "reductions", "sparsity")
"""Where numbers of statistics are computed."""
WITHOUT = ("passes/kfra.py", "products/estimate", "products/linear_operator.py", "products/positive.py")
WITHOUT += ("reductions/eigenbasis.py", "reductions/kronecker_factors.py", "reductions/nearest.py")
"""What is in there, but of no result that `certified` takes: K-factors, estimates, products that are made positive."""
EXAMPLES, SECONDS = 8000, 60
"""Problems that a fault is looked for on, at most, and the time of the processor for that."""


def numeric(fault: Fault) -> bool:
    """Whether a fault is in the numeric path, of results that `certified` takes."""
    return fault.file.startswith(NUMERIC) and not fault.file.startswith(WITHOUT)


def search(fault: Fault, say: Say) -> tuple[str, str]:
    """Certify statistics of drawn problems until one is wrong."""
    from invfunc.errors import CertificateError

    until, tried = time.process_time() + SECONDS, 0

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(st.data())
    def look(data: Any) -> None:
        nonlocal tried
        call, called = drawn(data)
        if time.process_time() > until:
            raise TimeoutError
        tried += 1
        say(called)
        _certify(call)

    try:
        look()
    except CertificateError as error:
        return "found", str(error)[:100]
    except TimeoutError:
        pass
    return "survived", f"{tried} problems"


def _certify(call: Callable[[], Any]) -> None:
    """What fails otherwise is told to the user as it is, but not by a certificate."""
    from invfunc.errors import CertificateError

    try:
        call()
    except CertificateError:
        raise
    except Exception:
        return


def drawn(data: Any) -> tuple[Callable[[], Any], str]:
    """A certified statistic or product of a drawn problem, on one side of each threshold."""
    from tests.crossed import sides, thresholds_at

    f, loss, params, batch, dims = data.draw(problems())
    crossed, seed = data.draw(st.one_of(st.just({}), sides())), data.draw(st.integers(0, 2**31))
    called, make = data.draw(st.one_of(*[_statistics()] * 4, _products()))

    def call() -> Any:
        with thresholds_at(**crossed) if crossed else nullcontext():
            return make(f, loss, params, batch, dims, seed)

    return call, f"{called} of {f}"


@st.composite
def _statistics(draw: Any) -> tuple[str, Callable]:
    from invfunc import certified, chunked
    from invfunc.testing.laws.rows import BOTH, FACTORS, MODEL, ROWS

    name = draw(st.sampled_from([name for name, row in ROWS.items() if row.gives != FACTORS]))
    row = ROWS[name]
    form = BOTH if BOTH in row.forms and draw(st.booleans()) else draw(st.sampled_from(row.forms))
    few = draw(st.one_of(st.none(), st.lists(st.integers(-1, 0), min_size=1, max_size=4)))
    over, n = draw(st.sampled_from(["", *row.axes])), draw(st.integers(1, 3))
    options: dict[str, Any] = {} if few is None else {"samples": few}
    if name in ("variance", "grad_and_variance"):
        options["correction"] = draw(st.sampled_from([0, -0.5]))

    def make(f: Callable, loss: Callable, params: Any, batch: tuple, dims: tuple, seed: int) -> Any:
        if form == MODEL:
            args, made = (params, *batch[:-1]), row.make(f, in_dims=dims[:-1], **options)
        else:
            args, made = (params, *batch), row.of(f, loss, form, in_dims=dims, **options)
        t: Any = chunked(made, n, over=over) if over else made
        return certified(t, generator=seed)(*args)

    return name, make


@st.composite
def _products(draw: Any) -> tuple[str, Callable]:
    import invfunc
    from invfunc import certified, tree
    from invfunc.certificates.of_products import HESSIANS, NAMES
    from tests.strategies import Numbers

    name, alone, k = draw(st.sampled_from(NAMES)), draw(st.booleans()), draw(st.integers(1, 2))

    def make(f: Callable, loss: Callable, params: Any, batch: tuple, dims: tuple, seed: int) -> Any:
        options = {} if name in HESSIANS else {"in_dims": dims}
        of = getattr(invfunc, name)
        whole = lambda params, *batch: loss(f(params, *batch[:-1]), batch[-1])  # noqa: E731
        t: Any = of(whole, **options) if alone else of(f, loss, **options)
        rand = Numbers(3)
        lead = [k] * t.lead
        v = tree.map_tensors(lambda p: rand(*lead, *p.shape).to(p), params)
        return certified(t, generator=seed)(params, v, *batch)

    return name, make


@st.composite
def problems(draw: Any) -> tuple:
    """A model function with a loss: families, layers and forms of operations; `(f, loss, params, batch, in_dims)`."""
    from invfunc.testing import strategies
    from tests.forms import FORMS
    from tests.strategies import Numbers, formed
    from tests.torch_layers import LAYERS

    if draw(st.booleans()):
        problem = draw(strategies.problems(dtype=draw(st.sampled_from([torch.float64, torch.float32]))))
        loss = draw(st.sampled_from([problem.loss, *_weighted(problem)]))
        return problem.model.f, loss, problem.model.params, problem.batch, problem.in_dims
    forms = [form for of in FORMS.values() for form in of]
    case = draw(st.one_of(st.one_of(*LAYERS.values()), st.sampled_from(forms).flatmap(formed)))
    with torch.no_grad():
        shape = case.f(case.params, *case.inputs).shape

    def each(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (z - y).square().reshape(len(z), -1).sum(1)

    loss = draw(st.sampled_from([F.mse_loss, each]))
    return case.f, loss, case.params, (*case.inputs, Numbers(1)(*shape)), (*case.in_dims, 0)


def _weighted(problem: Any) -> list[Callable]:
    """Cross entropies with weights, targets that are ignored, and smoothed labels."""
    if problem.loss.called != "cross_entropy":
        return []
    weight = torch.tensor([0.5, 2.0, 1.0])
    options = ({"weight": weight}, {"ignore_index": 1}, {"label_smoothing": 0.2})
    options += ({"weight": weight, "label_smoothing": 0.2, "ignore_index": 0},)

    def loss(o: dict) -> Callable:
        return lambda z, y: F.cross_entropy(z, y, **{k: v.to(z) if k == "weight" else v for k, v in o.items()})

    return [loss(o) for o in options]
