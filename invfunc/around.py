"""Around statistics: several of them together, functions of what they give, and how they are computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from invfunc.callables import by_name, check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.plan import Explanation, Options
from invfunc.statistic import Statistic
from invfunc.transform import Transform, check_no_budget

_SHARED = ("f", "loss", "argnums", "in_dims", "out_dims", "has_aux", "samples", "others")


def together(*statistics: Statistic) -> Statistic:
    """Compute several statistics of the same function at once.

        tuple(t(params, *batch) for t in statistics)

    Statistics of one kind (first-order, GGN, Hessian, Jacobians) share the forward pass. Statistics that pull back the
    same vectors (the gradient, the square root of the GGN, the same drawn columns) share the backward pass. f draws the
    same random numbers for all.

    Args:
        statistics: statistics of the same `f` (the same object), the same `loss` if it is passed apart, and the same
            options. First-order statistics need a loss function; with them, `diag_ggn(f)` takes the same one and finds
            its outputs. Chunk the result of `together`, not these.

    Returns:
        A function `(params, *batch) -> tuple` of the results in their order, aux last.

    Raises:
        ArgumentError: no statistics, different functions or options, `gram` or `batch_jacobian` beside others.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: torch.nn.functional.mse_loss(x @ w, y, reduction="none").sum(1)
        >>> both = invfunc.together(invfunc.diag_ggn(f), invfunc.variance(f))
        >>> both(torch.zeros(1, 1), torch.tensor([[1.0], [2.0]]), torch.ones(2, 1))
        (tensor([[10.0000]]), tensor([[1.]]))

    Composes with: `chunked` over the axes that all of them have, `reduced`; `torch.func.grad`, `vmap` around it.

    Cost: one forward pass for each kind of statistics, and each kind of vectors is pulled back once.

    Source: BackPACK computes all extensions in one backward pass.
    """
    if not statistics:
        raise ArgumentError("together(): give at least one statistic.")
    for t in statistics:
        check_no_budget("together", t)
        if not isinstance(t, Statistic):
            raise ArgumentTypeError(f"together(...): an argument is of type {type(t).__name__}, not a statistic.")
        if t.members or replace(t.options, dense=False) != Options() or t.shown is not None:
            raise ArgumentError(
                f"together({t!r}): it is a composition; apply `chunked` and `reduced` to together(...)."
            )
    first = statistics[0]
    for t in statistics[1:]:
        for name in _SHARED:
            if not _same(getattr(t, name), getattr(first, name)):
                raise ArgumentError(
                    f"together({first!r}, {t!r}): they have different {name}. Give all the same object; of a loss "
                    "function f, `diag_ggn(f)` finds the outputs itself."
                )
    kinds = {t.kind.of_model == "no" for t in statistics}
    if len(kinds) > 1:
        raise ArgumentError(
            f"together({', '.join(map(repr, statistics))}): `gram` and `batch_jacobian` do not come together with the "
            "statistics of a loss."
        )
    shown = f"together({', '.join(map(repr, statistics))})"
    options = Options(dense=any(t.options.dense for t in statistics))
    return replace(first, name="together", drawing=None, members=statistics, shown=shown, options=options)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # tensors of several entries
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)


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
        shown = "{" + ", ".join(fn) + "}"
        return _of(t, lambda path, quantity: one(path, quantity) if (one := named(path)) else quantity, shown)
    return _of(t, _with_path(fn), describe(fn))


def _of(t: Statistic, fn: Callable, shown: str) -> Statistic:
    if t.options.reduce is not None:
        raise ArgumentError(f"reduced({t!r}): it is reduced already; compose the two functions.")
    return replace(t, options=replace(t.options, reduce=fn), shown=f"reduced({t!r}, {shown})")


def _with_path(fn: Any) -> Callable:
    """A function of a path and a quantity."""
    check_callable("reduced", fn)
    return fn if _takes_two(fn) else partial(_without_path, fn)


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


@runtime_checkable
class Explainable(Protocol):
    """A statistic, or what is made of one."""

    def names(self, count: int) -> Any: ...

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation: ...


def explain(statistic: Explainable) -> Callable[..., Explanation]:
    """Say how a statistic would be computed, without computing it.

        print(explain(diag_ggn(f, loss))(params, *batch))

    Args:
        statistic: a statistic of this library, also `chunked`, `reduced`, `certified`, `streamed`, `distributed` or of
            several `together`; or a `compiled` product, of which it has the `plan` and its `code`.

    Returns:
        A function with the arguments of the statistic that returns an `Explanation`, which prints as a table. It has
        the number of `columns` of a sample (vectors of outputs that are pulled back, see `diag_ggn`), of backward
        `passes` (of one column each; with `chunked` the number of chunks) and of `pullbacks` (of several columns at
        once, if memory allows); `why`, which begins with how f is called if it is not followed operation by operation
        (on single samples, or by the rows of its losses); the `parts` of the exact columns with a shortcut: a closed
        form, columns that share backward passes ("local"), columns of a narrow layer, or the entries of parameters one
        by one; for each of the `params` the `operations` that read it, whether all have a "fast" rule, or some are
        "generic" (with a copy of the parameter for each sample), or it is "unread", and the shapes of its factors;
        about how many `bytes` the result takes; the estimated `cost` over that of all columns; an explanation of each
        of the `members` of `together`; what is `checked` if it is `certified`. If it is `streamed`, all this is for the
        first batch, which the loader is asked for, and there is the number of `sweeps` over how many `batches` (None if
        the loader has no length), and of `tiles` of `gram`. If it is `distributed`, there is the number of `processes`;
        no other process is asked, so one process can call it alone.

    Raises:
        ArgumentTypeError: something else than a statistic; a loader that gives its batches once, as a generator. The
        errors of the statistic if it cannot follow f. Errors that come later in a call (a parameter without Kronecker
        factors, say) are not found.

    Example:
        >>> import torch, invfunc
        >>> f = lambda p, x: torch.nn.functional.linear(x, p["w"]) * p["s"].exp()
        >>> g = invfunc.chunked(invfunc.diag_ggn(f, torch.nn.functional.mse_loss), 2)
        >>> p, x = {"w": torch.ones(4, 3), "s": torch.ones(4)}, torch.ones(2, 3)
        >>> invfunc.explain(g)(p, x, torch.zeros(2, 4))
        chunked(diag_ggn(<lambda>, mse_loss), n=2, over='outputs'): because chunked asks for it
          2 backward passes for 4 columns of a sample (vectors that are pulled back), in 2 pullbacks
          params['w']  fast  linear
          params['s']  fast  mul
          about 0.0 MiB for the result, 100.0% of the work without structure

    Composes with: `chunked`, `reduced`, `together`, `certified`, `streamed`, `distributed` inside of it.

    Cost: the forward passes of the statistic (for the Hessian also backward passes to the nonlinear operations); if it
    looks for structure, one of a single sample. No random numbers are used up.

    Source: this library.
    """
    if not isinstance(statistic, Explainable):
        raise ArgumentTypeError(
            f"explain({describe(statistic)}): it is of type {type(statistic).__name__}, but has to be a statistic, as "
            "in explain(diag_ggn(f, loss))(params, *batch). Of a block `pairs.held_states` tells what stays in memory, "
            "and `pairs.drift` how exactly it runs backwards."
        )
    return Explained(statistic)


@dataclass(frozen=True, repr=False)
class Explained(Transform):
    """A function `(params, *batch) -> Explanation`."""

    statistic: Explainable
    owned = False

    def __repr__(self) -> str:
        return f"explain({self.statistic!r})"

    def names(self, count: int) -> Any:
        return self.statistic.names(count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Explanation, Any]:
        return self.statistic.explanation(args, kwargs, names), None
