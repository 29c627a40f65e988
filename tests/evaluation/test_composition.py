"""Functions that say more of transforms around and inside of statistics than those that the laws are tried on.

Private is what no public law can say: of an encoder that f closes over, of aux, of what is refused, of torch.compile.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc.testing import laws
from invfunc.testing.laws.rows import ROWS
from invfunc.testing.oracles import assert_trees_close, dense_diag_ggn
from tests.networks import LOSSES, STATISTICS, network, plain, total
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("statistic", STATISTICS)


def holds(f, *args, **options):
    """The law does, and nothing is refused but K-factors."""
    table = laws.check(f, *args, **options, seconds=300)
    states = {outcome.law.name: outcome.state for outcome in table.outcomes}
    assert {*states.values()} == {"holds"} and all(of.startswith("kf") for of in table.refused), table


def test_layers_that_the_outputs_do_not_read():
    """In a pass of vmap, some layers are reached and others are not: the first one here is not."""
    x, y = Numbers(1)(4, 3), LOSSES[0].target(Numbers(2), 4)

    def f(p, x):
        (x @ p["a"]).tanh()
        return (x @ p["b"]).tanh() @ p["c"]

    params = {name: Numbers(i)(3, 3) for i, name in enumerate("abc")}
    holds(f, params, x, y, loss=LOSSES[0], only="vmap over parameters is the loop")


class TestWhatIsDifferentiated:
    """Of what f closes over, and of what it gives beside its result."""

    @statistics
    def test_closed_over_module_parameters(self, statistic):
        """A frozen encoder below: its parameters require grad and are not parameters of f."""
        encoder, net, loss = torch.nn.Linear(2, 2).double(), network("perceptron", 3), LOSSES[0]
        y = Numbers(1).below(3, 3)

        def composed(make):
            result = make(lambda p, x: net.f(p, encoder(x).tanh()), loss)(net.params, net.x, y)
            return torch.autograd.grad(total(result), list(encoder.parameters()))

        assert_trees_close(composed(STATISTICS[statistic]), composed(plain(statistic)), EXACT)

    @statistics
    def test_aux_goes_along(self, statistic):
        net, y = network("affine", 3), Numbers(1).below(3, 3)
        transform, options = getattr(invfunc, statistic.split()[0]), {"has_aux": True}
        if statistic.endswith("loss"):
            t = transform(lambda p, x: ((z := net.f(p, x)), z.exp()), lambda z, y: LOSSES[0](z, y), **options)
        else:
            t = transform(lambda p, x, y: (LOSSES[0](z := net.f(p, x), y), z.exp()), **options)

        def value(p):
            result, aux = t(p, net.x, y)
            return total(result), aux

        slopes, aux = grad(value, has_aux=True)(net.params)
        assert torch.allclose(aux, net.f(net.params, net.x).exp())
        assert_trees_close(slopes, grad(lambda p: value(p)[0])(net.params), EXACT)
        through = grad(lambda p: total(value(p)[1]))(net.params)
        assert_trees_close(through, grad(lambda p: total(net.f(p, net.x).exp()))(net.params), EXACT)


class Doubled(torch.autograd.Function):
    """A function of the user with rules for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return 2 * (x @ w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g @ w.mT, 2 * x.mT @ g


def dense(w, x):
    return (x @ w).tanh()


INSIDE = {
    "vmap": vmap(dense, (None, 0)),
    "vmap of a gradient": vmap(lambda w, x: grad(lambda x: dense(w, x).sum())(x), (None, 0)),
    "jvp": lambda w, x: jvp(lambda x: dense(w, x), (x,), (x.cos(),))[1],
    "vmap of jacrev": lambda w, x: vmap(lambda x: jacrev(dense, 1)(w, x).sum(0))(x),
    "checkpoint": lambda w, x: checkpoint(dense, w, x, use_reentrant=False),
    "autograd.Function": lambda w, x: Doubled.apply(x, w).tanh(),
}


class TestTransformsInside:
    """f may itself use transforms, as long as a sample can be told from the others."""

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_in_losses_of_the_samples(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))
        holds(lambda w, x: f(w, x).square().sum(1), *args, only="per-sample gradients equal their loop")

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_in_a_model_function(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))
        holds(f, *args, Numbers(2)(*f(*args).shape), loss=F.mse_loss, only="the GGN equals its loop")

    @pytest.mark.parametrize("name", ["diag_hessian", "diag_hessian of each"])
    def test_in_the_hessian_under_vmap(self, name):
        """What is sent back to see that the backward pass of a custom Function has a derivative is of its level."""
        t = ROWS[name].make(INSIDE["autograd.Function"], F.mse_loss)
        w, x, y = Numbers()(2, 3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)
        assert_trees_close(vmap(t, (0, None, None))(w, x, y), torch.stack([t(each, x, y) for each in w]), EXACT)

    @pytest.mark.parametrize("f", INSIDE.values(), ids=INSIDE)
    def test_of_a_mean_are_right_or_refused(self, f):
        args = (Numbers()(3, 2), Numbers(1)(4, 3))
        args = (*args, Numbers(2)(*f(*args).shape))

        def mean(w, x, y):
            return F.mse_loss(f(w, x), y)

        try:
            found = invfunc.diag_ggn(mean)(*args)
        except (invfunc.errors.SplitError, invfunc.errors.SampleAxisError):
            assert f is not INSIDE["checkpoint"]
        else:
            assert_trees_close(found, dense_diag_ggn(f, F.mse_loss)(*args), EXACT)


@pytest.mark.quick
@pytest.mark.parametrize("t", [invfunc.variance, invfunc.diag_ggn], ids=lambda t: t.__name__)
def test_compiled_functions_may_use_them(t):
    """The compiler leaves a statistic as it is, and compiles what is around it."""
    w, x, y = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)

    def step(w, x, y):
        return w.sin() - t(lambda w, x, y: torch.nn.functional.mse_loss(x @ w, y))(w, x, y).sqrt()

    assert_trees_close(torch.compile(step, backend="eager")(w, x, y), step(w, x, y), 1e-12)
