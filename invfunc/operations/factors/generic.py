"""The generic path of one parameter at one operation: the operation again, one sample at a time, under vmap."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from invfunc import tree
from invfunc.linear_algebra.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors import Part, Recipe, Site, axis_of
from invfunc.operations.operation import known
from invfunc.operations.pointwise import entrywise
from invfunc.operations.second_derivatives import TwiceDifferentiable

_UNBATCHED = (RuntimeError, ValueError, TypeError, IndexError)


class _Another(ValueError):
    """A sample alone has another shape than in the batch: what is beside the samples has an entry for each of them."""


def generic(site: Site, param: torch.Tensor) -> Recipe:
    """The vector-Jacobian product of the operation in a copy of the parameter for each sample."""
    again = _Again(site, param)
    labels = LETTERS[: param.ndim]

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        shares = None if again.by_place else again.alone(cotangent, part)
        shares = again.masked(cotangent, part) if shares is None else shares
        if site.axis.rows is not None:  # a sample that has none of them was given those of another
            own = torch.tensor(site.axis.owned(site.call.n), device=shares.device)[part] > 0
            shares = torch.where(own.reshape(-1, *[1] * param.ndim), shares, 0)
        return [("VN" + labels, shares)]

    reads = tuple(again.flat[i] for i in again.axes)
    return Recipe(labels, build=build, reads=reads, generic=True)


class _Again:
    """The operation at which a parameter meets samples, to be run again on some of them."""

    def __init__(self, site: Site, param: torch.Tensor) -> None:
        self.site, self.param = site, param
        self.flat, self.structure = tree.flatten((site.call.args, site.call.kwargs))
        placed = {id(x): axis for x, axis in _with_samples(site, param)}
        tensors = [(i, x) for i, x in enumerate(self.flat) if isinstance(x, torch.Tensor)]
        self.axes = {i: placed[id(x)] for i, x in tensors if id(x) in placed}
        self.by_place = _by_place(site, param, [(self.flat[i], axis) for i, axis in self.axes.items()])
        self.device = param.device.type
        casts = torch.is_autocast_enabled(self.device)
        self.low = torch.get_autocast_dtype(self.device) if casts else None

    def __call__(self, samples: dict[int, torch.Tensor], q: torch.Tensor) -> torch.Tensor:
        """The operation with q in place of the parameter, and these samples in place of all."""
        operands = [self.site.value(x) if isinstance(x, torch.Tensor) else x for x in self.flat]
        for i, x in enumerate(self.flat):
            operands[i] = q if x is self.param else samples[i].clone() if i in samples else operands[i]
        args, kwargs = tree.unflatten(operands, self.structure)
        casts = torch.autocast(self.device, self.low) if self.low is not None else nullcontext()  # as it was in the run
        with casts, TwiceDifferentiable():
            return self.site.call.func(*args, **kwargs)

    def alone(self, cotangent: torch.Tensor, part: Part) -> torch.Tensor | None:
        """The shares from each sample by itself; None where the operation does not run on it."""
        samples = [self.site.exposed(self.flat[i], axis, part, fill=None) for i, axis in self.axes.items()]

        def one(column: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
            run = partial(self, dict(zip(self.axes, xs, strict=True)))
            out, pull, *_ = torch.func.vjp(run, self.site.value(self.param))
            if out.shape != column.shape:
                raise _Another
            return pull(column.to(out.dtype))[0]

        def each(columns: torch.Tensor) -> torch.Tensor:
            if self.site.axis.dim is None:  # vmap has no rule for an index without dimensions
                return one_by_one(columns)
            return torch.vmap(one)(columns, *samples)

        def one_by_one(columns: torch.Tensor) -> torch.Tensor:
            return torch.stack([one(*sample) for sample in zip(columns, *samples, strict=True)])

        # columns outside, samples inside: the other order gives wrong shapes for prelu (torch 2.13)
        for way in (lambda: torch.vmap(each)(cotangent), lambda: torch.stack([one_by_one(c) for c in cotangent])):
            try:
                return way()
            except _Another:
                break
            except _UNBATCHED:  # no batching rule, or a wrong one
                continue
        return None

    def masked(self, cotangent: torch.Tensor, part: Part) -> torch.Tensor:
        """The shares from the whole batch, pulled back from the places of one sample after the other."""
        axis, n = self.site.axis, self.site.call.n
        whole = {i: self.site.value(self.flat[i]) for i in self.axes}
        out, pull, *_ = torch.func.vjp(lambda q: axis.expose(self(whole, q), n)[part], self.site.value(self.param))
        own = torch.eye(len(out), dtype=out.dtype, device=out.device).reshape(
            len(out), *out.shape[:1], *[1] * (out.ndim - 1)
        )
        return torch.stack([torch.stack([pull(sent.to(out.dtype) * e)[0] for e in own]) for sent in cotangent])


def _with_samples(site: Site, param: torch.Tensor) -> list[tuple[torch.Tensor, Axis]]:
    """The operands that have an entry for each sample, also constants that are paired with it entry by entry."""
    call, dim = site.call, site.axis.dim
    operands = [x for x in tree.tensors((call.args, call.kwargs)) if x is not param]
    found = [(x, axis) for x in operands if isinstance(axis := call.place(x), Axis)]
    paired = _paired(call)
    if dim is None or paired is None:
        return found
    labels, inputs = paired
    constants = [(x, own) for own, x in inputs if x is not param and call.place(x) is None]
    return found + [(x, axis) for x, i in constants if (axis := axis_of(site, x, i, labels[dim])) is not None]


def _paired(call: Call) -> tuple[str, list[tuple[str, torch.Tensor]]] | None:
    """The labels of the output and of the operands, where the operation is known to pair entries of the same label."""
    operands = tree.tensors((call.args, call.kwargs))
    if entrywise(call.name):
        labels = LETTERS[: call.out.ndim]
        return labels, [(labels[len(labels) - x.ndim :], x) for x in operands]
    parsed = call.equation
    return None if parsed is None else (parsed.output, list(zip(parsed.inputs, parsed.operands, strict=True)))


def _by_place(site: Site, param: torch.Tensor, samples: list[tuple[torch.Tensor, Axis]]) -> bool:
    """Whether the operation may combine a sample with an entry of what is not of samples, by its place in the batch."""
    call, dim = site.call, site.axis.dim
    if known(call.name).counts:
        return True
    if dim is None or call.n == 1 or _paired(call) is not None:
        return False
    lengths = {call.out.shape[dim], *(x.shape[axis.dim] for x, axis in samples if axis.dim is not None)}
    others = [x for x in tree.tensors((call.args, call.kwargs)) if all(x is not y for y, _ in samples)]
    return any(not lengths.isdisjoint(x.shape) for x in others if x is not param or not known(call.name).rows_only)
