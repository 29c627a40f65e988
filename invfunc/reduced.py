"""A function of each parameter's quantity, as soon as it is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from invfunc.callables import by_name, check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.statistic import Statistic
from invfunc.transform import check_no_budget


def reduced(t: Statistic, fn: Callable | Mapping[str, Callable]) -> Statistic:
    """A statistic with a function applied to each parameter's quantity.

        result = t(params, *batch)
        {path: fn(path, quantity) for path, quantity in result}          # as a tree like the parameters

    `fn` runs as soon as a parameter's quantity (such as its per-sample gradients) is known, and before the next one is
    formed, so the quantity of one parameter at a time is in memory.

    Args:
        t: a statistic of this library.
        fn: `fn(path, quantity)`, with the key path of the parameter (`"['weight']"`); or `fn(quantity)`, if it takes
            one argument, as `torch.sum` does. It may return anything. If the statistic has several results, it is
            called with each. Or a dict of such functions by the names of parameters (`{"0.weight": torch.sum}`); the
            others keep their quantities.

    Returns:
        A function with the signature of t, whose result has the values of `fn` in place of the quantities. Results that
        are sums over the parameters (`gram`, `ggn_trace`) come for each parameter.

    Raises:
        ArgumentTypeError: t is not a statistic, or fn is not a function.

    Example:
        >>> import torch, invfunc
        >>> f = lambda params, x: (x @ params["w"] + params["b"]).square()
        >>> spread = invfunc.reduced(invfunc.batch_grad(f), lambda path, g: g.std(0).amax())
        >>> spread({"w": torch.ones(2), "b": torch.zeros(())}, torch.eye(2))
        {'w': tensor(1.4142), 'b': tensor(0.)}

    Composes with: `chunked`, `together` inside; `torch.func.grad`, `vmap` around it, if fn does.

    Cost: that of t. Quantities of several columns (see `diag_ggn`) that do not fit one backward pass are computed
    parameter by parameter, with a pullback for each layer. With chunks of samples, fn runs after the last chunk.

    Source: BackPACK's extension hooks.
    """
    check_no_budget("reduced", t)
    if not isinstance(t, Statistic):
        raise ArgumentTypeError(f"reduced({describe(t)}): it is of type {type(t).__name__}, but has to be a statistic.")
    if isinstance(fn, Mapping):
        named = by_name({name: _with_path(one) for name, one in fn.items()})
        return _of(t, lambda path, quantity: (named(path) or _unchanged)(path, quantity), "{" + ", ".join(fn) + "}")
    return _of(t, _with_path(fn), describe(fn))


def _of(t: Statistic, fn: Callable, shown: str) -> Statistic:
    if t.options.reduce is not None:
        raise ArgumentError(f"reduced({t!r}): it is reduced already; compose the two functions.")
    return replace(t, options=replace(t.options, reduce=fn), shown=f"reduced({t!r}, {shown})")


def _with_path(fn: Any) -> Callable:
    """A function of a path and a quantity."""
    check_callable("reduced", fn)
    return fn if _takes_two(fn) else partial(_without_path, fn)


def _unchanged(path: str, quantity: Any) -> Any:
    return quantity


def _without_path(fn: Callable, path: str, quantity: Any) -> Any:
    return fn(quantity)


def _takes_two(fn: Callable) -> bool:
    """Tells whether a function takes a path beside the quantity; those written in C do not say."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) > 1
