"""Gradient descent with momentum, whose steps can be undone to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from invfunc.pairs.decay import Decay
from invfunc.pairs.exact import Grid
from invfunc.pairs.training import FINE, Optimiser, Steps, named


def reversible_sgd(
    loss: Callable, *, lr: float | Callable, momentum: float | Fraction = 0.9, grid: Grid = FINE
) -> Optimiser:
    """The pair `state -> state'` of one step of gradient descent with momentum, which runs backwards as well.

        v' = momentum * v - lr * grad(loss)(w, *args)       w = w' - v'
        w' = w + v'                                         v = (v' + lr * grad(loss)(w, *args)) / momentum

    So a training can be differentiated from its end, in the memory of one step: its start, and all that its losses and
    learning rates read, get the gradient of whatever the last weights are good for.

        step = reversible_sgd(loss, lr=0.1)
        last = repeated(step)(step.start(params), batches, *args)
        validation(last.params).backward()

    All numbers are on a grid, where sums are exact. momentum is a fraction n / d; the digits that v loses by it go into
    whole numbers beside v, log2(d / n) bits a step and entry, from which they come back. The product is off by less
    than a unit of the grid.

    Args:
        loss: `loss(params, *args, **kwargs)`, a scalar that is twice differentiable. It is evaluated at the weights on
            the grid, in the dtypes of the parameters. loss is pure in torch.func's sense (see the conventions).
        lr: the learning rate, or a function `lr(*args, **kwargs)` of what the loss gets behind the parameters, as
            `lambda batch, *rest: batch["lr"]` for one of each step.
        momentum: between 0 and 1, a fraction with a denominator up to 10000; no gradient is asked of it.
        grid: what the weights, v and each change of it are rounded to. By default 44 bits behind the point in float64,
            up to 512.

    Returns:
        An `Invertible`, called as `step(state, *args, **kwargs)`, with `step.start(params)`, the state before the first
        step, whose v is 0, and `state.params`, the weights of a state as `start` was given them. Its derivative is that
        of the step without rounding, at the rounded weights.

    Raises:
        ArgumentTypeError: loss is not a function, lr is neither that nor a number; a parameter is not a tensor of real
            numbers, or the state is not one of `start`.
        ArgumentError: momentum is no such fraction; loss or lr gives no scalar.
        InverseError: on the way back the gradients are not those of the way forth, which shows when a word of digits
            should be used up, and in a backward pass where the state before the steps is compared; or there is no step
            left to undo.
        RangeError: a number leaves the range of the grid, or is NaN.
        ReplayError: in a backward pass through several steps, the loss or lr reads another tensor that it closes over
            than on the way forth.
        ModifiedError: such a tensor was written in place since.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.reversible_sgd(lambda w, c: c * w.square() / 2, lr=0.5)
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
        training, as all steps behind the first are one node. Steps in which the loss draws random numbers, or closes
        over what needs a gradient, are a block each, as all are within torch.func; that is some 4 milliseconds more in
        either direction, and 40 kB. Memory: the state, 24 bytes an entry, 8 more for each 377 steps with 0.9 (30415
        with 0.999).

    Source: D. Maclaurin et al., Gradient-based Hyperparameter Optimization through Reversible Learning, 2015. There the
    product is off by up to n units.
    """
    call = named("reversible_sgd", loss, momentum=momentum)
    return _Sgd(call, lr, grid, (Decay.of(call, "momentum", momentum),)).pair(loss)


@dataclass(frozen=True, eq=False)
class _Sgd(Steps):
    def added(self, rate: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (-rate * gradient,)

    def moved(self, rate: Any, moments: tuple, steps: int) -> torch.Tensor:
        return moments[0]
