"""Couplings: states of two parts, which change in turn by what a function says of the other part; modules as pairs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any, ClassVar

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import counted, listening, unseen_versions
from invfunc._torch.values import wide
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError, ModifiedError
from invfunc.functional import Functional
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible, PairLaw, needed
from invfunc.pairs.value import Value


class OfModule(Value):
    """A module as a function `F(b, params, *args)`: of its own parameters, where None is given, or of those of
    `functional(module)`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.f = Functional(module, "__call__")

    def __repr__(self) -> str:
        return describe(self.f)

    def __call__(self, b: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        if params is None:
            return self.module(b, *args, **kwargs)
        if not isinstance(params, dict):
            raise ArgumentTypeError(
                f"the parameters of the module {self!r} are of type {type(params).__name__}, but have to be a dict as "
                "functional(module) returns it, or None for its own. Further inputs come after them."
            )
        return self.f(params, b, *args, **kwargs)


@dataclass(eq=False, repr=False)
class Rounded(Value):
    """A function whose results are put on a grid. It gets the state in the dtype of its parameters, if they have one;
    None stands in the place of parameters where none are given."""

    grid: Grid
    fn: Callable

    def __repr__(self) -> str:
        return describe(self.fn)

    def __call__(self, b: torch.Tensor, params: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        of_module = isinstance(self.fn, OfModule) and not isinstance(params, dict)
        weights = self.fn.module.parameters() if of_module else tree.tensors(params)
        kinds = {dtype for t in weights if (dtype := t.dtype).is_floating_point}
        dtype = kinds.pop() if len(kinds) == 1 else None
        own = () if params is None and not of_module else (params,)
        return self.grid.round(self.fn(b if dtype in (None, b.dtype) else b.to(dtype), *own, *args, **kwargs))


def as_part(call: str, which: str, fn: Any) -> Callable:
    """A function, or a module as one."""
    return OfModule(fn) if isinstance(fn, nn.Module) else needed(call, which, fn)


def without(fn: Callable) -> tuple:
    """Arguments in the place of the parameters of a part where none are given."""
    return (None,) if isinstance(fn, (OfModule, Rounded)) else ()


# States


def two_parts(state: Any, call: str, name: str) -> tuple[Any, Any]:
    """The parts of x or y."""
    several = isinstance(state, (tuple, list))
    if several and len(state) == 2:
        if type(state[0]) is torch.Tensor or all(isinstance(t, torch.Tensor) for t in tree.leaves(state)):
            return state[0], state[1]
    came = type(state).__name__ + (f" of {', '.join(type(t).__name__ for t in state)}" if several else "")
    raise ArgumentError(
        f"{call}: {name} has to be a pair of tensors, but is {came}. (For one tensor as the state pass split_dim=. A "
        "method of the pair takes its functions first: pair.log_det(*pair.shared, x).)"
    )


def fitting(result: Any, like: Any, call: str, what: str, name: str) -> Any:
    """A result, if it has the form and the shapes of what it changes; others would be broadcast in silence."""
    tensors = isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor)
    if tensors and result.shape == like.shape:
        return result
    (came, form), (wanted, like_form) = tree.flatten(result), tree.flatten(like)
    if form is None or form != like_form:
        kind = ArgumentError if tensors or form else ArgumentTypeError
        raise kind(f"{call}: {what} is {described(result)}, but {name}, which it changes, is {described(like)}.")
    return tree.unflatten([fitting(*each, call, what, name) for each in zip(came, wanted, strict=True)], form)


def described(state: Any) -> str:
    """The kind of a state, for errors."""
    if isinstance(state, torch.Tensor):
        return f"a tensor of shape {list(state.shape)}"
    paths = ", ".join(path for path, _ in tree.named_leaves(state) if path)
    return f"a {type(state).__name__} of {paths}" if paths else f"of type {type(state).__name__}"


def combined(fn: Callable, first: Any, *others: Any) -> Any:
    """Apply a function to the tensors of states of one form, each in its place."""
    if isinstance(first, torch.Tensor):
        return fn(first, *others)
    leaves, form = tree.flatten(first)
    return tree.unflatten([fn(*each) for each in zip(leaves, *map(tree.leaves, others), strict=True)], form)


def per_sample(t: torch.Tensor) -> torch.Tensor:
    """The sum over all axes but the leading one, at least in float32."""
    return wide(t).flatten(1).sum(1) if t.dim() > 1 else wide(t)


Calls = list[tuple[Callable, tuple]]
"""Functions, each with the arguments that it gets behind a part of the state."""


@dataclass(frozen=True, eq=False)
class Move(Value):
    """A change of one part, `scale * part + by * said`, where said is what a function says of the other part.

    Args:
        part: which of the two parts changes.
        function: which of the functions is asked; None takes the other part itself.
    """

    part: int
    function: int | None
    scale: float = 1
    by: float = 1

    def forth(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        """The part after the move."""
        part = part if self.scale == 1 else self.scale * part
        return part + said if self.by == 1 else part - said if self.by == -1 else part + self.by * said

    def back(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        """The part before it."""
        part = part - said if self.by == 1 else part + said if self.by == -1 else part - self.by * said
        return part if self.scale == 1 else part / self.scale

    fitting: ClassVar[Callable] = staticmethod(fitting)
    """The result of a function, if it fits the part."""


@dataclass(frozen=True, eq=False)
class Moves(PairLaw):
    """Moves, one after the other; the inverse undoes them from the last to the first."""

    call: str
    names: tuple[str, ...]
    """The functions."""
    parts: str
    """Names of the two parts, a letter each."""
    moves: tuple[Move, ...]
    dim: int | None = None
    """The axis along which the parts are halves of one tensor, if they are."""

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "x", self.moves[0])
        for move in self.moves:
            parts[move.part] = combined(move.forth, parts[move.part], self.said(move, parts, calls, kwargs))
        return self.joined(parts)

    def inverse(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "y", self.moves[-1])
        for move in reversed(self.moves):
            parts[move.part] = combined(move.back, parts[move.part], self.said(move, parts, calls, kwargs))
        return self.joined(parts)

    def log_det(self, *given: Any, **kwargs: Any) -> torch.Tensor:
        parts, calls = self.read(given, "x")
        if self.dim is not None and self.dim % parts[0].dim() == 0:
            raise ArgumentError(f"{self.call}: log_det is of the samples along axis 0, which split_dim=0 splits.")
        return self.log_scales(parts, calls, kwargs)

    def log_scales(self, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> torch.Tensor:
        """The sum of the log-scales of all moves, for each sample."""
        scale = sum(math.log(move.scale) for move in self.moves)  # of each entry, as both parts are alike
        return reduce(torch.add, [per_sample(torch.full_like(wide(t), scale)) for t in tree.tensors(parts[0])])

    def read(self, given: tuple, name: str, first: Move | None = None) -> tuple[list[Any], Calls]:
        """The parts of the state, and each function with the arguments that it gets behind a part."""
        functions, (state, *args) = given[: len(self.names)], given[len(self.names) :] or (None,)
        return self.apart(state, name, first), self.calls(functions, args)

    def apart(self, state: Any, name: str, first: Move | None) -> list[Any]:
        """The parts of x or y, of which a first move reads one."""
        if self.dim is None:
            return [*two_parts(state, self.call, name)]
        shape = list(state.shape) if isinstance(state, torch.Tensor) else []
        if not -len(shape) <= self.dim < len(shape) or shape[self.dim] < 2:
            what = shape if isinstance(state, torch.Tensor) else type(state).__name__
            raise ArgumentError(f"{self.call}: x is {what}, which has no two halves along this axis.")
        halves = [*state.chunk(2, self.dim)]  # whose gradients are joined at once; those of slices are each as large
        if first is not None:  # laid out by itself, as the other direction gives it, and no view of several,
            read = 1 - first.part  # which torch lets nobody write
            halves[read] = halves[read].clone(memory_format=torch.contiguous_format)
        return halves

    def joined(self, parts: list[Any]) -> Any:
        """The state of two parts."""
        return tuple(parts) if self.dim is None else torch.cat(parts, self.dim)

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        """Each function that a move may ask, with what it gets behind a part."""
        return [(functions[0], tuple(args))]

    def said(self, move: Move, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> Any:
        """Result of a function for the other part, which it may not write: the pair needs it again."""
        part, other, name = parts[move.part], parts[1 - move.part], self.parts[move.part]
        if move.function is None:
            return fitting(other, part, self.call, self.parts[1 - move.part], name)
        (fn, args), which = calls[move.function], self.names[move.function % len(self.names)]
        if torch.compiler.is_dynamo_compiling():
            said = fn(other, *args, **kwargs)
        elif torch.is_inference_mode_enabled():  # where nobody counts what is written
            said = fn(tree.map_tensors(torch.clone, other), *args, **kwargs)
        else:
            one = type(other) is torch.Tensor and not listening() and not other.is_inference()
            before = counted(other) if one else unseen_versions(tree.tensors(other))
            said = fn(other, *args, **kwargs)
            if before != (counted(other) if one else unseen_versions(tree.tensors(other))):
                raise ModifiedError(
                    f"{self.call}: {which} has written into its argument, a part of the state, which the pair needs "
                    f"again. Take inplace=False in its first layers, or give them a copy: lambda x: {which}(x.clone())."
                )
        return move.fitting(said, part, self.call, f"what {which} returns", name)


def additive_coupling(
    F: Callable, G: Callable, *, split_dim: int | None = None, exact: bool | Grid = False
) -> Invertible:
    """The pair `(a, b) -> (a', b')` of a reversible residual block.

        a' = a + F(b, p)                    b = b' - G(a', q)
        b' = b + G(a', q)                   a = a' - F(b, p)

    Args:
        F, G: any functions of one part of the state that return the shape of the other part; they need no inverse. Or
            modules, with their own parameters (which get their gradients), or with the p of `functional(module)`. They
            must not write into their argument (`nn.ReLU(inplace=True)` as the first layer), which is an error. F and G
            are pure in torch.func's sense (see the conventions).
        split_dim: the state is one tensor, whose halves along this axis are a and b, in place of a pair.
        exact: compute on a fixed-point grid (True: `Grid()`), where sums have no rounding errors: the inverse is exact
            in every bit, at any depth, as long as F and G get the same shapes. The state has to be on the grid:
            `Grid().enter(x)` rounds it. F and G get it in the dtype of their parameters, and their results are rounded
            to the grid; for gradients the rounding counts as the identity.

    Returns:
        An `Invertible`, called as `pair((a, b), (p, q), *args, **kwargs)`, with further arguments for F and G; or
        `pair((a, b))` for F and G without parameters, or modules. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: F or G is not a function, or an option is of a wrong kind.
        ArgumentError: the state or the parameters are not a pair; F or G returns another shape than that of the part
            that it changes; the axis to split has no two halves, or the log-determinant is asked for and the axis is
            the leading one.
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

    A Reformer's block is `additive_coupling(attention, mlp)`, with modules without skip connections: attention of the
    second stream is added to the first, then the MLP of the first to the second. With `split_dim=-1` the streams are
    halves of the channels. With F and G both `lambda x, p: 2 * h * f(x, p)` it is two steps of the explicit midpoint
    rule for dx/dt = f, on the last two states: `x[n + 1] = x[n - 1] + 2 * h * f(x[n])`.

    Composes with: `invertible_checkpoint`, `chain`, `repeated`. With modules as F and G, `.module()` of the pair, or of
    a block or chain of it, registers them: `invertible_checkpoint(additive_coupling(F, G)).module()` is an `nn.Module`
    that is moved, copied, saved and put into `nn.Sequential` as any other.

    Cost: F and G once in either direction, and once in a backward pass.

    Source: L. Dinh et al., NICE, 2014; A. Gomez et al., The Reversible Residual Network, 2017.
    """
    F, G = (as_part("additive_coupling(F, G)", which, fn) for which, fn in (("F", F), ("G", G)))
    call = f"additive_coupling({describe(F)}, {describe(G)})"
    if not isinstance(exact, (bool, Grid)):
        raise ArgumentTypeError(f"{call[:-1]}, exact={exact!r}): exact is True, False or a Grid.")
    if not exact:
        return _coupling(_Coupling, call, Move, F, G, split_dim)
    grid = exact if isinstance(exact, Grid) else Grid()
    return _coupling(_Coupling, call, partial(_OnAGrid, grid=grid), Rounded(grid, F), Rounded(grid, G), split_dim)


def affine_coupling(
    F: Callable, G: Callable, *, log_scale: Callable = torch.tanh, split_dim: int | None = None
) -> Invertible:
    """The pair `(a, b) -> (a', b')` that scales and shifts each part by functions of the other part.

        s, t = F(b, p)                              s, t = G(a', q)
        a' = a * exp(log_scale(s)) + t              b = (b' - t) / exp(log_scale(s))
        s, t = G(a', q)                             s, t = F(b, p)
        b' = b * exp(log_scale(s)) + t              a = (a' - t) / exp(log_scale(s))

    Args:
        F, G: functions, or modules, that return `(s, t)`, each of the shape of the other part; they need no inverse. F
            and G are pure in torch.func's sense (see the conventions).
        log_scale: the logarithm of the scale as a function of s. The default, `torch.tanh`, keeps the scale between 1/e
            and e, so that deep chains neither explode nor lose their digits; `lambda s: s` is the plain exponential.
        split_dim: the state is one tensor, whose halves along this axis are a and b, in place of a pair.

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
    return _coupling(_Affine, call, partial(_Scaled, log_scale=log_scale), F, G, split_dim)


def _coupling(law: type[_Coupling], call: str, move: Callable, F: Callable, G: Callable, dim: Any) -> Invertible:
    """The pair that changes a by F of b, and then b by G of a."""
    if dim is not None:
        call = f"{call[:-1]}, split_dim={dim!r})"
        if not isinstance(dim, int):
            raise ArgumentTypeError(f"{call}: split_dim is an axis, a whole number.")
    return law(call, ("F", "G"), "ab", (move(0, 0), move(1, 1)), dim, (without(F), without(G))).pair(call, (F, G))


@dataclass(frozen=True, eq=False)
class _OnAGrid(Move):
    """The sum of a part and what a function says, where it has no rounding error."""

    grid: Grid = Grid()

    def forth(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        self.grid.checked(part)
        return self.grid.checked(part + said, entered=True)[0]


@dataclass(frozen=True, eq=False)
class _Scaled(Move):
    """`part * exp(s) + t` for an s and a t that a function says."""

    log_scale: Callable = torch.tanh

    def forth(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        return part * said[0].exp() + said[1]

    def back(self, part: torch.Tensor, said: Any) -> torch.Tensor:
        return (part - said[1]) / said[0].exp()  # the scale rounded as forth, where that is coarser (autocast)

    def fitting(self, said: Any, part: Any, call: str, what: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        s, t = two_parts(said, call, what)
        s, t = fitting(s, part, call, what, name), fitting(t, part, call, what, name)
        return fitting(self.log_scale(s), part, call, "what log_scale returns", name), t


@dataclass(frozen=True, eq=False)
class _Coupling(Moves):
    """Moves of a by F and of b by G, which get parameters of their own."""

    without: tuple[tuple, tuple] = (), ()
    """Arguments in the place of the parameters of F and of G where none are given."""

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        params, *more = args or (None,)
        if params is None:
            own = self.without
        elif isinstance(params, (tuple, list)) and len(params) == 2:
            own = (params[0],), (params[1],)
        else:
            raise ArgumentError(
                f"{self.call}: the parameters have to be a pair, for F and for G, but are {type(params).__name__}. An "
                "F or G without parameters has None there."
            )
        (F, G), (p, q) = functions, own
        return [(F, (*p, *more)), (G, (*q, *more))]


class _Affine(_Coupling):
    def log_scales(self, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> torch.Tensor:
        s, t = self.said(self.moves[0], parts, calls, kwargs)
        after = [self.moves[0].forth(parts[0], (s, t)), parts[1]]
        return per_sample(s) + per_sample(self.said(self.moves[1], after, calls, kwargs)[0])


def from_module(module: nn.Module, *, log_det: bool = True) -> Invertible:
    """The pair of a module that has an inverse, as in libraries of normalizing flows.

        y, log_det = module(x, *args)                  x, _ = module.inverse(y, *args)            # normflows, nflows
        y, log_det = module(x, *args)                  x, _ = module(y, *args, rev=True)          # FrEIA
        y, log_det = module(*args).call_and_ladj(x)    x = module(*args).inv(y)                   # zuko

    Args:
        module: one that has a method `inverse` like its forward, an argument `rev` of its forward, or an attribute
            `inv` and a forward that returns a `torch.distributions.Transform`. Of FrEIA, a tensor is given as `(x,)`.
        log_det: False for a module with an `inverse` that returns the result alone, without a log-determinant.

    Returns:
        An `Invertible`, called as `pair(x)` with the module's own parameters, which get their gradients, or as `pair(x,
        params, *args, **kwargs)`: params are those of `functional(module)`, or None for its own, and further arguments
        go to the module. Its log-determinant `[N]` is that of the module, summed over the entries of each sample.

    Raises:
        ArgumentTypeError: `module` is no module.
        ArgumentError: it has none of these three; it does not return what they return, or a log-determinant that is
            neither a number nor `[N, ...]`.

    Example:
        >>> import torch, invfunc
        >>> class Scale(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return x * self.weight[0], self.weight.abs().log().sum()
        ...     def inverse(self, y):
        ...         return y / self.weight[0], -self.weight.abs().log().sum()
        >>> flow = invfunc.pairs.from_module(Scale(2, 1))
        >>> params = {"weight": torch.tensor([[1.0, 2.0]])}
        >>> flow(torch.ones(1, 2), params), invfunc.invert(flow)(torch.ones(1, 2), params)
        (tensor([[1., 2.]]), tensor([[1.0000, 0.5000]]))
        >>> invfunc.with_log_det(flow)((torch.ones(1, 2), torch.zeros(1)), params)
        (tensor([[1., 2.]]), tensor([0.6931]))

    Composes with: `chain` of several, `invertible_checkpoint` (whose check finds a wrong inverse), `invert`,
    `with_log_det`, which evaluates the module once for both; `testing.laws.check_pair` says whether the
    log-determinant is that of the Jacobian.

    A module that starts from its first batch (normflows' and FrEIA's ActNorm) has to be called once before. One with
    dropout in several subnets draws in another order in its inverse, which is an InverseError: keep its input, as by
    `invertible_checkpoint(pair, keep=True)`, or write it as an `affine_coupling`.

    Cost: that of the module in either direction; the log-determinant alone is another forward pass.

    Source: the interfaces of normflows, nflows, FrEIA and zuko.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"from_module(module): module is of type {type(module).__name__}, but has to be an nn.Module. Of two "
            "functions: Invertible(f, f_inv)."
        )
    call = f"from_module({type(module).__name__})"
    run = _interface(call, module)
    if not log_det and run is not _by_inverse:
        raise ArgumentError(f"{call[:-1]}, log_det=False): only a module with a method `inverse` may leave it out.")
    part = OfModule(_Directed(module, run, log_det))
    forward, inverse, both, both_back = (_Way(call, part, *way) for way in product(("y", "both"), (False, True)))
    if not log_det:
        return Invertible(forward, inverse, name=call)
    carried = Invertible(both, both_back, name=f"with_log_det({call})", carries_a_sum=True)
    return Invertible(forward, inverse, log_det=_Way(call, part, "log_det", False), name=call, carried=carried)


class _Directed(nn.Module):
    """A module in both directions."""

    def __init__(self, module: nn.Module, run: Callable, log_det: bool) -> None:
        super().__init__()
        self.module, self.run, self.log_det = module, run, log_det

    def forward(self, x: Any, *args: Any, backwards: bool, **kwargs: Any) -> tuple[Any, Any]:
        """The result, and the log-determinant of this direction."""
        found = self.run(self.module, backwards, x, *args, **kwargs)
        return found if self.log_det else (found, None)


@dataclass(frozen=True, eq=False)
class _Way(Value):
    """A direction of a module.

    Args:
        gives: the result alone ("y"), the log-determinant of each sample alone, or "both" on a state `(x, s)` with the
            sum of log-determinants.
    """

    call: str
    part: OfModule
    gives: str
    backwards: bool

    def __call__(self, x: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        x, s = x if self.gives == "both" else (x, None)
        if isinstance(params, dict):
            params = {f"module.{name}": p for name, p in params.items()}
        found = self.part(x, params, *args, backwards=self.backwards, **kwargs)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            what = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise ArgumentError(
                f"{self.call}: {'the inverse' if self.backwards else 'forward'} has to return (result, log_det), but "
                f"returns {what}. Pass log_det=False where both directions return the result alone."
            )
        if self.gives == "y":
            return found[0]
        log_det = self._of_each(tree.tensors(x)[0], found[1])
        return log_det if s is None else (found[0], s + log_det)

    def _of_each(self, x: torch.Tensor, found: Any) -> torch.Tensor:
        """The log-determinant of each sample: `[N]`."""
        found = found.to(x.device) if isinstance(found, torch.Tensor) else x.new_tensor(found)
        if not found.ndim or found.shape == (1,):
            return found.reshape(1).expand(len(x))
        if found.shape[0] != len(x):
            raise ArgumentError(
                f"{self.call}: the log-determinant has shape {list(found.shape)}, but there are {len(x)} samples."
            )
        return per_sample(found)


# The interfaces


def _interface(call: str, module: nn.Module) -> Callable:
    if "rev" in inspect.signature(module.forward).parameters:
        return _by_argument
    if callable(getattr(module, "inverse", None)):
        return _by_inverse
    if hasattr(type(module), "inv"):
        return _by_transform
    raise ArgumentError(
        f"{call}: it has no method `inverse`, its forward no argument `rev`, and it has no `inv` as transforms have. "
        "Of two functions: Invertible(f, f_inv)."
    )


def _by_inverse(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    return (module.inverse if backwards else module)(x, *args, **kwargs)


def _by_argument(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    single = not isinstance(x, (tuple, list))
    found, log_det = module((x,) if single else x, *args, rev=backwards, **kwargs)
    return found[0] if single and isinstance(found, (tuple, list)) else found, log_det


def _by_transform(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    transform = module(*args, **kwargs)
    transform = transform.inv if backwards else transform
    if hasattr(transform, "call_and_ladj"):
        return transform.call_and_ladj(x)
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)
