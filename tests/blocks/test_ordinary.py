"""Ordinary programs with blocks give what the same programs give without them: values, gradients, buffers, draws."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from invfunc import Invertible, additive_coupling, invertible_checkpoint, repeated
from invfunc.pairs import momentum
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

STEPS = 12
Program = Callable[..., Any]


def small(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh()).double()


def state() -> torch.Tensor:
    return Numbers()(3, 8).requires_grad_()


def looped(block: Callable) -> Callable:
    def run(x: Any, params: Any) -> Any:
        for p in params:
            x = block(x, p)
        return x

    return run


def backward(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    y.square().sum().backward()
    return y.detach(), x.grad, [p.grad for p in m.parameters()], list(m.buffers()), torch.get_rng_state()


class Chosen(nn.Module):
    """A module of which a number, or its mode, chooses the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small() for _ in range(STEPS))

    def forward(self, x: torch.Tensor, i: int | None = None) -> torch.Tensor:
        return self.layers[int(self.training) if i is None else i](x)


def by_halves(add: Callable) -> Invertible:
    def f(x: torch.Tensor, p: Any) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((b, a + add(b, p)), -1)

    def f_inv(y: torch.Tensor, p: Any) -> torch.Tensor:
        b, a = y.chunk(2, -1)
        return torch.cat((a - add(b, p), b), -1)

    return Invertible(f, f_inv)


def layers_of_steps(wrap, repeat, indices):
    """The steps after the first one read other parameters than it."""
    m, x = Chosen(), state()
    return backward(m, x, repeat(wrap(by_halves(lambda b, i: m(b, int(i)))))(x, indices))


def rates_of_steps(wrap, repeat):
    """The first step alone draws nothing, as in stochastic depth with a rate that grows."""
    m, x = small(), state()
    rates = [i / (2 * STEPS) for i in range(STEPS)]
    return backward(m, x, repeat(wrap(by_halves(lambda b, p: nn.functional.dropout(m(b), p))))(x, rates))


def hooked_weights(wrap, repeat):
    m, x = small(), state()
    weight, bias = m.parameters()
    weight.register_hook(lambda g: 2 * g)
    bias.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return backward(m, x, repeat(wrap(additive_coupling(m, m, split_dim=-1)))(x, [None] * STEPS))


def tied_weights(wrap, repeat):
    a, b, x = small(), small(), state()
    b[0].weight = a[0].weight
    m = nn.ModuleList((a, b))
    return backward(m, x, repeat(wrap(additive_coupling(a, b, split_dim=-1)))(x, [None] * STEPS))


def recurrent(wrap, repeat):
    """Its weights stand in a list beside the parameters."""
    m, x = nn.LSTM(4, 4).double(), state()
    return backward(m, x, repeat(wrap(additive_coupling(*2 * (lambda z: m(z)[0],), split_dim=-1)))(x, [None] * STEPS))


def of_samples(wrap, repeat):
    m, x = small(), state()
    block = repeat(wrap(additive_coupling(m, m, split_dim=-1)))
    return backward(m, x, vmap(lambda row: block(row, [None] * STEPS))(x))


