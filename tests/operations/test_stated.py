"""What the tables say of torch's functions, name by name: each has a program that would be wrong if it were not so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import find
from torch.func import grad

from invfunc import SampleAxisError, batch_grad, chunked, diag_ggn, diag_hessian, tree
from invfunc.operations import batch_axis, calls, equations
from invfunc.operations.batch_axis import BATCH_SUM, Call
from invfunc.operations.heard import function_of
from invfunc.operations.operation import OPERATIONS, known
from invfunc.statistic import Statistic
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian, loop_batch_grad
from tests import forms, moves, stated, stated_losses
from tests.coverage import FIRST
from tests.forms import Form
from tests.laws import FLOOR, composed, squares
from tests.stated_common import having, of_torch
from tests.strategies import Case, Numbers, sized
from tests.torch_layers import LAYERS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("old_core"),
]  # what torch says of functions that it will drop
EXACT = 1e-9
SIZES = {"all apart": {"n": 4, "a": 2, "b": 3}, "all alike": {"n": 2, "a": 2, "b": 2}}
"""Powers of two, so that means of numbers in half precision are exact."""
ROUNDED = {"bfloat16": 2e-2, "half": 2e-3, "float": 1e-6, "type": 1e-6, "type_as": 1e-6}
"""What rounds as torch does, whose second derivatives round otherwise."""
NOT_TWICE = {
    "hardsigmoid": "torch has no second derivative of it",
    "requires_grad": "torch.func refuses it",
    "get:data": "under torch.func it stays differentiable",
    "detach in place": "the same",
}
programs = pytest.mark.parametrize("form", stated.PROGRAMS, ids=str)
sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def arranged(form: Form, sizes: dict[str, int]) -> tuple[Case, tuple, dict[str, Any]]:
    case = sized(form, sizes)
    target = case.f(case.params, *case.inputs).detach().cos()
    return case, (case.params, *case.inputs, target), {"in_dims": (*case.in_dims, 0)}


def shares(f: Callable, args: tuple) -> Any:
    """Those of the mean of `[N]` losses."""
    return tree.map_tensors(lambda g: g / len(g), loop_batch_grad(f)(*args))


@programs
@sizes
class TestPrograms:
    def test_shares_in_a_mean(self, form, sizes):
        case, args, options = arranged(form, sizes)
        f = composed(case.f, squares)
        found = batch_grad(lambda *args: f(*args).mean(), **options)(*args)
        assert_trees_close(found, shares(f, args), EXACT, FLOOR)

    def test_of_data(self, form, sizes):
        """Which no parameter has met before."""
        case, args, options = arranged(form, sizes)
        ones = tree.map_tensors(torch.ones_like, case.params)
        f = composed(lambda p, *xs: case.f(ones, *xs) * (1 + sum(q.sum() for q in tree.leaves(p))), squares)
        found = batch_grad(lambda *args: f(*args).mean(), **options)(*args)
        assert_trees_close(found, shares(f, args), EXACT, FLOOR)

    def test_curvature(self, form, sizes):
        case, args, options = arranged(form, sizes)
        wanted = dense_diag_ggn(case.f, F.mse_loss)(*args)
        assert_trees_close(diag_ggn(case.f, F.mse_loss, **options)(*args), wanted, EXACT, FLOOR)
        if form.called not in NOT_TWICE:
            f, rounding = composed(case.f, squares), ROUNDED.get(form.called, EXACT)
            assert_trees_close(diag_hessian(f, **options)(*args), dense_diag_hessian(f)(*args), rounding, FLOOR)


def each_alone(f: Callable, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The gradient in a copy of w for each sample, and whether it depends on the others."""

    def of_copies(w: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(f(w, x), w)[0]

    copies = w.expand(x.shape)
    found, others = of_copies(copies), of_copies(torch.cat([copies[:1] + 1, copies[1:]]))
    return found, not torch.allclose(found[1:], others[1:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", [*stated.PROGRAMS, *forms.MOVES, *moves.SELECTIONS, *moves.COMPUTATIONS], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
def test_samples_in_another_place(form, dim):
    """Where it may compute across them, which is refused; what computes entry by entry is not."""
    w, x = Numbers(1)(2, 2), Numbers()(4, 2, 2)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w if w.ndim == 3 else w[None]
        return form.operation(*(t.transpose(0, dim).contiguous() for t in (x, w))).square().sum()

    wanted, mixed = each_alone(f, w, x)
    try:
        found = batch_grad(f)(w, x)
    except SampleAxisError:
        assert form not in stated.POINTWISE
    else:
        assert not mixed or form.called in stated.OF_DATA
        assert_trees_close(found, wanted, EXACT, FLOOR)


@pytest.mark.parametrize("called", stated_losses.TOTALS)
def test_shares_behind_a_sum_over_the_samples(called):
    f, w, x = stated_losses.of_total(stated_losses.TOTALS[called]), Numbers(1)(2, 3), Numbers()(4, 2, 3)
    wanted = torch.stack([grad(f)(w, x[n : n + 1]) for n in range(len(x))])
    assert_trees_close(batch_grad(f)(w, x), wanted, EXACT, FLOOR)


@pytest.mark.parametrize("called", stated.MIXING)
def test_what_mixes_samples_is_refused(called):
    with pytest.raises(SampleAxisError, match=called):
        batch_grad(lambda w, x: stated.MIXING[called]((x * w).sin()).square().sum())(
            Numbers(1)(2, 3), Numbers()(4, 2, 3)
        )


@pytest.mark.parametrize("indices", [False, True])
def test_pools_that_draw_do_so_once(indices):
    """However many passes there are."""

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        pooled = F.fractional_max_pool2d(F.conv2d(x, w), 2, 4, return_indices=indices)
        return (pooled[0] if indices else pooled).flatten(1).tanh()

    args = Numbers(1)(2, 1, 3, 3), Numbers()(6, 1, 12, 12), Numbers(2)(6, 32)
    found = []
    for t in (diag_ggn(f, F.mse_loss), chunked(diag_ggn(f, F.mse_loss), 7)):
        torch.manual_seed(0)
        found.append(t(*args))
    assert_trees_close(found[1], found[0], EXACT)


def reduced(loss: Callable, **how: str) -> Callable:
    """A scalar loss of the outputs."""
    return lambda w, x: loss((x * w).sin(), **how)


@pytest.mark.parametrize("how", ["none", "sum", "mean"])
@pytest.mark.parametrize("called", stated_losses.LOSSES)
def test_shares_of_a_loss(called, how):
    f, w, x = reduced(stated_losses.LOSSES[called], reduction=how), Numbers(1)(2, 3), Numbers()(4, 2, 3)
    loss = (lambda w, x: f(w, x).square().mean()) if how == "none" else f
    of_one = torch.stack([grad(loss)(w, x[n : n + 1]) for n in range(len(x))])
    assert_trees_close(batch_grad(loss)(w, x), of_one / (1 if how == "sum" else len(x)), EXACT, FLOOR)


@pytest.mark.parametrize("called", stated_losses.SUMS)
def test_shares_of_a_sum(called):
    f, w, x = reduced(stated_losses.SUMS[called]), Numbers(1)(2, 3), Numbers()(4, 2, 3)
    wanted = torch.stack([grad(f)(w, x[n : n + 1]) for n in range(len(x))])
    assert_trees_close(batch_grad(f)(w, x), wanted, EXACT, FLOOR)


# What the tables say of a call is so at every call that the programs make


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls that are followed while it lasts."""
    found: list[Call] = []
    right = batch_axis.propagate

    def seen(call: Call) -> Any:
        found.append(call)
        return right(call)

    with mock.patch.object(batch_axis, "propagate", seen):
        yield found


@pytest.fixture(scope="module")
def met() -> list[Call]:
    """All calls of all programs; such as are made once by each layer too."""
    every = [*sum(forms.FORMS.values(), []), *forms.MOVES, *moves.SELECTIONS, *moves.COMPUTATIONS, *moves.MEETINGS]
    old_core = mock.patch.object(Statistic, "direct", False)
    with old_core, recorded() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in [*every, *stated.PROGRAMS]:
            case, args, options = arranged(form, SIZES["all apart"])
            batch_grad(lambda *args, f=case.f: squares(f(*args[:-1]), args[-1]).mean(), **options)(*args)
        for layer in LAYERS.values():
            case = find(layer, lambda case: True, settings=FIRST)
            target = case.f(case.params, *case.inputs).detach().cos()
            f, dims = composed(case.f, F.mse_loss), (*case.in_dims, 0)
            batch_grad(f, in_dims=dims)(case.params, *case.inputs, target)
        for move in stated_losses.TOTALS.values():
            batch_grad(stated_losses.of_total(move))(Numbers(1)(2, 3), Numbers()(4, 2, 3))
        for loss in [*stated_losses.LOSSES.values(), *stated_losses.SUMS.values()]:
            batch_grad(reduced(loss))(Numbers(1)(2, 3), Numbers()(4, 2, 3))
        for weights in stated_losses.WEIGHTS.values():
            batch_grad(stated_losses.weighted(weights))(Numbers(1)(2, 3), Numbers()(6, 2), torch.arange(6) % 3)
    return found


def numbers(call: Call) -> list[torch.Tensor]:
    """The floating-point tensors that a call reads."""
    return [x for x in calls.read_by(call.name, call.args, call.kwargs) if x.is_floating_point()]


def called(call: Call, instead: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """The results of the call on copies, some of them of other values."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        return instead.get(id(x), x).detach().clone()

    args, kwargs = tree.map_tensors(copy, (call.args, {k: v for k, v in call.kwargs.items() if k != "out"}))
    with torch.random.fork_rng():
        out = call.func(*args, **kwargs)
    out = args[0] if call.name == "setitem" else out
    return [x for x in tree.tensors(out) if x.is_floating_point()]


def bend(call: Call, inputs: list[torch.Tensor], step: float) -> float:
    """How far the results are from their chord along a line through inputs whose entries are all different."""
    rand, middle, aside = Numbers(5), {}, {}
    for x in {id(x): x for x in inputs}.values():
        middle[id(x)] = x.detach() + (0.1 * rand(*x.shape)).to(x)
        aside[id(x)] = rand(*x.shape).to(x)
    at = [called(call, {i: x + k * step * aside[i] for i, x in middle.items()}) for k in (-1, 0, 1)]
    off = [((a + c - 2 * b) / (1 + b.abs().max())).nan_to_num(0) for a, b, c in zip(*at, strict=True) if b.numel()]
    return max((x.abs().max().item() for x in off), default=0.0)


def exact(call: Call) -> bool:
    """Whether it is of numbers, all in full precision."""
    return {x.dtype for x in numbers(call)} == {torch.float64}


CASTS = {"half", "bfloat16", "float", "to", "type", "type_as"}
"""Round, so that nothing is seen in small steps."""


def picked(call: Call) -> list[torch.Tensor]:
    """The places in the first floating-point argument from which the entries of the results come."""
    first = numbers(call)[0]
    return called(call, {id(first): torch.arange(1.0, 1 + first.numel()).view(first.shape).to(first)})


def linear_in(call: Call) -> list[list[torch.Tensor]]:
    """The tensors in which a call is said to be linear, those at a time that go together."""
    entry, read = known(call.name), numbers(call)
    if entry.unless and call.arg(entry.unless):
        return []
    if entry.linear == "all":
        return [read]
    if entry.linear == "each":
        return [[x] for x in read if sum(x is y for y in read) == 1]
    return [read[: entry.linear]]


def is_linear(call: Call) -> bool:
    small, tolerance = (1e-5, 1e-12) if known(call.name).piecewise else (1.0, 1e-9)
    return call.name in CASTS or all(bend(call, xs, small) < tolerance for xs in linear_in(call))


def picks(call: Call) -> bool:
    places = set(range(1, 1 + numbers(call)[0].numel()))
    return all(set(x.flatten().tolist()) <= places for x in picked(call))


def picks_once(call: Call) -> bool:
    return picks(call) and all(len(set(x.flatten().tolist())) == x.numel() for x in picked(call))


def linear_in_totals(call: Call) -> bool:
    totals = [x for x, place in call.samples if place is BATCH_SUM and x.is_floating_point()]
    apart = [[x] for x in totals] if known(call.name).linear == "each" else [totals]
    return call.name in CASTS or all(bend(call, xs, 1.0) < 1e-9 for xs in apart)


def is_its_equation(call: Call) -> bool:
    parsed, found = equations.equation(call.name, call.args, call.kwargs), called(call, {})
    if parsed is None or not found:  # there are others, such as those of complex numbers
        return True
    (out,) = found
    added = sum((factor * x for x, factor in parsed.added), torch.zeros(()))
    if parsed.operands:
        product = torch.einsum(",".join(parsed.inputs) + "->" + parsed.output, *parsed.operands)
        added = added + parsed.scale * product
    off = (added - out).masked_fill(added == out, 0)  # a number that is added is left out
    return added.shape == out.shape and (off.max() - off.min()).item() < 1e-9


def names(fact: str, *values: Any) -> set[str]:
    """The names of torch's functions of which a fact is stated, or one of these values of it."""
    return {n for n in having(fact) if of_torch(n) and (not values or getattr(OPERATIONS[n], fact) in values)}


FACTS: dict[str, tuple[Set[str], Callable[[Call], bool]]] = {
    "linear": (names("linear"), is_linear),
    "picks": (names("picks"), picks),
    "picks once": (names("picks", "once"), picks_once),
    "an equation": (names("equation"), is_its_equation),
    "linear in sums over the samples": ({n for n in names("linear") if not known(n).piecewise}, linear_in_totals),
}
"""By what is said: of which names, and whether it is so of a call."""


@pytest.mark.parametrize("table", FACTS)
def test_what_a_table_says_is_so_at_every_call(table, met):
    wanted, holds = FACTS[table]
    checked = set()
    for call in met:
        of_totals = any(place is BATCH_SUM for _, place in call.samples)
        if call.name in wanted and exact(call) and (of_totals or holds is not linear_in_totals):
            drawn = function_of(call.func).draws(call.args, call.kwargs)
            assert drawn or holds(call), f"`{call.name}` of {[tuple(x.shape) for x in numbers(call)]} is not {table}"
            checked.add(call.name)
    missing = sorted(wanted - checked - set(stated.NOT_MET))
    assert not missing, f"add programs of {missing}: to `stated_losses.TOTALS` for sums, else to `stated` or `forms`"


TABLES = {
    "follows": names("batch_axis"),
    "fast": names("factor"),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_has_a_program(table, met):
    apart = {call.name for call in met if all(place is not BATCH_SUM for _, place in call.samples)}
    assert sorted(TABLES[table] - apart - set(stated.NOT_MET)) == []
