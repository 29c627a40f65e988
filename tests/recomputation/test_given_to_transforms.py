"""A function may close over a tensor that it gives to a transform of torch.func as an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

from invfunc import ModifiedError, additive_coupling, functional, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


def potential(z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (z * v).tanh().sum()


def in_a_constant(z: torch.Tensor, v: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return grad(potential, 1)(z * v, c)


FORCES: dict[str, Callable] = {
    "an argument of grad": lambda z, v, c: grad(potential)(z, v + 0 * c) + grad(potential)(z, v),
    "beside a constant": lambda z, v, c: grad(lambda z, c: potential(z, v * c))(z, c),
    "vmap": lambda z, v, c: vmap(lambda a, b, c: (a * b).tanh() * c)(z, v, c),
    "vmap of grad": lambda z, v, c: vmap(grad(lambda a, b, c: (a * b).tanh() * c))(z, v, c),
    "vmap within grad": lambda z, v, c: grad(lambda z: vmap(lambda a, b: (a * b).tanh())(z, v).sum())(z) * c,
    "vjp": lambda z, v, c: vjp(lambda a, b: (a * b).tanh(), z, v)[1](c)[1],
    "jvp": lambda z, v, c: jvp(lambda a: (a * v).tanh(), (z,), (c * v,))[1],
    "hessian": lambda z, v, c: hessian(potential)(z, v) @ c,
}


class Force(nn.Module):
    def __init__(self, of: Callable, rand: Numbers) -> None:
        super().__init__()
        self.of, self.v = of, nn.Parameter(rand(3))
        self.register_buffer("c", rand(3))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.of(z, self.v, self.c)


class Twice(nn.Module):
    def __init__(self, force: Force, wrap: Callable) -> None:
        super().__init__()
        self.force, self.g = force, wrap(additive_coupling(force, force))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.g(self.g((x, x.cos())))).square().sum()


def in_autograd(model: nn.Module, x: torch.Tensor) -> Any:
    inputs = [x.clone().requires_grad_(), *model.parameters()]
    first = torch.autograd.grad(model(inputs[0]), inputs, create_graph=True)
    return first, torch.autograd.grad(first[1].square().sum(), inputs)


def called_with_others(model: Twice, x: torch.Tensor) -> Any:
    others = {name: (1.5 * t).detach().requires_grad_() for name, t in model.named_parameters()}
    others |= {name: 0.5 * t for name, t in model.named_buffers() if model.force.of is not in_a_constant}
    return torch.autograd.grad(functional_call(model, others, (x,)), [t for t in others.values() if t.requires_grad])


def in_torch_func(transform: Callable) -> Callable:
    def way(model: nn.Module, x: torch.Tensor) -> Any:
        f, params = functional(model)
        return transform(f)(params, x)

    return way


WAYS: dict[str, Callable] = {
    "autograd": in_autograd,
    "functional_call": called_with_others,
    "grad": in_torch_func(lambda f: grad(f, (0, 1))),
    "grad in x": in_torch_func(lambda f: grad(f, 1)),
    "hessian": in_torch_func(lambda f: hessian(f, 1)),
    "vmap(grad)": in_torch_func(lambda f: lambda p, x: vmap(grad(f), (None, 0))(p, torch.stack([x, 2 * x]))),
}


@pytest.mark.filterwarnings("ignore:.*saves no memory:invfunc.errors.InvFuncWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("of", FORCES.values(), ids=FORCES)
@pytest.mark.parametrize("wrap", [invertible_checkpoint, lambda f: invertible_checkpoint(f, None)], ids=["pair", "f"])
def test_equals_the_function(wrap, of, way, dtype, device):
    rand = Numbers(5)
    force, x = Force(of, rand).to(device, dtype), rand(3).to(device, dtype)
    if wrap is not invertible_checkpoint:
        block = wrap(lambda state: additive_coupling(force, force)(state))
        found = way(Twice(force, lambda pair: block), x)
    else:
        found = way(Twice(force, wrap), x)
    assert_trees_close(found, way(Twice(force, lambda pair: pair), x), 1e-3 if dtype == torch.float32 else 1e-9, 1e-2)


class TestWhatNeedsNoGradient:
    def test_may_not_change_before_the_gradient(self):
        rand = Numbers(5)
        force = Force(in_a_constant, rand)
        loss = Twice(force, invertible_checkpoint)(rand(3).requires_grad_())
        force.c.add_(1)
        with pytest.raises(ModifiedError, match="written|modified"):
            loss.backward()
