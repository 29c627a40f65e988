"""Texts of a function that a transform has made; it is copied and pickled if its function is."""

import inspect
import pickle
from pydoc import render_doc

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import chunked, compiled, distributed, explain, functional, linear_operator, reduced, streamed, together
from invfunc.statistic import Statistic
from invfunc.testing.oracles import assert_trees_close
from tests.rows import LOSS, MODEL, ROWS


def model(params, x):
    return torch.tanh(x @ params["w"])


def losses(params, x, y):
    return F.mse_loss(model(params, x), y, reduction="none").sum(1)


def scaled(params, x, scale=1.0, *, flipped=False):
    return model(params, x) * (-scale if flipped else scale)


def by_name(params=None, x=None):
    return losses(params, x, x)


def trained(params, *batch):
    return losses(params, *batch)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (invfunc.variance(losses), "(params, x, y)"),
        (chunked(invfunc.variance(losses), 2), "(params, x, y)"),
        (chunked(invfunc.variance(losses), memory="1GiB"), "(params, x, y)"),
        (together(invfunc.variance(losses), invfunc.batch_grad(losses)), "(params, x, y)"),
        (compiled(invfunc.variance(losses)), "(params, x, y)"),
        (distributed(invfunc.variance(losses)), "(params, x, y)"),
        (explain(invfunc.diag_ggn(model, F.mse_loss)), "(params, x, target)"),
        (invfunc.diag_ggn(model, F.mse_loss), "(params, x, target)"),
        (invfunc.diag_ggn(scaled, F.mse_loss), "(params, x, target, *, scale=1.0, flipped=False)"),
        (invfunc.batch_jacobian(scaled), "(params, x, scale=1.0, *, flipped=False)"),
        (invfunc.hvp(losses), "(params, v, x, y)"),
        (invfunc.ggnvp(model, F.mse_loss), "(params, v, x, target)"),
        (invfunc.ggnvp(model, F.mse_loss, blocks=True), "(params, V, x, target)"),
        (invfunc.hvp(trained), "(params, v, /, *batch)"),
        (invfunc.variance(trained), "(params, *batch)"),
        (streamed(invfunc.variance(losses)), "(params, loader, /)"),
        (streamed(invfunc.hvp(losses)), "(params, v, loader, /)"),
        (linear_operator(invfunc.hvp(losses)), "(params, x, y)"),
    ],
    ids=repr,
)
def test_has_the_signature_of_a_call(made, wanted):
    assert str(inspect.signature(made)) == wanted


def said(of):
    return inspect.getdoc(of) or ""


class TestHelp:
    @pytest.mark.parametrize("of", [chunked(invfunc.variance(losses), 2), invfunc.hvp(losses)], ids=repr)
    def test_is_that_of_what_has_made_it(self, of):
        function = getattr(invfunc, repr(of).partition("(")[0])
        first, _, rest = said(of).partition("\n\n")
        assert first == f"{of!r}{inspect.signature(of)}" and rest == said(function)
        assert said(function).splitlines()[0] in render_doc(of)

    def test_of_a_class_stays_its_own(self):
        assert said(Statistic).startswith("A function `(params, *batch)")
        assert not hasattr(Statistic, "__signature__") and "name" in str(inspect.signature(Statistic))

    def test_of_a_function_without_a_signature(self):
        assert said(invfunc.batch_grad(torch.dot)).startswith("batch_grad(dot)(params, ...)")
        assert said(invfunc.hvp(by_name)).startswith("hvp(by_name)(params, ...)")

    def test_names_are_those_for_users(self):
        assert dir(invfunc.variance(losses)) == ["f"]
        assert dir(invfunc.ggnvp(model, F.mse_loss)) == ["f", "linearize", "loss"]
        assert dir(streamed(invfunc.variance(losses))) == ["t"]
        assert dir(invfunc) == invfunc.__all__

    def test_of_the_package_has_all_of_it_in_groups(self):
        assert all(f"`{name}`" in said(invfunc) for name in invfunc.__all__)


def made(name):
    row = ROWS[name]
    functions = {LOSS: [losses], MODEL: [model]}.get(row.form, [model, F.mse_loss])
    return row.make(*functions), (torch.randn(4, 3), torch.randn(4, 2))[: 1 if row.form == MODEL else 2]


class TestPickled:
    """In another process it is the same function, whose generators are copies, as they were."""

    @pytest.mark.parametrize("name", ROWS)
    def test_gives_the_same(self, name):
        params = {"w": torch.randn(3, 2)}
        t, batch = made(name)
        for of in [t, reduced(t, type)]:
            self.check(of, params, *batch)

    @pytest.mark.parametrize("name", ["variance", "diag_ggn"])
    def test_within_a_budget(self, name):
        t, batch = made(name)
        self.check(chunked(t, memory="1GiB"), {"w": torch.randn(3, 2)}, *batch)

    @staticmethod
    def check(of, params, *batch):
        again = pickle.loads(pickle.dumps(of))
        assert repr(again) == repr(of)
        assert_trees_close(again(params, *batch), of(params, *batch), 1e-12)

    def test_of_a_module(self):
        f, params = functional(torch.nn.Linear(3, 2))
        t, batch = invfunc.diag_ggn(f, F.mse_loss), (torch.randn(4, 3), torch.randn(4, 2))
        assert_trees_close(pickle.loads(pickle.dumps(t))(params, *batch), t(params, *batch), 1e-12)
