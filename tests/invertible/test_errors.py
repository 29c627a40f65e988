"""Errors of invertible functions: the call, what came, what was wanted, the fix."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    check_inverse,
    invert,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
    with_log_det,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, ModifiedError, RangeError, ReplayError
from invfunc.pairs import Grid, drift, leapfrog, momentum, state_first
from invfunc.testing.models import moved
from tests.invertible.test_chain import AFFINE, KINDS, WIDTH, blocks, mixed
from tests.invertible_cases import f, f_inv, g, gradients, leaves, squares
from tests.strategies import Numbers

X, W = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)
PLAIN = Invertible(f, f_inv)
COUPLING = additive_coupling(torch.sin, torch.cos)
HIDING = Invertible(lambda x: (2 * x, 2.0), lambda y, by: y / by, hidden=True, name="hiding")
CHAIN = chain(g, g)
REPEATED = repeated(g)


def made(f=f, f_inv=f_inv, x=X, **options):
    return invertible_checkpoint(f, f_inv, **options)(x, W)


TYPES = [
    (lambda: invertible_checkpoint(3, f_inv), r"^invertible_checkpoint\(f\): f is of type int"),
    (lambda: invertible_checkpoint(torch.nn.Linear, f_inv), r"the class Linear.*functional\(Linear\(...\)\)"),
    (lambda: invertible_checkpoint(PLAIN, f_inv), "leave f_inv out"),
    (lambda: invertible_checkpoint(PLAIN, None), "leave f_inv out"),
    (lambda: Invertible(1, f_inv), r"^Invertible\(.*forward is of type int"),
    (lambda: Invertible(f, None), "inverse is of type NoneType"),
    (lambda: Invertible(f, f_inv, shared=(f, 2)), r"shared\[1\] is of type int"),
    (lambda: Invertible(f, f_inv, log_det=2), "log_det is of type int"),
    (lambda: invert(f), r"^invert\(pair\).*has to be an Invertible"),
    (lambda: with_log_det(f), r"^with_log_det\(pair\).*has to be an Invertible"),
    (lambda: additive_coupling(torch.sin, 1), "^additive_coupling.*G is of type int"),
    (lambda: affine_coupling(f, f, log_scale=1), "^affine_coupling.*log_scale is of type int"),
    (lambda: momentum(None), "^momentum.*of type NoneType"),
    (lambda: leapfrog("f", 0.1), "^leapfrog.*of type str"),
    (lambda: state_first(2), "^state_first.*of type int"),
    (lambda: chain(g, 2), "^chain.*block 1 is of type int"),
    (lambda: repeated(2), "^repeated.*is of type int"),
    (lambda: check_inverse(f, X), r"^check_inverse.*of type function.*\(f, f_inv\)"),
    (lambda: drift(None, X, [W]), r"^drift.*of type NoneType.*\(f, f_inv\)"),
]
VALUES = [
    (lambda: made(keep=(1,)), r"^invertible_checkpoint\(f, f_inv\).*keep=\(1,\).*x has 1"),
    (lambda: invertible_checkpoint(PLAIN, has_aux=True), "^invertible_checkpoint.*has_aux=True"),
    (lambda: Invertible(f, f_inv, hidden=True, name="hiding")(X, W), r"^hiding.*has to return \(y, hidden\)"),
    (lambda: invert(HIDING), r"^invert\(hiding\).*hidden"),
    (lambda: with_log_det(HIDING), r"^with_log_det\(hiding\).*has no log_det"),
    (lambda: with_log_det(PLAIN), "^with_log_det.*has no log_det"),
    (lambda: COUPLING(X), r"^additive_coupling\(sin, cos\).*x has to be a pair of tensors.*Tensor.*split_dim="),
    (lambda: COUPLING((X, X, X)), "x has to be a pair of tensors, but is tuple"),
    (lambda: COUPLING((X, X), 3), "the parameters have to be a pair"),
    (lambda: invert(COUPLING)(X), "y has to be a pair of tensors"),
    (lambda: additive_coupling(torch.sin, torch.cos, split_dim=2)(X), r"x is \[2, 3\], which has no two halves"),
    (lambda: momentum(torch.sin, 1), r"^momentum\(sin, gamma=1\): gamma has to be between 0 and 1"),
    (lambda: CHAIN(X, [W]), "params is 1 entries.*2 blocks"),
    (lambda: CHAIN(X, W), "params is (Tensor|Parameter)"),
    (lambda: REPEATED(X, {"a": X, "b": W}), r"one leading size.*\[2, 3\], \[3\]"),
    (lambda: REPEATED(X, None), r"params is missing, and says how often.*\[None\] \* n"),
    (lambda: chain(g, anchor_every=0), "^chain.*anchor_every=0"),
    (lambda: repeated(g, anchor_every=-1), "^repeated.*anchor_every=-1"),
    (lambda: Grid(dtype=torch.float16), r"^Grid\(.*float32 or torch.float64"),
]


@pytest.mark.parametrize(("fn", "reason"), TYPES, ids=[reason for _, reason in TYPES])
def test_what_is_no_function(fn, reason):
    with pytest.raises(ArgumentTypeError, match=reason) as told:
        fn()
    assert isinstance(told.value, TypeError)


@pytest.mark.parametrize(("fn", "reason"), VALUES, ids=[reason for _, reason in VALUES])
def test_what_has_another_form(fn, reason):
    with pytest.raises(ArgumentError, match=reason) as told:
        fn()
    assert isinstance(told.value, ValueError)


WRONG = {
    "another shape": (lambda y, w: f_inv(y, w)[:1], r"gives x as \[1, 3\].* \[2, 3\]"),
    "another dtype": (lambda y, w: f_inv(y, w).float(), "gives x as .*float32.*float64"),
    "another structure": (lambda y, w: (f_inv(y, w),), r"gives tuple of x\[0\], where x was one tensor.*form of x"),
    "none": (lambda y, w: None, "gives None, where x was one tensor.*form of x"),
}


class TestWrongInverses:
    @pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG)
    def test_whose_results_do_not_come_back(self, wrong, reason):
        """An error when called with check=, in backward without it, and within every transform."""
        with pytest.raises(InverseError, match=reason):
            made(f_inv=wrong, check=True)
        x, w = leaves()
        h = invertible_checkpoint(f, wrong)
        y = h(x * 1, w)
        with pytest.raises(InverseError, match=reason):
            gradients(y, x)
        for transform in (grad, lambda f: vmap(grad(f))):
            batched = transform is not grad
            with pytest.raises(InverseError, match="the inverse gives"):
                transform(lambda v: squares(h(h(x.detach(), v), v)))((torch.stack([w] * 2) if batched else w).detach())

    def test_are_found_by_check_which_names_the_leaf(self):
        def forward(x, w):
            return {"a": x["a"] * w.exp(), "b": [x["b"][0] * w.exp()]}

        def back(y, w):
            return {"a": y["a"] / w.exp(), "b": [y["b"][0] / w.exp() * (1 + 1e-3)]}

        state = {"a": X, "b": [X]}
        told = r"gives x\['b'\]\[0\] .*1.0e-03.*tolerated"
        for check in (True, 1e-4):
            h = invertible_checkpoint(forward, back, check=check)
            for call in (lambda h=h: h(state, W), lambda h=h: grad(lambda w: h(state, w)["a"].sum())(W.detach())):
                with pytest.raises(InverseError, match=told):
                    call()
        invertible_checkpoint(forward, back, check=2e-3)(state, W)
        invertible_checkpoint(forward, back, check=True, keep=(1,))(state, W)

    def test_that_lack_the_arguments_of_f_are_told_how_they_were_called(self):
        x, w = leaves()
        with pytest.raises(TypeError) as told:
            gradients(invertible_checkpoint(f, lambda y: y)(x * 1, w), w)
        (note,) = told.value.__notes__
        assert note.startswith("<lambda> was called with (Tensor, ") and "in the backward pass of invertible_ch" in note

    def test_and_functions_that_get_a_state_of_another_form_are_told_of_it(self):
        for first in (lambda x: x.sin(), lambda x: torch.sin(x)):
            with pytest.raises((TypeError, AttributeError)) as told:
                invertible_checkpoint(first, torch.asin)((X, X))
            (note,) = told.value.__notes__
            assert "with an x of type tuple" in note and "as its first argument" in note and "g(x, w)" in note

    def test_that_fail_or_are_none(self):
        x, w = leaves()
        with pytest.raises(ZeroDivisionError):
            gradients(invertible_checkpoint(f, lambda y, w: 1 / 0)(x * 1, w), x)
        with pytest.raises(InverseError, match="has no inverse"):
            invert(chain(lambda x: 2 * x))(X, [None])


CHANGES = {"number": lambda x: x.sin(), "shape": lambda x: x[:1].sin() * x, "dtype": lambda x: x.float().sin() * x}


class TestChanges:
    @pytest.mark.parametrize("later", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("check", [False, True])
    def test_other_tensors_saved_by_the_second_evaluation(self, later, check):
        calls = []

        def part(x):
            calls.append(x)
            return x.sin() * x if len(calls) == 1 else later(x)

        x = leaves()[0]
        y = invertible_checkpoint(part, None, check=check)(x * 1)
        with pytest.raises(ReplayError, match="invertible_checkpoint"):
            gradients(y, x)

    def test_tell_what_came_and_the_way_out(self):
        x, w = leaves()
        y = g(x * 1, w)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(ModifiedError, match=r"shape \[2, 3\].*inplace operation.*y = y \+ z"):
            gradients(y, x)
        with pytest.raises(ModifiedError, match=r"^invertible_checkpoint\(<lambda>, f_inv\).* its argument x.*x.clone"):
            invertible_checkpoint(lambda x, w: x.mul_(w), f_inv)(x * 1, w)
        with pytest.raises(RangeError, match=r"^Grid\(.*Grid.enter\(x\)"):
            additive_coupling(torch.sin, torch.cos, exact=True)((X, X))

    def test_are_told_once_by_the_outermost_call(self):
        inner = invertible_checkpoint(lambda x, w: x.mul_(w), f_inv)
        with pytest.raises(ModifiedError) as told:
            invertible_checkpoint(lambda x, w: inner(x * 1, w), None)(X, W)
        assert str(told.value).count("(x, ...)") == 1
        with pytest.raises(ArgumentError, match="W has shape"):
            invertible_checkpoint(layers.linear())(X, X.detach().requires_grad_())


# Reports on an inverse: its errors, leaf by leaf, and their growth with the depth

CONTAINERS = {
    "tensor": lambda a, b: (a, {"x": a}),
    "tuple": lambda a, b: ((a, b), {"x[0]": a, "x[1]": b}),
    "nested": lambda a, b: ([a, {"b": (b, None)}], {"x[0]": a, "x[1]['b'][0]": b}),
    "with an integer": lambda a, b: ((a, torch.arange(3), "text"), {"x[0]": a, "x[1]": torch.arange(3)}),
}


def doubled(x: Any, by: float = 2.0) -> Any:
    return tree.map_tensors(lambda t: t * by if t.is_floating_point() else t + 1, x)


def halved(y: Any, by: float = 2.0) -> Any:
    return tree.map_tensors(lambda t: t / by if t.is_floating_point() else t - 1, y)


def forms_of(f: Any, f_inv: Any) -> list:
    return [(f, f_inv), Invertible(f, f_inv), invertible_checkpoint(f, f_inv)]


@pytest.mark.quick
class TestCheckInverse:
    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    @given(by=st.floats(0.1, 10), off=st.sampled_from([0.0, 1e-3, 0.5]), shape=st.lists(st.integers(1, 3), max_size=3))
    def test_reports_the_error_of_each_leaf_both_ways(self, device, dtype, container, by, off, shape):
        rand = Numbers()
        x, named = moved(container(rand(*shape), rand(*shape, 2)), dtype, device)

        def inexact(y, by):
            return tree.map_tensors(lambda t: t * (1 + off) if t.is_floating_point() else t, halved(y, by))

        for pair in forms_of(doubled, inexact):
            report = check_inverse(pair, x, by, tolerance=1.0)
            assert list(report.x) == list(named)
            assert list(report.y) == [name.replace("x", "y", 1) for name in named]
            for (name, error), of_y in zip(report.x.items(), report.y.values(), strict=True):
                wanted = off if named[name].is_floating_point() else 0.0
                assert error == pytest.approx(wanted, rel=1e-5, abs=1e-6)
                assert of_y == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert 0.5 < report.condition < 2

    @given(data=st.data())
    def test_is_content_with_what_is_right(self, device, dtype, data):
        case = data.draw(blocks(KINDS))
        x, params = moved((Numbers(1)(3, WIDTH), case.params), dtype, device)
        for pair in (case.block, invertible_checkpoint(case.block)):
            report = check_inverse(pair, x, params)
            assert max(*report.x.values(), *report.y.values()) < torch.finfo(dtype).eps ** 0.5
            assert not any(t.requires_grad for t in tree.tensors((x, params)))

    def test_takes_pairs_that_hide_or_share_something(self, device, dtype):
        rand = Numbers()
        x = moved(rand(5, 3), dtype, device)
        for pair in (layers.batch_norm(), chain(layers.batch_norm(), layers.leaky_relu(0.5)), layers.flatten()):
            given_to = ([None, None],) if repr(pair).startswith("chain") else ()
            report = check_inverse(pair, x, *given_to)
            assert list(report.x) == ["x"] and list(report.y) == ["y"]
        report = check_inverse(leapfrog(torch.sin, 0.1), (x, x))
        assert list(report.x) == ["x[0]", "x[1]"]

    def test_replays_random_numbers(self):
        """Dropout draws the same mask on the way back, as it does for a gradient."""
        x, state = Numbers()(2, 8, 4).unbind(), torch.get_rng_state()
        pair = additive_coupling(F.dropout, F.dropout)
        assert check_inverse(pair, x).x["x[0]"] < 1e-12
        assert max(drift(pair, x, [None] * 3)) < 1e-12
        torch.set_rng_state(state)

    @given(factor=st.sampled_from([1.0, 1e4, 1e12]), kind=st.sampled_from(["float64", "float32", "complex128"]))
    def test_warns_where_rounding_takes_half_of_the_digits(self, device, factor, kind):
        """The largest entry of y tells nothing about the smallest, from which x comes as well."""
        kind = getattr(torch, kind)
        scale = torch.tensor([1, 1 / factor], dtype=kind, device=device)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = check_inverse((lambda x: x * scale, lambda y: y / scale), torch.ones_like(scale))
        assert factor / 4 <= report.condition <= 4 * factor
        bad = factor > torch.finfo(kind).eps ** -0.5
        assert len(seen) == bad and all("ill-conditioned" in str(w.message) for w in seen)
        assert all(w.filename == __file__ for w in seen)


def told(f: Any, f_inv: Any, x: Any, *args: Any, **options: Any) -> list[str]:
    """Messages about a wrong inverse, by each form of the pair."""
    errors = []
    for pair in forms_of(f, f_inv):
        with pytest.raises(InverseError) as error:
            check_inverse(pair, x, *args, **options)
        errors.append(str(error.value))
    return errors


class TestWrongInverse:
    X = {"a": torch.ones(2, 3), "b": torch.arange(3)}

    @pytest.mark.parametrize(
        "f_inv, said",
        [
            (lambda y: {**halved(y), "a": y["a"] / 2 + 0.25}, "x['a'] comes back with an error of 2.5e-01"),
            (lambda y: {**halved(y), "b": y["b"]}, "x['b'] comes back with an error of 5.0e-01 of its largest entry"),
            (lambda y: {**halved(y), "a": y["a"] * math.nan}, "x['a'] comes back with an error of nan"),
            (lambda y: {**halved(y), "a": y["a"] / 2 + 1e-3}, "where 3.5e-04 is tolerated (tolerance=)"),
            (lambda y: {**halved(y), "a": y["a"].mT / 2}, "x['a'] .*[3, 2] torch.float32 .*[2, 3]"),
            (lambda y: {**halved(y), "a": y["a"].half() / 2}, "x['a'] .*[2, 3] torch.float16 .*[2, 3] torch.float32"),
            (lambda y: {**halved(y), "a": None}, "dict of x['b'], where x was x['a'], x['b']"),
            (lambda y: {"a": y["a"] / 2}, "dict of x['a'], where x was x['a'], x['b']"),
            (lambda y: y["a"] / 2, "one tensor, where x was x['a'], x['b']"),
        ],
    )
    def test_is_found_by_leaf(self, f_inv, said):
        for text in told(doubled, f_inv, self.X):
            assert text.startswith("check_inverse(") and all(part in text for part in said.split(" .*"))

    def test_is_none(self):
        plain = invertible_checkpoint(torch.sin, None)
        for call in (lambda: check_inverse(plain, torch.ones(2)), lambda: drift(plain, torch.ones(2), [None])):
            with pytest.raises(InverseError, match="inverse"):
                call()
        with pytest.raises(InverseError, match="inverse"):
            drift(chain(AFFINE, torch.sin), torch.ones(2, WIDTH), [(torch.ones(2, 2),) * 2, None])


OFF = Invertible(lambda x, c=2.0, *, by=1.0: x * c * by, lambda y, c=2.0, *, by=1.0: y / c / by * 1.001, name="off")


class TestDrift:
    @pytest.mark.parametrize("form", ["one", "functions", "checkpoint", "repeated", "stacked", "chain", "chains"])
    @given(depth=st.integers(0, 6))
    def test_has_an_entry_for_each_block(self, form, depth):
        x, c = torch.ones(2).double(), [1.0 + i for i in range(depth)]
        pair, params = {
            "one": lambda: (OFF, c),
            "functions": lambda: ((OFF.forward, OFF.inverse), c),
            "checkpoint": lambda: (invertible_checkpoint(OFF), c),
            "repeated": lambda: (repeated(OFF), c),
            "stacked": lambda: (OFF, torch.tensor(c).double()),
            "chain": lambda: (chain(*[OFF] * depth), c),
            "chains": lambda: (chain(*[chain(OFF)] * depth), [[p] for p in c]),
        }[form]()
        wanted = [1.001 ** (d + 1) - 1 for d in range(depth)]
        assert drift(pair, x, params) == pytest.approx(wanted, rel=1e-6)
        assert drift(pair, x, params, by=4.0) == pytest.approx(wanted, rel=1e-6)

    def test_grows_in_float32_and_is_none_on_a_grid(self):
        """Additive couplings: 3e-8, 2e-7, 2e-6 and 4e-5 at depth 1, 10, 50 and 100."""
        rand = Numbers()
        x, w = rand(2, 8, WIDTH).float().unbind(), (1.5 * rand(100, 2, WIDTH, WIDTH) / 2).float()
        params = [tuple(p.unbind()) for p in w.unbind()]
        errors = drift(additive_coupling(mixed, mixed), x, params)
        assert 0 < errors[0] < 1e-6 and errors[0] < errors[9] < errors[99] < 1e-2
        assert errors[99] > 10 * errors[9]
        on_grid = tuple(Grid().enter(t) for t in x)
        assert drift(additive_coupling(mixed, mixed, exact=True), on_grid, params) == [0.0] * 100
        half = drift(additive_coupling(mixed, mixed), *tree.map_tensors(torch.Tensor.bfloat16, (x, params)))
        assert half[0] > 100 * errors[0]
