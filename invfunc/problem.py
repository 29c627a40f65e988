"""A function with its arguments: which are parameters, which are samples, and how to call it on a part of them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from invfunc import tree
from invfunc._torch.functorch import dual, dual_level, transforming
from invfunc._torch.opened import Uncompiled
from invfunc._torch.sharded import sharded
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.operations.axis import Axis

InDims = int | None | Sequence[int | None]
Indices = Sequence[int] | torch.Tensor


class Watching(AbstractContextManager, Protocol):
    """A mode under which f runs."""

    def samples(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The tensor that f gets in place of a batch tensor."""
        ...


@dataclass
class BoundProblem:
    """`f(*args, **kwargs)` with the parameters at `argnums`; the last argument is `target` where a loss is given."""

    f: Callable
    loss: Callable | None
    args: tuple
    kwargs: dict[str, Any]
    argnums: tuple[int, ...]
    several: bool
    """True if argnums was a tuple, and so is the result."""
    has_aux: bool
    out_dims: int
    leaves: list[torch.Tensor]
    structure: Any
    dims: dict[int, int | None]
    """The sample dimension of each argument that is not parameters."""
    n: int
    samples: list[int] | None = None
    """The samples that the caller chose, as places in the batch."""
    others: int = 0
    """Number of the last samples that are of another batch, joined to the first."""
    first: int = 0
    """The place of its first sample in the batch of which it is a chunk."""
    factor: float | None = None
    """Of a chunk, what its loss is multiplied by to have the scale of the loss of all samples."""

    @classmethod
    def of_no_samples(cls, t: Any, params: Any, several: bool = False) -> BoundProblem:
        """The problem of a transform without samples, which has parameters only."""
        leaves, structure = tree.flatten([params], none_is_leaf=False)
        return cls(t.f, t.loss, (params,), {}, (0,), several, t.has_aux, t.out_dims, leaves, structure, {}, 0)

    @property
    def inputs(self) -> range:
        """The positions of what f gets."""
        return range(len(self.args) - (self.loss is not None))

    @cached_property
    def paths(self) -> list[str]:
        """The key paths of the parameters in the result."""
        trees = [self.args[i] for i in self.argnums]
        return [path for path, _ in tree.named_leaves(trees if self.several else trees[0], none_is_leaf=False)]

    def name(self, place: int) -> str:
        """The name of a parameter in an error."""
        return "params" + self.paths[place]

    def call(self, trace: Watching, params: list[torch.Tensor]) -> tuple[Any, Any]:
        """f under a mode that watches it: its result and aux."""
        trees = tree.unflatten(params, self.structure)
        given = [trees[self.argnums.index(i)] if i in self.argnums else self._samples(trace, i) for i in self.inputs]
        with Uncompiled(), trace:
            try:
                result = self.f(*given, **self.kwargs)
                result, aux = with_aux(result) if self.has_aux else (result, None)
                return result if self.factor in (None, 1) else result * self.factor, aux
            except SystemError as error:  # torch's own code makes one of what we raise where it calls us
                raise error if error.__cause__ is None else error.__cause__ from None

    def chunk(self, part: slice | torch.Tensor, n: int, factor: float = 1) -> BoundProblem:
        """The problem of n of the samples alone, whose loss is multiplied by a factor."""
        args = [some_samples(x, self.dims.get(i), part) for i, x in enumerate(self.args)]
        first = part.start if isinstance(part, slice) else 0
        return replace(self, args=tuple(args), n=n, samples=None, first=first, factor=factor)

    def target(self, trace: Watching) -> Any:
        return self._samples(trace, len(self.args) - 1)

    def drawn(self, trace: Any, target: Any) -> Any:
        """A target that was drawn in place of the given one."""
        place = len(self.args) - 1
        return replace(self, args=(*self.args[:-1], target), dims={**self.dims, place: 0}).target(trace)

    def _samples(self, trace: Watching, position: int) -> Any:
        dim, given = self.dims[position], self.args[position]
        if dim is None:
            return given
        if isinstance(given, torch.Tensor):
            return trace.samples(given, (dim % given.ndim - given.ndim, 1, 1))
        return tree.map_tensors(lambda x: trace.samples(x, (dim % x.ndim - x.ndim, 1, 1)), given)

    def fixed(self) -> list[torch.Tensor]:
        """The tensors that all samples share."""
        return tree.tensors(([self.args[i] for i, d in self.dims.items() if d is None], self.kwargs))

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return tree.tensors((*self.args, self.kwargs) if self.kwargs else self.args)


