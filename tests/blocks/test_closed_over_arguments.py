"""A function may close over a tensor that it is given as an argument, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


def of_argument(b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.tanh(b @ p)


def other(closed: Callable, w: torch.Tensor) -> tuple[Any, Any]:
    return additive_coupling(of_argument, closed, split_dim=1), (w, None)


def of_two(w: torch.Tensor, c: torch.Tensor) -> tuple[Any, Any]:
    return additive_coupling(lambda b, p: torch.sin(b @ w @ p + c), of_argument, split_dim=1), (w, w)


PROGRAMS: dict[str, Callable] = {
    "the first closes over the argument of the second": lambda w, c: (
        additive_coupling(lambda b, _: torch.sin(b @ w + c), of_argument, split_dim=1),
        (None, w),
    ),
    "the second over that of the first": lambda w, c: other(lambda b, _: torch.sin(b @ w + c), w),
    "one over its own": of_two,
}


def in_autograd(f: Callable, w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    first = torch.autograd.grad(f(w, x).sin().sum(), (w, x), create_graph=True)
    return first, torch.autograd.grad(first[0].square().sum(), (w, x))


def in_torch_func(f: Callable, w: torch.Tensor, x: torch.Tensor) -> Any:
    return grad(lambda w, x: f(w, x).sin().sum(), (0, 1))(w, x)


@pytest.mark.parametrize("options", [{}, {"keep": True}], ids=str)
@pytest.mark.parametrize("way", [in_autograd, in_torch_func])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_equals_the_function(program, way, options, dtype, device):
    rand = Numbers(3)
    w, c, x = (t.to(device, dtype) for t in (rand(2, 2), rand(2), rand(3, 4)))

    def through(wrap: Callable) -> Callable:
        def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            pair, params = program(w, c)
            g = wrap(pair)
            return g(g(x, params), params)

        return f

    found, wanted = (way(through(wrap), w, x) for wrap in (lambda p: invertible_checkpoint(p, **options), lambda p: p))
    assert_trees_close(found, wanted, 1e-3 if dtype == torch.float32 else 1e-9, 1e-2)
