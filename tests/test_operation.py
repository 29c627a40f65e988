"""operation: a function of the user's as one operation, with shares by the generic path or by a rule of the user's."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, chunked, diag_ggn, operation
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, laws, loop_batch_grad
from tests.laws import FLOOR, STATISTICS, arranged
from tests.networks import LOSSES, Network
from tests.strategies import Numbers


class Affine(torch.autograd.Function):
    """A user's kernel: no function mode and no rule of ours can see into it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.mT + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, weight, _ = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).mT @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


def affine(x, weight, bias):
    """A layer that autograd sees as one node."""
    return Affine.apply(x, weight, bias)


def with_rules(fn):
    """Its weight and bias have rules; the positions p are summed over."""
    op = operation(fn)

    @op.share_of("weight")
    def _(delta, x, weight, bias):
        return "vnpo,npi->oi", delta, x

    @op.share_of("bias")
    def _(delta, x, weight, bias):
        return "vnpo->o", delta

    return op


def spectrum(x, weight):
    """An operation without a rule that follows the samples: a diagonal in an equation."""
    return torch.einsum("ni,nj,jj->ni", x.sin(), x, weight @ weight.mT)


def stretched(x, scale, power=2, *, shift=0.0):
    """Constants, defaults and keywords."""
    return (x * scale).tanh() ** power + shift


def of_rules(op):
    rand = Numbers()
    params = {"w": rand(4, 3), "b": rand(4), "v": rand(3, 4), "c": rand(3)}

    def f(p, x):
        return op(op(x, p["w"], p["b"]).tanh(), p["v"], p["c"]).sum(1)

    return Network("kernel", f, params, rand(3, 2, 3), 3)


def of_tied_rules(op):
    rand = Numbers()

    def f(p, x):
        z = op(x, p["w"], p["b"]).tanh()
        return op(z, 2 * p["w"], p["b"]).sum(1) * p["b"] @ p["w"]

    return Network("tied kernel", f, {"w": rand(3, 3), "b": rand(3)}, rand(4, 2, 3), 4)


def of_no_rule(op):
    rand, eigen, stretch = Numbers(), op(spectrum), op(stretched)

    def f(p, x):
        z = stretch(x, p["s"]) + stretch(x=x, scale=p["t"], power=3, shift=0.5)
        return eigen(z, p["w"])

    return Network("no rule", f, {"w": rand(3, 3), "s": rand(3), "t": rand()}, rand(4, 3), 4)


EXACT = 1e-10
statistics = pytest.mark.parametrize("statistic", STATISTICS)


MODELS = {
    "rules": lambda: of_rules(with_rules(affine)),
    "tied rules": lambda: of_tied_rules(with_rules(affine)),
    "function, rules missing": lambda: of_rules(operation(affine)),
    "no rule": lambda: of_no_rule(operation),
}
PLAIN = {
    "rules": lambda: of_rules(affine),
    "tied rules": lambda: of_tied_rules(affine),
    "function, rules missing": lambda: of_rules(affine),
    "no rule": lambda: of_no_rule(lambda fn: fn),
}


