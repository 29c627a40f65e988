"""Many invertible functions in a row; flows of which a half leaves at each scale; steps towards a fixed point."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, unwatched
from invfunc._torch.values import in_float64
from invfunc.blocks.series import in_series
from invfunc.callables import check_count, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, InvFuncWarning
from invfunc.invertible.checkpoint import Checkpointed, Step, invertible_checkpoint, opened
from invfunc.pairs.couplings import per_sample
from invfunc.pairs.pair import Invertible, PairLaw, as_pair, behind, invert, rewrapped
from invfunc.pairs.steps import fixed_point
from invfunc.pairs.value import Value
from invfunc.transform import shown


def chain(*blocks: Callable, anchor_every: int | None = None) -> Invertible:
    """Apply functions one after the other, and keep only the last output in memory.

        def chained(x, params, *args, **kwargs):
            for g, p in zip(blocks, params):
                x = g(x, p, *args, **kwargs)
            return x

    The backward pass inverts block after block, so the memory does not grow with their number. States between the
    blocks to which other code refers stay in memory; `held_states` lists them.

    Args:
        blocks: each an `Invertible` or a result of `invertible_checkpoint`. Or any other function or module, without an
            inverse: its input is kept, and the backward pass evaluates it again. All are pure in torch.func's sense
            (see the conventions).
        anchor_every: also keep the input of every n-th block, so that rounding errors of the inverses add up between
            two anchors only.

    Returns:
        An `Invertible`, called as `chained(x, params, *args, **kwargs)`: `params` has an entry for each block, None for
        one without parameters; None in place of the list is None for all. The further arguments go to every block; in
        a call without any, a block whose entry is None is called as `g(x)`. Its inverse takes the same arguments, and
        saves memory in the same way.

    Raises:
        ArgumentTypeError: a block is not a function.
        ArgumentError: `params` has not one entry for each block; `anchor_every` is less than 1; a block has
            `has_aux=True`, which is an option for the whole chain.
        InverseError: it is inverted, but has a block without an inverse.
        TypeError: a block does not take the further arguments; a note says which one, and how to wrap it.

    Example:
        >>> import torch, invfunc
        >>> scale = invfunc.Invertible(lambda x, c: c * x, lambda y, c: y / c)
        >>> shift = invfunc.Invertible(lambda x, c: x + c, lambda y, c: y - c)
        >>> affine = invfunc.chain(scale, shift)
        >>> affine(torch.ones(2), [3.0, 1.0]), invfunc.invert(affine)(torch.ones(2), [2.0, 1.0])
        (tensor([4., 4.]), tensor([0., 0.]))

    Composes with: all that `invertible_checkpoint` composes with; chains may be blocks of chains. Within
    `torch.compile(fullgraph=True)` a chain is one operation of the graph, whose backward pass inverts block after block
    and is compiled, too: as outside, it needs the memory of one block. There, functions must have no side effects in
    Python (a counter, a list that grows; torch raises an error), a block without f_inv keeps its input, and `check`
    compares x of the first block alone. Blocks that draw random numbers, write buffers, or hide something are compiled
    without saving memory, with a warning; so is a chain inside of torch.func. `chained.module()` is an `nn.Module` that
    registers the modules of all blocks; it goes into `nn.Sequential`.

    Cost: that of its blocks.

    Source: MemCNN and invtorch stack wrapped modules in `nn.Sequential`.
    """
    check_anchor("chain", anchor_every)
    return Chain(tuple(_block(b, f"chain: block {i}") for i, b in enumerate(blocks)), anchor_every).pair()


def repeated(block: Callable, *, anchor_every: int | None = None) -> Invertible:
    """Apply one function repeatedly, with new parameters each time, and keep only the last output in memory.

        def repeat(x, params, *args, **kwargs):
            for p in params:
                x = block(x, p, *args, **kwargs)
            return x

    Args:
        block: as those of `chain`. It is pure in torch.func's sense (see the conventions).
        anchor_every: as in `chain`.

    Returns:
        An `Invertible`, called as `repeat(x, params, *args, **kwargs)`: `params` is a list with an entry for each time,
        or any other pytree whose tensors are stacked along their leading axis. `[None] * n` repeats a block without
        parameters n times; the further arguments go to it each time, as in `chain`.

    Raises:
        ArgumentTypeError: the block is not a function.
        ArgumentError: the tensors of stacked parameters differ in their leading size; `anchor_every` is less than 1.
        InverseError: it is inverted, but the block has no inverse.

    Example:
        >>> import torch, invfunc
        >>> shift = invfunc.Invertible(lambda x, c: x + c, lambda y, c: y - c)
        >>> invfunc.repeated(shift)(torch.zeros(2), torch.tensor([1.0, 2.0, 3.0]))
        tensor([6., 6.])

    Composes with: all that `invertible_checkpoint` composes with; within torch.compile it is one operation, as `chain`.

    Cost: that of the blocks. Many equal steps on a small state (at least 8, of at most 64 KiB, without dropout or batch
    norm in train mode) are one node of autograd, which keeps the last state.

    Source: `jax.lax.scan`, whose parameters are stacked in this way.
    """
    check_anchor("repeated", anchor_every)
    return _Repeated((_block(block, "repeated: its block"),), anchor_every).pair()


@dataclass(frozen=True, eq=False)
class _Sequence(Value, ABC):
    """Blocks, as one."""

    counted: ClassVar[bool] = False
    """True if the parameters say how many blocks there are."""
    blocks: tuple[Checkpointed, ...]
    anchor_every: int | None
    keep: bool | tuple[int, ...] | None = None
    """Tensors that the first step keeps, where its block does not say so."""
    backwards: bool = False
    """True if the last entry of the parameters comes first."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The text of `repr`."""

    @abstractmethod
    def each(self, params: Any) -> Iterable[Step]:
        """The steps for some parameters."""

    def steps(self, params: Any) -> list[Step]:
        """The blocks for some parameters, with those of each."""
        every, found = self.anchor_every, list(self.each(params))[:: -1 if self.backwards else 1]
        for i, (g, p) in enumerate(found):
            if every is not None and i and i % every == 0:
                found[i] = replace(g, keep=True), p
            elif i == 0 and self.keep is not None:
                found[i] = replace(g, keep=self.keep), p
        return found

    def changed(self, change: Callable[[Any], Any]) -> Invertible:
        """The sequence of changed blocks."""
        blocks = tuple(checkpointed(change(block), self.name) for block in self.blocks)
        return replace(self, blocks=blocks).pair()

    def keeping(self, keep: bool | tuple[int, ...]) -> Invertible:
        """This sequence, with blocks that keep these tensors of x in memory."""
        return replace(self, keep=keep).pair()

    def inverted(self, name: str) -> Invertible:
        """The inverses of the blocks, the other way round."""
        blocks = tuple(checkpointed(_inverse(block, None), name) for block in self.blocks)
        return replace(self, blocks=blocks, keep=None, backwards=not self.backwards).pair()

    def pair(self) -> Invertible:
        """The `Invertible` that it is."""
        return Invertible(self.forward, self.inverse, hidden=self.hidden, name=self.name, composition=self)

    @property
    def hidden(self) -> bool:
        """Tells whether a block hides something."""
        return any(block.pair.hidden for block in self.blocks)

    def forward(self, x: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        seen: list[Any] = []
        steps, compiling = self.steps(params), torch.compiler.is_compiling()
        if compiling and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            from invfunc.invertible.within import fits, within  # imports the compiler, which takes a second

            if fits(steps):
                return within(steps, x, args, kwargs)
        if not compiling and not any(g.has_aux for g, _ in steps):
            calls = [(g, behind(p, args, kwargs), kwargs) for g, p in opened(steps)]
            try:
                return in_series(calls, x)[0]
            except TypeError as error:
                at = getattr(error, "at", 0)
                self._blame(error, at, calls[at][0], args, kwargs)
                raise
        for at, (g, p) in enumerate(steps):
            try:
                x = g(x, *behind(p, args, kwargs), **kwargs)
            except TypeError as error:
                self._blame(error, at, g, args, kwargs)
                raise
            x, own = x if g.pair.hidden else (x, None)
            seen.append(own)
        return (x, seen) if self.hidden else x

    def inverse(self, y: Any, *given: Any, **kwargs: Any) -> Any:
        seen, *rest = given if self.hidden else (None, *given)
        params, args = rest[0] if rest else None, tuple(rest[1:])
        blocks = self.steps(params)
        for (g, p), own in zip(reversed(blocks), reversed(seen or [None] * len(blocks)), strict=True):
            y = _inverse(g, own)(y, *behind(p, args, kwargs), **kwargs)
        return y

    def _blame(self, error: TypeError, at: int, g: Checkpointed, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note which block was called when an error was raised, if it may not take the further arguments."""
        if (args or kwargs) and not torch.compiler.is_compiling():
            more = ("p", *(type(a).__name__ for a in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items()))
            error.add_note(
                f"Block {at} of {self.name}, {g.pair!r}, was called as g(x, {', '.join(more)}): further arguments go "
                f"to every block. {'Leave out a None for parameters: a .module() has them. ' * ('NoneType' in more)}"
                "Wrap one that does not take them, as in lambda x, p, mask: f(x), or with its inverse "
                "as in Invertible(lambda x, p, mask: f(x), lambda y, p, mask: f_inv(y)); or pass them in the entries "
                "of params of those that do."
            )


class Chain(_Sequence):
    """Different blocks, with a list of their parameters."""

    @property
    def name(self) -> str:
        return f"chain({', '.join(repr(block.pair) for block in self.blocks[:: -1 if self.backwards else 1])})"

    def each(self, params: Any) -> Iterable[Step]:
        return zip(self.blocks, self.entries(params, len(self.blocks)), strict=True)

    def entries(self, params: Any, number: int) -> Sequence[Any]:
        """So many entries of the parameters."""
        if params is None:
            return [None] * number
        is_list = isinstance(params, Sequence) and not isinstance(params, (str, torch.Tensor))
        if not is_list or len(params) != number:
            given = f"{len(params)} entries" if isinstance(params, (list, tuple)) else type(params).__name__
            raise ArgumentError(
                f"{self.name}(x, params): params is {given}, but has to be a list with an entry for each of the "
                f"{number} blocks (None for a block without parameters)."
            )
        return params


class _Repeated(_Sequence):
    counted = True

    @property
    def name(self) -> str:
        return f"repeated({self.blocks[0].pair!r})"

    def each(self, params: Any) -> Iterable[Step]:
        (block,) = self.blocks
        if params is None:
            raise ArgumentError(
                f"{self.name}(x, params): params is missing, and says how often the block is applied: a list with an "
                "entry for each time, or stacked tensors. A block without parameters is repeated n times by [None] * n."
            )
        return ((block, p) for p in (params if isinstance(params, list) else self._unstacked(params)))

    def _unstacked(self, params: Any) -> list[Any]:
        """The parameters of each time, from those that are stacked."""
        tensors, form = tree.separate(params)
        sizes = {t.shape[0] if t.dim() else None for t in tensors}
        if len(sizes) != 1 or None in sizes:
            shapes = ", ".join(str(list(t.shape)) for t in tensors) or "none"
            raise ArgumentError(
                f"{self.name}(x, params): stacked parameters have one leading size, that of the number of blocks, but "
                f"the tensors have the shapes {shapes}. A list has an entry for each block instead."
            )
        return [form.join(each) for each in zip(*(t.unbind(0) for t in tensors), strict=True)]


def _inverse(g: Checkpointed, hidden: Any) -> Callable:
    if not g.has_inverse:
        raise InverseError(f"the block {g.pair!r} has no inverse.")
    if g.pair.hidden:
        return lambda y, *args, **kwargs: g.pair.inverse(*g.pair.shared, y, hidden, *args, **kwargs)
    return replace(g, pair=invert(g.pair), keep=False)


def _block(block: Callable, where: str) -> Checkpointed:
    """A block of a sequence, as the caller gave it."""
    if isinstance(block, Checkpointed) and block.has_aux:
        raise ArgumentError(
            f"{where}, {block!r}, has has_aux=True, but its hidden values cannot go to the next block. "
            "invertible_checkpoint(chain(...), has_aux=True) returns what all blocks hide, as a list."
        )
    return checkpointed(block, where)


def checkpointed(block: Callable, where: str) -> Checkpointed:
    """A block of a sequence; any function is one, kept where it has no inverse."""
    if isinstance(block, Checkpointed):
        made = block
    elif isinstance(block, Invertible):
        made = Checkpointed(block)
    elif callable(block):
        made = invertible_checkpoint(block, None)
        made = replace(made, pair=replace(made.pair, name=describe(block)))
    else:
        raise ArgumentTypeError(f"{where} is of type {type(block).__name__}, but has to be a function.")
    return made if made.has_aux is made.pair.hidden else replace(made, has_aux=made.pair.hidden)


def check_anchor(name: str, anchor_every: int | None) -> None:
    """The states between two anchors are counted."""
    if anchor_every is not None:
        check_count(f"{name}(..., ", "anchor_every", anchor_every)


def multiscale(*flows: Callable[..., Any], split_dim: int = 1) -> Invertible:
    """Flows one after the other; before each but the first, half of the state goes directly to the output.

        def f(x, params):
            left = []
            for flow, p in zip(flows[:-1], params):
                x, half = flow(x, p).tensor_split(2, split_dim)
                left.append(half)
            return (flows[-1](x, params[-1]), *reversed(left))

    So the halves that leave early cost less, and each flow works on a smaller state.

    Args:
        flows: each an `Invertible` on one tensor, such as a `chain` of the steps of a scale, or a block of one, which
            keeps its options. They are pure in torch.func's sense (see the conventions).
        split_dim: the axis along which the state is divided, that of the channels.

    Returns:
        An `Invertible` `(x, params, *args, **kwargs) -> (last, ..., first)`, with an entry of `params` for each flow
        and further arguments for all flows, as in `chain`; its memory does not grow with the depth of a scale.
        `with_log_det` of it carries the log-determinants of all flows; the inverse takes the tuple and gives x. Of a
        single flow the result is a tensor.

    Raises:
        ArgumentTypeError: a flow is not an `Invertible`.
        ArgumentError: there are no flows, a flow hides something, or its result has no two halves along this axis.

    Example:
        >>> import torch, invfunc
        >>> double = invfunc.Invertible(lambda x: 2 * x, lambda y: y / 2)
        >>> scales = invfunc.pairs.multiscale(double, double, double)
        >>> scales(torch.ones(1, 4))
        (tensor([[8.]]), tensor([[4.]]), tensor([[2., 2.]]))
        >>> scales.inverse(scales(torch.ones(1, 4)))
        tensor([[1., 1., 1., 1.]])

    Composes with: `invertible_checkpoint`, `invert`, `with_log_det`, `chain`.

    Cost: that of the flows, and a copy of the state for each.

    Source: Dinh, Sohl-Dickstein and Bengio, Real NVP, ICLR 2017; Kingma and Dhariwal, Glow, NeurIPS 2018.
    """
    if not flows:
        raise ArgumentError("multiscale(*flows): there are no flows. Pass one for each scale.")
    if not isinstance(split_dim, int) or isinstance(split_dim, bool):
        raise ArgumentTypeError(f"multiscale(..., split_dim={split_dim!r}): split_dim is an axis, a whole number.")
    pairs = [as_pair(f"multiscale(*flows): flow {i}", flow) for i, flow in enumerate(flows)]
    for pair in pairs:
        if pair.hidden:
            raise ArgumentError(f"multiscale(*flows): {pair!r} hides something beside its result, which has no scale.")
    halved = _Halved(split_dim).pair(f"halved(split_dim={split_dim})")
    firsts = [rewrapped(flow, _of_first(pair)) for flow, pair in zip(flows, pairs, strict=True)]
    blocks = [block for first in firsts for block in (first, halved)][:-1]
    return _Multiscale(tuple(checkpointed(block, "multiscale") for block in blocks), None).pair()


class _Multiscale(Chain):
    """Flows on the first tensor of a state, and in between what divides that tensor."""

    @property
    def name(self) -> str:
        return f"multiscale({', '.join(repr(block.pair) for block in self.blocks[::2])})"

    def each(self, params: Any) -> Iterable[Step]:
        flows, halved = self.blocks[::2], self.blocks[1::2]
        for i, (flow, entry) in enumerate(zip(flows, self.entries(params, len(flows)), strict=True)):
            yield flow, entry
            if i < len(halved):
                yield halved[i], None


def _of_first(pair: Invertible, summed: bool = False) -> Invertible:
    """A pair on the first tensor of a state; of a composition that of its blocks, each of which frees its own.

    `summed` says that a sum of log-determinants stands beside the state.
    """
    if pair.composition is not None:
        return pair.composition.changed(lambda block: replace(block, pair=_of_first(block.pair), has_aux=False))
    forward, inverse = (_OfFirst(way, len(pair.shared), summed) for way in (pair.forward, pair.inverse))
    log_det = None if pair.log_det is None else _OfFirst(pair.log_det, len(pair.shared), returns=False)
    carried = None if pair.carried is None else _of_first(pair.carried, summed=True)
    return Invertible(forward, inverse, pair.shared, log_det=log_det, name=repr(pair), carried=carried)


@dataclass(frozen=True, eq=False)
class _OfFirst(Value):
    """A function of x as one of a state: of the first tensor in a tuple, or of a tensor alone."""

    fn: Callable
    shared: int
    """Number of functions in front of x."""
    summed: bool = False
    returns: bool = True
    """True if it returns a state."""

    def __call__(self, *given: Any, **kwargs: Any) -> Any:
        state, *args = given[self.shared :]
        state, s = state if self.summed else (state, None)
        x, *left = state if isinstance(state, tuple) else (state,)
        y = self.fn(*given[: self.shared], (x, s) if self.summed else x, *args, **kwargs)
        if not self.returns:
            return y
        y, s = y if self.summed else (y, None)
        state = (y, *left) if left else y
        return (state, s) if self.summed else state


@dataclass(frozen=True, eq=False)
class _Halved(PairLaw):
    """Divides the first tensor of a state into two; what the flows get beside it says nothing about that."""

    dim: int

    def forward(self, state: Any, *given: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        y, *left = state if isinstance(state, tuple) else (state,)
        if not isinstance(y, torch.Tensor) or not -y.dim() <= self.dim < y.dim() or y.shape[self.dim] < 2:
            what = f"of shape {list(y.shape)}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
            raise ArgumentError(
                f"multiscale(..., split_dim={self.dim}): what leaves a flow is {what}, which has no two halves there."
            )
        first, second = y.tensor_split(2, self.dim)
        return first.contiguous(), second.contiguous(), *left  # so that one can be freed without the other

    def inverse(self, state: tuple[torch.Tensor, ...], *given: Any, **kwargs: Any) -> Any:
        first, second, *left = state
        x = torch.cat([first, second], self.dim)
        return (x, *left) if left else x

    def log_det(self, state: Any, *given: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.zeros_like(state[0] if isinstance(state, tuple) else state))


class Equilibrium(NamedTuple):
    """Result of `equilibrium`: the last point, the number of evaluations of the function, and the residual.

    `residual` is the largest difference between x and f(x) in the last step, and between the two copies of x, relative
    to the largest entry of x.
    """

    value: Any
    evaluations: int
    residual: float


def equilibrium(
    f: Callable[..., Any],
    beta: float = 0.5,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 50,
    anchor_every: int | None = None,
) -> Callable[..., Any]:
    """A layer whose output is a fixed point, x = f(x, p), in the memory of one step and with exact gradients.

        def solve(x, *args, **kwargs):
            state = (x, x)
            while residual(state) > tolerance:
                state = fixed_point(f, beta)(state, *args, **kwargs)
            return Equilibrium(state[1], evaluations, residual(state))

    The backward pass inverts the same steps, so the gradient is that of the result, even if it is not yet the fixed
    point. As rounding errors grow on the way back, both copies are kept in float64; f gets its argument, and returns
    its result, in the dtype of x.

    Args:
        f: any function that keeps the form of x, a tensor or any pytree of tensors; or a module. It has to be a
            contraction, or there may be no fixed point. f is pure in torch.func's sense (see the conventions).
        beta: as in `fixed_point`.
        tolerance: the largest residual, relative to the largest entry of x.
        max_steps: the largest number of steps; a larger residual after these is a warning.
        anchor_every: keep the state of every n-th step, so that rounding errors on the way back grow between two
            anchors only. They grow by at most 1 / (1 - beta)**2 at each step if f is a contraction. By default there is
            an anchor where they may have taken half of the digits of float64: at every 13th step for a beta of 0.5.

    Returns:
        `solve(x, *args, **kwargs) -> Equilibrium(value, evaluations, residual)`: x is the initial point, any pytree of
        tensors; further arguments go to f. So `solve(x, u)` evaluates `module(x, u)`, with the module's own parameters;
        to pass others, take `f, params = functional(module)` and `equilibrium(state_first(f))(x, params, u)`. All
        samples take the same number of steps, until the last one has converged.

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: as in `fixed_point`; tolerance, max_steps or anchor_every is not above 0.

    Example:
        >>> import torch, invfunc
        >>> solve = invfunc.pairs.equilibrium(lambda x, w: torch.tanh(w * x + 1))
        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> x = solve(torch.zeros(3), w)
        >>> x.value.detach(), x.evaluations
        (tensor([0.8950, 0.8950, 0.8950]), 26)
        >>> torch.autograd.grad(x.value.sum(), w)
        (tensor(0.5917),)

    Composes with: `.backward()` and every transform of torch.func, as `invertible_checkpoint`; inside of vmap return
    its value. `repeated(fixed_point(f))` takes a number of steps that is known before.

    Cost: two evaluations of f a step, and as many in the backward pass.

    Source: S. Bai et al., Deep Equilibrium Models, 2019; Reversible Deep Equilibrium Models, arXiv 2509.12917, 2025.
    """
    if not callable(f):
        raise ArgumentTypeError(f"equilibrium(f): f is of type {type(f).__name__}, but has to be a function.")
    pair = fixed_point(_Narrow(f), beta)
    call = f"equilibrium({describe(pair.shared[0])}, beta={beta})"
    for name, value, kinds in (("tolerance", tolerance, (int, float)), ("max_steps", max_steps, int)):
        if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
            raise ArgumentError(f"{call[:-1]}, {name}={value!r}): {name} has to be above 0.")
    check_anchor("equilibrium", anchor_every)
    half = -math.log(torch.finfo(torch.float64).eps) / 2
    every = anchor_every or max(1, int(half / -2 / math.log(1 - beta)))
    return _Solver(call, Checkpointed(pair, check="off"), beta, tolerance, max_steps, every)


@dataclass(frozen=True, eq=False, repr=False)
class _Narrow(Value):
    """A function of a state in dtypes that are told, of one in float64."""

    f: Callable

    @property
    def __name__(self) -> str:
        return describe(self.f)

    def __call__(self, x: Any, dtypes: tuple[torch.dtype, ...], *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree.flatten(x)
        narrow = [t.to(dtype) for t, dtype in zip(leaves, dtypes, strict=True)]
        return _wide(self.f(tree.unflatten(narrow, form), *args, **kwargs))


def _wide(x: Any) -> Any:
    return tree.map_tensors(lambda t: in_float64(t, "an equilibrium keeps two copies of its state"), x)


@shown
@dataclass(frozen=True, eq=False, repr=False)
class _Solver(Value):
    """The loop of steps."""

    call: str
    step: Checkpointed
    beta: float
    tolerance: float
    max_steps: int
    anchor_every: int

    def __repr__(self) -> str:
        return self.call

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Equilibrium:
        dtypes = tuple(t.dtype for t in tree.tensors(x))
        state, residual, steps = (_wide(x), _wide(x)), math.inf, 0
        anchored = replace(self.step, keep=True)
        while steps < self.max_steps and residual > self.tolerance:
            step = anchored if steps and steps % self.anchor_every == 0 else self.step
            before, state = state, step(state, dtypes, *args, **kwargs)
            residual = self._residual(before, state)
            steps += 1
            del before  # which the next step takes over
        if not residual <= self.tolerance:
            warnings.warn(
                f"{self.call}(x, ...): after {steps} steps the residual is {residual:.1e}, where {self.tolerance:.1e} "
                "is tolerated (tolerance=). Take more (max_steps=), or an f that contracts more.",
                InvFuncWarning,
                stacklevel=2,
            )
        leaves, form = tree.flatten(state[1])
        value = tree.unflatten([t.to(dtype) for t, dtype in zip(leaves, dtypes, strict=True)], form)
        return Equilibrium(value, 2 * steps, residual)

    def _residual(self, before: Any, after: Any) -> float:
        """Relative to the largest entry: f(z) - y and f(y') - z, from how far both have moved, and y' - z'."""
        if torch.compiler.is_compiling():
            return self._largest(*map(tree.tensors, (*before, *after)))
        with unwatched(), torch.no_grad():  # values that are only looked at
            return self._largest(*([innermost(t) for t in tree.tensors(part)] for part in (*before, *after)))

    def _largest(self, *parts: list[torch.Tensor]) -> float:
        off, sizes = [torch.zeros(())], [torch.zeros(())]
        for y, z, after, last in zip(*(map(torch.Tensor.detach, part) for part in parts), strict=True):
            moved = (after - y) / self.beta, (last - z) / self.beta, after - last
            off += [t.abs().amax().cpu() for t in moved if t.numel()]
            sizes += [t.abs().amax().cpu() for t in (last,) if t.numel()]
        most, size = (float(torch.stack([t.double() for t in found]).amax()) for found in (off, sizes))
        return most / size if size else most  # NaN if there is one anywhere
