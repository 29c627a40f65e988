"""The generic path of one parameter at one operation: the operation again, one sample at a time, under vmap."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from invfunc import tree
from invfunc.contract import Term
from invfunc.errors import SampleAxisError
from invfunc.operations import batch_axis
from invfunc.operations.axis import Axis
from invfunc.operations.equations import LETTERS, equation
from invfunc.operations.factors import Part, Recipe, Site, axis_of
from invfunc.operations.second_derivatives import TwiceDifferentiable

_UNBATCHED = (RuntimeError, ValueError, TypeError, IndexError)


def generic(site: Site, param: torch.Tensor) -> Recipe:
    """A copy of the parameter for each sample, and the vector-Jacobian product of the operation in the copies."""
    call = site.call
    axes = {id(x): axis for x, axis in _with_samples(site, param)}
    flat, structure = tree.flatten((call.args, call.kwargs))
    batched = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and id(x) in axes]
    device = param.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        values = [site.value(x) if isinstance(x, torch.Tensor) else x for x in flat]
        samples = [site.exposed(flat[i], axes[id(flat[i])], part, fill=None) for i in batched]

        def one(column: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
            def operation(q: torch.Tensor) -> torch.Tensor:
                operands = [q if x is param else v for x, v in zip(flat, values, strict=True)]
                for i, x in zip(batched, xs, strict=True):
                    operands[i] = x.clone()
                args, kwargs = tree.unflatten(operands, structure)
                casts = torch.autocast(device, low) if low is not None else nullcontext()  # as it was in the run
                with casts, TwiceDifferentiable():
                    return call.func(*args, **kwargs)

            out, pull, *_ = torch.func.vjp(operation, site.value(param))
            if out.shape != column.shape:
                raise SampleAxisError(f"`{call.name}` cannot be computed one sample at a time.")
            return pull(column.to(out.dtype))[0]

        def each(columns: torch.Tensor) -> torch.Tensor:
            if site.axis.dim is None:  # vmap has no rule for an index without dimensions
                return one_by_one(columns)
            return torch.vmap(one)(columns, *samples)

        def one_by_one(columns: torch.Tensor) -> torch.Tensor:
            return torch.stack([one(*each) for each in zip(columns, *samples, strict=True)])

        # columns outside, samples inside: the other order gives wrong shapes for prelu (torch 2.13)
        try:
            shares = torch.vmap(each)(cotangent)
        except _UNBATCHED:  # no batching rule, or a wrong one
            try:
                shares = torch.stack([one_by_one(columns) for columns in cotangent])
            except _UNBATCHED as error:
                if isinstance(error, SampleAxisError):
                    raise
                raise SampleAxisError(f"`{call.name}` cannot be computed one sample at a time.") from error
        if site.axis.rows is not None:  # a sample that has none of them was given those of another
            own = torch.tensor(site.axis.owned(call.n), device=shares.device)[part] > 0
            shares = torch.where(own.reshape(-1, *[1] * param.ndim), shares, 0)
        return [("VN" + LETTERS[: param.ndim], shares)]

    return Recipe(
        LETTERS[: param.ndim], build, reads=tuple(flat[i] for i in batched), joins=False, linear=False, generic=True
    )


def _with_samples(site: Site, param: torch.Tensor) -> list[tuple[torch.Tensor, Axis]]:
    """The operands that have an entry for each sample, also constants that are paired with it entry by entry."""
    call, dim = site.call, site.axis.dim
    operands = [x for x in tree.tensors((call.args, call.kwargs)) if x is not param]
    found = [(x, axis) for x in operands if isinstance(axis := call.place(x), Axis)]
    if dim is None:
        return found
    parsed = equation(call.name, call.args, call.kwargs)
    if batch_axis.find(call.name) is batch_axis.pointwise:
        labels = LETTERS[: call.out.ndim]
        paired = [(labels[len(labels) - x.ndim :], x) for x in operands]
    elif parsed is not None:
        labels, paired = parsed.output, list(zip(parsed.inputs, parsed.operands, strict=True))
    else:
        return found
    constants = [(x, inputs) for inputs, x in paired if x is not param and call.place(x) is None]
    return found + [(x, axis) for x, i in constants if (axis := axis_of(site, x, i, labels[dim])) is not None]
