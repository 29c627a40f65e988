"""Couplings: a part of the state changes by what the other part says, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible, Law
from invfunc.pairs.part import Rounded, Unwritten, as_part, fitting, given_functions, no_parameters, of_part
from invfunc.pairs.state import per_sample, two_parts


def additive_coupling(
    F: Callable, G: Callable, *, split_dim: int | None = None, exact: bool | Grid = False
) -> Invertible:
    """The pair `(a, b) -> (a', b')` of a reversible residual block.

        a' = a + F(b, p)                    b = b' - G(a', q)
        b' = b + G(a', q)                   a = a' - F(b, p)

    Args:
        F, G: any functions of one part that return the shape of the other; they need no inverse. Or modules: `F(b)`
            with their own parameters, which get their gradients, or with the p of `functional(module)`. They must not
            write into their argument (`nn.ReLU(inplace=True)` as the first layer), which is an error. F and G are pure
            in torch.func's sense (see the conventions).
        split_dim: take one tensor, whose halves along this axis are a and b, in place of a pair.
        exact: compute on a fixed-point grid (True: `Grid()`), where adding and subtracting make no rounding errors: the
            inverse gives back every bit, at any depth, as long as F and G see the same shapes. The state has to be on
            the grid: `Grid().enter(x)` puts it there. F and G get it in the dtype of their parameters, and what they
            give is rounded to it; gradients take the rounding for the identity.

    Returns:
        An `Invertible`, called as `pair((a, b), (p, q), *args, **kwargs)`, the further arguments going to F and G; or
        `pair((a, b))` for F and G without parameters. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: F or G is not a function, or an option is of a wrong kind.
        ArgumentError: the state or the parameters are not a pair; F or G returns another shape than that of the part
            that it changes; the axis to split has no two halves, or is the leading one where the log-determinant is
            asked for.
        ModifiedError: F or G has written into the state.
        RangeError: with `exact`, the state is not on the grid, or leaves its range.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.additive_coupling(lambda b, p: p * b, lambda a, q: q * a)
        >>> a, b = pair((torch.ones(2), torch.ones(2)), (2.0, 3.0))
        >>> a, b
        (tensor([3., 3.]), tensor([10., 10.]))
        >>> invfunc.invert(pair)((a, b), (2.0, 3.0))
        (tensor([1., 1.]), tensor([1., 1.]))

    With F and G both `lambda x, p: 2 * h * f(x, p)` it is two steps of the explicit midpoint rule for dx/dt = f, on the
    last two states: `x[n + 1] = x[n - 1] + 2 * h * f(x[n])`. A Reformer's block is `additive_coupling(attention, mlp)`,
    of modules without their skip connections: the second stream attends to itself, which is added to the first, and so
    on; with `split_dim=-1` the streams are the halves of the channels.

    Composes with: `invertible_checkpoint`, `chain`, `repeated`. With modules as F and G, `.module()` of the pair, or of
    a block or chain of it, registers them: `invertible_checkpoint(additive_coupling(F, G)).module()` is an `nn.Module`
    that is moved, copied, saved and put into `nn.Sequential` as any other.

    Cost: F and G once in either direction, and once in a backward pass.

    Source: L. Dinh et al., NICE, 2014; A. Gomez et al., The Reversible Residual Network, 2017.
    """
    F, G = as_part("additive_coupling(F, G)", "F", F), as_part("additive_coupling(F, G)", "G", G)
    call = f"additive_coupling({describe(F)}, {describe(G)})"
    if not isinstance(exact, (bool, Grid)):
        raise ArgumentTypeError(f"{call[:-1]}, exact={exact!r}): exact is True, False or a Grid.")
    grid = exact if isinstance(exact, Grid) else Grid() if exact else None
    shared = (F, G) if grid is None else (Rounded(grid, of_part(F)), Rounded(grid, of_part(G)))
    return _made(_Additive(call, tuple(map(no_parameters, shared)), grid), shared, split_dim)


def affine_coupling(
    F: Callable, G: Callable, *, log_scale: Callable = torch.tanh, split_dim: int | None = None
) -> Invertible:
    """The pair `(a, b) -> (a', b')` that scales and shifts each part by what the other says.

        s, t = F(b, p)                              s, t = G(a', q)
        a' = a * exp(log_scale(s)) + t              b = (b' - t) / exp(log_scale(s))
        s, t = G(a', q)                             s, t = F(b, p)
        b' = b * exp(log_scale(s)) + t              a = (a' - t) / exp(log_scale(s))

    Args:
        F, G: functions, or modules, that return `(s, t)`, each of the shape of the other part; they need no inverse. F
            and G are pure in torch.func's sense (see the conventions).
        log_scale: the logarithm of the scale as a function of s. The default keeps the scale between 1/e and e, so that
            deep chains neither explode nor lose their digits; `lambda s: s` is the plain exponential.
        split_dim: take one tensor, whose halves along this axis are a and b, in place of a pair.

    Returns:
        An `Invertible`, called as that of `additive_coupling`. Its log-determinant is the sum of all log-scales, [N],
        at least in float32.

    Raises:
        ArgumentTypeError: F, G or log_scale is not a function.
        ArgumentError: as `additive_coupling`; F or G returns no pair.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.affine_coupling(lambda b: (0 * b, b), lambda a: (0 * a, a))
        >>> pair((torch.ones(2), torch.ones(2)))
        (tensor([2., 2.]), tensor([3., 3.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: F and G once in either direction, and once in a backward pass.

    Source: L. Dinh et al., Density Estimation Using Real NVP, 2016.
    """
    parts = {"F": F, "G": G, "log_scale": log_scale}
    F, G, log_scale = (as_part("affine_coupling(F, G)", which, part) for which, part in parts.items())
    call = f"affine_coupling({describe(F)}, {describe(G)})"
    return _made(_Affine(call, tuple(map(no_parameters, (F, G))), log_scale), (F, G), split_dim)


def _made(law: _Coupling, shared: tuple[Callable, ...], dim: Any) -> Invertible:
    """The pair on a state of two parts, or on one tensor whose halves they are."""
    shared = tuple(Unwritten(law.call, which, fn) for which, fn in zip("FG", shared, strict=True))
    if dim is None:
        return law.pair(law.call, shared)
    name = f"{law.call[:-1]}, split_dim={dim!r})"
    if not isinstance(dim, int):
        raise ArgumentTypeError(f"{name}: split_dim is an axis, a whole number.")
    return _OnOneTensor(law, dim, name).pair(name, shared)


@dataclass(frozen=True, eq=False)
class _Coupling(Law):
    """A coupling as functions of F and G."""

    call: str
    without: tuple[tuple, ...]
    """What stands in the place of the parameters of F and of G where none are given."""

    def read(self, functions: tuple, state: Any, params: Any, name: str) -> tuple[Any, Any]:
        """The parts of the state, and the parameters of each function, as they stand in its calls."""
        parts = two_parts(given_functions(functions, self.call, state), self.call, name)
        if params is None:
            return parts, self.without
        if not isinstance(params, (tuple, list)) or len(params) != 2:
            raise ArgumentError(
                f"{self.call}: the parameters have to be a pair, of F and of G, but are {type(params).__name__}. None "
                "of it calls them without."
            )
        return parts, ((params[0],), (params[1],))


@dataclass(frozen=True, eq=False)
class _Additive(_Coupling):
    grid: Grid | None

    def forward(self, F: Any, G: Any = None, x: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = self.read((F, G), x, params, "x")
        if self.grid is not None:
            self.grid.checked(a, b)
        a = a + fitting(F(b, *p, *args, **kwargs), a, self.call, "F", "a")
        b = b + fitting(G(a, *q, *args, **kwargs), b, self.call, "G", "b")
        return (a, b) if self.grid is None else self.grid.checked(a, b, entered=True)

    def inverse(self, F: Any, G: Any = None, y: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = self.read((F, G), y, params, "y")
        b = b - fitting(G(a, *q, *args, **kwargs), b, self.call, "G", "b")
        a = a - fitting(F(b, *p, *args, **kwargs), a, self.call, "F", "a")
        return a, b

    def log_det(self, F: Any, G: Any = None, x: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, _), _ = self.read((F, G), x, params, "x")
        return per_sample(torch.zeros_like(a))


@dataclass(frozen=True, eq=False)
class _Affine(_Coupling):
    log_scale: Callable

    def forward(self, F: Any, G: Any = None, x: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = self.read((F, G), x, params, "x")
        s, t = self._two(F(b, *p, *args, **kwargs), a, "F", "a")
        a = a * s.exp() + t
        s, t = self._two(G(a, *q, *args, **kwargs), b, "G", "b")
        return a, b * s.exp() + t

    def inverse(self, F: Any, G: Any = None, y: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = self.read((F, G), y, params, "y")
        s, t = self._two(G(a, *q, *args, **kwargs), b, "G", "b")
        b = (b - t) / s.exp()  # the same rounded scale as forward, where that is coarser than b (autocast)
        s, t = self._two(F(b, *p, *args, **kwargs), a, "F", "a")
        return (a - t) / s.exp(), b

    def log_det(self, F: Any, G: Any = None, x: Any = None, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = self.read((F, G), x, params, "x")
        s, t = self._two(F(b, *p, *args, **kwargs), a, "F", "a")
        first = per_sample(s)
        s, _ = self._two(G(a * s.exp() + t, *q, *args, **kwargs), b, "G", "b")
        return first + per_sample(s)

    def _two(self, result: Any, like: torch.Tensor, which: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The logarithm of the scale, and the shift."""
        s, t = (
            fitting(part, like, self.call, which, name)
            for part in two_parts(result, self.call, f"what {which} returns")
        )
        return fitting(self.log_scale(s), like, self.call, "log_scale", name), t


@dataclass(frozen=True, eq=False)
class _OnOneTensor(Law):
    """A coupling on one tensor, of which the two parts of its state are the halves."""

    law: _Coupling
    dim: int
    call: str

    def forward(self, F: Any, G: Any = None, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, b = self._halves(given_functions((F, G), self.call, x))
        return self._joined(self.law.forward, (F, G), x, a, _copied(b), *args, **kwargs)

    def inverse(self, F: Any, G: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, b = self._halves(given_functions((F, G), self.call, y))
        return self._joined(self.law.inverse, (F, G), y, _copied(a), b, *args, **kwargs)

    def _joined(self, fn: Callable, functions: tuple, x: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """What a direction gives as one tensor."""
        try:
            return torch.cat(fn(*functions, (a, b), *args, **kwargs), self.dim)
        except Exception as error:
            if a.shape != b.shape and not torch.compiler.is_compiling():
                error.add_note(
                    f"{self.call}: x of shape {list(x.shape)} has an odd size along this axis, so that its halves are "
                    f"a of shape {list(a.shape)} and b of shape {list(b.shape)}: F makes an a of b, and G a b of a."
                )
            raise

    def log_det(self, F: Any, G: Any = None, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        halves = self._halves(given_functions((F, G), self.call, x))
        if self.dim % x.dim() == 0:
            raise ArgumentError(
                f"{self.call}: the log-determinant is that of each entry of axis 0, which is the one that is split."
            )
        return self.law.log_det(F, G, halves, *args, **kwargs)

    def _halves(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(x, torch.Tensor) or not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] < 2:
            shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{self.call}: x is {shape}, which has no two halves along this axis.")
        a, b = x.chunk(2, self.dim)  # whose gradients are joined at once; those of slices are each as large as x
        return a, b


def _copied(half: torch.Tensor) -> torch.Tensor:
    """As the other direction gives it: laid out by itself, and no view of several, which torch lets nobody write."""
    return half.clone(memory_format=torch.contiguous_format)
