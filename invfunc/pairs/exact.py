"""Fixed-point numbers whose sums and products can be undone to the last bit, and training whose steps can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, saving_hooks, transforming, unwatched
from invfunc._torch.values import in_float64
from invfunc.callables import check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, RangeError
from invfunc.pairs.pair import Invertible
from invfunc.pairs.value import Value

_MANTISSA = {torch.float32: 24, torch.float64: 53}
_OFF = "is not on the grid; put it there with Grid.enter(x)."


@dataclass(frozen=True)
class Grid:
    """The multiples of `2 ** -fraction_bits` in the range in which a dtype represents all of them.

    For a and r on the grid `a + r` is computed exactly as long as it is in the range, and so is `(a + r) - r == a`.

    Args:
        fraction_bits: the number of bits after the point.
        dtype: what holds the numbers, `torch.float32` (24 bits in all: up to 2 ** (24 - fraction_bits)) or
            `torch.float64` (53). By default float32, unless `largest` asks for more.
        largest: the largest number that will occur.

    Raises:
        ArgumentTypeError: fraction_bits is not a whole number, or what `enter` is given is not a real tensor.
        ArgumentError: dtype holds no such grid.
        RangeError: `enter` is given numbers beyond the range.

    Example:
        >>> import torch, invfunc
        >>> grid = invfunc.pairs.Grid(fraction_bits=2)
        >>> grid.enter(torch.tensor([0.3, 1.6])), grid.limit
        (tensor([0.2500, 1.5000]), 4194304.0)
        >>> invfunc.pairs.Grid(fraction_bits=16, largest=1000.0).dtype
        torch.float64
    """

    fraction_bits: int = 16
    dtype: Any = None
    largest: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.fraction_bits, int):
            raise ArgumentTypeError(f"{self!r}: fraction_bits is a whole number.")
        if self.dtype is None:
            fits = self.largest <= 2.0 ** (24 - self.fraction_bits)
            object.__setattr__(self, "dtype", torch.float32 if fits else torch.float64)
        if self.dtype not in _MANTISSA:
            raise ArgumentError(f"{self!r}: the numbers are held by torch.float32 or torch.float64.")
        if self.largest > self.limit:
            raise ArgumentError(f"{self!r}: numbers up to {self.largest} do not fit, the range ends at {self.limit}.")

    @property
    def limit(self) -> float:
        """The end of the range."""
        return 2.0 ** (_MANTISSA[self.dtype] - self.fraction_bits)

    @property
    def unit(self) -> float:
        """The distance of two numbers."""
        return 2.0**-self.fraction_bits

    def enter(self, x: tree.Tree) -> tree.Tree:
        """The nearest numbers of the grid, of its dtype, for all tensors of a pytree; the gradient is that of the
        identity."""
        return tree.map_leaves(lambda leaf: self.checked(self.round(leaf), entered=True)[0], x)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest numbers on the grid, without a check of the range."""
        if not isinstance(x, torch.Tensor) or x.is_complex():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentTypeError(f"{self!r}: a tensor of real numbers is put on a grid, not {kind}.")
        x = x.to(self.dtype)
        return straight_through(self._nearest(x.detach()), x)

    def checked(self, *tensors: torch.Tensor, entered: bool = False) -> tuple[torch.Tensor, ...]:
        """The tensors, if they are within the range, and on the grid; `entered` says that this is known."""
        if torch.compiler.is_compiling():
            return tensors
        with unwatched():  # values that are only looked at
            for x in map(innermost, tensors):
                if x.dtype != self.dtype:
                    raise RangeError(f"{self!r}: a state of {x.dtype} {_OFF}")
                low, high = (float(end) for end in x.aminmax()) if x.numel() else (0.0, 0.0)
                if not (-self.limit < low and high < self.limit):
                    raise RangeError(
                        f"{self!r}: numbers between {low:.3g} and {high:.3g} leave the range, which ends at "
                        f"{self.limit:.6g}. Take fewer fraction_bits, or dtype=torch.float64."
                    )
                if not entered and not torch.equal(self._nearest(x), x):
                    raise RangeError(f"{self!r}: the state {_OFF}")
        return tensors

    def _nearest(self, x: torch.Tensor) -> torch.Tensor:
        return (x / self.unit).round_().mul_(self.unit).add_(0.0)  # -0.0 does not come back as such


