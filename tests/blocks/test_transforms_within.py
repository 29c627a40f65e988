"""The parts of a block may use torch.func themselves, on tensors that they close over: it is the net without blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from invfunc import additive_coupling, affine_coupling, functional, invertible_checkpoint
from invfunc.pairs import leapfrog
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


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
