"""A function of the user's with arguments for it, and what kind of function it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc.callables import check_functions, describe
from invfunc.errors import ArgumentError, InvFuncError
from invfunc.problem import InDims, batch_dims, batch_size, check_params
from invfunc.testing.laws.compare import cast, fixed, generators, seeded
from invfunc.testing.laws.run import Subject, coarsest
from invfunc.transform import ArgumentNames

LOSSES, SCALAR, MODEL, BOTH = "[N] losses", "a scalar loss", "a model", "a model and its loss"
"""The kinds of f."""

ENTRIES = 24
"""Of how many entries of large parameters the diagonals and columns are compared."""


@dataclass(frozen=True, repr=False, kw_only=True)
class LawProblem(Subject):
    """`f(params, *batch)`, or `loss(f(params, *batch[:-1]), batch[-1])`, perhaps of a statistic `t` alone."""

    f: Callable
    params: Any
    batch: tuple
    loss: Callable | None
    in_dims: tuple[int | None, ...]
    kind: str = LOSSES
    draws: bool = False
    """True if f draws from torch's global generators."""
    t: Callable | None = None
    """Makes the statistic that the laws are of; they are of all unless given."""
    oracle: Callable | None = None
    """Makes its loop."""
    called: str = ""
    """Its subject."""

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f" with {describe(self.loss)}"
        drawing = ", which draws" if self.draws else ""
        dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in tree.tensors(self.params)}))
        return f"{describe(self.f)}{loss}, {self.kind}{drawing}, N = {self.n}, {dtypes}"

    def part(self, samples: Sequence[int]) -> LawProblem:
        """The same of these samples of the batch."""
        given = tuple(_taken(x, dim, samples) for x, dim in zip(self.batch, self.in_dims, strict=True))
        return self.of_samples(samples, batch=given)

    def double(self) -> LawProblem:
        """The same in float64."""
        return replace(self, params=cast(self.params, torch.float64), batch=cast(self.batch, torch.float64))

    @property
    def args(self) -> tuple:
        """The arguments of a statistic of f, or of f and its loss."""
        return (self.params, *self.batch)

    @property
    def functions(self) -> tuple[Callable, ...]:
        """The functions that a statistic is made of."""
        return (self.f,) if self.loss is None else (self.f, self.loss)

    @property
    def inputs(self) -> tuple:
        """The inputs of f."""
        return self.batch if self.loss is None else self.batch[:-1]

    def losses(self, params: Any, *batch: Any) -> torch.Tensor:
        """The loss, a scalar or `[N]`, of a loss function or of a model with its loss."""
        if self.loss is None:
            return self.f(params, *batch)
        return self.loss(self.f(params, *batch[:-1]), batch[-1])

    @cached_property
    def loss_function(self) -> Callable:
        """One object, as `together` wants it."""
        return self.f if self.loss is None else self.losses

    def steady(self, fn: Callable) -> Callable:
        """A function that draws the same numbers at each call."""
        if not self.draws:
            return fn

        def again(*args: Any) -> Any:
            torch.manual_seed(self.seed)
            return fn(*args)

        return again

    @cached_property
    def entries(self) -> list[torch.Tensor]:
        """Of each parameter the places of the entries that are compared one by one, all of them if they are few."""
        sizes = [p.numel() for p in tree.tensors(self.params)]
        if sum(sizes) <= 2 * ENTRIES:
            return [torch.arange(size) for size in sizes]
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randperm(size, generator=generator) for size in sizes]
        return [places[: max(1, ENTRIES * len(places) // sum(sizes))].sort().values for places in drawn]

    @property
    def complete(self) -> bool:
        """True if the entries are all there are."""
        return all(len(k) == p.numel() for k, p in zip(self.entries, tree.tensors(self.params), strict=True))

    @cached_property
    def results(self) -> dict[str, Any]:
        """Results of statistics that laws compare with others."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest one of the parameters."""
        return coarsest(self.params)

    @cached_property
    def floor(self) -> float:
        """A size that is small beside the gradients and their squares, so that rounding is all there is in it."""
        sizes = [0.0]
        for part in (self, self.part([0])):
            try:
                sizes.append(self._steepness(part) * part.n / self.n)
            except Exception:  # of the user's f, which may want several samples, or not be differentiable
                continue
        return 1e-6 * min(max(sizes), max(sizes) ** 2)

    def _steepness(self, at: LawProblem) -> float:
        leaves, form = tree.separate(at.params)
        leaves = [p.detach().requires_grad_() for p in leaves]
        with torch.enable_grad():
            f = self.f if self.kind == MODEL else self.losses
            z = tree.tensors(f(form.join(leaves), *at.batch))
            value = sum(((y * fixed(y.shape, y, 0.3)).sum() for y in z), torch.tensor(0.0))
        slopes = torch.autograd.grad(value, leaves, materialize_grads=True)
        return max((g.abs().nan_to_num().max().item() for g in slopes if g.numel()), default=0.0)

    @cached_property
    def fold(self) -> str:
        """Of a scalar loss: "sum" or "mean" if it is that of its values for the single samples, else ""."""
        if self.draws:
            return ""
        try:
            with torch.no_grad():
                each = torch.stack([self.f(self.params, *self.part([n]).batch).reshape(()) for n in range(self.n)])
                whole = self.f(*self.args).reshape(())
        except Exception:  # of the user's f, which may want several samples
            return ""
        near = torch.finfo(whole.dtype).eps ** 0.5 * each.abs().sum()
        folds = {"mean": each.mean(), "sum": each.sum()}
        return next((name for name, value in folds.items() if (value - whole).abs() <= near / self.n), "")


def _taken(argument: Any, dim: int | None, samples: Sequence[int]) -> Any:
    if dim is None:
        return argument
    return tree.map_tensors(lambda x: x.index_select(dim, torch.tensor(samples, device=x.device)), argument)


def problem(
    call: str, f: Callable, params: Any, batch: tuple, loss: Callable | None, in_dims: InDims, samples: Any, seed: int
) -> LawProblem:
    """Find out what f is, by one call."""
    check_functions(call, f, loss)
    places = list(range(1, len(batch) + 1))
    try:
        if not batch[bool(loss) :]:
            wanted = "(f, params, *batch)" if loss is None else "(f, params, *inputs, target, loss=loss)"
            raise ArgumentError(f"there are no samples; the call is {call}{wanted}.")
        dims = batch_dims(in_dims, places)
        names = ArgumentNames(f, 1 + len(batch), loss is not None)
        n = batch_size((params, *batch), dims, names)
        if not check_params(params, names, 0)[0]:
            raise ArgumentError(f"{names[0]} has no tensors.")
    except InvFuncError as error:
        raise type(error)(f"{call}({describe(f)}, ...): {error}") from None
    given = {"f": f, "params": params, "batch": batch, "loss": loss, "in_dims": tuple(dims[i] for i in places)}
    given = LawProblem(**given, seed=seed, n=n, samples=tuple(range(n)))
    if samples is not None:
        given = given.part(picked(call, samples, n))
    draws, result = _called(call, given)
    return replace(given, draws=draws, kind=_kind(call, given, result))


def picked(call: str, samples: Iterable[int], n: int) -> list[int]:
    """Some of n samples."""
    places = list(samples)
    if not places or any(isinstance(i, bool) or not isinstance(i, int) or not -n <= i < n for i in places):
        raise ArgumentError(f"{call}(..., samples={places}): give some of the samples 0 to {n - 1} of the batch.")
    return [range(n)[i] for i in places]


def _called(call: str, given: LawProblem) -> tuple[bool, Any]:
    """Calls f: returns whether it draws, and what the loss or the model gives."""
    own = tree.map_tensors(torch.clone, (given.params, *given.inputs))
    with seeded(given.seed), torch.no_grad():
        before, versions = generators(), [version(x) for x in tree.tensors(own)]
        result = given.f(*own)
        draws = any(not torch.equal(a, b) for a, b in zip(before, generators(), strict=True))
        if versions != [version(x) for x in tree.tensors(own)]:
            raise ArgumentError(
                f"{call}({describe(given.f)}, ...): f writes into its arguments, so that no two calls see the same "
                "numbers. Write into a copy, as in x = x.clone()."
            )
        if given.loss is not None:
            result = result, given.loss(result, given.batch[-1])
    return draws, result


def _kind(call: str, given: LawProblem, result: Any) -> str:
    told, kind = f"{call}({describe(given.f)}, ...)", SCALAR
    if any(bool(x.isnan().any()) for x in tree.tensors(result) if x.is_floating_point()):
        rows = [x.isnan().reshape(given.n, -1).any(1) for x in tree.tensors(result) if x.ndim and len(x) == given.n]
        of = [given.samples[i] for i in torch.stack(rows).any(0).nonzero()] if rows else []
        raise ArgumentError(
            f"{told}: samples {of or 'all together'} give NaN, which equals nothing, and in plain loops it spreads "
            "from one sample to others (0 times NaN). Check the other samples alone: samples=[...]."
        )
    if given.loss is not None:
        outputs, value = result
        if _shape(value) not in ((), (given.n,)):
            raise ArgumentError(f"{told}: loss returns {_shown(value)}, but has to return a scalar or [N] losses.")
        _check_outputs(told, outputs, given.n)
        kind = BOTH
    elif _shape(result) == (given.n,):
        kind = LOSSES
    elif _shape(result) != ():
        _check_outputs(told, result, given.n)
        kind = MODEL
    return kind


def _check_outputs(told: str, outputs: Any, n: int) -> None:
    found = tree.leaves(outputs)
    if not found or not all(isinstance(z, torch.Tensor) and z.ndim and len(z) == n for z in found):
        shown = ", ".join(map(_shown, found))
        raise ArgumentError(
            f"{told}: f returns {shown or 'no tensors'} for N = {n}. A loss function returns a scalar or [N], a model "
            "function tensors [N, ...]."
        )


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else None


def _shown(x: Any) -> str:
    return f"shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def options(given: LawProblem, in_dims: InDims) -> dict[str, Any]:
    """The options by which a loss and in_dims were given."""
    loss = {} if given.loss is None else {"loss": "loss"}
    return loss | ({} if in_dims == 0 else {"in_dims": in_dims})
