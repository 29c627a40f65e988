"""The way a result for all samples is made up of those for some of them alone, if it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._torch.generators import uniform
from invfunc._torch.values import HALF, anywhere, doubled, fake, near, same_values, size_of, wide
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import ArgumentError, RandomnessError, SampleAxisError
from invfunc.evaluation.batches import unscaled
from invfunc.loss.drawn import joined
from invfunc.problem import BoundProblem

Kind = Literal["each", "mean", "sum"]
"""One by one, as their mean or their sum."""
Some = Callable[[BoundProblem, list[int]], tuple[list[torch.Tensor], bool]]
"""Result of f for the samples at some places, `[k, ...]`, and whether it drew random numbers."""
_KNOWN: WeakIdMap[dict[Hashable, Kind]] = WeakIdMap()
_KEPT, FEW = 64, 8
"""Of how many calls it is known, and how many samples are looked at."""
_GIVE = "Pass what belongs to a sample, such as a mask or indices, as a batch argument."


class Drew(Exception):
    """f draws random numbers: those of the whole batch are another sequence."""


def kind_of(problem: BoundProblem, size: int, some: Some, f: Callable, what: Hashable) -> Kind:
    """The way parts of at most so many samples make up the result, or an error; looked at once for what is asked of a
    function, and arguments of these shapes."""
    key, known = (what, size, *_described(problem)), _KNOWN.get(f) or {}
    if key not in known:
        kind = _kind(problem, size, some)
        if fake(problem.leaves[0]):
            return kind
        known = dict([*known.items(), (key, kind)][-_KEPT:])
        with suppress(TypeError):  # a function of a kind that has no weak references
            _KNOWN.set(f, known)
    return known[key]


def _described(problem: BoundProblem) -> Iterator[Hashable]:
    yield from (problem.out_dims, *problem.dims.items())
    for x in tree.leaves((problem.args, problem.kwargs)):
        yield (x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x)


def _kind(problem: BoundProblem, size: int, some: Some) -> Kind:
    """A few samples from all over the batch, and either half of them alone.

    Where a parameter has the same numbers at two places, as zeros and ones have, values would not show that f reads it
    by the place of a sample: such ones are `told_apart`, and computed in single precision if f runs in half. Where
    results differ, they may be nothing but rounding, as losses of what is learnt by heart: it is looked again where
    all parameters are others.
    """
    n, k = problem.n, min(problem.n, max(2, min(size, FEW)))
    places = [n * i // k for i in range(k)]
    halves = places, places[::2], places[1::2]

    def looked(leaves: list[torch.Tensor], elsewhere: bool) -> Kind:
        at, found = replace(problem, leaves=leaves), list[tuple[list, bool]]()
        device = at.leaves[0].device.type
        casts = torch.is_autocast_enabled(device)
        half = casts or any(x.dtype in HALF for x in at.tensors)
        if half:
            with suppress(Exception), torch.autocast(device, enabled=False) if casts else nullcontext():
                found = [some(widened(at), each) for each in halves]
        if not found:
            found = [some(at, each) for each in halves]
            found = [([z.bfloat16() for z in values], drew) for values, drew in found] if half else found
        drew = any(drew for _, drew in found)
        if elsewhere and any(anywhere(~z.isfinite()) or not anywhere(z != 0) for z in found[0][0] if z.numel()):
            raise SampleAxisError("f has no numbers there")
        values = zip(*(values for values, _ in found), strict=True)
        kinds: list[Kind] = [_joined(*z, k=k, drew=drew) for z in values]
        return kinds[0] if kinds else "each"

    apart = [_told_apart(p.detach()) if _alike(p) else p for p in problem.leaves]
    try:
        return looked(apart, elsewhere=False)
    except SampleAxisError:
        with suppress(Exception):
            return looked(moved(apart), elsewhere=True)
        raise


def _joined(whole: torch.Tensor, even: torch.Tensor, odd: torch.Tensor, *, k: int, drew: bool) -> Kind:
    """The way a result for k samples is made up of those for the even and for the odd ones alone."""
    if whole.ndim:
        size = size_of(whole)  # beside the largest, others are only rounding
        pairs = (even, whole[::2]), (odd, whole[1::2])
        if not drew and not all(x.shape == y.shape and near(x, y, size) for x, y in pairs):
            raise SampleAxisError(
                "f gives a sample another result in a smaller batch, so that parts of a batch, or batches, cannot be "
                "joined: it mixes the samples, as batch norm in train mode does (take `model.eval()`), uses the length "
                "of the batch, or reads something by the place of a sample (as `p[: len(x)]` does). Chunk over outputs "
                f"or params. {_GIVE}"
            )
        return "each"
    if drew:
        raise RandomnessError(
            "f draws random numbers and returns one number, which may be the mean over its samples or the sum, so it "
            "cannot be chunked over samples. Return the [N] losses of the samples."
        )
    if fake(whole):  # which says nothing of the numbers
        return "mean"
    mean = near(whole, even * (1 - k // 2 / k) + odd * (k // 2 / k), size := even.abs() + odd.abs())
    if mean == near(whole, even + odd, size):
        raise neither()
    return "mean" if mean else "sum"


def check_batches(problem: BoundProblem, joined: torch.Tensor, alone: Callable[[slice], torch.Tensor]) -> None:
    """Check that samples have the same losses or outputs in the joined batch as where f sees a batch alone."""
    if not joined.ndim:
        raise ArgumentError(
            "f returned one number for both batches together, which does not tell their scales apart. Return the [N] "
            "losses of the samples, as with reduction='none', and scale the products."
        )
    edge, dim = problem.n - problem.others, problem.out_dims if joined.ndim > 1 else 0
    for start, stop in ((0, edge), (edge, problem.n)):
        if not same_values(alone(slice(start, stop)), joined.narrow(dim, start, stop - start)):
            raise ArgumentError(
                "f gives samples other results where both batches are joined, so it depends on the number of samples "
                f"or on their positions. {_GIVE}"
            )


def not_in_parts(error: Exception) -> SampleAxisError:
    """The error for an f that raises one of its own on some of the samples."""
    told = str(error).strip().split("\n")[0]
    return SampleAxisError(
        f"f does not run on a part of the batch ({told}), so it cannot be chunked over samples. {_GIVE}"
    )


def neither() -> SampleAxisError:
    """The error for a loss that is one number, and none of its samples."""
    return SampleAxisError(
        "the loss is one number, and on a part of the batch neither the mean nor the sum over its samples (does it "
        "divide by weights, or by a count of its data?), so it cannot be chunked over samples. Return the [N] losses "
        "of the samples, or give the loss apart, as in `diag_ggn(f, loss)`."
    )


def widened(problem: BoundProblem) -> BoundProblem:
    """The problem with all that is in half precision in single precision."""
    leaves, args, kwargs = tree.map_tensors(wide, (problem.leaves, problem.args, problem.kwargs))
    return replace(problem, leaves=leaves, args=args, kwargs=kwargs)


def moved(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parameters of other sizes and the same signs, always the same ones."""
    by = [(1 + uniform(x.numel(), seed) / 2).reshape(x.shape) for seed, x in enumerate(params, 1)]
    return [x.detach() * factor.to(x) for x, factor in zip(params, by, strict=True)]