def check_numbers(tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors hold numbers, and no tangents that are not followed."""
    for x in tensors:
        if x.is_meta:
            raise ArgumentError(
                f"a tensor of shape {tuple(x.shape)} is on the meta device, where tensors hold no numbers, and some "
                "are read. Make it on a device that stores numbers, as x.new_zeros(x.shape, device='cpu') does."
            )
    if dual_level() and not transforming() and dual(*tensors):
        raise ArgumentError(
            "an argument carries a tangent of torch.autograd.forward_ad, which is not followed; use jvp."
        )


def some_samples(argument: Any, dim: int | None, part: slice | torch.Tensor) -> Any:
    """An argument of some samples alone; with `dim` None it is shared by all."""
    return (
        argument if dim is None else tree.map_tensors(lambda x: x[(slice(None),) * (dim % x.ndim) + (part,)], argument)
    )


def whole(problem: BoundProblem) -> BoundProblem:
    """A model and its loss as one function."""
    f, loss = problem.f, problem.loss
    assert loss is not None

    def of_both(*args: Any, **kwargs: Any) -> Any:
        found = f(*args[:-1], **kwargs)
        outputs, aux = with_aux(found) if problem.has_aux else (found, None)
        return (loss(outputs, args[-1]), aux) if problem.has_aux else loss(outputs, args[-1])

    return replace(problem, f=of_both, loss=None)


def with_aux(result: Any) -> tuple[Any, Any]:
    """The pair that a function with has_aux returns."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ArgumentError("with has_aux=True the function has to return a pair (result, aux).")
    return result


def problem(
    f: Callable,
    loss: Callable | None,
    args: tuple,
    kwargs: dict[str, Any],
    argnums: int | tuple[int, ...],
    in_dims: InDims,
    out_dims: int,
    has_aux: bool,
    names: Sequence[str],
    samples: Any = None,
    empty: bool = False,
) -> BoundProblem:
    """Check the arguments of a call and sort them; `empty` says that there may be no samples."""
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(wanted, tuple) or not all([isinstance(a, int) for a in wanted]):
        raise ArgumentTypeError(f"argnums={argnums!r} has to be an int or a tuple of ints.")
    count = len(args) - (loss is not None)
    for a in wanted:
        if not -count <= a < count:
            raise ArgumentError(f"argnums={argnums} asks for argument {a}, but the function gets {count}.")
    positions = tuple([a % count for a in wanted])
    if not positions or len(set(positions)) < len(positions):
        raise ArgumentError(f"argnums={argnums} has to name at least one argument, and each only once.")
    trees = [args[i] for i in positions]
    leaves, structure = tree.flatten(trees, none_is_leaf=False)
    _check_leaves(leaves, trees, names, positions)
    if not leaves:
        raise ArgumentError(f"{names[positions[0]]} has no tensors in it.")
    rest = [i for i in range(len(args)) if i not in positions]
    dims = batch_dims(in_dims, rest)
    n = batch_size(args, dims, names, empty)
    chosen = None if samples is None else _places(samples, n)
    several = wanted is argnums
    return BoundProblem(
        f, loss, args, kwargs, positions, several, has_aux, out_dims, leaves, structure, dims, n, chosen
    )


def _places(samples: Any, n: int) -> list[int]:
    """The samples that were chosen, counted from 0."""
    wanted = "wanted is a sequence of ints, a slice, or a tensor [S] of ints"
    if isinstance(samples, (list, tuple)) and any(isinstance(i, bool) for i in samples):
        samples = torch.tensor(samples, dtype=torch.bool)
    if isinstance(samples, slice):
        samples = range(n)[samples]
    if isinstance(samples, torch.Tensor):
        if samples.dtype == torch.bool:
            raise ArgumentTypeError("samples is a mask, but has to have indices: pass its nonzero().squeeze(1).")
        if samples.ndim != 1 or samples.is_floating_point() or samples.is_complex():
            raise ArgumentTypeError(
                f"samples is a tensor of {samples.dtype} and shape {tuple(samples.shape)}; {wanted}."
            )
        samples = samples.tolist()
    try:
        places = [operator.index(samples[i]) for i in range(len(samples))]
    except TypeError:
        raise ArgumentTypeError(f"samples={samples!r}; {wanted}.") from None
    if not places:
        raise ArgumentError("samples is empty, but has to name at least one sample.")
    for i in places:
        if not -n <= i < n:
            raise ArgumentError(f"samples asks for sample {i}, but there are {n}.")
    return [i % n for i in places]


def check_params(params: Any, names: Sequence[str], place: int, whole: bool = True) -> tuple[list[Any], Any]:
    """Check that all leaves of the argument at a place are real floating-point tensors, and `whole` in this process;
    returns them, and the structure."""
    leaves, structure = tree.flatten(params, none_is_leaf=False)
    _check_leaves(leaves, [params], names, [place], whole)
    return leaves, structure


def _check_leaves(
    leaves: list[Any], trees: Sequence[Any], names: Sequence[str], places: Sequence[int], whole: bool = True
) -> None:
    """Check the leaves of the arguments at some places."""
    kinds = {*map(type, leaves)}
    if not all([isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves]):
        for params, place in zip(trees, places, strict=True):
            _check_floats(params, names[place])
    if not whole or kinds <= _PLAIN or not any(map(sharded, leaves)):
        return
    for params, place in zip(trees, places, strict=True):
        for path, leaf in tree.named_leaves(params, none_is_leaf=False):
            if sharded(leaf):
                raise ArgumentTypeError(
                    f"{names[place]}{path} is a DTensor, which is sharded over the processes, but the samples are "
                    "those of this process alone. Take distributed(t) of the statistic or product, or pass "
                    "p.full_tensor() of each parameter."
                )


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _check_floats(params: Any, name: str) -> None:
    for path, leaf in tree.named_leaves(params, none_is_leaf=False):
        if not isinstance(leaf, torch.Tensor):
            hint = ""
            if isinstance(leaf, torch.nn.Module):
                hint = " Of a module: f, params = functional(model)."
            elif of_numpy(leaf):
                hint = f" Pass torch.as_tensor({name}{path})."
            elif isinstance(leaf, Iterator):
                hint = " Give the tree that f takes, such as dict(model.named_parameters())."
            kind = type(leaf).__name__
            raise ArgumentTypeError(f"{name}{path} is of type {kind}, but parameters are tensors.{hint}")
        if not leaf.is_floating_point():
            raise ArgumentTypeError(
                f"{name}{path} has dtype {leaf.dtype}, but parameters are real floating-point tensors. Close "
                "over tensors that need no gradient, or pass them as batch arguments with in_dims None."
            )


def batch_dims(in_dims: InDims, rest: list[int]) -> dict[int, int | None]:
    """The sample dimension of each batch argument, None for what all samples share."""
    if in_dims is None or isinstance(in_dims, int):
        return dict.fromkeys(rest, in_dims)
    if not isinstance(in_dims, (tuple, list)) or not all(d is None or isinstance(d, int) for d in in_dims):
        raise ArgumentTypeError(f"in_dims={in_dims!r} has to be an int, None, or a tuple of them.")
    if len(in_dims) != len(rest):
        raise ArgumentError(f"in_dims={tuple(in_dims)} has {len(in_dims)} entries for {len(rest)} batch arguments.")
    return dict(zip(rest, in_dims, strict=True))


def batch_size(args: tuple, dims: dict[int, int | None], names: Sequence[str], empty: bool = False) -> int:
    """N, on which all batch arguments have to agree; it may be 0 where that is said."""
    found = set[int]()
    for i, dim in dims.items():
        if dim is not None:
            for x in [args[i]] if isinstance(args[i], torch.Tensor) else tree.tensors(args[i]):
                found.add(x.shape[dim] if -x.ndim <= dim < x.ndim else 0)
    if len(found) == 1 and 0 not in found:
        return found.pop()
    sizes = _sizes(args, dims, names)  # names are looked up for errors only
    if not sizes:
        arrays = numpy_arrays(args, names)
        if arrays:
            raise ArgumentTypeError(arrays)
        raise ArgumentError(
            "there is no batch argument: pass the samples as positional arguments, tensors or trees of them, not by "
            "keyword (those are constants) or in a closure."
        )
    (_, first, n), *others = sizes
    for _, name, size in others:
        if size != n:
            raise ArgumentError(
                f"{first} has {n} samples but {name} has {size}. Batch arguments must share their sample axis"
                f"{_suggestion(dims, names, sizes)}."
            )
    if n == 0 and not empty:
        raise nothing(first)
    return n


def nothing(first: str) -> ArgumentError:
    """The error for a batch without samples, of which there is no mean."""
    return ArgumentError(
        f"{first} has no samples (N = 0), and the mean of no losses is not defined. Return the [N] losses, as with "
        "reduction='none', or their sum: then first-order statistics give zeros. Otherwise skip the call; `streamed` "
        "and `distributed` skip batches without samples themselves."
    )


def _sizes(args: tuple, dims: dict[int, int | None], names: Sequence[str]) -> list[tuple[int, str, int]]:
    """The argument that each batch tensor is in, its name, and its number of samples."""
    sizes = []
    for i, dim in dims.items():
        if dim is None:
            continue
        for path, leaf in tree.named_leaves(args[i]):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not -leaf.ndim <= dim < leaf.ndim:
                raise ArgumentError(
                    f"{names[i]}{path} has shape {tuple(leaf.shape)} and no axis {dim} for its samples. Pass "
                    "in_dims=None for an argument that all samples share."
                )
            sizes.append((i, names[i] + path, leaf.shape[dim]))
    return sizes


def _suggestion(dims: dict[int, int | None], names: Sequence[str], sizes: list[tuple[int, str, int]]) -> str:
    """The way to hold fixed what has another number of samples than most, or than the other one."""
    count = Counter(size for _, _, size in sizes)
    most = [size for size, times in count.items() if times == max(count.values())]

    def fixed(size: int) -> str:
        held = [i for i in dims if any(k == i and other != size for k, _, other in sizes)]
        if len(held) == len(dims):
            return ""
        entries = ", ".join(str(None if i in held else dim) for i, dim in dims.items())
        return f"in_dims=({entries}{',' * (len(dims) == 1)}) to hold {' and '.join(names[i] for i in held)} fixed"

    ways = ", or ".join(dict.fromkeys(text for text in map(fixed, most) if text))
    return f"; pass {ways}" if ways else ""


def numpy_arrays(args: tuple, names: Sequence[str]) -> str:
    """The error of arguments that are arrays of numpy, if some are."""
    for name, arg in zip(names, args, strict=False):
        for path, leaf in tree.named_leaves(arg):
            if of_numpy(leaf):
                return (
                    f"{name}{path} is of type numpy.ndarray, but samples are tensors: pass "
                    f"torch.as_tensor({name}{path})."
                )
    return ""


def of_numpy(x: Any) -> bool:
    """Tells whether an argument is an array of numpy."""
    return type(x).__module__ == "numpy" and getattr(x, "ndim", 0) > 0


# Two batches as one: the samples of another one behind those of a call


def beside(problem: BoundProblem, others: tuple, names: Sequence[str]) -> BoundProblem:
    """The problem of both batches; the samples of the other one are all chosen, and the last."""
    at = [i for i, dim in problem.dims.items() if dim is not None]
    if len(others) != len(at):
        raise ArgumentError(
            f"others has {len(others)} entries, but there are {len(at)} batch arguments: "
            f"({', '.join(names[i] for i in at)}). Give one for each, without those that all samples share."
        )
    args, theirs = list(problem.args), dict(zip(at, others, strict=True))
    called = [f"others[{at.index(i)}]" if i in theirs else names[i] for i in range(len(args))]
    given = tuple(theirs.get(i, x) for i, x in enumerate(args))
    count = batch_size(given, {i: problem.dims[i] for i in at}, called)
    for i, other in theirs.items():
        (mine, form), (more, other_form) = tree.flatten(args[i]), tree.flatten(other)
        if form != other_form:
            raise ArgumentError(f"{called[i]} has another structure than {names[i]}.")
        joined = [_behind(x, y, problem.dims[i], called[i]) for x, y in zip(mine, more, strict=True)]
        args[i] = tree.unflatten(joined, form)
    n = problem.n + count
    chosen = None if problem.samples is None else [*problem.samples, *range(problem.n, n)]
    return replace(problem, args=tuple(args), n=n, samples=chosen, others=count)


def _behind(x: Any, other: Any, dim: int | None, name: str) -> Any:
    """A batch tensor with the samples of another behind its own."""
    if not isinstance(x, torch.Tensor):
        return x
    assert dim is not None
    mine, theirs = ([*t.shape[: dim % t.ndim], *t.shape[dim % t.ndim + 1 :]] for t in (x, other))
    if mine != theirs or x.dtype != other.dtype or x.device != other.device:
        raise ArgumentError(
            f"{name} has shape {tuple(other.shape)}, {other.dtype} and is on {other.device}, beside "
            f"{tuple(x.shape)}, {x.dtype} on {x.device}: but for the number of samples they have to agree, as both "
            "batches are joined. Pad the shorter samples."
        )
    return torch.cat([x, other], dim)
