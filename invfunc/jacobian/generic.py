"""The generic path of one parameter at one operation: the operation again, one sample at a time, under vmap."""

from __future__ import annotations

import torch

from invfunc import tree
from invfunc.errors import SampleAxisError
from invfunc.jacobian import follow
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.contract import Term
from invfunc.jacobian.equations import LETTERS
from invfunc.jacobian.rules import Recipe, Site


def generic(site: Site, param: torch.Tensor) -> Recipe:
    """A copy of the parameter for each sample, and the vector-Jacobian product of the operation in the copies."""
    call = site.call
    axes = {id(x): axis for x, axis in _with_samples(site, param)}
    flat, structure = tree.flatten((call.args, call.kwargs))
    batched = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and id(x) in axes]

    def build(delta: torch.Tensor, part: slice) -> list[Term]:
        values = [site.value(x) if isinstance(x, torch.Tensor) else x for x in flat]
        samples = [site.exposed(flat[i], axes[id(flat[i])], part) for i in batched]

        def one(column: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
            def operation(q: torch.Tensor) -> torch.Tensor:
                operands = [q if x is param else v for x, v in zip(flat, values, strict=True)]
                for i, x in zip(batched, xs, strict=True):
                    operands[i] = x.clone()
                args, kwargs = tree.unflatten(operands, structure)
                return call.func(*args, **kwargs)

            out, pull, *_ = torch.func.vjp(operation, site.value(param))
            if out.shape != column.shape:
                raise SampleAxisError(f"`{call.name}` cannot be computed one sample at a time.")
            return pull(column.to(out.dtype))[0]

        # columns outside, samples inside: the other order gives wrong shapes for prelu (torch 2.13)
        shares = torch.vmap(lambda columns: torch.vmap(one)(columns, *samples))(delta)
        return [("VN" + LETTERS[: param.ndim], shares)]

    return Recipe(LETTERS[: param.ndim], build, reads=tuple(flat[i] for i in batched))


def _with_samples(site: Site, param: torch.Tensor) -> list[tuple[torch.Tensor, Axis]]:
    """The operands that have an entry for each sample, also constants that are paired with it entry by entry."""
    call, found = site.call, []
    for x in tree.tensors((call.args, call.kwargs)):
        axis = call.place(x)
        if axis is None and x is not param and site.axis.dim is not None and follow.find(call.name) is follow.pointwise:
            dim = site.axis.dim - call.out.ndim + x.ndim
            if 0 <= dim and x.shape[dim] == call.out.shape[site.axis.dim] > 1:
                axis = site.axis.at(dim)
        if isinstance(axis, Axis):
            found.append((x, axis))
    return found
