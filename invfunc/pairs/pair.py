"""A function and its inverse, as one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc.callables import check_callable, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.value import Value, places_in, read
from invfunc.transform import shown


def needed(call: str, which: str, fn: Any) -> Callable:
    """A function that has to be one."""
    if not callable(fn):
        raise ArgumentTypeError(f"{call}: {which} is of type {type(fn).__name__}, but has to be a function.")
    return fn


def behind(p: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The positional arguments of a block behind its state: its own entry of the parameters and the further ones."""
    return () if p is None and not args and not kwargs else (p, *args)


@shown
@dataclass(frozen=True, repr=False)
class Invertible(Value):
    """A function `forward(x, *args, **kwargs) -> y` with its inverse `inverse(y, *args, **kwargs) -> x`.

    Call it as its forward function. It goes wherever a pair `(f, f_inv)` goes. x and y are any pytrees; further
    arguments are the same in both directions.

    Args:
        forward: the function. It is pure in torch.func's sense (see the conventions).
        inverse: returns x for y and the same further arguments.
        shared: expensive functions that both directions evaluate at the same arguments, the inverse in the reverse
            order. Both directions take them as their first arguments. The backward pass evaluates each once, for the
            inverse and the derivative together: so a coupling costs four evaluations in place of five.
        hidden: True if forward returns `(y, hidden)`. The inverse takes `hidden` as its second argument; the caller
            gets y alone. It stays in memory, so it should be small.
        log_det: `log_det(x, *args, **kwargs) -> [N]`, the logarithm of the absolute determinant of dy/dx for each entry
            of the leading axis. It takes `shared` first, too, and evaluates them in the order of forward.
        name: what `repr` says.
        composition: what it is composed of, as in `chain`; it then frees its own memory.
        carried: what `with_log_det` makes of it, where both directions give the log-determinant beside their result.
        carries_a_sum: whether the last tensor of the state is a sum, which nothing is computed from but further sums.

    Raises:
        ArgumentTypeError: a part is not a function.
        ArgumentError: `hidden`, but forward returns no pair.

    Example:
        >>> import torch, invfunc
        >>> double = invfunc.Invertible(lambda x: 2 * x, lambda y: y / 2)
        >>> double(torch.ones(2)), invfunc.invert(double)(torch.ones(2))
        (tensor([2., 2.]), tensor([0.5000, 0.5000]))
    """

    forward: Callable
    inverse: Callable
    shared: tuple[Callable, ...] = ()
    hidden: bool = False
    log_det: Callable | None = None
    name: str = ""
    composition: Any = None
    carried: Invertible | None = None
    carries_a_sum: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", tuple(self.shared))
        parts = {"forward": self.forward, "inverse": self.inverse, "log_det": self.log_det or callable}
        for name, part in (parts | {f"shared[{i}]": fn for i, fn in enumerate(self.shared)}).items():
            needed(repr(self), name, part)

    def __repr__(self) -> str:
        return self.name or f"Invertible({describe(self.forward)}, {describe(self.inverse)})"

    def __init_subclass__(cls) -> None:
        shown(cls)

    def signature(self) -> inspect.Signature:
        """Signature of a call: of forward, without what it shares with the inverse."""
        try:
            own = inspect.signature(getattr(self.forward, "forward", self.forward))  # a module says it there
        except (TypeError, ValueError):  # of a function that does not say what it takes
            own = inspect.signature(lambda *args: ...)
        given = [p.replace(annotation=p.empty) for p in own.parameters.values()]
        if given and given[0].kind is given[0].VAR_POSITIONAL:
            return inspect.signature(lambda x, params=None, *args, **kwargs: ...)
        return inspect.Signature(given[len(self.shared) :])

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.apart(self.forward(*self.shared, x, *args, **kwargs))[0]

    def module(self) -> nn.Module:
        """The pair as an `nn.Module`, called as `module(x, *args, **kwargs)`, that registers the modules it is made of.

        It goes into `nn.Sequential`. Its parameters have names such as `F.weight` (a coupling) and `0.F.weight` (a
        chain). A block (`invertible_checkpoint(pair)`) and a chain have the same method.

        Raises:
            ArgumentError: no part is a module.

        Example:
            >>> import torch, invfunc
            >>> pair = invfunc.additive_coupling(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), split_dim=1)
            >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), invfunc.invertible_checkpoint(pair).module())
            >>> [name for name, _ in net.named_parameters()][2:]
            ['1.F.weight', '1.F.bias', '1.G.weight', '1.G.bias']
        """
        return BlockModule(self, self)

    def inverse_of(self, x: tree.Form, like: Sequence[Any], kept: Mapping[int, torch.Tensor]) -> Callable:
        """The inverse, for an x of this form whose tensors are like these, and some of which are known."""
        return self.inverse

    def apart(self, y: Any) -> tuple[Any, tuple]:
        """The part of forward's result for the caller, and the part that it hides."""
        if not self.hidden:
            return y, ()
        if not isinstance(y, tuple) or len(y) != 2:
            raise ArgumentError(f"{self!r}: forward has to return (y, hidden), but returns {type(y).__name__}.")
        return y[0], (y[1],)


