"""Pairs with arguments, and the formulas of their docstrings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from invfunc import Invertible, additive_coupling, affine_coupling, tree
from invfunc.pairs import fixed_point, leapfrog, momentum, reversible_step
from tests.strategies import Numbers


@dataclass(frozen=True, repr=False)
class Case:
    """A pair with arguments, and the formulas of its docstring."""

    pair: Invertible
    there: Callable
    back: Callable
    x: Any
    args: tuple = ()
    functions: int = 2
    """Number of function evaluations of one direction."""

    def __repr__(self) -> str:
        shapes = tree.map_tensors(lambda t: tuple(t.shape), (self.x, self.args))
        return f"{self.pair!r} of {shapes}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Text that hypothesis shows."""
        printer.text(repr(self))


def mixing(axis: int, number: int = 1, own: list[torch.Tensor] | None = None) -> Callable:
    """A function that mixes the entries of an axis with each of its weights; `own` if it takes none."""

    def mix(x: torch.Tensor, *given: Any) -> Any:
        weights, more = (own, given) if own is not None else (given[0], given[1:])
        made = [torch.tanh((x.movedim(axis, -1) @ w.to(x)).movedim(-1, axis)) for w in weights]
        made = [m * more[0] for m in made] if more else made
        return made[0] if number == 1 else tuple(made)

    return mix


def additive_formulas(F: Callable, G: Callable) -> tuple[Callable, Callable]:
    def there(a, b, p, q, given):
        a = a + F(b, *p, *given)
        return a, b + G(a, *q, *given)

    def back(a, b, p, q, given):
        b = b - G(a, *q, *given)
        return a - F(b, *p, *given), b

    return there, back


def affine_formulas(F: Callable, G: Callable, log_scale: Callable) -> tuple[Callable, Callable]:
    def there(a, b, p, q, given):
        s, t = F(b, *p, *given)
        a = a * torch.exp(log_scale(s)) + t
        s, t = G(a, *q, *given)
        return a, b * torch.exp(log_scale(s)) + t

    def back(a, b, p, q, given):
        s, t = G(a, *q, *given)
        b = (b - t) / torch.exp(log_scale(s))
        s, t = F(b, *p, *given)
        return (a - t) / torch.exp(log_scale(s)), b

    return there, back


def opened(formula: Callable, split: int | None) -> Callable:
    """A formula as the pair is called."""

    def called(x, params=None, *given):
        a, b = x if split is None else x.tensor_split(2, split)
        p, q = ((), ()) if params is None else ((params[0],), (params[1],))
        y = formula(a, b, p, q, given)
        return y if split is None else torch.cat(y, split)

    return called


@st.composite
def couplings(draw, affine: bool) -> Case:
    """Parts of different sizes, one tensor or two, with and without parameters and further arguments."""
    rand, number, split = Numbers(), 1 + affine, draw(st.booleans())
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    axis = draw(st.integers(1, len(shape) - 1)) - len(shape)
    size = draw(st.integers(2, 5))
    first = size - size // 2 if split else draw(st.integers(1, size - 1))
    shape[axis] = size
    a, b = rand(*shape).split([first, size - first], axis)
    weights = [[rand(i, j) / 2 for _ in range(number)] for i, j in ((size - first, first), (first, size - first))]
    own, given = draw(st.booleans()), draw(st.sampled_from([(), (0.5,), (rand(),)]))
    F, G = (mixing(axis, number, w if own else None) for w in weights)
    dim = axis + draw(st.sampled_from([0, len(shape)])) if split else None
    if affine:
        log_scale = draw(st.sampled_from([torch.tanh, torch.sin, lambda s: s]))
        there, back = affine_formulas(F, G, log_scale)
        plain = log_scale is torch.tanh  # the default
        pair = affine_coupling(F, G, split_dim=dim, **({} if plain else {"log_scale": log_scale}))
    else:
        (there, back), pair = additive_formulas(F, G), additive_coupling(F, G, split_dim=dim)
    x = torch.cat([a, b], axis) if split else draw(st.sampled_from([tuple, list]))((a, b))
    params = None if own else tuple(weights)
    args = () if own and not given else (params, *given)
    return Case(pair, opened(there, dim), opened(back, dim), x, args)


@st.composite
def dynamics(draw, kind: str) -> Case:
    """Momentum, leapfrog and steps towards a fixed point."""
    rand, shape = Numbers(), draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    weights, own = [rand(shape[-1], shape[-1]) / 2], draw(st.booleans())
    f, c = mixing(-1, 1, weights if own else None), draw(st.sampled_from([0.25, 0.5, 0.9]))

    def there(x, v, p):
        if kind == "momentum":
            v = c * v + (1 - c) * f(x, *p)
            return x + v, v
        if kind == "fixed_point":
            x = (1 - c) * x + c * f(v, *p)
            return x, (1 - c) * v + c * f(x, *p)
        w = v + c / 2 * f(x, *p)
        x = x + c * w
        return x, w + c / 2 * f(x, *p)

    def back(x, v, p):
        if kind == "momentum":
            x = x - v
            return x, (v - (1 - c) * f(x, *p)) / c
        if kind == "fixed_point":
            v = (v - c * f(x, *p)) / (1 - c)
            return (x - c * f(v, *p)) / (1 - c), v
        w = v - c / 2 * f(x, *p)
        x = x - c * w
        return x, w - c / 2 * f(x, *p)

    def called(formula):
        return lambda state, *p: formula(*state, p)

    pair = {"momentum": momentum, "leapfrog": leapfrog, "fixed_point": fixed_point}[kind](f, c)
    args = () if own else (weights,)
    x = (rand(*shape), rand(*shape))
    return Case(pair, called(there), called(back), x, args, functions=1 if kind == "momentum" else 2)


@st.composite
def solvers(draw) -> Case:
    """A step of a solver on any tree, from one time to another."""
    rand, shape = Numbers(), draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    weights, own = [rand(shape[-1], shape[-1]) / 2], draw(st.booleans())
    mix, c = mixing(-1, 1, weights if own else None), draw(st.sampled_from([0.5, 0.99, 1.0]))
    ends = draw(st.sampled_from([(0.0, 0.5), (1.0, 0.75), (rand(), rand())]))
    given = () if own else (weights,)
    put = draw(st.sampled_from([lambda t: t, lambda t: {"a": t, "b": [t.sin()]}]))

    def increment(x, start, end, *p):
        return tree.map_tensors(lambda t: (end - start) * mix(t, *p) + (end**2 - start**2) * t.sin(), x)

    def there(state, ends, *p):
        y, z = state
        y = tree.map_leaves(lambda y, z, by: c * y + (1 - c) * z + by, y, z, increment(z, *ends, *p))
        return y, tree.map_leaves(lambda z, by: z - by, z, increment(y, *ends[1::-1], *ends[2:], *p))

    def back(state, ends, *p):
        y, z = state
        z = tree.map_leaves(lambda z, by: z + by, z, increment(y, *ends[1::-1], *ends[2:], *p))
        return tree.map_leaves(lambda y, z, by: (y - (1 - c) * z - by) / c, y, z, increment(z, *ends, *p)), z

    args = draw(st.sampled_from([(ends, *given), ((*ends, *given),)]))
    return Case(reversible_step(increment, c), there, back, (put(rand(*shape)), put(rand(*shape))), args)


KINDS = {
    "additive": couplings(affine=False),
    "affine": couplings(affine=True),
    "momentum": dynamics("momentum"),
    "leapfrog": dynamics("leapfrog"),
    "reversible_step": solvers(),
    "fixed_point": dynamics("fixed_point"),
}
