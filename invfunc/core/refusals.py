"""From what the core does not follow to the error that the caller gets: one wording for each class of error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc.budget import bytes_of, free_on, told
from invfunc.core.marks import SUMMED, Mark, Node, Run, Unsupported
from invfunc.core.uses import TableRows, Use
from invfunc.errors import ArgumentError, SampleAxisError, unreached
from invfunc.problem import BoundProblem
from invfunc.reductions import Reduction
from invfunc.reductions.reduction import Quantity

WAY_OUT = (
    "Keep them apart up to the loss, or return the [N] losses of the samples from a function that also works on a "
    "batch of one. A loss that mixes them (a contrastive one) has the products `hvp(f)` and `ggnvp(f, loss)` alone"
)


def refused_by(refusals: Sequence[Exception]) -> Exception:
    """The error of a call that no way follows, given what each of them says; the first is told, the last a note."""
    first, *others = refusals
    if not isinstance(first, Unsupported):  # of torch, as of an operation without a derivative
        return first
    at = f" at `{first.op}`" if first.op else ""
    at += f" ({first.place})" if first.place else ""
    error = SampleAxisError(f"the samples are not kept apart{at}: {first}. {WAY_OUT}.")
    for other in others[:1]:
        error.add_note(f"Nor is f right on single samples: {other}.")
    return error


def check_loss(run: Run, out: Any, name: str = "f") -> None:
    """Check that a result is a loss, with a derivative, a number or one for each sample."""
    if not isinstance(out, torch.Tensor):
        raise ArgumentError(
            f"{name} returned an object of type {type(out).__name__}, but a loss is a tensor: a scalar or [N]."
        )
    axis = _axis(run, out)
    if out.ndim and tuple(out.shape) != (run.n,):
        kind = "a model function" if type(axis) is tuple else "no loss function"
        raise ArgumentError(
            f"{name} returned shape {tuple(out.shape)} for N = {run.n}, so it looks like {kind}; wanted is a loss "
            f"function, which returns a scalar or shape ({run.n},). Compute the loss in it, or sum over its other axes."
        )
    if not out.is_floating_point():
        raise ArgumentError(f"{name} returned dtype {out.dtype}, but a loss is a floating-point tensor.")
    if not out.requires_grad:
        raise unreached()
    if isinstance(axis, Unsupported):
        if axis.params and run.criterion is not None and run.criterion.outputs:
            run.criterion.found(out, run.leaves)  # which tells of a path around the outputs
        raise axis
    if axis is None and isinstance(getattr(out, "_known", None), Node):
        raise Unsupported(
            f"the result of {name} is computed from the parameters alone, as an L2 term is, or from what f"
            " closes over: pass the samples as batch arguments"
        )
    if out.ndim and run.n > 1 and axis is SUMMED:
        raise ArgumentError(
            f"{name} returned shape ({run.n},), but each entry is a sum over the {run.n} samples; wanted is a scalar "
            "or the [N] losses of the samples."
        )
    if out.ndim and run.n > 1 and type(axis) is tuple and axis != (-1, 1, 1):
        raise ArgumentError(
            f"{name} returned shape ({run.n},), but the {run.n} samples were selected or moved; wanted is a scalar or "
            "the [N] losses of the samples, in their order."
        )
    if axis is None or (run.n > 1 and out.ndim and axis is SUMMED):
        raise Unsupported(f"no sample reaches the result of {name} in a way that was seen")


def check_outputs(run: Run, z: Any, dim: int, path: str = "") -> None:
    """Check that a result is the outputs of a model, or some of them at a path, with the samples in a dim."""
    among = f" at {path}" if path else ""
    pick = " Pick the outputs that the loss reads, as in `lambda params, x: f(params, x).logits`." if path else ""
    if not isinstance(z, torch.Tensor):
        kind = type(z).__name__
        raise ArgumentError(f"f returned no tensor but an object of {kind}; outputs are floating-point tensors.")
    axis = _axis(run, z)
    if not z.is_floating_point():
        raise ArgumentError(f"f returned a tensor of {z.dtype}{among}, but outputs are floating-point tensors.{pick}")
    squeezed = run.n == 1 and not z.ndim
    if not squeezed and (not -z.ndim <= dim < z.ndim or z.shape[dim] != run.n):
        kind = "has other outputs" if z.ndim or path else "looks like a loss function; call the transform on it alone"
        raise ArgumentError(
            f"f returned shape {tuple(z.shape)}{among} for N = {run.n}, so it {kind}; wanted is a model function, "
            f"which returns outputs with the samples along axis {dim}.{pick}"
        )
    if not z.requires_grad and not path:
        raise unreached()
    if isinstance(axis, Unsupported):
        raise axis
    if not z.requires_grad and axis is None:
        return
    if type(axis) is tuple and run.n > 1 and axis != (dim % z.ndim - z.ndim, 1, 1):
        if axis[0] == dim % z.ndim - z.ndim:
            raise ArgumentError(
                "f returned outputs whose samples were selected or moved; wanted are those of the samples, in order."
            )
        raise ArgumentError(
            f"f returned outputs with their samples along axis {axis[0] % z.ndim}, not {dim % z.ndim}; pass out_dims."
        )
    if type(axis) is not tuple:
        raise Unsupported("no sample reaches the outputs of f in a way that was seen")


def _axis(run: Run, x: torch.Tensor) -> Any:
    """The axis of a result; None of one that no sample reaches, and an error of one in which samples are mixed."""
    known = getattr(x, "_known", None)
    if type(known) is not Mark or known.run is not run.token or (x.requires_grad and not known.graph):
        return None
    return known.axis


def check_room(problem: BoundProblem, quantities: Sequence[Quantity], of: Sequence[Sequence[Use]]) -> None:
    """Refuse matrices that take more than what is free, given the uses of each parameter."""
    there = free_on(problem.leaves[0].device)
    for q in quantities:
        shapes = [matrices(q.reduction, leaf, uses) for leaf, uses in zip(problem.leaves, of, strict=True)]
        each = [bytes_of(x, leaf) for x, leaf in zip(shapes, problem.leaves, strict=True)]
        if sum(each) > there:
            i = max(range(len(each)), key=each.__getitem__)
            raise ArgumentError(
                f"its matrices take {told(sum(each))}, but {told(int(there))} are free. The largest are those of "
                f"{problem.name(i)}: {told(each[i])}, of shapes {shapes[i]}. Pass a smaller max_factor_dim=, above "
                "which factors are kept as their diagonals, or keep parameters in another argument."
            )


def matrices(reduction: Reduction, leaf: torch.Tensor, uses: Sequence[Use]) -> list[list[int]]:
    """The shapes of the matrices that are kept of a parameter: at most, as a bias may come with its weight."""
    if not uses:
        return []
    shapes = reduction.bound(leaf.shape)
    picked = shapes and all(isinstance(use, TableRows) for use in uses)  # the rows of a table have a diagonal
    return [shapes[0][:1], *shapes[1:]] if picked else shapes