def as_pair(call: str, pair: Any, more: str = "") -> Invertible:
    """An `Invertible`, or that of a checkpointed one."""
    found = getattr(pair, "pair", pair)
    if not isinstance(found, Invertible):
        raise ArgumentTypeError(f"{call}: pair is of type {type(pair).__name__}, but has to be an Invertible{more}.")
    return found


def rewrapped(block: Any, pair: Invertible, **options: Any) -> Any:
    """Another pair, or a block of it with the options of a block of the first one."""
    return pair if isinstance(block, Invertible) else replace(block, pair=pair, has_aux=False, **options)


def invert(pair: Invertible) -> Invertible:
    """The inverse of a pair, as a pair: `invert(pair)(y, *args) == x` if `pair(x, *args) == y`.

    Args:
        pair: an `Invertible`. For two functions f and f_inv, `Invertible(f_inv, f)` is the same.

    Returns:
        An `Invertible` from y to x, with the negated log-determinant. Of what `invertible_checkpoint` returned, a block
        with the same options, but for `keep`, which is of x.

    Raises:
        ArgumentTypeError: `pair` is not an `Invertible`.
        ArgumentError: the inverse needs hidden values of forward (batch statistics, a shape), not y alone.
        InverseError: a block of a chain has no inverse.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.Invertible(lambda x, by: x + by, lambda y, by: y - by)
        >>> invfunc.invert(step)(torch.tensor([3.0]), 1.0)
        tensor([2.])

    Composes with: `invertible_checkpoint`, `chain`, and every transform of torch.func.

    Cost: that of the inverse.

    Source: invtorch's `reversed`.
    """
    block, pair = pair, as_pair("invert(pair)", pair, ". Of two functions: Invertible(f_inv, f)")
    if pair.hidden:
        raise ArgumentError(
            f"invert({pair!r}): the inverse needs hidden values of forward (a shape, batch statistics), not y alone."
        )
    name = f"invert({pair!r})"
    if pair.composition is not None:
        return rewrapped(block, pair.composition.inverted(name), keep=False)
    log_det = None if pair.log_det is None else _Carried(pair).of_inverse
    carried = None if pair.carried is None else invert(pair.carried)
    given = {"log_det": log_det, "name": name, "carried": carried, "carries_a_sum": pair.carries_a_sum}
    return rewrapped(block, Invertible(pair.inverse, pair.forward, pair.shared, **given), keep=False)


def with_log_det(pair: Invertible) -> Invertible:
    """The pair on states `(x, s)`, to which it adds its log-determinant: `(x, s) -> (y, s + log |det dy/dx|)`.

    The sum s is a part of the state: the inverse subtracts it again, and a checkpointed flow needs no more memory.

    Args:
        pair: an `Invertible` with a log_det. Of a chain the log-determinants of all blocks are carried.

    Returns:
        An `Invertible`; of what `invertible_checkpoint` returned, a block with the same options. s has the shape [N], a
        sum for each sample; start with `torch.zeros(N)`. Hidden values stay hidden.

    Raises:
        ArgumentTypeError: `pair` is not an `Invertible`.
        ArgumentError: it has no log_det.

    Example:
        >>> import torch, invfunc
        >>> flow = invfunc.with_log_det(invfunc.layers.leaky_relu(0.5))
        >>> flow((torch.tensor([[-1.0, 2.0]]), torch.zeros(1)))
        (tensor([[-0.5000,  2.0000]]), tensor([-0.6931]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `invert`.

    Cost: functions that forward and log_det share are evaluated once.

    Source: D. Rezende and S. Mohamed, Variational Inference with Normalizing Flows, 2015.
    """
    block, pair = pair, as_pair("with_log_det(pair)", pair)
    name = f"with_log_det({pair!r})"
    if pair.composition is not None:
        carried = pair.composition.changed(lambda block: replace(block, pair=with_log_det(block.pair), has_aux=False))
    elif pair.carried is not None:
        carried = pair.carried
    elif pair.log_det is not None:
        both = _Carried(pair)
        carried = Invertible(both.forward, both.inverse, pair.shared, pair.hidden, name=name, carries_a_sum=True)
    else:
        raise ArgumentError(f"{name}: the pair has no log_det.")
    return rewrapped(block, carried)


