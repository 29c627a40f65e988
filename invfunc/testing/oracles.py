"""Oracles of the statistics: the plain loops of their docstrings, whole matrices, and Kronecker factors by hooks.

They are slow, and simple enough to be believed; loops and dense matrices are differentiable where an argument requires
grad, so that they are the oracles of derivatives too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, jacrev

from invfunc import tree
from invfunc.reductions.estimates import NoiseScale

Samples = Any
"""None for all, or the indices of the samples whose shares count, as a list or a tensor."""


def loop_batch_grad(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `batch_grad` for an `[N]`-valued f: entry by entry, `torch.autograd.grad(f(params, *batch)[n])`."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        run = _Run(f, params, batch, kwargs)
        rows = zip(*(run.grad(loss) for loss in run.result), strict=True)
        return run.like_params([_chosen(torch.stack(shares), samples) for shares in rows])

    return oracle


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
        run = _Run(f, params, inputs, kwargs)

        def jacobian(z: torch.Tensor) -> Any:
            z = z.movedim(out_dims, 0)
            rows = [j.reshape(*z.shape, *p.shape) for j, p in zip(run.jacobian([z]), run.leaves, strict=True)]
            return run.like_params([_chosen(j, samples) for j in rows])

        return tree.map_tensors(jacobian, run.result)

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

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        *given, target = inputs
        model = _Run(f, params, tuple(given), kwargs)
        z = model.result if model.deep else tree.map_tensors(torch.detach, model.result)
        outer = _Run(lambda z, target: loss(z, target), z, (target,), {})
        slope = torch.autograd.grad(outer.result.sum(), outer.leaves, create_graph=True, materialize_grads=True)
        hessian = torch.cat(outer.jacobian(slope), 1)
        if samples is not None:
            n = len(slope[0])
            counts = torch.bincount(torch.arange(n)[samples], minlength=n).to(hessian)
            hessian = hessian * torch.cat([counts.repeat_interleave(h[0].numel()) for h in slope])
        diagonals = [torch.einsum("ap,ab,bp->p", j, hessian, j) for j in model.jacobian(tree.leaves(model.result))]
        return model.like_params([d.reshape(p.shape) for d, p in zip(diagonals, model.leaves, strict=True)])

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


class _Run:
    """One call of f, to be differentiated in its parameters; `deep` if what is found is to be differentiated again."""

    def __init__(self, f: Callable, params: Any, batch: tuple, kwargs: dict[str, Any]) -> None:
        leaves, self.form = tree.separate(params)
        given = tree.tensors((params, batch, kwargs))
        self.deep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        # a view of its own for each leaf: one leaf may have been computed from another
        self.leaves = [x.view_as(x) if self.deep and x.requires_grad else x.detach().requires_grad_() for x in leaves]
        with torch.enable_grad():
            self.result = f(self.like_params(self.leaves), *batch, **kwargs)

    def like_params(self, leaves: list[torch.Tensor]) -> Any:
        return self.form.join(leaves)

    def grad(self, y: torch.Tensor) -> Any:
        if not y.requires_grad:
            return [torch.zeros_like(x) for x in self.leaves]
        return torch.autograd.grad(y, self.leaves, retain_graph=True, create_graph=self.deep, materialize_grads=True)

    def jacobian(self, outputs: Any) -> list[torch.Tensor]:
        """The Jacobian in each parameter, `[numbers in the outputs, numbers in the parameter]`."""
        rows = [self.grad(y) for z in outputs for y in z.flatten()]
        empty = [x.new_zeros(0, x.numel()) for x in self.leaves]
        return [torch.stack([g.flatten() for g in found]) for found in zip(*rows, strict=True)] if rows else empty


def _chosen(shares: torch.Tensor, samples: Samples) -> torch.Tensor:
    return shares if samples is None else shares[samples]


def dense_diag_hessian(f: Callable, loss: Callable | None = None) -> Callable:
    """The oracle of `diag_hessian`: the diagonal of each parameter's block of the whole Hessian, row by row."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        def value(p: Any) -> torch.Tensor:
            return (f(p, *batch, **kwargs) if loss is None else loss(f(p, *batch[:-1], **kwargs), batch[-1])).sum()

        return _diagonals(value, params)

    return oracle


def dense_batch_diag_hessian(f: Callable, loss: Callable | None = None) -> Callable:
    """The oracle of `diag_hessian(per_sample=True)`: of an `[N]`-valued f its entries, of a model function with
    its loss the loss as a function of the outputs of one sample, while the outputs of the others stay what they are."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        def part(p: Any, n: int) -> torch.Tensor:
            if loss is None:
                return f(p, *batch, **kwargs)[n]
            return loss(tree.map_tensors(lambda z: _only(z, n), f(p, *batch[:-1], **kwargs)), batch[-1]).sum()

        count = len(tree.tensors(f(params, *batch[: None if loss is None else -1], **kwargs))[0])
        each = [_diagonals(lambda p, n=n: part(p, n), params) for n in range(count)]
        return tree.map_leaves(lambda *leaves: torch.stack(leaves), *each)

    return oracle


def dense_ggn(f: Callable, loss: Callable) -> Callable:
    """The generalised Gauss-Newton matrix `J^T H J` of each parameter, `[P, P]` for P numbers in it."""

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        *given, target = inputs
        parts, structure = tree.flatten(f(params, *given, **kwargs))

        def outputs(p: Any) -> torch.Tensor:
            return torch.cat([z.flatten() for z in tree.leaves(f(p, *given, **kwargs))])

        def value(flat: torch.Tensor) -> torch.Tensor:
            pieces = flat.split([z.numel() for z in parts])
            shaped = [x.view(z.shape) for x, z in zip(pieces, parts, strict=True)]
            return loss(tree.unflatten(shaped, structure), target).sum()

        hessian = jacrev(grad(value), chunk_size=1)(outputs(params))
        rows = tree.map_leaves(lambda j: j.reshape(len(hessian), -1), jacrev(outputs, chunk_size=1)(params))
        return tree.map_leaves(lambda j: j.T @ hessian @ j, rows)

    return oracle


def _diagonals(value: Callable, params: Any) -> Any:
    leaves, structure = tree.flatten(params)

    def of_one(i: int) -> torch.Tensor:
        slope = grad(lambda x: value(tree.unflatten([*leaves[:i], x, *leaves[i + 1 :]], structure)))
        size = leaves[i].numel()
        return jacrev(slope, chunk_size=1)(leaves[i]).reshape(size, size).diagonal().reshape(leaves[i].shape)

    return tree.unflatten([of_one(i) for i in range(len(leaves))], structure)


def _only(z: torch.Tensor, n: int) -> torch.Tensor:
    """The outputs with those of all samples but one as constants."""
    own = torch.arange(len(z), device=z.device).reshape(-1, *[1] * (z.ndim - 1)) == n
    return torch.where(own, z, z.detach())
