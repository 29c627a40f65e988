"""Errors of invertible functions: the call, what came, what was wanted, the fix."""

import pytest
import torch
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
    with_log_det,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, ModifiedError, RangeError, ReplayError
from invfunc.pairs import Grid, drift, leapfrog, momentum, state_first
from tests.invertible_same import f, f_inv, g, gradients, leaves, squares

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


CHANGES = {
    "number": lambda x: x.sin(),
    "shape": lambda x: x[:1].sin() * x,
    "dtype": lambda x: x.float().sin() * x,
}


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