@dataclass(frozen=True, eq=False)
class _Carried(Value):
    """Both directions of a pair on states `(x, s)` with a sum of log-determinants."""

    pair: Any
    """An `Invertible` with a log_det."""

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        functions, results, x, s, args = self._read(given)
        y, hidden = self.pair.apart(self.pair.forward(*functions, x, *args, **kwargs))
        state = y, s + self.pair.log_det(*_recalling(results, functions), x, *args, **kwargs)
        return (state, *hidden) if hidden else state

    def inverse(self, *given: Any, **kwargs: Any) -> Any:
        functions, results, y, s, args = self._read(given)
        x = self.pair.inverse(*functions, y, *args, **kwargs)
        args = args[1:] if self.pair.hidden else args
        return x, s - self.pair.log_det(*_recalling(results[::-1], functions), x, *args, **kwargs)

    def of_inverse(self, *given: Any, **kwargs: Any) -> torch.Tensor:
        """The log-determinant of the inverse."""
        number = len(self.pair.shared)
        return self.inverse(*given[:number], (given[number], 0), *given[number + 1 :], **kwargs)[1]

    def _read(self, given: tuple) -> tuple[list[Callable], list[Any], Any, Any, list]:
        """The shared functions, the list into which they put their results, x, the sum and further arguments."""
        number = len(self.pair.shared)
        results: list[Any] = []
        state, *args = given[number:]
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ArgumentError(
                f"with_log_det({self.pair!r}): the state is of type {type(state).__name__}, but has to be (x, s), "
                "where s is the sum of the log-determinants, [N]; it starts as torch.zeros(N)."
            )
        return [partial(_kept, results, fn) for fn in given[:number]], results, *state, args


def _kept(results: list[Any], fn: Callable, *args: Any, **kwargs: Any) -> Any:
    results.append(fn(*args, **kwargs))
    return results[-1]


def _recalling(results: list[Any], functions: list[Callable]) -> list[Callable]:
    """Functions that give these results, one after the other, in place of evaluating these."""
    left = iter(results)
    return [lambda *args, **kwargs: next(left)] * len(functions)


class PairLaw(Value):
    """The two directions of a pair and its log-determinant as methods of a dataclass, for some options."""

    forward: Callable[..., Any]
    inverse: Callable[..., Any]
    log_det: Callable[..., torch.Tensor]

    def pair(self, name: str, shared: tuple[Callable, ...] = (), hidden: bool = False) -> Invertible:
        """The `Invertible` of both directions."""
        return Invertible(self.forward, self.inverse, shared, hidden, self.log_det, name)


def state_first(f: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `f(params, x, *args)` into `f(x, params, *args)`, or back.

    A model function takes its parameters first, as `torch.func.grad` and the statistics do; an invertible function
    takes its state first:

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
        >>> invfunc.pairs.state_first(lambda params, x: x - params)(1.0, 3.0)
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


class BlockModule(nn.Module):
    """A pair, block or chain as a module: `module(x, *args, **kwargs)`.

    Args:
        block: what it calls, with the parameters of its own modules.
        pair: the pair of the block.
    """

    def __init__(self, block: Any, pair: Any) -> None:
        super().__init__()
        self.block = block
        of_parts = isinstance(getattr(pair.forward, "__self__", pair.forward), Value)
        self._of_parts = of_parts if pair.composition is None else not pair.composition.counted
        """True if the block takes parameters in front of further arguments."""
        for name, module in _modules(pair):
            if module not in self._modules.values():
                self.add_module(f"{name}_{len(self._modules)}" if name in self._modules else name, module)
        if not self._modules:
            raise ArgumentError(
                f"{block!r}.module(): it has no modules to register. Pass modules in place of functions, as in "
                "additive_coupling(nn.Linear(2, 2), nn.Linear(2, 2)). Modules that lambdas call are registered by the "
                "module that has them as attributes."
            )

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the block; further arguments go to its parts."""
        own = (None,) if self._of_parts and (args or kwargs) else ()
        return self.block(x, *own, *args, **kwargs)

    def extra_repr(self) -> str:
        return repr(self.block)


def _modules(pair: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a pair with their names; of a chain one for each block that has any."""
    if pair.composition is not None:
        blocks = enumerate(pair.composition.blocks)
        yield from ((str(i), BlockModule(block, block.pair)) for i, block in blocks if any(_modules(block.pair)))
        return
    names = getattr(getattr(pair.forward, "__self__", None), "names", [f"parts_{i}" for i in range(len(pair.shared))])
    for name, held in (*zip(names, pair.shared, strict=True), ("f", pair.forward), ("f_inv", pair.inverse)):
        yield from ((name, module) for module in _held(held))


def _held(value: Any) -> Iterator[nn.Module]:
    """The modules that a function of a pair is, or holds as its own."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, (MethodType, partial, tuple, list, Value)):
        for place in places_in(value):
            yield from _held(read(place))
