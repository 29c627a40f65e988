"""Steps of training on a grid, as pairs: what their states hold, and the gradient that both directions evaluate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import saving_hooks, transforming
from invfunc.callables import check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError
from invfunc.pairs.decay import Decay, Words
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible
from invfunc.pairs.value import Value

FINE = Grid(44, torch.float64)
"""Numbers up to 512, to 6e-14."""


@dataclass(frozen=True)
class _Parameters:
    """How the parameters of a loss are one vector of the grid."""

    form: tree.Form
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    def joined(self, vector: torch.Tensor) -> Any:
        """The parameters, in their own dtypes."""
        parts = vector.split([math.prod(shape) for shape in self.shapes])
        like = zip(parts, self.shapes, self.dtypes, strict=True)
        return self.form.join(part.view(shape).to(dtype) for part, shape, dtype in like)

    def vector(self, given: Any, grid: Grid) -> torch.Tensor:
        """One vector of the grid's dtype."""
        return torch.cat([t.to(grid.dtype).flatten() for t in tree.tensors(given)])


@tree.register("weights", "moments", "digits")
@dataclass(frozen=True)
class Training:
    """Where a training is: all that its next step needs, and its last one to be undone."""

    weights: torch.Tensor
    """[P], on a grid."""
    moments: tuple[torch.Tensor, ...]
    """The running means of the optimiser, [P] each, on a grid."""
    digits: tuple[Words, ...]
    """The digits that each has lost, [P] a word of 63 bits."""
    steps: int
    """How many have been taken."""
    like: _Parameters

    @property
    def params(self) -> Any:
        """The parameters, a pytree as `start` was given."""
        return self.like.joined(self.weights)


@dataclass(frozen=True, repr=False)
class Optimiser(Invertible):
    """An `Invertible` on states of training, with the way into them."""

    law: Steps | None = None

    def start(self, params: Any) -> Training:
        """The state before the first step; its derivative in the parameters is that of the identity."""
        assert self.law is not None
        return self.law.start(params)


@dataclass(frozen=True, eq=False)
class Gradient(Value):
    """The gradient of a loss, as a vector."""

    call: str
    loss: Callable

    def __call__(self, weights: torch.Tensor, like: _Parameters, grid: Grid, *args: Any, **kwargs: Any) -> torch.Tensor:
        if saving_hooks() is None or transforming():
            return like.vector(torch.func.grad(self._scalar)(like.joined(weights), *args, **kwargs), grid)
        recorded = torch.is_grad_enabled()  # torch.func.grad refuses the hooks of an invertible block
        with torch.enable_grad():
            weights = weights if weights.requires_grad else weights.detach().requires_grad_()
            (found,) = torch.autograd.grad(
                self._scalar(like.joined(weights), *args, **kwargs), weights, create_graph=recorded, allow_unused=True
            )
        return torch.zeros_like(weights) if found is None else found

    def _scalar(self, *given: Any, **kwargs: Any) -> torch.Tensor:
        value = self.loss(*given, **kwargs)
        if not isinstance(value, torch.Tensor) or value.shape:
            came = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
            raise ArgumentError(f"{self.call}: the loss has to return a scalar tensor, but returns one of {came}.")
        return value


@dataclass(frozen=True, eq=False)
class Steps(Value, ABC):
    """The steps of an optimiser in both directions, for some options.

    Args:
        lr: a number, or a function of the further arguments of the loss.
        decays: of each running mean.
    """

    call: str
    lr: Any
    grid: Grid
    decays: tuple[Decay, ...]

    @abstractmethod
    def moved(self, rate: Any, moments: tuple, steps: int) -> torch.Tensor:
        """By how much the weights change, from the new running means."""

    @abstractmethod
    def added(self, rate: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each running mean gains by a gradient."""

    def pair(self, loss: Callable) -> Optimiser:
        """The pair."""
        check_callable(self.call.split("(")[0], loss)
        if not callable(self.lr) and not isinstance(self.lr, (int, float)):
            raise ArgumentTypeError(
                f"{self.call}: lr is of type {type(self.lr).__name__}, but has to be a number, or a function of the "
                "arguments behind the parameters; what needs a gradient is such an argument."
            )
        if not isinstance(self.grid, Grid):
            raise ArgumentTypeError(f"{self.call}: grid is of type {type(self.grid).__name__}, but has to be a Grid.")
        return Optimiser(self.forward, self.inverse, (Gradient(self.call, loss),), name=self.call, law=self)

    def start(self, params: Any) -> Training:
        """The state before the first step."""
        for path, leaf in tree.named_leaves(params):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                kind = leaf.dtype if isinstance(leaf, torch.Tensor) else f"of type {type(leaf).__name__}"
                raise ArgumentTypeError(
                    f"{self.call}.start(params): params{path} is {kind}, but has to be a tensor of real numbers."
                )
        tensors, form = tree.separate(params)
        if not tensors:
            raise ArgumentError(f"{self.call}.start(params): there are no tensors in params.")
        like = _Parameters(form, tuple(t.shape for t in tensors), tuple(t.dtype for t in tensors))
        weights = self.grid.enter(like.vector(params, self.grid))
        zeros, none = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64)
        return Training(weights, (zeros,) * len(self.decays), ((none,),) * len(self.decays), 0, like)

    def forward(self, gradient: Callable, state: Any = None, *args: Any, **kwargs: Any) -> Training:
        state = self._read(state)
        rate, steps = self._rate(args, kwargs), state.steps
        gained = self.added(rate, gradient(state.weights, state.like, self.grid, *args, **kwargs))
        moments, digits = self._each("forth", state.moments, state.digits, gained, steps)
        weights = state.weights + self.moved(rate, moments, steps + 1)
        self.grid.checked(weights, *moments, *gained, entered=True)
        return Training(weights, moments, digits, steps + 1, state.like)

    def inverse(self, gradient: Callable, state: Any = None, *args: Any, **kwargs: Any) -> Training:
        state = self._read(state)
        if not state.steps:
            raise InverseError(f"{self.call}: the state is that of the start, before which there is no step.")
        rate, steps = self._rate(args, kwargs), state.steps - 1
        weights = state.weights - self.moved(rate, state.moments, steps + 1)
        gained = self.added(rate, gradient(weights, state.like, self.grid, *args, **kwargs))
        moments, digits = self._each("back", state.moments, state.digits, gained, steps)
        self.grid.checked(weights, *moments, *gained, entered=True)
        return Training(weights, moments, digits, steps, state.like)

    def _each(self, way: str, moments: tuple, digits: tuple, gained: tuple, steps: int) -> tuple[tuple, tuple]:
        """All running means one step further, or back."""
        together = zip(self.decays, moments, digits, gained, strict=True)
        done = [getattr(decay, way)(x, words, r, steps, self.grid) for decay, x, words, r in together]
        return tuple(x for x, _ in done), tuple(words for _, words in done)

    def _read(self, state: Any) -> Training:
        if not isinstance(state, Training) or len(state.moments) != len(self.decays):
            raise ArgumentTypeError(
                f"{self.call}: the state is of type {type(state).__name__}, but has to be what its start(params) gives."
            )
        return state

    def _rate(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        rate = self.lr(*args, **kwargs) if callable(self.lr) else self.lr
        if isinstance(rate, torch.Tensor) and rate.shape:
            raise ArgumentError(
                f"{self.call}: lr(...) returns a tensor of shape {list(rate.shape)}, but has to return a scalar."
            )
        return rate


def named(name: str, loss: Any, **options: Any) -> str:
    """The call as written."""
    return f"{name}({', '.join([describe(loss), *(f'{key}={value!r}' for key, value in options.items())])})"
