"""together: several statistics from one forward pass, each as it is alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, reduced, together
from invfunc.core.evaluate import of_each_kind
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.laws import composed
from tests.networks import LOSSES, network, networks
from tests.rows import BOTH, FIRST_ORDER, MODEL, in_blocks, rows
from tests.strategies import Numbers

EXACT, FLOOR = 1e-9, 1e-6
FIRST = {name: row.make for name, row in FIRST_ORDER.items() if MODEL not in row.forms}
SECOND = {name: row.make for name, row in rows(form=BOTH).items()}
OF_MODELS = {name: row.make for name, row in rows(form=MODEL).items()}
LINEAR = ["affine", "perceptron", "convolution", "module"]
"""Networks that have K-factors."""


def assert_as_alone(makers, functions, args, of=lambda t: t):
    """And, of one kind, from as many calls of f as the one that needs most of them; else with a call for each kind."""
    calls = []

    def counted(f):
        def call(*given):
            calls.append(1)
            return f(*given)

        return call

    functions = (counted(functions[0]), *functions[1:])
    alone, counts = [], []
    for make in makers:
        calls.clear()
        alone.append(make(*functions)(*args))
        counts.append(len(calls))
    calls.clear()
    found = of(together(*[make(*functions) for make in makers]))(*args)
    assert isinstance(found, tuple) and len(found) == len(makers)
    assert_trees_close(found, tuple(alone), EXACT, FLOOR)
    if of is not in_blocks:
        quantities = [make(*functions).quantity for make in makers]
        assert len(calls) <= max(counts) * len(of_each_kind(quantities))


def some(names):
    return st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=4)


PATHS = st.sampled_from([lambda t: t, in_blocks])


class TestEqualsEachAlone:
    @settings(max_examples=12)
    @given(called=st.sampled_from(LINEAR), names=some(FIRST | SECOND), of=PATHS, n=st.integers(2, 4))
    def test_of_a_mean_loss(self, called, names, of, n):
        net, loss = network(called, n), LOSSES[n % 3]
        makers = [(FIRST | SECOND)[name] for name in names]
        args = (net.params, net.x, loss.target(Numbers(1), n))
        assert_as_alone(makers, (composed(net.f, loss),), args, of)

    @settings(max_examples=8)
    @given(net=networks(), names=some(OF_MODELS), of=PATHS)
    def test_of_a_model(self, net, names, of):
        assert_as_alone([OF_MODELS[name] for name in names], (net.f,), (net.params, net.x), of)

    @pytest.mark.quick
    def test_all_at_once(self):
        net = network("perceptron", 3)
        args = (net.params, net.x, LOSSES[0].target(Numbers(1), 3))
        assert_as_alone([*(FIRST | SECOND).values()], (composed(net.f, LOSSES[0]),), args)


W, V, X, Y = Numbers()(3, 2), Numbers(3)(2), Numbers(1)(4, 3), Numbers(2)(4, 2)


def model(w, x):
    return (x @ w).tanh()


def loss(w, x, y):
    return F.mse_loss(model(w, x), y)


class TestRefusals:
    def test_other_functions(self):
        with pytest.raises(ArgumentError, match=r"together\(.*f"):
            together(invfunc.batch_grad(loss), invfunc.variance(lambda w, x, y: loss(w, x, y)))

    @pytest.mark.parametrize(
        "option", [{"argnums": 1}, {"in_dims": (0, None)}, {"has_aux": True}], ids=lambda option: next(iter(option))
    )
    def test_other_options(self, option):
        with pytest.raises(ArgumentError, match=rf"together\(.*{next(iter(option))}"):
            together(invfunc.batch_grad(loss), invfunc.variance(loss, **option))

    @pytest.mark.parametrize(
        "composed",
        [lambda t: chunked(t, 2), lambda t: reduced(t, torch.sum), lambda t: together(t)],
        ids=["chunked", "reduced", "together"],
    )
    def test_compositions(self, composed):
        with pytest.raises(ArgumentError, match="chunked"):
            together(invfunc.batch_grad(loss), composed(invfunc.batch_grad(loss)))

    @pytest.mark.parametrize("other", [loss, 3, None, torch.func.grad(loss)], ids=["f", "3", "None", "grad"])
    def test_what_is_no_statistic(self, other):
        with pytest.raises(ArgumentTypeError, match="together"):
            together(invfunc.batch_grad(loss), other)

    def test_a_bad_argument_is_told_once(self):
        with pytest.raises(ArgumentError, match="5.*4|4.*5") as told:
            together(invfunc.batch_grad(loss), invfunc.variance(loss))(W, torch.ones(5, 3).double(), Y)
        assert "together(batch_grad(loss), variance(loss))(w, x, y)" in str(told.value)


def test_factors_that_share_positions_otherwise_are_not_each_others():
    """The input factor of a bias is that of its weight, of the same member."""
    params = {"0.w": Numbers()(2, 2, 3), "0.b": Numbers(1)(2), "1.w": Numbers(2)(2, 2, 3)}
    args = params, Numbers(3)(3, 2, 6), Numbers(4)(3, 2, 2)

    def f(p, x):
        return F.conv1d(F.conv1d(x, p["0.w"], p["0.b"]).tanh(), p["1.w"])

    members = [
        invfunc.kfac(f, F.mse_loss, weight_sharing=sharing, joint=joint, fisher="exact")
        for sharing in ("expand", "reduce", "backpack")
        for joint in (False, True)
    ]
    for found, alone in zip(together(*members)(*args), members, strict=True):
        for name, factors in alone(*args).items():
            if factors is not None:
                assert_trees_close(found[name].factors, factors.factors, EXACT)
