"""Inside of torch.func blocks close over parameters of modules, which are put in for the time of a call, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from invfunc import Invertible, additive_coupling, affine_coupling, chain, functional, invertible_checkpoint, tree
from invfunc.pairs import leapfrog, momentum
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

WIDTH = 3


class Net(nn.Module):
    """Its blocks close over its modules; with `wrapped` they are checkpointed."""

    KINDS = (
        "modules",
        "lambdas",
        "affine",
        "one module twice",
        "a parameter",
        "no inverse",
        "functions",
        "chain",
        "args",
    )
    KINDS += ("nested", "dropout", "transposed")

    def __init__(self, kind: str, wrapped: bool, depth: int = 3) -> None:
        super().__init__()
        self.F, self.G, self.H = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.s = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        self.register_buffer("c", torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))
        for number, p in enumerate(self.parameters()):
            p.data.copy_(Numbers(number)(*p.shape) / 2)
        made = {
            "modules": lambda: additive_coupling(self.F, self.G),
            "lambdas": lambda: additive_coupling(
                lambda b: self.F(b).tanh() * self.c, lambda a: self.G(a).sin() + self.c
            ),
            "affine": lambda: affine_coupling(lambda b: (self.F(b), self.H(b)), lambda a: (self.G(a), a.sin())),
            "one module twice": lambda: additive_coupling(self.F, lambda a: self.F(self.F(a))),
            "a parameter": lambda: momentum(lambda x: (x * self.s).sin() + self.s.sum()),
            "no inverse": lambda: lambda x: (self.F(x[1]).tanh(), x[0] * self.s),
            "functions": lambda: Invertible(self.there, self.back),
            "chain": lambda: chain(additive_coupling(self.F, self.G), momentum(lambda x: self.H(x).sin() * self.s)),
            "args": lambda: additive_coupling(lambda b, by: self.F(b) * by, lambda a, by: self.G(a) / by),
            "dropout": lambda: additive_coupling(lambda b: nn.functional.dropout(self.F(b), 0.5), self.G),
            "nested": lambda: additive_coupling(lambda b: self.inner((b, b.cos()))[0].sin(), self.H),
            "transposed": lambda: additive_coupling(
                lambda b: b @ self.F.weight.T, lambda a: (a @ self.G.weight.H).sin()
            ),
        }
        inner = additive_coupling(self.F, lambda a: self.G(a) * self.s)
        self.inner = invertible_checkpoint(inner) if wrapped else inner
        block = made[kind]()
        if wrapped:
            block = invertible_checkpoint(block, None) if kind == "no inverse" else invertible_checkpoint(block)
        self.block, self.given, self.depth = block, (None, 1.5) if kind == "args" else (), depth

    def there(self, x: tuple) -> tuple:
        return x[1] * self.s.exp(), x[0] + self.F(x[1])

    def back(self, y: tuple) -> tuple:
        b = y[0] * (-self.s).exp()
        return y[1] - self.F(b), b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(WIDTH, -1)
        for _ in range(self.depth):
            a, b = self.block((a, b), *self.given)
        return ((a + 1) * b.sin()).square().sum(-1)


def called(net: Net):
    """As torch.func.functional_call puts parameters in."""
    return lambda p, x: functional_call(net, p, (x,))


X = Numbers(7)(2, 2 * WIDTH)


def own(net: Net) -> dict:
    return {name: 1.25 * p.detach() for name, p in net.named_parameters()}


def total(f):
    return lambda p, x: f(p, x).sum()


def pulled(f, p, x):
    """The pullback is called when f has returned."""
    y, pullback = vjp(f, p, x)
    return pullback(torch.ones_like(y))


OF_FUNCTIONS = {
    "grad": lambda f, p: grad(total(f))(p, X),
    "grad in x too": lambda f, p: grad(total(f), argnums=(0, 1))(p, X),
    "vmap(grad)": lambda f, p: vmap(grad(f), (None, 0))(p, X),
    "grad of an ensemble": lambda f, p: vmap(grad(total(f)), (0, None))(
        {k: torch.stack([v, v / 2]) for k, v in p.items()}, X
    ),
    "grad(vmap)": lambda f, p: grad(lambda p: vmap(f, (None, 0))(p, X).sum())(p),
    "jacrev": lambda f, p: jacrev(f)(p, X),
    "vjp": lambda f, p: pulled(f, p, X),
    "grad(grad)": lambda f, p: grad(lambda p: sum(g.square().sum() for g in grad(total(f))(p, X).values()))(p),
    "jvp(grad)": lambda f, p: jvp(lambda p: grad(total(f))(p, X), (p,), (p,))[1],
    "grad(grad), mixed": lambda f, p: grad(lambda p: grad(lambda x: total(f)(p, x))(X).sin().sum())(p),
    "backward of grad": lambda f, p: backward_of(lambda p: grad(lambda x: total(f)(p, x))(X), p),
    "backward": lambda f, p: backward_of(lambda p: f(p, X), p),
    "backward of vmap": lambda f, p: backward_of(lambda p: vmap(f, (None, 0))(p, X), p),
}
OF_MODULES = {
    "grad": lambda net: grad(lambda x: net(x).sum())(X),
    "vmap(grad)": lambda net: vmap(grad(net))(X),
    "backward of grad": lambda net: of_own(net, grad(lambda x: net(x).sum())(X)),
    "backward of vmap(grad)": lambda net: of_own(net, vmap(grad(net))(X)),
    "backward of vmap": lambda net: of_own(net, vmap(net)(X)),
}


def backward_of(f, p: dict) -> tuple:
    p = {name: t.clone().requires_grad_() for name, t in p.items()}
    return torch.autograd.grad(f(p).square().sum(), list(p.values()), allow_unused=True, materialize_grads=True)


def of_own(net: Net, result: torch.Tensor) -> tuple:
    inputs = list(net.parameters())
    return torch.autograd.grad(result.square().sum(), inputs, allow_unused=True, materialize_grads=True)


def same(results) -> None:
    found = []
    for result in results:
        torch.manual_seed(0)
        found.append((tree.tensors(result()), torch.get_rng_state()))
    assert_trees_close(found[0][0], found[1][0], 1e-9, 1e-2)
    assert torch.equal(found[0][1], found[1][1])


class TestAreWhatTheFunctionIsWithoutCheckpoints:
    @pytest.mark.parametrize("how", OF_FUNCTIONS)
    @settings(max_examples=8)
    @given(kind=st.sampled_from(Net.KINDS), of=st.sampled_from(["functional", "functional_call"]))
    def test_of_parameters_that_are_put_in(self, how, kind, of):
        if kind != "dropout" or not ("vmap" in how or "ensemble" in how):  # vmap asks for its randomness
            nets = [Net(kind, wrapped) for wrapped in (False, True)]
            p = {k: v * 1.25 for k, v in functional(nets[0])[1].items()}
            functions = [functional(net)[0] if of == "functional" else called(net) for net in nets]
            same([lambda f=f: OF_FUNCTIONS[how](f, p) for f in functions])

    @pytest.mark.parametrize("how", OF_MODULES)
    @pytest.mark.parametrize("kind", [kind for kind in Net.KINDS if kind != "dropout"])
    def test_of_a_modules_own_parameters(self, kind, how):
        nets = [Net(kind, wrapped) for wrapped in (False, True)]
        same([lambda net=net: OF_MODULES[how](net) for net in nets])

    def test_of_tensors_of_several_levels(self):
        """One belongs to the inner derivative, one to the outer one, one to plain autograd."""
        w, x = Numbers(3)(WIDTH).requires_grad_(), (X[:, :WIDTH], X[:, WIDTH:])

        def slope(wrap):
            def outer(u):
                def inner(v):
                    block = wrap(additive_coupling(lambda b: (b * u).sin() * w, lambda a: (a * v).tanh() * u))
                    return sum((t * t.cos()).sum() for t in block(block(x)))

                return grad(inner)(u * 2).square().sum()

            first = grad(outer)(Numbers(5)(WIDTH))
            return first, torch.autograd.grad(first.square().sum(), w)[0]

        assert_trees_close(slope(invertible_checkpoint), slope(lambda pair: pair), 1e-9)

    def test_of_a_batch_of_what_is_closed_over(self):
        x = X[:, :WIDTH], X[:, WIDTH:]

        def of_one(wrap):
            def loss(u, v):
                block = wrap(additive_coupling(lambda b: (b * u).sin(), lambda a: (a * v).tanh()))
                return sum((t * t.cos()).sum() for t in block(block(x)))

            return vmap(grad(loss, argnums=(0, 1)), (0, None))(Numbers(1)(4, WIDTH), Numbers(2)(WIDTH))

        assert_trees_close(of_one(invertible_checkpoint), of_one(lambda pair: pair), 1e-9)


class TestTheRest:
    @pytest.mark.parametrize("kind", Net.KINDS)
    def test_a_pullback_after_other_parameters_were_put_in(self, kind):
        """Parameters of an outer derivative are in the module when the pullback evaluates its blocks again."""

        class Within(nn.Module):
            def __init__(self, net, pullback):
                super().__init__()
                self.net, self.pullback = net, pullback

            def forward(self, scale):
                gradients = self.pullback(scale * torch.ones(len(X), dtype=X.dtype))[0]
                return gradients["F.bias"].sin().sum() + self.net(X).sum()

        def of(wrapped):
            torch.manual_seed(0)
            net = Net(kind, wrapped)
            _, pullback = vjp(lambda p: called(net)(p, X), own(net))
            p, scale = {f"net.{name}": 2 * t for name, t in own(net).items()}, torch.ones((), dtype=X.dtype)
            return grad(lambda p, scale: functional_call(Within(net, pullback), p, (scale,)), (0, 1))(p, scale)

        assert_trees_close(of(True), of(False), rtol=1e-8)

    def test_memory_does_not_grow_with_depth(self):
        def peak(depth):
            net = Net("modules", True, depth)
            x = torch.ones(3000, 2 * WIDTH, dtype=torch.float64)
            f, p = functional(net)
            with nothing_collected(), Meter() as meter:
                found = grad(lambda p: f(p, x).sum())(p)
                return meter.peak(without=found)

        assert peak(24) < 1.1 * peak(6)


# The parts of a block may use torch.func themselves, on tensors that they close over: it is the net without blocks


def potential(z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (z * v).tanh().sum()


FORCES: dict[str, Callable] = {
    "grad": lambda z, v, c: grad(potential)(z, v + 0 * c) + grad(potential)(z, v),
    "beside a constant": lambda z, v, c: grad(lambda z, c: potential(z, v * c))(z, c),
    "in a constant": lambda z, v, c: grad(potential, 1)(z * v, c),
    "vmap": lambda z, v, c: vmap(lambda a, b, c: (a * b).tanh() * c)(z, v, c),
    "vmap of grad": lambda z, v, c: vmap(grad(lambda a, b, c: (a * b).tanh() * c))(z, v, c),
    "vmap, other axes": lambda z, v, c: vmap(lambda r: (r * v).tanh(), out_dims=1)(torch.stack([z, z * c])).sum(1),
    "vmap within grad": lambda z, v, c: grad(lambda z: vmap(lambda a, b: (a * b).tanh())(z, v).sum())(z) * c,
    "vjp": lambda z, v, c: vjp(lambda a, b: (a * b).tanh(), z, v)[1](c)[1],
    "jvp": lambda z, v, c: jvp(lambda a: (a * v).tanh(), (z,), (c * v,))[1],
    "jvp of grad": lambda z, v, c: jvp(grad(lambda z: potential(z, v)), (z,), (z.sin(),))[1],
    "jvp in a parameter": lambda z, v, c: jvp(lambda w: (z * w).tanh(), (v,), (v.sin(),))[1],
    "vmap of jvp": lambda z, v, c: vmap(lambda u: jvp(lambda z: (z * v).sin(), (z,), (u,))[1])(c[None]).sum(0),
    "jacrev": lambda z, v, c: z * jacrev(lambda r: (r * v).sin())(z).diagonal(),
    "jacfwd": lambda z, v, c: jacfwd(lambda s: (s * z * v).sin())(c.sum()),
    "hessian": lambda z, v, c: hessian(potential)(z, v) @ c,
    "dropout": lambda z, v, c: grad(lambda z: (F.dropout(z, 0.5) * v).sin().sum())(z),
}


class Force(nn.Module):
    def __init__(self, of: str, rand: Numbers) -> None:
        super().__init__()
        self.of, self.v = FORCES[of], nn.Parameter(rand(3))
        self.register_buffer("c", rand(3))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.of(z, self.v, self.c)


def shifting(force: Callable, wrap: Callable) -> Callable:
    return wrap(lambda x: (x[0] + force(x[1]), x[1].sin()), lambda y: (y[0] - force(y[1].asin()), y[1].asin()))


POSITIONS: dict[str, Callable] = {
    "coupling": lambda force, wrap: wrap(additive_coupling(force, force)),
    "affine": lambda force, wrap: wrap(affine_coupling(*2 * [lambda x: (force(x).sin(), force(x))])),
    "leapfrog": lambda force, wrap: wrap(leapfrog(force, 0.1)),
    "functions": shifting,
    "no inverse": lambda force, wrap: shifting(force, lambda f, _: wrap(f, None)),
}


class Twice(nn.Module):
    def __init__(self, of: str, position: str, wrap: Callable) -> None:
        super().__init__()
        self.force = Force(of, Numbers(5))
        self.g = POSITIONS[position](self.force, wrap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.g(self.g((0.4 * x.sin(), 0.4 * x.cos())))).square().sum()


def in_autograd(model: nn.Module, x: torch.Tensor) -> Any:
    inputs = [x.clone().requires_grad_(), *model.parameters()]
    first = torch.autograd.grad(model(inputs[0]), inputs, create_graph=True)
    return first, torch.autograd.grad(first[1].square().sum(), inputs)


def called_with_others(model: Twice, x: torch.Tensor) -> Any:
    others = {name: (1.5 * t).detach().requires_grad_() for name, t in model.named_parameters()}
    return torch.autograd.grad(functional_call(model, others, (x,)), list(others.values()))


def in_torch_func(transform: Callable) -> Callable:
    def way(model: nn.Module, x: torch.Tensor) -> Any:
        f, params = functional(model)
        return transform(f)(params, x)

    return way


WAYS: dict[str, Callable] = {
    "autograd": in_autograd,
    "functional_call": called_with_others,
    "grad": in_torch_func(lambda f: grad(f, (0, 1))),
    "hessian": in_torch_func(lambda f: hessian(f, 1)),
    "vmap(grad)": in_torch_func(lambda f: lambda p, x: vmap(grad(f), (None, 0))(p, torch.stack([x, 2 * x]))),
}


@pytest.mark.filterwarnings("ignore::invfunc.errors.InvFuncWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", FORCES)
@pytest.mark.parametrize("position", POSITIONS)
def test_equals_the_function(position, of, way, dtype, device):
    if of == "dropout" and way in ("hessian", "vmap(grad)"):
        pytest.skip("vmap asks for its randomness")
    found = []
    for wrap in (invertible_checkpoint, lambda f, f_inv=None: f):
        torch.manual_seed(0)
        model, x = Twice(of, position, wrap).to(device, dtype), Numbers(6)(3).to(device, dtype)
        found.append(WAYS[way](model, x))
    assert_trees_close(*found, 1e-3 if dtype == torch.float32 else 1e-9, 1e-2)
