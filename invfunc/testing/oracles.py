"""Oracles of the statistics: the plain loops of their docstrings, and whole matrices.

They are slow, and simple enough to be believed. All are made of one loop, which pulls one vector back at a time; they
are differentiable where an argument requires grad, so that they are the oracles of derivatives too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.reductions.estimates import NoiseScale

Samples = Any
"""None for all, or the indices of the samples whose shares count, as a list or a tensor."""
Tensors = list[torch.Tensor]
Vector = Sequence[torch.Tensor | None]
"""A tensor for each parameter; None stands for zeros."""


class Loop:
    """The derivatives of one run of f from parameters to `z`, its outputs or losses, and those of a loss of z.

    Each is a backward pass of torch.autograd for one vector. A Jacobian times a vector is the derivative of
    `u -> J^T u`, a Hessian times a vector that of a gradient.
    """

    def __init__(
        self,
        leaves: Tensors,
        z: Tensors,
        loss: torch.Tensor | None = None,
        n: int | None = None,
        dim: int = 0,
        *,
        deep: bool = False,
        by_columns: bool = False,
        back: Callable[[torch.device], AbstractContextManager] = nullcontext,
    ) -> None:
        """`loss` is None where z are losses themselves. Samples, of which there are n if that is known, are along an
        axis of z. With `deep`, all can be differentiated. With `by_columns`, the whole Jacobian is made of columns: of
        an f that can be differentiated twice, for few parameters; NaN of a sample then is that of no other. Backward
        passes run in the context `back(device)`."""
        self.leaves, self.z, self.loss, self.dim = leaves, z, loss, dim
        self.deep, self.by_columns, self.context = deep, by_columns, back
        sizes = {x.shape[dim] if -x.ndim <= dim < x.ndim else None for x in z}
        self.apart = len(sizes) == 1 and (None not in sizes if n is None else n in sizes)
        self.n: int = z[0].shape[dim] if self.apart else 1
        """The number of samples that z tells apart."""

    def pulled(self, ys: Sequence[torch.Tensor], xs: Tensors, cotangents: Vector, again: bool = False) -> Tensors:
        """A vector-Jacobian product; with `again`, it is differentiated further."""
        pairs = [(y, c.to(y)) for y, c in zip(ys, cotangents, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in xs]
        y, c = zip(*pairs, strict=True)
        options = {"retain_graph": True, "create_graph": again or self.deep, "materialize_grads": True}
        with self.context(xs[0].device):
            return list(torch.autograd.grad(y, xs, c, **options))

    @cached_property
    def slope(self) -> Tensors:
        """The gradient of the loss in z."""
        ones = [torch.ones_like(x) for x in (self.z if self.loss is None else [self.loss])]
        return ones if self.loss is None else self.pulled([self.loss], self.z, ones, again=True)

    @cached_property
    def dummies(self) -> Tensors:
        """Cotangents u of z."""
        return [torch.ones_like(x).requires_grad_() for x in self.z]

    @cached_property
    def rows(self) -> Tensors:
        """`J^T u`, to be differentiated in u and in the parameters."""
        return self.pulled(self.z, self.leaves, self.dummies, again=True)

    def forth(self, v: Vector) -> Tensors:
        """`J v`"""
        return self.pulled(self.rows, self.dummies, v)

    def back(self, cotangents: Tensors) -> Tensors:
        """`J^T c`"""
        return self.pulled(self.z, self.leaves, cotangents)

    def bent(self, t: Tensors) -> Tensors:
        """`H t`, with the Hessian of the loss in z."""
        return self.pulled(self.slope, self.z, t)

    def weighed(self, weights: torch.Tensor) -> Tensors:
        """The gradient of the loss in z times a weight for each sample."""
        if not self.apart:
            return [weights.to(c) * c for c in self.slope]
        return [(weights.to(c) * c.movedim(self.dim, -1)).movedim(-1, self.dim) for c in self.slope]

    def share(self, n: int) -> Tensors:
        """The gradient `G[n]` of a sample."""
        return self.back(self.weighed(F.one_hot(torch.tensor(n), self.n)))

    def jacobian(self, ys: Tensors) -> Tensors:
        """The Jacobian of numbers that the run has computed, row by row: `[numbers, *p]` for each parameter."""
        rows = [self.pulled([y], self.leaves, [torch.ones_like(y)]) for z in ys for y in z.flatten()]
        empty = [x.new_zeros(0, *x.shape) for x in self.leaves]
        return [torch.stack(found) for found in zip(*rows, strict=True)] if rows else empty

    def unit(self, leaf: int, place: int) -> Vector:
        """The vector with a one at an entry of a parameter."""
        one = torch.zeros_like(self.leaves[leaf], memory_format=torch.contiguous_format)
        one.view(-1)[place] = 1
        return [one if i == leaf else None for i in range(len(self.leaves))]

    @property
    def entries(self) -> list[tuple[int, int]]:
        """The entries of the parameters, as the number of the parameter and a place in it."""
        return [(i, k) for i, x in enumerate(self.leaves) for k in range(x.numel())]

    def columns(self) -> Iterator[Tensors]:
        """`J e` for each entry of the parameters."""
        if self.by_columns:
            yield from (self.forth(self.unit(*entry)) for entry in self.entries)
            return
        sizes = [x.numel() for x in self.z]
        whole = torch.cat([j[:, None].flatten(1) for j in self.jacobian(self.z)], 1)
        for column in whole.T:
            yield [c.view(x.shape) for c, x in zip(column.split(sizes), self.z, strict=True)]

    def paired(self, a: Tensors, b: Tensors) -> torch.Tensor:
        """The inner products of what each sample has at z, `[N]`, in float64."""
        return torch.stack([(self._flat(x) * self._flat(y)).sum(1) for x, y in zip(a, b, strict=True)]).sum(0)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(self.dim, 0) if self.apart else x[None]
        return x[:, None].flatten(1).cpu().double()

    def shares(self) -> torch.Tensor:
        """The gradients of the samples, `[N, entries]`."""
        return self._of_entries(self.paired(t, self.slope) for t in self.columns())

    def ggn(self) -> torch.Tensor:
        """The diagonals of `J[n]^T H[n] J[n]`, `[N, entries]`."""
        return self._of_entries(self.paired(t, self.bent(t)) for t in self.columns())

    def hessian(self) -> torch.Tensor:
        """The diagonals of the Hessians of the losses of the samples, `[N, entries]`; of a loss as a function of the
        outputs of one sample, while the others stay what they are."""
        found = self._of_entries(self.paired(self._curved(*entry), self.slope) for entry in self.entries)
        return found if self.loss is None else found + self.ggn()

    def _curved(self, leaf: int, place: int) -> Tensors:
        """The second derivative of z along an entry."""
        slope = self.rows[leaf].flatten()[place]
        (twice,) = self.pulled([slope], self.leaves[leaf : leaf + 1], [torch.ones_like(slope)], again=True)
        return self.pulled([twice.flatten()[place]], self.dummies, [torch.ones(())])

    def _of_entries(self, found: Iterator[torch.Tensor]) -> torch.Tensor:
        rows = list(found)
        return torch.stack(rows, 1) if rows else torch.zeros(self.n, 0, dtype=torch.float64)

    def each(self, found: torch.Tensor) -> Tensors:
        """Numbers `[*lead, entries]`, as `[*lead, *p]` of each parameter."""
        parts = found.split([x.numel() for x in self.leaves], -1)
        return [part.reshape((*part.shape[:-1], *x.shape)).to(x) for part, x in zip(parts, self.leaves, strict=True)]


def loop_of(
    f: Callable,
    loss: Callable | None,
    params: Any,
    batch: tuple,
    kwargs: Any = None,
    at: list[torch.Tensor] | None = None,
) -> tuple[Loop, Any, Any]:
    """The loop of `f(params, *batch)`, or with a loss of `f(params, *inputs)` and its target, in all parameters or at
    some entries of each; the form of what is like the parameters, and that of z."""
    leaves, form = tree.separate(params)
    deep = torch.is_grad_enabled() and any(x.requires_grad for x in tree.tensors((params, batch, kwargs)))
    # a view of its own for each leaf: one leaf may have been computed from another
    leaves = [x.view_as(x) if deep and x.requires_grad else x.detach().requires_grad_() for x in leaves]
    leaves, moved = (leaves, leaves) if at is None else at_entries(leaves, at)
    with torch.enable_grad():
        found = f(form.join(moved), *(batch if loss is None else batch[:-1]), **(kwargs or {}))
        z, of = tree.separate(found)
        z = [x.view_as(x) for x in z]  # one output may have been computed from another
        value = None if loss is None else loss(of.join(z), batch[-1]).sum()
    return Loop(leaves, z, value, deep=deep), form, of


def at_entries(params: Tensors, places: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Zeros `[k]` for each parameter, and the parameters with these added at k places, so that derivatives in the zeros
    are those in these entries."""
    moves = [p.new_zeros(len(at)).requires_grad_() for p, at in zip(params, places, strict=True)]
    with torch.enable_grad():
        full = [
            p.new_zeros(p.numel()).index_put((at.to(p.device),), move).view(p.shape)
            for p, at, move in zip(params, places, moves, strict=True)
        ]
        return moves, [p.detach() + x for p, x in zip(params, full, strict=True)]


