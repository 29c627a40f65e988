"""certified: the result as it is, wrong numbers found as often as promised, no alarm for right ones.

Also beside numbers that are not finite, kinks and small leaves.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.func import vmap

import invfunc
from invfunc import (
    InvFuncError,
    batch_grad,
    batch_l2_grad,
    certified,
    chunked,
    diag_ggn,
    explain,
    gram,
    kfac,
    reduced,
    together,
    tree,
    variance,
)
from invfunc.certified import needed
from invfunc.errors import ArgumentError, ArgumentTypeError, CertificateError, SplitError
from invfunc.kronecker import kfra
from invfunc.products.product import Linearised, Product
from invfunc.statistic import Statistic
from invfunc.testing import strategies
from invfunc.testing.strategies import Loss, Model, Problem
from tests.rows import BOTH, FACTORS, LOSS, MODEL, PRODUCTS, ROWS
from tests.strategies import Numbers

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


rows = st.sampled_from(list(CERTIFIED.values()))
each_row = pytest.mark.parametrize("row", CERTIFIED.values(), ids=CERTIFIED)
SEED = 7


def made(row, problem, form=None, **options):
    """A statistic of a problem with its arguments."""
    form = form or row.form
    dims = problem.in_dims
    if form == MODEL:
        return row.make(problem.model.f, in_dims=dims[:1], **options), (problem.model.params, problem.model.x)
    functions = (problem.f,) if form == LOSS else (problem.model.f, problem.loss)
    return row.make(*functions, in_dims=dims, **options), (problem.model.params, *problem.batch)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.tensors(a), tree.tensors(b), strict=True))


@contextmanager
def planted(change):
    """Statistics whose results are changed."""
    compute = Statistic.compute

    def wrong(self, *given):
        result, aux = compute(self, *given)
        return change(result), aux

    with mock.patch.object(Statistic, "compute", wrong):
        yield


class TestRandomNumbers:
    def test_of_a_function_that_draws(self):
        def f(w, x, y):
            return (F.dropout(x, 0.5) @ w - y).square().sum(1)

        args = torch.randn(3, 2), torch.randn(6, 3), torch.randn(6, 2)
        torch.manual_seed(1)
        plain = variance(f)(*args)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        assert same(certified(variance(f), generator=SEED)(*args), plain)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("drawing", ["generator", "seed"])
    def test_draw_from_the_callers_generator(self, drawing):
        problem = Problem(Model("affine"), Loss("mse_loss"))
        g = torch.Generator().manual_seed(0)
        before = g.get_state()
        t = certified(variance(problem.f), generator=g if drawing == "generator" else 0)
        t(problem.model.params, *problem.batch)
        assert torch.equal(g.get_state(), before) == (drawing == "seed")


class TestWrongResults:
    @given(rows, strategies.problems(["affine", "convolution", "attention", "recurrent"]), st.data())
    def test_are_found_in_each_statistic_and_leaf(self, row, problem, data):
        """All numbers of a leaf are 1 % larger, one result after the other."""
        t, args = made(row, problem, data.draw(st.sampled_from(row.forms)))
        try:
            leaves = tree.tensors(t(*args))
        except InvFuncError:
            return
        sizes = [x.abs().max() if x.numel() else 0 for x in leaves]
        at = data.draw(st.sampled_from([i for i, s in enumerate(sizes) if s >= 0.1 * max(sizes)]))
        if not max(sizes):
            return

        def change(result):
            whole, form = tree.separate(result)
            return form.join([x * 1.01 if i == at else x for i, x in enumerate(whole)])

        with planted(change), pytest.raises(CertificateError):
            certified(t, generator=data.draw(st.integers(0, 99)))(*args)

    def test_are_found_as_often_as_promised(self):
        """Small ones, which are not drawn by their size: by k entries evenly, and no more often than that explains."""
        f = lambda w, x: x @ w  # noqa: E731  (as users write it)
        size, share, confidence = 300, 0.1, 0.8
        args = torch.ones(size, dtype=torch.float64), torch.rand(1, size, dtype=torch.float64)
        args[1][:, : size // 10] = 0
        calls = 60

        def found(of):
            faults = 0
            with planted(lambda result: result + (args[1] == 0) * 1e-6):
                for seed in range(calls):
                    try:
                        certified(of, generator=seed, confidence=confidence, share=share)(*args)
                    except CertificateError:
                        faults += 1
            return faults

        expected = 1 - (1 - share) ** needed(confidence, share)
        off = found(batch_grad(f)) / calls - expected
        assert abs(off) < 4 * (expected * (1 - expected) / calls) ** 0.5

    def test_are_told(self):
        f = lambda p, x, y: (x @ p["w"] + p["b"] - y).square()  # noqa: E731  (as users write it)
        args = {"w": torch.ones(3), "b": torch.zeros(())}, torch.ones(2, 3), torch.zeros(2)

        def change(result):
            result["w"][1] += 1
            return result

        t = certified(batch_l2_grad(f), generator=5)
        with planted(change), pytest.raises(CertificateError, match=r"result\['w'\]\[1\] is 109, .* 108;") as told:
            t(*args)
        error = told.value
        assert str(error).startswith("certified(batch_l2_grad(<lambda>))(p, x, y): ")
        assert (error.path, error.found, error.expected, error.seed) == ("result['w'][1]", 109, 108, 5)
        assert isinstance(error, RuntimeError)


@pytest.mark.quick
class TestNumberOfEntries:
    def test_and_evaluations_are_told(self):
        calls = []

        def f(w, x):
            calls.append(1)
            return x @ w

        args = torch.rand(30, 10), torch.rand(4, 30), torch.rand(4, 10)
        t = diag_ggn(f, F.mse_loss)
        t(*args)
        alone, calls[:] = len(calls), []
        checked = certified(t, generator=SEED)
        checked(*args)
        assert len(calls) == alone + 1
        told = str(explain(checked)(*args))
        assert told.startswith("certified(diag_ggn(f, mse_loss)): ")
        assert "certified: 90 evenly and 90 by size of 300 entries" in told
        assert "all 12 entries" in str(explain(checked)(args[0][:, :1][:12], args[1][:, :12], args[2][:, :1]))


@pytest.mark.quick
class TestErrors:
    F = staticmethod(lambda w, x, y: (x @ w - y).square())
    ARGS = torch.ones(3), torch.rand(4, 3), torch.zeros(4)

    @pytest.mark.parametrize(
        "make, error, match",
        [
            (lambda f: certified(f, generator=0), ArgumentTypeError, "has to be a statistic"),
            (lambda f: certified(kfac(f, fisher="empirical"), generator=0), ArgumentError, "entries of kfac are no"),
            (lambda f: certified(kfra(f), generator=0), ArgumentError, "Certify `diag_ggn`"),
            (lambda f: certified(invfunc.noise_scale(f), generator=0), ArgumentError, "entries of noise_scale are no"),
            (
                lambda f: certified(diag_ggn(f, mc_samples=1, generator=torch.Generator()), generator=0),
                ArgumentError,
                "Certify the exact one",
            ),
            (lambda f: certified(invfunc.linearize(f), generator=0), ArgumentTypeError, "has to be a statistic"),
            (lambda f: certified(reduced(variance(f), torch.sum), generator=0), ArgumentError, "without `reduced`"),
            (lambda f: certified(variance(f), generator=0, share=0), ArgumentError, "between 0 and 1"),
            (lambda f: certified(variance(f), generator=0, confidence=1), ArgumentError, "between 0 and 1"),
            (lambda f: certified(variance(f), generator=0, confidence="99%"), ArgumentError, "'99%'.*between 0 and 1"),
            (lambda f: certified(variance(f), generator=None), ArgumentTypeError, "pass generator="),
            (lambda f: certified(variance(f), generator=2**70), ArgumentError, "generator=1180.*at least 0 and below"),
            (lambda f: certified(variance(f), generator=-1), ArgumentError, "at least 0 and below"),
            (lambda f: chunked(certified(variance(f), generator=0), 2), ArgumentTypeError, "statistic inside"),
            (lambda f: together(certified(variance(f), generator=0)), ArgumentTypeError, "not a statistic"),
            (lambda f: reduced(certified(variance(f), generator=0), sum), ArgumentTypeError, "has to be a statistic"),
        ],
    )
    def test_are_early(self, make, error, match):
        with pytest.raises(error, match=match):
            make(self.F)

    def test_within_vmap(self):
        checked = certified(variance(self.F), generator=0)
        with pytest.raises(ArgumentError, match=r"^certified\(variance\(.*within torch.func.vmap"):
            vmap(checked, (0, None, None))(torch.ones(2, 3), *self.ARGS[1:])

    def test_of_a_scalar_that_has_no_parts(self):
        with pytest.raises(SplitError, match=r"^certified\(.*neither the sum nor the mean"):
            certified(variance(lambda w, x, y: self.F(w, x, y).sum() / (len(x) + 1)), generator=0)(*self.ARGS)

    def test_of_the_statistic_are_its_own(self):
        with pytest.raises(ArgumentError, match=r"^variance\("):
            certified(variance(self.F), generator=0)(self.ARGS[0], self.ARGS[1], torch.zeros(5))


# certified, of products with matrices


def made_of_products(name, problem, alone):
    """A product with its arguments."""
    functions = (problem.f,) if alone else (problem.model.f, problem.loss)
    t, r = PRODUCTS[name](*functions, in_dims=problem.in_dims), Numbers(5)
    params = problem.model.params
    v = tree.map_tensors(lambda p: r(*[2] * t.lead, *p.shape).to(p), params)
    return t, (params, v, *problem.batch)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_wrong_ones_are_found(name):
    problem = strategies.Problem(strategies.Model("perceptron", n=3), strategies.Loss("cross_entropy", "none"))
    t, args = made_of_products(name, problem, alone=False)
    compute = Product.compute

    def wrong(self, *given):
        result, aux = compute(self, *given)
        return tree.map_tensors(lambda x: 2 * x, result), aux

    with (
        mock.patch.object(Product, "compute", wrong),
        pytest.raises(CertificateError, match=rf"^certified\({name.split()[0]}\("),
    ):
        certified(t, generator=SEED)(*args)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_aux", [False, True])
def test_linearised(name, has_aux):
    """Each product is checked; the probes of estimates and scipy's operators take it."""
    problem = strategies.Problem(strategies.Model("perceptron", n=3), strategies.Loss("mse_loss", "none"))
    f = (lambda *args: (problem.model.f(*args), "aux")) if has_aux else problem.model.f
    t = PRODUCTS[name](f, problem.loss, has_aux=has_aux)
    params, v, *batch = made_of_products(name, problem, alone=False)[1]
    found = certified(t, generator=SEED).linearize(params, *batch)
    found, aux = found if has_aux else (found, "aux")
    plain = t(params, v, *batch)
    plain = plain[0] if has_aux else plain
    assert aux == "aux"
    torch.testing.assert_close(found(v), plain)
    wrong = mock.patch.object(Linearised, "compute", lambda self, args, *given: (args[0], None))
    with wrong, pytest.raises(CertificateError, match=rf"^certified\({name.split()[0]}\("):
        found(v)


