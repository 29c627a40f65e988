"""reduced: a function of each parameter's quantity in its place, as soon as it is known."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import invfunc
from invfunc import reduced, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.laws import composed
from tests.networks import LOSSES, network, networks, samples_loss
from tests.rows import BOTH, LEAVES, MODEL, in_blocks, rows
from tests.strategies import Numbers

EXACT, FLOOR = 1e-9, 1e-6
ALL = {name: row for name, row in rows(LEAVES).items() if row.form != MODEL}
EITHER = rows(LEAVES, form=BOTH)


def weighed(path, tensor):
    """Another number for each path."""
    return len(path) * tensor.square().mean() + tensor.flatten()[0]


def expected(t, fn, args):
    result = t(*args)
    return tree.unflatten([fn(path, x) for path, x in tree.named_leaves(result)], tree.flatten(result)[1])


def arranged(net, loss, form):
    """The functions in one of the forms, and arguments."""
    functions = {"[N]": (samples_loss(net, loss),), "mean": (composed(net.f, loss),), "model": (net.f, loss)}[form]
    return functions, (net.params, net.x, loss.target(Numbers(1), net.n))


@settings(max_examples=8)
@given(net=networks(), loss=st.sampled_from(LOSSES), form=st.sampled_from(["[N]", "mean", "model"]), data=st.data())
@pytest.mark.parametrize("of", [lambda t: t, in_blocks], ids=["fast", "blocks"])
def test_it_is_what_one_would_compute_afterwards(of, net, loss, form, data):
    called = data.draw(st.sampled_from(list(EITHER if form == "model" else ALL)))
    loss = LOSSES[0] if ALL[called].drawn else loss  # not all can be drawn from
    functions, args = arranged(net, loss, form)

    def t():
        return ALL[called].make(*functions)

    assert_trees_close(of(reduced(t(), weighed))(*args), expected(t(), weighed, args), EXACT, FLOOR)


@pytest.mark.quick
@pytest.mark.parametrize("called", ALL)
class TestCalls:
    @staticmethod
    def made(called):
        functions, args = arranged(network("perceptron", 3), LOSSES[0], "mean")
        return ALL[called].make(*functions), args

    def test_what_was_given_is_gone_when_the_next_is_formed(self, called):
        """Whoever keeps a small number of each parameter never pays for the tensors of two of them."""
        t, args = self.made(called)
        seen, alive = [], []

        def fn(path, tensor):
            alive.append(sum(not storage.expired() for storage in seen))
            seen.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor.sum()

        reduced(t, fn)(*args)
        assert alive == [0] * len(tree.leaves(args[0]))


class TestResults:
    args = {"b": Numbers()(3, 2), "a": [Numbers(1)(2), torch.ones(2).double()]}, Numbers(2)(4, 3), Numbers(3)(4, 2)

    @staticmethod
    def loss(p, x, y):
        return F.mse_loss((x @ p["b"]).tanh() * p["a"][0], y)

    def test_may_be_anything(self):
        for made in ("text", None, 3, {"one": torch.ones(2), "two": [1]}):
            found = reduced(invfunc.batch_grad(self.loss), lambda path, tensor, made=made: made)(*self.args)
            assert repr(found) == repr({"b": made, "a": [made, made]})

    def test_what_is_summed_over_parameters_comes_for_each(self):
        functions = (lambda p, x: (x @ p["b"]).tanh() * p["a"][0]), F.mse_loss
        wanted = tree.map_leaves(lambda x: 2 * x, invfunc.ggn_trace(*functions, per_parameter=True)(*self.args))
        assert_trees_close(reduced(invfunc.ggn_trace(*functions), lambda x: 2 * x)(*self.args), wanted, EXACT)
        wanted = tree.map_leaves(torch.trace, invfunc.gram(self.loss_of_each, per_parameter=True)(*self.args))
        assert_trees_close(reduced(invfunc.gram(self.loss_of_each), torch.trace)(*self.args), wanted, EXACT)

    @staticmethod
    def loss_of_each(p, x, y):
        return ((x @ p["b"]).tanh() * p["a"][0] - y).square().sum(1)


class TestRefusals:
    t = invfunc.batch_grad(TestResults.loss)

    def test_what_is_reduced(self):
        with pytest.raises(ArgumentError, match="reduced already"):
            reduced(reduced(self.t, torch.sum), torch.sum)

    @pytest.mark.parametrize("fn", [3, None, "sum"], ids=repr)
    def test_what_is_no_function(self, fn):
        with pytest.raises(ArgumentTypeError, match=rf"reduced\(.*is of type {type(fn).__name__}"):
            reduced(self.t, fn)

    @pytest.mark.parametrize(
        "other", [3, None, F.mse_loss, torch.func.grad(F.mse_loss)], ids=["3", "None", "f", "grad"]
    )
    def test_what_is_no_statistic(self, other):
        with pytest.raises(ArgumentTypeError, match="reduced"):
            reduced(other, torch.sum)
