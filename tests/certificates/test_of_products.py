"""certified, of products with matrices."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import certified, explain, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, CertificateError
from invfunc.products.product import Linearised, Product
from invfunc.testing import strategies
from invfunc.testing.laws.rows import PRODUCTS
from tests.alarms import NAMES
from tests.strategies import Numbers

SEED = 7
names = st.sampled_from(NAMES)


def made(name, problem, alone):
    """A product with its arguments."""
    functions = (problem.f,) if alone else (problem.model.f, problem.loss)
    t, r = PRODUCTS[name](*functions, in_dims=problem.in_dims), Numbers(5)
    params = problem.model.params
    v = tree.map_tensors(lambda p: r(*[2] * t.lead, *p.shape).to(p), params)
    return t, (params, v, *problem.batch)


@given(names, strategies.problems(dtype=torch.float32), st.booleans())
def test_right_ones_are_given_as_they_are(name, problem, alone):
    t, args = made(name, problem, alone)
    found, plain = certified(t, generator=SEED)(*args), t(*args)
    assert all(torch.equal(x, y) for x, y in zip(tree.tensors(found), tree.tensors(plain), strict=True))


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_wrong_ones_are_found(name):
    problem = strategies.Problem(strategies.Model("perceptron", n=3), strategies.Loss("cross_entropy", "none"))
    t, args = made(name, problem, alone=False)
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
def test_of_a_model_that_mixes_samples():
    f = lambda w, x: (x @ w).softmax(0)  # noqa: E731  (as users write it)
    args = torch.randn(3, 2), torch.randn(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    for product in (invfunc.ggnvp, invfunc.hvp):
        certified(product(f, F.mse_loss), generator=SEED)(*args)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_aux", [False, True])
def test_linearised(name, has_aux):
    """Each product is checked; the probes of estimates and scipy's operators take it."""
    problem = strategies.Problem(strategies.Model("perceptron", n=3), strategies.Loss("mse_loss", "none"))
    f = (lambda *args: (problem.model.f(*args), "aux")) if has_aux else problem.model.f
    t = PRODUCTS[name](f, problem.loss, has_aux=has_aux)
    params, v, *batch = made(name, problem, alone=False)[1]
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


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_of_vectors_in_another_order(name):
    """A dict is a tree by its keys."""
    f = lambda p, x: (x @ p["a"]).tanh() @ p["b"]  # noqa: E731  (as users write it)
    loss = lambda z, y: (z - y).square().sum(1)  # noqa: E731
    rand = strategies.Numbers()
    t = PRODUCTS[name](f, loss)
    lead = [1] * t.lead
    params, v = {"a": rand(2, 2), "b": rand(2, 2)}, {"b": rand(*lead, 2, 2), "a": rand(*lead, 2, 2)}
    certified(t, generator=SEED)(params, v, rand(4, 2), rand(4, 2))
