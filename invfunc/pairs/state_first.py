"""The arguments of invertible functions, and of model functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from invfunc.callables import check_callable, describe
from invfunc.pairs.value import Value


def state_first(f: Callable) -> Callable:
    """Turn `f(params, x, *args)` into `f(x, params, *args)`, or back.

    A model function takes its parameters first, as `torch.func.grad` and the statistics want it, an invertible function
    its state:

        g = invertible_checkpoint(state_first(f), state_first(f_inv))
        variance(state_first(g))(params, x)

    Args:
        f: a function of two or more arguments. f is pure in torch.func's sense (see the conventions).

    Returns:
        The function with its first two arguments swapped.

    Raises:
        ArgumentTypeError: f is not a function.

    Example:
        >>> import invfunc
        >>> invfunc.state_first(lambda params, x: x - params)(1.0, 3.0)
        -2.0

    Composes with: everything.

    Cost: none.

    Source: `flip` of functional programming.
    """
    check_callable("state_first", f)
    return _Swapped(f)


@dataclass(frozen=True, repr=False)
class _Swapped(Value):
    f: Callable

    def __repr__(self) -> str:
        return f"state_first({describe(self.f)})"

    def __call__(self, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        return self.f(second, first, *args, **kwargs)
