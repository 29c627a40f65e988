"""Products with the positive-curvature Hessian: each operation that bends adds its own part, made positive."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev

from invfunc import functional, ggnvp, hvp
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from tests.laws import composed
from tests.strategies import Numbers

POSITIVE = {"abs": torch.abs, "clip": lambda h: h.clamp(min=0)}
ACTIVATIONS = [torch.tanh, torch.sigmoid, F.softplus, F.gelu, F.silu, torch.relu, torch.sin, torch.square]
LOSSES = {
    "cross entropy": (F.cross_entropy, torch.tensor([0, 2, 1, 1])),
    "mean of squares": (F.mse_loss, Numbers(9)(4, 3)),
    "squares": (lambda z, y: (z - y).square().sum(), Numbers(9)(4, 3)),
}
PARAMS = {"a": Numbers(1)(3, 4), "b": Numbers(2)(4), "c": Numbers(3)(4, 4), "d": Numbers(4)(4, 3)}
X = Numbers(5)(4, 3)


def network(activation):
    """And the inputs of its activations."""

    def bent(p, x):
        first = x @ p["a"] + p["b"]
        return [first, activation(first) @ p["c"]]

    def f(p, x):
        return activation(bent(p, x)[1]) @ p["d"]

    return f, bent


def dense(activation, loss, target, positive):
    """The blocks, from the Jacobians of the outputs and of the inputs of the activations."""
    f, bent = network(activation)
    outputs, inputs = f(PARAMS, X), bent(PARAMS, X)

    def rest(u, k):
        """The loss as a function of what activation k returns."""
        h = u if k == 1 else activation(u @ PARAMS["c"])
        return loss(h @ PARAMS["d"], target)

    jacobians = [jacrev(f)(PARAMS, X), *({name: J[name] for name in PARAMS} for J in jacrev(bent)(PARAMS, X))]
    curved = hessian(loss)(outputs, target).reshape(outputs.numel(), -1)
    found = {}
    for name, p in PARAMS.items():
        rows = [J[name].reshape(-1, p.numel()) for J in jacobians]
        block = rows[0].T @ curved @ rows[0]
        for k, u in enumerate(inputs):
            slope = grad(rest)(activation(u), k)
            second = grad(lambda x: grad(lambda x: activation(x).sum())(x).sum())(u)
            block = block + rows[1 + k].T @ (positive(slope * second).reshape(-1, 1) * rows[1 + k])
        found[name] = block
    return found


def units():
    """As many vectors for all parameters as the largest has entries."""
    count = max(p.numel() for p in PARAMS.values())
    return {name: torch.eye(count, p.numel()).double().reshape(count, *p.shape) for name, p in PARAMS.items()}


@pytest.mark.quick
@pytest.mark.parametrize("modify", POSITIVE)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_is_the_sum_of_its_parts(activation, kind, modify):
    (f, _), (loss, target) = network(activation), LOSSES[kind]
    wanted = dense(activation, loss, target, POSITIVE[modify])
    for t in (hvp(f, loss, modify=modify, blocks=True), hvp(composed(f, loss), modify=modify, blocks=True)):
        if t.loss is None and kind == "squares":
            continue  # a loss whose outputs cannot be found
        found = t(PARAMS, units(), X, target)
        found = {name: v.reshape(len(v), -1)[: v[0].numel()] for name, v in found.items()}
        assert_trees_close(found, wanted, 1e-10, 1e-3)


@pytest.mark.parametrize("modify", POSITIVE)
def test_is_no_smaller_than_the_ggn(modify):
    f, _ = network(torch.tanh)
    loss, target = LOSSES["cross entropy"]
    blocks = [
        t(f, loss)(PARAMS, units(), X, target)
        for t in (partial(hvp, blocks=True, modify="abs"), partial(ggnvp, blocks=True))
    ]
    for name, p in PARAMS.items():
        more, less = (b[name].reshape(-1, p.numel())[: p.numel()] for b in blocks)
        assert torch.linalg.eigvalsh(more - less).min() > -1e-12


def test_is_the_hessian_where_nothing_is_negative():
    """Of exponentials with positive weights behind them, and a loss with positive slopes."""

    def f(p, x):
        return torch.exp(x @ p["a"]).exp().sum(1)

    def loss(z, y):
        return (z * y).square().sum()

    params, V = {"a": PARAMS["a"] / 3}, {"a": Numbers(7)(2, 3, 4)}
    args = (params, V, X / 3, torch.ones(4).double())
    assert_trees_close(hvp(f, loss, blocks=True, modify="abs")(*args), hvp(f, loss, blocks=True)(*args), 1e-10)


def test_a_linearisation_serves_several_vectors_and_modules():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(inplace=True), torch.nn.Linear(4, 3)).double()
    f, params = functional(module)
    t, y = hvp(f, F.cross_entropy, modify="clip", blocks=True), torch.tensor([0, 2, 1, 1])
    product = t.linearize(params, X, y)
    for seed in (1, 2):
        V = {name: Numbers(seed)(2, *p.shape) for name, p in params.items()}
        assert_trees_close(product(V), t(params, V, X, y), 1e-12)


STRAIGHT = {
    "interpolate": lambda z: F.interpolate(z.view(-1, 1, 2, 2), size=(4, 4), mode="bilinear").flatten(1),
    "addcmul": lambda z: torch.addcmul(z, X[:, :1], z.flip(1), value=0.5),
    "addmm": lambda z: torch.addmm(z, z, Numbers(6)(4, 4)),
    "lerp": lambda z: torch.lerp(X[:, :1], z, 0.3),
    "scatter": lambda z: torch.zeros(4, 6).double().scatter_add(1, torch.tensor([[0, 2, 2, 5]]).expand(4, -1), z),
    "pieces": lambda z: torch.cat([z.relu().chunk(2, 1)[0].cumsum(1), z.clamp(-1, 1).topk(2, 1).values], 1),
    "moved": lambda z: z.swapdims(0, 1).ravel().view(4, 4).T.to(torch.float64).tril(),
}
"""Functions of outputs in which nothing bends."""


@pytest.mark.parametrize("name", STRAIGHT)
def test_what_does_not_bend_is_the_ggn(name):
    def f(p, x):
        return STRAIGHT[name](x @ p["a"])

    params, V, y = {"a": PARAMS["a"]}, {"a": Numbers(7)(2, 3, 4)}, torch.tensor([0, 2, 1, 1])
    found = hvp(f, F.cross_entropy, blocks=True, modify="abs")(params, V, X, y)
    assert_trees_close(found, ggnvp(f, F.cross_entropy, blocks=True)(params, V, X, y), 1e-10)


BOTH = (lambda z: torch.stack([*torch.var_mean(z, 1), z[:, 0]], 1), "var_mean")
"""An operation with two results."""


def test_what_is_not_element_wise_is_refused():
    V, y = {"a": Numbers(7)(2, 3, 4)}, torch.tensor([0, 2, 1, 1])
    for bent, named in ((lambda z: z.softmax(1), "softmax"), (lambda z: F.layer_norm(z, (4,)), "layer_norm"), BOTH):

        def f(p, x, bent=bent):
            return bent(x @ p["a"]).sin()

        with pytest.raises(ArgumentError, match=named):
            hvp(f, F.cross_entropy, blocks=True, modify="abs")({"a": PARAMS["a"]}, V, X, y)
    with pytest.raises(ArgumentError, match="modify='square'.*'abs', 'clip'"):
        hvp(F.linear, F.mse_loss, modify="square", blocks=True)