@statistics
@pytest.mark.parametrize("called", MODELS)
class TestStatistics:
    """Of a model with operations they are those of the same model without."""

    def both(self, statistic, called, loss=LOSSES[1]):
        kind, functions, args = arranged(statistic, MODELS[called](), loss)
        return kind, kind.make(*functions), kind.loop(*arranged(statistic, PLAIN[called](), loss)[1]), args

    @pytest.mark.quick
    def test_equal_the_loop(self, statistic, called):
        kind, t, loop, args = self.both(statistic, called)
        wanted = loop(*args)
        for over in (None, *kind.axes):
            assert_trees_close((t if over is None else chunked(t, 2, over=over))(*args), wanted, EXACT, FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("called", MODELS)
def test_laws_of_what_is_around_statistics_hold_with_operations(called):
    net, loss = MODELS[called](), partial(LOSSES[0], reduction="sum")
    only = [name for name in laws.LAWS if "of a statistic is that of its loop" in name and not name.startswith("jvp")]
    only += ["vmap over parameters is the loop"]  # torch has no jvp of what has rules
    table = laws.check(net.f, net.params, net.x, LOSSES[0].target(Numbers(1), net.n), loss=loss, only=only, seconds=300)
    assert {outcome.state for outcome in table.outcomes} == {"holds"}, table


class TestScalarLosses:
    """An operation keeps its samples apart by its word, so that what has no rule may enter a mean."""

    w, x = Numbers()(3, 3), Numbers(1)(4, 3)

    def test_of_the_ggn(self):
        op, y = operation(spectrum), Numbers(2)(4, 3)
        found = diag_ggn(lambda w, x, y: F.mse_loss(op(x, w), y))(self.w, self.x, y)
        assert_trees_close(found, dense_diag_ggn(lambda w, x: spectrum(x, w), F.mse_loss)(self.w, self.x, y), EXACT)


class Opaque(torch.autograd.Function):
    """As old code has them: neither vmap nor torch.func can take it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight.mT, x.mT @ g


def test_a_function_that_torch_cannot_vmap_works_by_its_rule():
    op = operation(lambda x, weight: Opaque.apply(x, weight))

    @op.share_of("weight")
    def _(delta, x, weight):
        return "vno,ni->io", delta, x

    args = (Numbers()(3, 2), Numbers(1)(4, 3))
    wanted = loop_batch_grad(lambda w, x: (x @ w).tanh().sum(1))(*args)
    assert_trees_close(batch_grad(lambda w, x: op(x, w).tanh().sum(1))(*args), wanted, EXACT)
    assert_trees_close(batch_grad(lambda w, x: op(x, w).tanh().sum(1).mean())(*args), wanted / 4, EXACT)


class TestRules:
    def test_get_what_the_operation_got_with_the_samples_in_front(self):
        seen = []
        op = operation(lambda x, weight, bias, *, names: x @ weight.mT + bias)

        @op.share_of("weight")
        def _(delta, x, weight, bias, *, names):
            seen.append((delta.shape[1:], x.shape, weight.shape, bias, names))
            return "vno,ni->oi", delta, x

        w, x = Numbers()(2, 3), Numbers(1)(4, 3)
        found = batch_grad(lambda w, x: op(x, w, 1.5, names=["a"]).square().sum(1))(w, x)
        assert_trees_close(found, loop_batch_grad(lambda w, x: (x @ w.mT + 1.5).square().sum(1))(w, x), EXACT)
        assert {n for (n, _), *_ in seen} <= {1, 4} and seen[-1] == ((4, 2), (4, 3), (2, 3), 1.5, ["a"])

    def test_of_some_arguments_leave_the_others_to_the_generic_path(self):
        op = operation(affine)

        @op.share_of("bias")
        def _(delta, x, weight, bias):
            return "vnpo->o", delta

        net, plain = of_rules(op), of_rules(affine)
        found = batch_grad(lambda p, x: net.f(p, x).sum(1))(net.params, net.x)
        assert_trees_close(found, loop_batch_grad(lambda p, x: plain.f(p, x).sum(1))(net.params, net.x), EXACT)

    @pytest.mark.parametrize("name", ["wieght", ""])
    def test_of_an_argument_that_there_is_not(self, name):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="share_of.*weight"):
            operation(affine).share_of(name)(lambda delta, *args: ("vno->o", delta))

    @pytest.mark.parametrize("f", [3, None], ids=repr)
    def test_are_of_functions_only(self, f):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"operation\("):
            operation(f)

    @pytest.mark.parametrize("equation", ["vnpo,npi->io1", "vnpo,npi->noi", "vnpo,npi->o", "vnpo,npi", None])
    def test_that_do_not_give_the_dimensions_of_the_parameter_are_told(self, equation):
        op = with_rules(affine)
        op.share_of("weight")(lambda delta, x, weight, bias: (equation, delta, x))
        net = of_rules(op)
        with pytest.raises((ArgumentError, ArgumentTypeError), match="affine.*equation"):
            batch_grad(lambda p, x: net.f(p, x).sum(1))(net.params, net.x)


class TestItself:
    """Outside of our transforms an operation is its function."""

    args = Numbers()(4, 2, 3), Numbers(1)(5, 3), Numbers(2)(5)

    def test_is_the_function(self):
        op = with_rules(affine)
        assert torch.equal(op(*self.args), affine(*self.args))
        assert torch.equal(op(self.args[0], bias=self.args[2], weight=self.args[1]), affine(*self.args))
        assert "affine" in op.__name__ and op.__doc__ == affine.__doc__ and "affine" in repr(op)


class TestWhatIsRefused:
    w, x = Numbers()(3, 3), Numbers(1)(4, 3)

    def test_a_parameter_that_the_body_closes_over(self):
        """It would be silently without influence."""

        def f(w, x):
            return operation(lambda x: x @ w)(x).square().sum(1)

        assert_trees_close(batch_grad(f)(self.w, self.x), loop_batch_grad(f)(self.w, self.x), EXACT)

    @pytest.mark.parametrize("reduction", [lambda losses: losses, torch.mean], ids=["[N]", "mean"])
    def test_samples_along_another_axis(self, reduction):
        op = operation(lambda x, weight: x @ weight)

        def f(w, x):
            return reduction(op(x.mT, w).square().sum(0))

        with pytest.raises(SampleAxisError, match="axis 0"):
            batch_grad(f)(Numbers(2)(4, 2), Numbers(3)(4, 4))

    def test_an_output_that_is_no_tensor_with_the_samples_in_front(self):
        """It may be right on single samples."""
        for fn in (lambda x, w: x.sum().cos() * w.sum(), lambda x, w: (x @ w)[:2].square()):
            op = operation(fn)
            with pytest.raises(SampleAxisError):
                batch_grad(lambda w, x, op=op: op(x, w).sum())(self.w, self.x)
        op = operation(lambda x, w: (x @ w).sin().flatten())
        wanted = loop_batch_grad(lambda w, x: (x @ w).sin().sum(1))(self.w, self.x)
        assert_trees_close(batch_grad(lambda w, x: op(x, w).sum())(self.w, self.x), wanted, EXACT)


@pytest.mark.parametrize("samples", [[0], [3, 1], [3, 2, 1, 0], None])
@pytest.mark.parametrize("rule", ["in the rule", "as an operand", "no rule"])
def test_what_a_body_and_a_rule_close_over_for_each_sample_is_right_or_refused(rule, samples):
    w, x, c = Numbers()(3, 2), Numbers(1)(4, 3), 1 + Numbers(2)(4, 1).square()
    op = operation(lambda x, w: (x * c) @ w)
    if rule != "no rule":
        op.share_of("w")(
            lambda d, x, w: ("vno,ni,n->io", d, x, c[:, 0]) if rule == "as an operand" else ("vno,ni->io", d * c, x)
        )
    args, given = (w, x, torch.zeros(4, 2)), {"samples": samples}
    for t in (
        lambda f: batch_grad(lambda w, x, y: f(x, w).tanh().square().sum(1), **given),
        lambda f: diag_ggn(lambda w, x: f(x, w), F.mse_loss, **given),
    ):
        with suppress(SampleAxisError, ArgumentError):
            assert_trees_close(t(op)(*args), t(lambda x, w: (x * c) @ w)(*args), EXACT)