def straight_through(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A value that is differentiated as x."""
    return value + (x - x.detach())


# Products

_DENOMINATOR = 10_000

Words = tuple[torch.Tensor, ...]
"""Digits, of which only the last word is written; those before it are full."""


@dataclass(frozen=True)
class Decay:
    """`x -> n / d * x` on a grid, step after step, where x takes fewer digits each time.

    The digits that it loses are put into whole numbers beside it, from which they come back: log2(d / n) bits a step.
    """

    by: Fraction
    call: str
    """Of the optimiser, for errors."""

    @staticmethod
    def of(call: str, name: str, by: Any) -> Decay:
        """The decay by a number between 0 and 1 which is a fraction of small numbers, as 0.9 is 9/10."""
        if isinstance(by, (int, float, Fraction)) and 0 < by < 1:
            near, tolerance = Fraction(by).limit_denominator(_DENOMINATOR), Fraction(1, 10**12)  # of 0.9 as a float
            if abs(near - Fraction(by)) < tolerance and 0 < near < 1:
                return Decay(near, call)
        raise ArgumentError(
            f"{call}: {name} has to be between 0 and 1, and a fraction with a denominator up to {_DENOMINATOR}, as 0.9 "
            "or Fraction(9, 10): only such a product can be undone to the last bit."
        )

    @cached_property
    def capacity(self) -> int:
        """Number of steps that fit into a word of 63 bits."""
        n, d = self.by.as_integer_ratio()
        largest, steps = 0, 0
        while (largest := largest // n * d + d - 1) <= torch.iinfo(torch.int64).max:
            steps += 1
        return steps

    def forth(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """`n / d * x + gained` after so many steps, and all digits."""
        if steps and steps % self.capacity == 0:
            words = (*words, torch.zeros_like(words[-1]))
        x, last = _product(x, words[-1], self.by, grid.unit)
        return x + gained, (*words[:-1], last)

    def back(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """The number that it was computed from, with so many steps before it."""
        x, last = _product(x - gained, words[-1], 1 / self.by, grid.unit)
        if steps % self.capacity:
            return x, (*words[:-1], last)
        with unwatched():
            used_up = not bool(innermost(last).any())
        if not used_up:
            raise InverseError(
                f"{self.call}: back at the start of at most {self.capacity} steps there are saved digits left, so that "
                "the gradients on the way back were other ones: the data or random numbers have changed (within "
                "invertible_checkpoint they are replayed), or an operation is not deterministic "
                "(torch.use_deterministic_algorithms)."
            )
        return x, words[:-1] if steps else (last,)


def _product(x: torch.Tensor, digits: torch.Tensor, by: Fraction, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """n / d * x on the grid to less than a unit, and the digits; differentiated as without rounding.

    In units `n * x + u` is divided by d, where u is taken from the digits (as their remainder by n), and what remains
    is put there. By d / n it is undone.
    """
    n, d = by.as_integer_ratio()
    units = (in_float64(x.detach(), "a decay that is exact counts") / unit).round_()  # it holds up to 2 ** 53
    whole = (units / d).trunc_()  # as n * x itself may have more than 53 bits
    fewer = digits.div(n, rounding_mode="trunc")
    part = torch.sub(units, whole, alpha=d).mul_(n) + torch.sub(digits, fewer, alpha=n)
    more = ((part + 0.5) / d).floor_()  # half a unit from where a rounded quotient would be another whole number
    left = part.sub_(more, alpha=d)
    product = whole.to(torch.int64).mul_(n) + more.to(torch.int64)
    rounded = product.to(x.dtype) * unit
    return straight_through(rounded, x * float(by)), fewer.mul_(d) + left.to(torch.int64)


FINE = Grid(44, torch.float64)
"""Numbers up to 512, to 6e-14."""


def reversible_sgd(
    loss: Callable[..., Any], *, lr: float | Callable[..., Any], momentum: float | Fraction = 0.9, grid: Grid = FINE
) -> Optimiser:
    """The pair `state -> state'` of one step of gradient descent with momentum, which can be inverted.

        v' = momentum * v - lr * grad(loss)(w, *args)       w = w' - v'
        w' = w + v'                                         v = (v' + lr * grad(loss)(w, *args)) / momentum

    So a whole training can be differentiated in the memory of one step: a function of the last weights has gradients in
    the initial weights, and in everything that the losses and learning rates read.

        step = reversible_sgd(loss, lr=0.1)
        last = repeated(step)(step.start(params), batches, *args)
        validation(last.params).backward()

    All numbers are on a grid, where sums are exact. momentum is a fraction n / d; the digits that v loses by the
    product are saved in integers, log2(d / n) bits a step and entry. The product is exact up to a unit of the grid.

    Args:
        loss: `loss(params, *args, **kwargs)`, a scalar that is twice differentiable. It is evaluated at the weights on
            the grid, in the dtypes of the parameters. loss is pure in torch.func's sense (see the conventions).
        lr: the learning rate, or a function `lr(*args, **kwargs)` of the arguments of the loss after the parameters, as
            `lambda batch, *rest: batch["lr"]` for a learning rate of each step.
        momentum: between 0 and 1, a fraction with a denominator up to 10000; it has no gradient.
        grid: the weights, v and each change of it are rounded to it. By default 44 bits after the point in float64, up
            to 512.

    Returns:
        An `Invertible`, called as `step(state, *args, **kwargs)`, with `step.start(params)`, the state before the first
        step, whose v is 0, and `state.params`, the weights of a state as `start` was given them. Its derivative is that
        of the step without rounding, at the rounded weights.

    Raises:
        ArgumentTypeError: loss is not a function, lr is neither that nor a number; a parameter is not a tensor of real
            numbers, or the state is not one of `start`.
        ArgumentError: momentum is no such fraction; the loss gives no scalar.
        InverseError: on the way back the gradients are not those of the forward steps, which shows when the saved
            digits do not match, or when the initial state is compared; or there is no step left to invert.
        RangeError: a number leaves the range of the grid, or is NaN.
        ReplayError: in a backward pass through several steps, the loss or lr closes over another tensor than in the
            forward pass.
        ModifiedError: such a tensor was written in place since.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.pairs.reversible_sgd(lambda w, c: c * w.square() / 2, lr=0.5)
        >>> train, cs = invfunc.repeated(step), torch.ones(100)
        >>> state = step.start(torch.tensor(4.0))
        >>> last = train(state, cs)
        >>> invfunc.invert(train)(last, cs).params
        tensor(4.)
        >>> torch.func.grad(lambda cs: train(state, cs).params.square())(cs[:3])
        tensor([12.3808,  8.1760, -2.3360])

    Composes with: `chain`, `repeated`, `invertible_checkpoint`, whose backward pass draws the random numbers of a loss
    (dropout) again; `invert` does not, which is an error.

    Cost: a gradient in either direction; in a backward pass one, and a product of its Jacobian (a Hessian-vector
        product) from the same evaluation. With `repeated` or `chain` in plain autograd that is twice the time of the
        training, as all steps after the first are one node. Within torch.func, or if the loss draws random numbers, or
        closes over a tensor that needs a gradient, each step is a block of its own: some 4 milliseconds more in either
        direction, and 40 kB. Memory: the state, 24 bytes an entry, 8 more for each 377 steps with 0.9 (30415 with
        0.999).

    Source: D. Maclaurin et al., Gradient-based Hyperparameter Optimization through Reversible Learning, 2015. There the
    product is off by up to n units.
    """
    call = f"reversible_sgd({describe(loss)}, momentum={momentum!r})"
    return _Descent(call, lr, grid, (Decay.of(call, "momentum", momentum),)).pair_of(loss)


def reversible_adam(
    loss: Callable[..., Any],
    *,
    lr: float | Callable[..., Any],
    betas: tuple[float | Fraction, float | Fraction] = (0.9, 0.999),
    eps: float = 1e-8,
    grid: Grid = FINE,
) -> Optimiser:
    """The pair `state -> state'` of one step of Adam, which can be inverted.

        m' = beta1 * m + (1 - beta1) * g            with g = grad(loss)(w, *args)
        s' = beta2 * s + (1 - beta2) * g ** 2
        w' = w - lr * m' / (1 - beta1 ** t) / (sqrt(s' / (1 - beta2 ** t)) + eps)

    m' and s' give the change of the weights, so the inverse computes w first, then the gradient there, then m and s. It
    is like `reversible_sgd`, with these differences.

    Args:
        loss, lr: as in `reversible_sgd`. loss is pure in torch.func's sense (see the conventions).
        betas: two fractions as its momentum.
        eps: a number of at least 0. Where you differentiate through a training, take 1e-4 or more: at the default an
            entry of the gradient near 1e-6 can dominate the derivative, which is then wrong. Or multiply the loss and
            eps by the same number, such as 1000: the steps are the same, and the grid is finer beside the gradients.
        grid: the weights, m, s and their changes are rounded to it; increases of s are rounded up, so that no gradient
            counts as zero. A gradient that is small beside the root of 1 / (1 - beta2) units (7.5e-6 by default) moves
            its weight by less than in Adam, as if eps were that large.

    Returns:
        An `Invertible`, called as `step(state, *args, **kwargs)`, with `step.start(params)` and `state.params`.

    Raises:
        ArgumentTypeError, ArgumentError, InverseError, RangeError: as `reversible_sgd`; betas is not a pair, or eps is
            negative.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.pairs.reversible_adam(lambda w, c: c * w.square() / 2, lr=0.5)
        >>> train, cs = invfunc.repeated(step), torch.ones(100)
        >>> state = step.start(torch.tensor(4.0))
        >>> train(state, cs[:3]).params
        tensor(2.5111)
        >>> invfunc.invert(train)(train(state, cs), cs).params
        tensor(4.)

    Composes with: as `reversible_sgd`.

    Cost: as `reversible_sgd`, with a state of 40 bytes an entry, and 8 more for each 377 and each 30415 steps.

    Source: D. Kingma and J. Ba, Adam, 2015; D. Maclaurin et al., Gradient-based Hyperparameter Optimization through
    Reversible Learning, 2015.
    """
    call = f"reversible_adam({describe(loss)}, betas={betas!r}, eps={eps!r})"
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ArgumentError(f"{call}: betas has to be a pair of numbers.")
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise ArgumentError(f"{call}: eps has to be a number of at least 0.")
    decays = tuple(Decay.of(call, f"betas[{i}]", beta) for i, beta in enumerate(betas))
    return _Adam(call, lr, grid, decays, eps).pair_of(loss)


@dataclass(frozen=True)
class _Parameters:
    """Form, shapes and dtypes of parameters that are joined to one vector."""

    form: tree.Form
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    def joined(self, vector: torch.Tensor) -> Any:
        """The parameters, in their own dtypes."""
        parts = vector.split([math.prod(shape) for shape in self.shapes])
        like = zip(parts, self.shapes, self.dtypes, strict=True)
        return self.form.join(part.view(shape).to(dtype) for part, shape, dtype in like)


@tree.register("weights", "moments", "digits")
@dataclass(frozen=True)
class Training:
    """State of a training: all that its next step needs, and its last one to be undone."""

    weights: torch.Tensor
    """[P], on a grid."""
    moments: tuple[torch.Tensor, ...]
    """The running means of the optimiser, [P] each, on a grid."""
    digits: tuple[Words, ...]
    """The digits that each has lost, [P] a word of 63 bits."""
    steps: int
    """Number of steps that have been taken."""
    like: _Parameters

    @property
    def params(self) -> Any:
        """The parameters, a pytree as `start` was given."""
        return self.like.joined(self.weights)


@dataclass(frozen=True, repr=False)
class Optimiser(Invertible):
    """An `Invertible` on states of training, with the way into them."""

    law: Any = None

    def start(self, params: Any) -> Training:
        """The state before the first step; its derivative in the parameters is that of the identity."""
        return self.law.start(params)


@dataclass(frozen=True, eq=False)
class _Gradient(Value):
    """The gradient of a loss, as a vector of a dtype."""

    loss: Callable

    def __call__(self, weights: torch.Tensor, like: _Parameters, *args: Any, **kwargs: Any) -> torch.Tensor:
        if saving_hooks() is None or transforming():
            return _vector(torch.func.grad(self.loss)(like.joined(weights), *args, **kwargs), weights.dtype)
        recorded = torch.is_grad_enabled()  # torch.func.grad refuses the hooks of an invertible block
        with torch.enable_grad():
            weights = weights if weights.requires_grad else weights.detach().requires_grad_()
            value = self.loss(like.joined(weights), *args, **kwargs)
            (found,) = torch.autograd.grad(value, weights, create_graph=recorded, allow_unused=True)
        return torch.zeros_like(weights) if found is None else found


def _vector(params: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([t.to(dtype).flatten() for t in tree.tensors(params)])


@dataclass(frozen=True, eq=False)
class _Descent(Value):
    """The steps of gradient descent with momentum in both directions, as those of other optimisers.

    Args:
        lr: a number, or a function of the further arguments of the loss.
        decays: of each running mean.
    """

    call: str
    lr: Any
    grid: Grid
    decays: tuple[Decay, ...]

    def added(self, rate: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gain of each running mean by a gradient, on the grid."""
        return (self.grid.round(-rate * gradient),)

    def moved(self, rate: Any, moments: tuple, steps: int) -> torch.Tensor:
        """By how much the weights change, from the new running means."""
        return moments[0]

    def pair_of(self, loss: Callable) -> Optimiser:
        """The pair."""
        check_callable(self.call.split("(")[0], loss)
        if not callable(self.lr) and not isinstance(self.lr, (int, float)):
            raise ArgumentTypeError(
                f"{self.call}: lr is of type {type(self.lr).__name__}, but has to be a number, or a function of the "
                "arguments after the parameters; a learning rate with a gradient is such an argument."
            )
        if not isinstance(self.grid, Grid):
            raise ArgumentTypeError(f"{self.call}: grid is of type {type(self.grid).__name__}, but has to be a Grid.")
        return Optimiser(self.forward, self.inverse, (_Gradient(loss),), name=self.call, law=self)

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
        weights = self.grid.enter(_vector(tensors, self.grid.dtype))
        zeros, none = torch.zeros_like(weights), torch.zeros_like(weights, dtype=torch.int64)
        return Training(weights, (zeros,) * len(self.decays), ((none,),) * len(self.decays), 0, like)

    def forward(self, gradient: Callable, state: Any = None, *args: Any, **kwargs: Any) -> Training:
        rate = self._rate(state, args, kwargs)
        gained = self.added(rate, gradient(state.weights, state.like, *args, **kwargs))
        moments, digits = self._each(Decay.forth, state, gained, state.steps)
        weights = state.weights + self.moved(rate, moments, state.steps + 1)
        self.grid.checked(weights, *moments, *gained, entered=True)
        return Training(weights, moments, digits, state.steps + 1, state.like)

    def inverse(self, gradient: Callable, state: Any = None, *args: Any, **kwargs: Any) -> Training:
        rate, steps = self._rate(state, args, kwargs), state.steps - 1
        if steps < 0:
            raise InverseError(f"{self.call}: the state is that of the start, before which there is no step.")
        weights = state.weights - self.moved(rate, state.moments, state.steps)
        gained = self.added(rate, gradient(weights, state.like, *args, **kwargs))
        moments, digits = self._each(Decay.back, state, gained, steps)
        self.grid.checked(weights, *moments, *gained, entered=True)
        return Training(weights, moments, digits, steps, state.like)

    def _rate(self, state: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The learning rate of a step, where the state is one of `start`."""
        if not isinstance(state, Training) or len(state.moments) != len(self.decays):
            raise ArgumentTypeError(
                f"{self.call}: the state is of type {type(state).__name__}, but has to come from its start(params)."
            )
        return self.lr(*args, **kwargs) if callable(self.lr) else self.lr

    def _each(self, way: Callable, state: Training, gained: tuple, steps: int) -> tuple[tuple, tuple]:
        """All running means one step further, or back, and their digits."""
        together = zip(self.decays, state.moments, state.digits, gained, strict=True)
        moments, digits = zip(*(way(*each, steps, self.grid) for each in together), strict=True)
        return moments, digits


@dataclass(frozen=True, eq=False)
class _Adam(_Descent):
    eps: float

    def added(self, rate: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (float(1 - decay.by) for decay in self.decays)
        square = second * gradient.square() + self.grid.unit / 2
        return self.grid.round(first * gradient), self.grid.round(square)

    def moved(self, rate: Any, moments: tuple, steps: int) -> torch.Tensor:
        first, second = (1 - float(decay.by) ** steps for decay in self.decays)
        mean, square = moments
        root = (square.clamp(min=self.grid.unit) / second).sqrt()  # whose derivative at 0 would be infinite
        return self.grid.round(-rate * (mean / first) / (root + self.eps))
