"""One law for many runs: what is made of a checkpointed function is what is made of the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import invertible_checkpoint
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.invertible_cases import RTOL
from tests.strategies import Numbers


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w.exp() + w.tanh()


def f_inv(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (y - w.tanh()) * (-w).exp()


g = invertible_checkpoint(f, f_inv)


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """x and w, new ones each time."""
    return Numbers()(2, 3).requires_grad_(), Numbers(1)(3).requires_grad_()


def assert_same(
    dtype: torch.dtype, device: torch.device, run: Callable, *functions: Callable, rtol: float | None = None
) -> None:
    """`run(h, x, w)` is the same for all functions h, with the first of them as the oracle; x and w are new leaves.

    Without functions it is the same for f, for g, and for a plain checkpoint.
    """
    x, w = moved((Numbers()(2, 3), Numbers(1)(3)), dtype, device)

    def result(h: Callable) -> Any:
        torch.manual_seed(0)
        return run(h, x.clone().requires_grad_(), w.clone().requires_grad_())

    plain, *others = functions or (f, g, invertible_checkpoint(f, None))
    wanted = result(plain)
    for h in others:
        assert_trees_close(result(h), wanted, RTOL[dtype] if rtol is None else rtol)


def squares(y: Any) -> torch.Tensor:
    """A loss of all outputs."""
    return sum(t.square().sum() for t in (y if isinstance(y, (tuple, list)) else (y,)))


def gradients(y: Any, *of: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the loss."""
    return torch.autograd.grad(squares(y), of, **options)