@pytest.mark.quick
def test_errors():
    f = lambda w, x: (x @ w).square()  # noqa: E731  (as users write it)
    with pytest.raises(ArgumentError, match="Certify the product with the GGN"):
        certified(invfunc.hvp(f, F.mse_loss, blocks=True, modify="abs"), generator=SEED)
    with pytest.raises(ArgumentTypeError, match="computed in one way only"):
        explain(certified(invfunc.hvp(f), generator=SEED))(torch.ones(2), torch.ones(2), torch.ones(1, 2))


# What is found


def squares(p, x, y):
    return (torch.tanh(x @ p["w"]) @ p["v"] - y).square()


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


PARAMS = {"w": rand(3, 2), "v": rand(2, seed=1)}
ARGS = PARAMS, rand(5, 3, seed=2), rand(5, seed=3)


class TestNumbersThatAreNotFinite:
    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    @each_row
    def test_are_no_fault(self, row, number):
        problem = Problem(Model("perceptron", n=4), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        x = x.clone()
        x[1, 0] = number
        certified(t, generator=SEED)(params, x, *target)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0])
    @each_row
    def test_beside_finite_ones_are_a_fault(self, row, number):
        """One kind in the place of the other."""
        problem = Problem(Model("perceptron", n=3), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        if number == 0:
            x = torch.full_like(x, float("nan"))
        with planted(lambda result: tree.map_tensors(lambda r: torch.full_like(r, number), result)):
            with pytest.raises(CertificateError):
                certified(t, generator=SEED)(params, x, *target)


class TestKinks:
    """|z| where z is 0 to the last digit for one of the samples."""

    @staticmethod
    def f(p, x, y):
        return (x @ p["w"] - y).abs() + torch.tanh(x @ p["v"])

    ARGS = {"w": torch.ones(3), "v": rand(3).float()}, torch.randint(9, (6, 3)).float(), torch.zeros(6)

    def args(self):
        x = self.ARGS[1]
        return *self.ARGS[:2], torch.cat([x[:1].sum(1), self.ARGS[2][1:]])

    @pytest.mark.parametrize("t", [batch_grad, batch_l2_grad, variance, gram, invfunc.sum_grad_squared])
    def test_are_no_fault(self, t):
        for seed in range(5):
            certified(t(self.f), generator=seed)(*self.args())


@pytest.mark.quick
def test_an_output_that_is_computed_from_another_is_no_fault():
    def f(p, x):
        h = (x @ p["w"]).tanh()
        return h, h @ p["v"][:, None]

    def loss(z, y):
        return (z[0].sum(1) - y).square().sum() + (z[1][:, 0] - y).square().sum()

    certified(invfunc.diag_ggn(f, loss), generator=SEED)(*ARGS)
    certified(invfunc.ggnvp(f, loss), generator=SEED)(ARGS[0], *ARGS)


class TestPaths:
    """An error names the entry that is wrong."""

    @pytest.mark.parametrize(
        "t, path",
        [
            (batch_grad, r"result\['[wv]'\]\[1, [\d, ]+\]"),
            (batch_l2_grad, r"result\['[wv]'\]\[1\]"),
            (gram, r"result\[1, [01]\]"),
            (invfunc.batch_jacobian, r"result\['w'\]\[1, [01], \d, \d\]"),
            (invfunc.sqrt_ggn, r"\(result\['w'\] \*\* 2\).sum\(0\)\[1, \d, \d\]"),
        ],
    )
    def test_name_the_place_in_the_result(self, t, path):
        """Of which only some are asked for."""
        model = lambda p, x: torch.tanh(x @ p["w"])  # noqa: E731  (as users write it)
        f, args = (squares, ARGS) if t in (batch_grad, batch_l2_grad, gram) else (model, ({"w": PARAMS["w"]}, ARGS[1]))
        loss, args = ((F.mse_loss,), (*args, rand(5, 2))) if t is invfunc.sqrt_ggn else ((), args)

        def change(result):
            def off(x):
                x = x.clone()
                x.narrow(1 if t is invfunc.sqrt_ggn else 0, 1, 1).mul_(2)
                return x

            return tree.map_tensors(off, result)

        with planted(change), pytest.raises(CertificateError) as told:
            certified(t(f, *loss, samples=[4, 1]), generator=SEED)(*args)
        assert re.fullmatch(path, told.value.path), told.value.path


# `certified` raises no false alarm: of drawn problems in each precision, and all that it takes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_right_results_raise_none(dtype):
    came = []

    @settings(max_examples=20, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(drawn(dtype))
    def look(call):
        what, said = call.outcome()
        assert what in ("right", "refused"), f"{said}\n{call}.check()"
        came.append(what)

    look()
    assert came.count("right") >= 10


@pytest.mark.quick
def test_wrong_results_raise_one_and_the_call_prints_as_code(monkeypatch):
    problem = Problem(Model("affine", 3, dtype=torch.bfloat16), Loss("mse_loss"))
    call, compute = Call(problem, ("variance",), LOSS, samples=(0, 2), chunks=2, over="samples"), Statistic.compute
    assert call.outcome() == ("right", "") and eval(repr(call)) == call

    def wrong(self, *given):
        return tree.map_tensors(lambda x: 2 * x, compute(self, *given))

    monkeypatch.setattr(Statistic, "compute", wrong)
    assert call.outcome()[0] == "alarm"
