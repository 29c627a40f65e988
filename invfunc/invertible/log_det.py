"""Log-determinants that are carried along."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from invfunc.errors import ArgumentError, ArgumentTypeError

from .pair import Invertible


def with_log_det(pair: Invertible) -> Invertible:
    """The pair on states `(x, s)`, to which it adds its log-determinant: `(x, s) -> (y, s + log |det dy/dx|)`.

    The sum is part of the state, so it is taken back by the inverse, and a checkpointed flow needs no more memory.

    Args:
        pair: an `Invertible` with a log_det. Of a chain the log-determinants of all blocks are carried.

    Returns:
        An `Invertible`. s has the shape [N] of one sum for each entry of the leading axis of x; `torch.zeros(N)` starts.

    Raises:
        ArgumentTypeError: `pair` is no `Invertible`.
        ArgumentError: it has no log_det, or hides something.

    Example:
        >>> import torch, invfunc
        >>> flow = invfunc.with_log_det(invfunc.layers.leaky_relu(0.5))
        >>> flow((torch.tensor([[-1.0, 2.0]]), torch.zeros(1)))
        (tensor([[-0.5000,  2.0000]]), tensor([-0.6931]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `invert`.

    Cost: functions that forward and log_det share are evaluated once.

    Source: D. Rezende and S. Mohamed, Variational Inference with Normalizing Flows, 2015.
    """
    if not isinstance(pair, Invertible):
        kind = type(pair).__name__
        raise ArgumentTypeError(f"with_log_det(pair): pair is of type {kind}, but has to be an Invertible.")
    if pair.composition is not None:
        return pair.composition.changed(with_log_det)
    if pair.log_det is None or pair.hidden:
        why = "hides something, so that its inverse is no function of y" if pair.hidden else "has no log_det"
        raise ArgumentError(f"with_log_det({pair!r}): the pair {why}.")
    log_det, number = pair.log_det, len(pair.shared)

    def forward(*given: Any, **kwargs: Any) -> Any:
        shared, ((x, s), *args) = _remembering(given[:number]), given[number:]
        return pair.forward(*shared, x, *args, **kwargs), s + log_det(*shared, x, *args, **kwargs)

    def inverse(*given: Any, **kwargs: Any) -> Any:
        shared, ((y, s), *args) = _remembering(given[:number]), given[number:]
        x = pair.inverse(*shared, y, *args, **kwargs)
        return x, s - log_det(*shared, x, *args, **kwargs)

    return Invertible(forward, inverse, pair.shared, name=f"with_log_det({pair!r})")


def _remembering(functions: tuple[Callable, ...]) -> tuple[Callable, ...]:
    """Functions that give the same result, without evaluating again, for the very same arguments."""
    made: list[tuple[Callable, tuple, dict[str, Any], Any]] = []

    def call(fn: Callable, *args: Any, **kwargs: Any) -> Any:
        for known, given, named, result in made:
            same = known is fn and len(given) == len(args) and named.keys() == kwargs.keys()
            if same and all(a is b for a, b in zip(given, args, strict=True)):
                if all(named[name] is kwargs[name] for name in named):
                    return result
        made.append((fn, args, kwargs, fn(*args, **kwargs)))
        return made[-1][-1]

    return tuple(partial(call, fn) for fn in functions)
