"""Weights of batches where the loss is one number for all samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.precision import doubled
from invfunc.arguments.problem import BoundProblem
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import not_scalar, unscaled
from invfunc.loss.drawn import joined


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
        with torch.enable_grad(), torch.random.fork_rng(self._devices):
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

    @property
    def _devices(self) -> list[int]:
        found = {z.device.index for z in tree.tensors((self.outputs,)) if z.device.type == "cuda"}
        return [i for i in found if i is not None]


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
            raise not_scalar(self.reduction)
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