PROGRAMS: dict[str, Program] = {
    "layers by numbers": partial(layers_of_steps, indices=list(range(STEPS))),
    "layers by a tensor": partial(layers_of_steps, indices=torch.arange(STEPS)),
    "rates": rates_of_steps,
    "hooked weights": hooked_weights,
    "tied weights": tied_weights,
    "recurrent": recurrent,
    "samples of a vmap": of_samples,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_steps_are_those_of_a_loop(name):
    found = []
    for wrap, repeat in (
        (lambda pair: pair, looped),
        (invertible_checkpoint, looped),
        (invertible_checkpoint, repeated),
    ):
        torch.manual_seed(0)
        found.append(PROGRAMS[name](wrap, repeat))
    assert_trees_close(found[1], found[0], 1e-10)
    assert_trees_close(found[2], found[0], 1e-10)


class TestReadByALaterCallAlone:
    """A block whose first call does not read all that it closes over, as one in eval mode."""

    @pytest.fixture(params=["mode", "argument"])
    def called(self, request):
        m = Chosen().eval()

        def call(block, x, second):
            m.train(second and request.param == "mode")
            return block(x, int(second) if request.param == "argument" else None)

        return m, by_halves(m), call

    def test_parameters_of_functional_call_are_put_back(self, called):
        m, pair, call = called
        block, x = invertible_checkpoint(pair), Numbers()(3, 8)
        params = {f"0.{k}": 2 * p.detach() for k, p in m.named_parameters()}

        class Model(nn.ModuleList):
            def forward(self, f, second):
                return call(f, x, second).square().sum()

        for second in (False, True):
            losses = [lambda p, given=(f, second): functional_call(Model([m]), p, given) for f in (pair, block)]
            slopes = [grad(loss)(params) for loss in losses]
            assert_trees_close(slopes[1], slopes[0], 1e-10)

    def test_writes_are_an_error(self, called):
        m, pair, call = called
        block = invertible_checkpoint(pair)
        call(block, state(), False).sum().backward()
        y = call(block, state(), True)
        with torch.no_grad():
            m.layers[1][0].bias.mul_(1.01)
        with pytest.raises(RuntimeError, match="inplace operation"):
            y.sum().backward()


def force(x):
    """Minus the slope of an energy."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        return -torch.autograd.grad((x @ ENERGY).tanh().square().sum(), x, create_graph=True)[0]


ENERGY = torch.linspace(-1, 1, 9).double().view(3, 3)


def kicked(state):
    v = state[1] + 0.1 * force(state[0])
    return state[0] + 0.1 * v, v


def kicked_back(state):
    x = state[0] - 0.1 * state[1]
    return x, state[1] - 0.1 * force(x)


@pytest.mark.parametrize(
    "block",
    [
        invertible_checkpoint(kicked, kicked_back),
        invertible_checkpoint(kicked, None),
        invertible_checkpoint(kicked, kicked_back, keep=True),
        invertible_checkpoint(kicked),
        invertible_checkpoint(momentum(force)),
    ],
    ids=["f_inv", "no inverse", "kept", "found", "momentum"],
)
def test_a_derivative_within_f(block):
    plain = kicked if "kicked" in repr(block) else block.pair

    def slopes(h):
        x = [t.requires_grad_() for t in (torch.linspace(-1, 1, 12).double().view(4, 3), torch.ones(4, 3).double())]
        state = tuple(t * 1 for t in x)
        for _ in range(3):
            state = h(state)
        return torch.autograd.grad(state[0].sin().sum() + state[1].square().sum(), x)

    torch.testing.assert_close(slopes(block), slopes(plain), rtol=1e-9, atol=1e-11)


class TestListsOfArguments:
    """Parameters in lists and dicts that the program changes after the call are those of the call."""

    @pytest.mark.parametrize(
        "made", [lambda w: [w], lambda w: {0: w}, lambda w: ([w],)], ids=["list", "dict", "nested"]
    )
    @pytest.mark.parametrize("graph", [False, True], ids=["leaf", "computed"])
    def test_are_read_as_they_were(self, made, graph):
        rand, found = Numbers(), []
        first, other = rand(4, 4), rand(4, 4)

        def weight(params: Any) -> torch.Tensor:
            return weight(params[0]) if not isinstance(params, torch.Tensor) else params

        def f(x: Any, params: Any) -> Any:
            return x[0] + torch.tanh(x[1] @ weight(params)), x[1]

        def f_inv(y: Any, params: Any) -> Any:
            return y[0] - torch.tanh(y[1] @ weight(params)), y[1]

        x = rand(3, 4), rand(3, 4)
        for block in (invertible_checkpoint(f, f_inv), f):
            w = first.clone().requires_grad_()
            params = made(2 * w if graph else w)
            y = block(block(x, params), params)
            held = params[0] if isinstance(params, tuple) else params
            held[0] = other.clone().requires_grad_()
            found.append(torch.autograd.grad(y[0].square().sum(), w))
        assert_trees_close(found[0], found[1], 1e-12)