def loop_batch_grad(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `batch_grad` for an `[N]`-valued f: entry by entry, `torch.autograd.grad(f(params, *batch)[n])`."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        loop, form, _ = loop_of(f, None, params, batch, kwargs)
        rows = [loop.share(n) for n in chosen(torch.arange(loop.n), samples).tolist()]
        empty = [x.new_zeros(0, *x.shape) for x in loop.leaves]
        return form.join([torch.stack(shares) for shares in zip(*rows, strict=True)] if rows else empty)

    return oracle


def chosen(x: torch.Tensor, samples: Samples) -> torch.Tensor:
    """The samples along axis 0 that count."""
    return x if samples is None else x[samples]


def of_shares(of: Callable, f: Callable, samples: Samples = None) -> Callable:
    """The oracle of a function of the per-sample gradients of an `[N]`-valued f, a tree of `[N, *p]`."""
    shares = loop_batch_grad(f, samples=samples)
    return lambda *args, **kwargs: of(shares(*args, **kwargs))


def loop_batch_l2_grad(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `batch_l2_grad` for an `[N]`-valued f."""
    return of_shares(norms, f, samples)


def norms(shares: Any) -> Any:
    """`|G[n]|^2` of each parameter."""
    return tree.map_tensors(lambda g: g.reshape(len(g), -1).square().sum(1), shares)


def loop_sum_grad_squared(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `sum_grad_squared` for an `[N]`-valued f."""
    return of_shares(squares, f, samples)


def squares(shares: Any) -> Any:
    """`sum_n G[n]^2`"""
    return tree.map_tensors(lambda g: g.square().sum(0), shares)


def loop_variance(f: Callable, correction: float = 0, *, samples: Samples = None) -> Callable:
    """The oracle of `variance` for an `[N]`-valued f."""
    return of_shares(lambda shares: variances(shares, correction), f, samples)


def variances(shares: Any, correction: float = 0) -> Any:
    """The variance of the `G[n]`."""
    return tree.map_tensors(lambda g: g.var(0, correction=correction), shares)


def loop_grad_and_variance(f: Callable, *, correction: float = 0, samples: Samples = None) -> Callable:
    """The oracle of `grad_and_variance` for an `[N]`-valued f: the sum and the variance of the G[n]."""
    return of_shares(lambda shares: (summed(shares), variances(shares, correction)), f, samples)


def summed(shares: Any) -> Any:
    """The sum over the samples."""
    return tree.map_tensors(lambda g: g.sum(0), shares)


def loop_clipped_grad(
    f: Callable,
    max_norm: float,
    *,
    groups: Callable | None = None,
    weight: Callable | None = None,
    samples: Samples = None,
) -> Callable:
    """The oracle of `clipped_grad` for an `[N]`-valued f: `min(1, max_norm / norm) * G[n]`, sample by sample."""
    return of_shares(lambda shares: clipped(shares, max_norm, groups, weight), f, samples)


def clipped(
    shares: Any, max_norm: float, groups: Callable | None = None, weight: Callable | None = None
) -> tuple[Any, Any]:
    """The sum of per-sample gradients, clipped in groups of parameters or by a weight of their norms, and the norms."""
    leaves, form = tree.separate(shares)
    names = ["" if groups is None else groups(path) for path, g in tree.named_leaves(shares) if g is not None]
    rows, norms = [], {name: [] for name in names}
    for one in zip(*leaves, strict=True):
        factors = {}
        for name in norms:
            own = [g.flatten() for g, group in zip(one, names, strict=True) if group == name]
            squared = torch.cat(own).square().sum()
            norm = 0 * squared if squared == 0 else squared.sqrt()  # the slope of a norm at zero is taken to be zero
            factor = max_norm / norm if norm > max_norm else 1
            factors[name] = factor if weight is None else weight(norm, max_norm)
            norms[name].append(norm)
        rows.append([factors[name] * g for name, g in zip(names, one, strict=True)])
    found = {name: torch.stack(each) for name, each in norms.items()}
    summed = form.join([torch.stack(leaf).sum(0) for leaf in zip(*rows, strict=True)])
    return summed, found[""] if groups is None else found


def loop_noise_scale(f: Callable, groups: Callable | None = None, *, samples: Samples = None) -> Callable:
    """The oracle of `noise_scale` for an `[N]`-valued f: the sum of the per-sample gradients, and of the parameters of
    each group their mean and covariance, as they are defined."""
    return of_shares(lambda shares: (summed(shares), noise_of(shares, groups)), f, samples)


def noise_of(shares: Any, groups: Callable | None = None) -> Any:
    """The noise scales of shares `[N, *p]`."""
    rows: dict[str | None, list[torch.Tensor]] = {}
    for path, g in tree.named_leaves(shares):
        if g is not None:
            rows.setdefault("" if groups is None else groups(path), []).append(g.reshape(len(g), -1))
    found = {}
    for name, parts in rows.items():
        g = torch.cat(parts, 1)
        n, mean = len(g), g.mean(0)
        trace = (g - mean).square().sum() / (n - 1)
        found[name] = NoiseScale(mean.square().sum() - trace / n, trace)
    found.pop(None, None)
    return found[""] if groups is None else found


def projected(shares: Any, sides: Callable) -> Any:
    """Shares `[N, *p]`, taken as `[N, O, I]`, between `sides(i, p)` of leaf i: `[O, rows]` and `[I, columns]`."""
    leaves, form = tree.separate(shares)
    found = []
    for i, g in enumerate(leaves):
        first, rest = (x.to(g) for x in sides(i, g.new_zeros(g.shape[1:])))
        found.append((first.T @ g.reshape(len(g), len(first), len(rest)) @ rest).reshape(len(g), -1))
    return form.join(found)


def loop_batch_jacobian(f: Callable, *, out_dims: int = 0, samples: Samples = None) -> Callable:
    """The oracle of `batch_jacobian`: entry by entry, `torch.autograd.grad(f(params, *inputs)[n, c])`."""

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        loop, form, of = loop_of(f, None, params, inputs, kwargs)
        found = []
        for z in loop.z:
            z = chosen(z.movedim(out_dims, 0), samples)
            found.append(form.join([j.reshape(*z.shape, *j.shape[1:]) for j in loop.jacobian([z])]))
        return of.join(found)

    return oracle


def loop_gram(
    f: Callable,
    *,
    others: tuple | None = None,
    per_parameter: bool = False,
    out_dims: int = 0,
    samples: Samples = None,
) -> Callable:
    """The oracle of `gram`: the inner products of all rows of `batch_jacobian`, row by row.

    For an `[N]`-valued loss function the rows are the per-sample gradients; for a model function it is the empirical
    NTK. `others` are all arguments behind the parameters in a call of f on another batch, whose rows are the second
    factors then.
    """

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        leaves, form = tree.separate(params)
        each = tree.tensors(loop_batch_jacobian(f, out_dims=out_dims, samples=samples)(params, *inputs, **kwargs))
        beside = each
        if others is not None:
            beside = tree.tensors(loop_batch_jacobian(f, out_dims=out_dims)(params, *others, **kwargs))
        grams = []
        for j, k, p in zip(each, beside, leaves, strict=True):
            shapes = [x.shape[: x.ndim - p.ndim] for x in (j, k)]
            rows, columns = (x.reshape(shape.numel(), p.numel()) for x, shape in zip((j, k), shapes, strict=True))
            products = torch.stack([columns @ row for row in rows]) if len(rows) else rows @ columns.T
            grams.append(products.reshape(*shapes[0], *shapes[1]))
        return form.join(grams) if per_parameter else sum(grams)

    return oracle


def dense_diag_ggn(f: Callable, loss: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `diag_ggn(f, loss)`: the diagonal of `J^T H J` with the whole J and H of the batch, row by row.

    With `samples`, the rows of a sample count as often as it is named (outputs with their samples along axis 0).
    """

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        loop, form, _ = loop_of(f, loss, params, batch, kwargs)
        return form.join(loop.each(chosen(loop.ggn(), samples).sum(0)))

    return oracle


def assert_trees_close(actual: Any, expected: Any, rtol: float, floor: float = 0.0) -> None:
    """Assert equal structure and shapes, and no entry further off than `rtol` times the largest one of its tensor.

    Args:
        actual, expected: pytrees of tensors.
        rtol: the tolerance.
        floor: a largest entry below this counts as this: the size of what cancels in a tensor that may be zero.

    Raises:
        AssertionError: it names the tensor, the error and the tolerance.
    """
    structure, (wanted, layout) = tree.flatten(actual)[1], tree.flatten(expected)
    assert structure == layout, f"{structure} is not {layout}"
    for (path, x), y in zip(tree.named_leaves(actual), wanted, strict=True):
        if not isinstance(x, torch.Tensor):
            assert type(x) is type(y) and x == y, f"the entry {path} is {x!r}, not {y!r}"
            continue
        x, y = x.detach().double().cpu(), y.detach().double().cpu()
        largest = y.abs().nan_to_num(0, 0, 0).max().item() if y.numel() else 0.0
        where, atol = f"the tensor {path}".strip(), rtol * max(largest, floor)
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda told, where=where: f"{where}: {told}")


def dense_diag_hessian(f: Callable, loss: Callable | None = None) -> Callable:
    """The oracle of `diag_hessian`: the diagonal of each parameter's block of the whole Hessian, entry by entry."""

    def value(params: Any, *batch: Any, **kwargs: Any) -> torch.Tensor:
        found = f(params, *batch, **kwargs) if loss is None else loss(f(params, *batch[:-1], **kwargs), batch[-1])
        return found.sum().reshape(1)

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        loop, form, _ = loop_of(value, None, params, batch, kwargs)
        return form.join(loop.each(loop.hessian()[0]))

    return oracle


def dense_batch_diag_hessian(f: Callable, loss: Callable | None = None) -> Callable:
    """The oracle of `diag_hessian(per_sample=True)`: of an `[N]`-valued f its entries, of a model function with
    its loss the loss as a function of the outputs of one sample, while the outputs of the others stay what they are."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        loop, form, _ = loop_of(f, loss, params, batch, kwargs)
        return form.join(loop.each(loop.hessian()))

    return oracle


def dense_ggn(f: Callable, loss: Callable) -> Callable:
    """The generalised Gauss-Newton matrix `J^T H J` of each parameter, `[P, P]` for P numbers in it."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        loop, form, _ = loop_of(f, loss, params, batch, kwargs)
        columns = [
            (torch.cat([x.flatten() for x in t]), torch.cat([x.flatten() for x in loop.bent(t)]))
            for t in loop.columns()
        ]
        j, bent = (torch.stack(x) for x in zip(*columns, strict=True))
        sizes = [x.numel() for x in loop.leaves]
        return form.join([a @ b.T for a, b in zip(j.split(sizes), bent.split(sizes), strict=True)])

    return oracle