def _alike(x: torch.Tensor) -> bool:
    """Tells whether a parameter has the same numbers at two places."""
    sides = [d for d, size in enumerate(x.shape) if size > 1]
    return not fake(x) and any(not anywhere(x.select(d, 0) != x.select(d, 1)) for d in sides)


def _told_apart(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x
    size = x.abs().nan_to_num(0, 0, 0).amax()
    step = 0.01 if torch.finfo(x.dtype).eps < 1e-5 else 0.5  # half precision is compared to few digits
    numbers = step * torch.arange(1.0, x.numel() + 1, device=x.device).cos().reshape(x.shape).to(x.dtype)
    return x + numbers * torch.where(x == 0, torch.where(size > 0, size, 1), x)


@dataclass(frozen=True)
class LossPart:
    """A loss that is given apart, at the outputs of some samples and their targets."""

    loss: Callable[[Any, Any], Any]
    outputs: Any
    target: Any
    n: int
    out_dim: int
    dim: int | None
    """The sample dimension of the target, if it has one."""

    @classmethod
    def of(cls, problem: BoundProblem, outputs: Any) -> LossPart:
        assert problem.loss is not None
        place = len(problem.args) - 1
        outputs = tree.map_tensors(torch.Tensor.detach, outputs)
        return cls(problem.loss, outputs, problem.args[place], problem.n, problem.out_dims, problem.dims[place])

    def gradient(self, first: LossPart | None = None, shift: float = 0) -> torch.Tensor:
        """The gradient in these outputs, moved by `shift`, of the loss of them, or of `first` and them joined."""
        devices = {z.device.index for z in tree.tensors((self.outputs,)) if z.device.type == "cuda"} - {None}
        with torch.enable_grad(), torch.random.fork_rng([*devices]):
            own = tree.map_tensors(lambda z: (z + shift).requires_grad_(z.is_floating_point()), self.outputs)
            outputs, target = own, self.target
            if first is not None:
                outputs = joined([first.outputs, own], self.out_dim)
                target = target if self.dim is None else joined([first.target, target], self.dim)
            inputs = [z for z in tree.tensors((own,)) if z.requires_grad]
            found = torch.autograd.grad(self.loss(outputs, target), inputs, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(z) if g is None else g).flatten() for z, g in zip(inputs, found, strict=True)]
        )

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of the outputs and the target by name, without their samples: what another batch has to have to be joined."""
        trees = {"outputs": (self.outputs, self.out_dim), "target": (self.target, self.dim)}
        return {
            name + path: [size for d, size in enumerate(x.shape) if d != dim % x.ndim]
            for name, (one, dim) in trees.items()
            if dim is not None
            for path, x in tree.named_leaves(one)
            if isinstance(x, torch.Tensor) and x.ndim
        }

    def own(self) -> LossPart:
        """It, where a loader may write the next batch in the memory of this one."""
        outputs, target = tree.map_tensors(torch.clone, (self.outputs, self.target))
        return replace(self, outputs=outputs, target=target)


class BatchWeights:
    """Finds out whether a loss is a sum over the samples or their mean, of each batch beside the first one, unless the
    caller says that it is a sum."""

    def __init__(self, reduction: str | None = None) -> None:
        self.first: LossPart | None = None
        self.reduction, self.mean = reduction, False

    @property
    def seen(self) -> bool | None:
        """Tells whether it is a mean; None if no batch has shown it."""
        return None if self.first is None else self.mean

    def saved(self) -> dict[str, Any] | None:
        """All that it has seen but the loss, in trees of tensors and numbers."""
        return None if self.first is None else {**vars(self.first), "loss": None, "mean": self.mean}

    def restore(self, saved: dict[str, Any] | None, loss: Any) -> None:
        """Go on from what was seen of a loss."""
        if saved is not None:
            self.mean = saved["mean"]
            self.first = LossPart(**{name: x for name, x in saved.items() if name not in ("loss", "mean")}, loss=loss)

    def of_batch(self, part: LossPart | None, n: int, scalar: bool) -> int:
        """Factor with which the loss of a batch of n samples is a sum over them; one number, if it is `scalar`."""
        if not scalar and self.reduction is not None:
            raise ArgumentError(
                f"reduction={self.reduction!r} is for a loss that is one number for its batch, but f returned the "
                "losses of the samples. Leave reduction out."
            )
        if not scalar or self.reduction is not None:
            return 1
        if part is None:
            raise unscaled(n)
        return self.of(part)

    def of(self, part: LossPart) -> int:
        """Factor with which the loss of a batch is a sum over its samples."""
        first = self.first or part
        if first.shapes != part.shapes:  # beside itself, a sum counts as a whole, but a mean as any other one
            if self.mean:
                raise _others(first, part)
            first = part
        both = first.n + part.n
        ratios = [(_seen(first, part), part.n / both), (_seen(part, first), first.n / both)]
        if self.first is None:
            self.first, self.mean = part.own(), bool(ratios[0][0] < 0.75)  # joined with itself: 1/2 or 1
        for r, share in ratios:  # that of the smaller one tells with more digits what it weighs
            wanted = share if self.mean else 1
            if not abs(float(r) - wanted) <= torch.finfo(r.dtype).eps ** 0.75 * wanted:
                raise _neither(f"counts {float(r):.4g} of itself")
        return part.n if self.mean else 1


def ratio(first: LossPart, part: LossPart) -> torch.Tensor | None:
    """The factor by which the gradient of a batch's loss changes where the first joins it; None if it is zero."""
    for shift in (0, 1):  # the loss may be at its minimum
        alone, joined = part.gradient(shift=shift), part.gradient(first, shift)
        wide = torch.promote_types(alone.dtype, torch.float32)
        if alone.any():
            r = (doubled(joined) @ doubled(alone) / doubled(alone).square().sum()).to(wide)
            off = (joined - r * alone).abs().amax() / joined.abs().amax()
            if not off <= torch.finfo(alone.dtype).eps ** 0.75:
                raise _neither("changes in another way than by a factor")
            return r.to(alone.dtype)
    return None


def _seen(first: LossPart, part: LossPart) -> torch.Tensor:
    found = ratio(first, part)
    if found is None:
        raise _neither("has no gradient")
    return found


def _others(first: LossPart, part: LossPart) -> ArgumentError:
    """The error for batches that cannot be joined."""
    a, b = first.shapes, part.shapes
    name = next(name for name in {**a, **b} if a.get(name) != b.get(name))
    return ArgumentError(
        f"the loss is a mean, and a sample has {name} of shape {a.get(name)} in the first batch, and {b.get(name)} in "
        "another one, so that the weight of each batch is not known (a mean over tokens of sequences of other "
        "lengths?). Return the [N] losses of the samples, as with reduction='none', or their sum."
    )


def _neither(why: str) -> ArgumentError:
    return ArgumentError(
        "the loss is one number, and neither the sum over the samples nor their mean: joined with another batch, it "
        f"{why}. (With ignore_index or class weights, a mean is divided by the weights of its batch.) Return the [N] "
        "losses of the samples, as with reduction='none', or their sum."
    )
