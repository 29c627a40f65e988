"""Oracles of the statistics: the plain loops of their docstrings, whole matrices, and Kronecker factors by hooks.

They are slow, and simple enough to be believed; loops and dense matrices are differentiable where an argument requires
grad, so that they are the oracles of derivatives too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.reductions.noise import NoiseScale

Samples = Any
"""None for all, or the indices of the samples whose shares count, as a list or a tensor."""


def loop_batch_grad(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `batch_grad` for an `[N]`-valued f: entry by entry, `torch.autograd.grad(f(params, *batch)[n])`."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        run = _Run(f, params, batch, kwargs)
        rows = zip(*(run.grad(loss) for loss in run.result), strict=True)
        return run.like_params([_chosen(torch.stack(shares), samples) for shares in rows])

    return oracle


def loop_batch_l2_grad(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `batch_l2_grad` for an `[N]`-valued f."""
    shares = loop_batch_grad(f, samples=samples)
    return lambda *args, **kwargs: tree.map_tensors(_squared_norms, shares(*args, **kwargs))


def loop_sum_grad_squared(f: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `sum_grad_squared` for an `[N]`-valued f."""
    shares = loop_batch_grad(f, samples=samples)
    return lambda *args, **kwargs: tree.map_tensors(lambda g: g.square().sum(0), shares(*args, **kwargs))


def loop_variance(f: Callable, correction: float = 0, *, samples: Samples = None) -> Callable:
    """The oracle of `variance` for an `[N]`-valued f."""
    shares = loop_batch_grad(f, samples=samples)
    return lambda *args, **kwargs: tree.map_tensors(lambda g: g.var(0, correction=correction), shares(*args, **kwargs))


def loop_grad_and_variance(f: Callable, *, correction: float = 0, samples: Samples = None) -> Callable:
    """The oracle of `grad_and_variance` for an `[N]`-valued f: the sum and the variance of the G[n]."""
    shares = loop_batch_grad(f, samples=samples)

    def oracle(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = shares(*args, **kwargs)
        summed = tree.map_tensors(lambda g: g.sum(0), given)
        return summed, tree.map_tensors(lambda g: g.var(0, correction=correction), given)

    return oracle


def loop_clipped_grad(
    f: Callable,
    max_norm: float,
    *,
    groups: Callable | None = None,
    weight: Callable | None = None,
    samples: Samples = None,
) -> Callable:
    """The oracle of `clipped_grad` for an `[N]`-valued f: `min(1, max_norm / norm) * G[n]`, sample by sample."""
    shares = loop_batch_grad(f, samples=samples)

    def oracle(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = shares(*args, **kwargs)
        leaves, form = tree.separate(given)
        names = ["" if groups is None else groups(path) for path, g in tree.named_leaves(given) if g is not None]
        clipped, norms = [], {name: [] for name in names}
        for one in zip(*leaves, strict=True):
            factors = {}
            for name in norms:
                own = [g.flatten() for g, group in zip(one, names, strict=True) if group == name]
                squared = torch.cat(own).square().sum()
                norm = squared.sqrt() if squared > 0 else 0 * squared  # the slope of a norm at zero is taken to be zero
                factor = max_norm / norm if norm > max_norm else 1
                factors[name] = factor if weight is None else weight(norm, max_norm)
                norms[name].append(norm)
            clipped.append([factors[name] * g for name, g in zip(names, one, strict=True)])
        summed = form.join([torch.stack(leaf).sum(0) for leaf in zip(*clipped, strict=True)])
        found = {name: torch.stack(each) for name, each in norms.items()}
        return summed, found[""] if groups is None else found

    return oracle


def loop_noise_scale(f: Callable, groups: Callable | None = None, *, samples: Samples = None) -> Callable:
    """The oracle of `noise_scale` for an `[N]`-valued f: the sum of the per-sample gradients, and of the parameters of
    each group their mean and covariance, as they are defined."""
    shares = loop_batch_grad(f, samples=samples)

    def oracle(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = shares(*args, **kwargs)
        return tree.map_tensors(lambda g: g.sum(0), given), noise_of(given, groups)

    return oracle


def noise_of(shares: Any, groups: Callable | None = None) -> Any:
    """The result of `noise_scale` for shares `[N, *p]`."""
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


def loop_sketched_grad(f: Callable, sides: Callable, *, samples: Samples = None) -> Callable:
    """The oracle of `sketched_grad` for an `[N]`-valued f: each share, which is there, between the two matrices of its
    leaf, as in `projected`."""
    shares = loop_batch_grad(f, samples=samples)
    return lambda *args, **kwargs: projected(shares(*args, **kwargs), sides)


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


def loop_predictive_covariance(
    f: Callable, covariance: float | list[torch.Tensor], *, out_dims: int = 0, samples: Samples = None
) -> Callable:
    """The oracle of `predictive_covariance`: `J S J^T` of each sample, with the whole J. The covariance is a number, or
    a matrix `[P, P]` for each parameter."""

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        leaves, _ = tree.separate(params)
        each = tree.tensors(loop_batch_jacobian(f, out_dims=out_dims, samples=samples)(params, *inputs, **kwargs))
        found = []
        for k, (j, p) in enumerate(zip(each, leaves, strict=True)):
            shape = j.shape[: j.ndim - p.ndim]
            rows = j.reshape(shape[0], shape[1:].numel(), p.numel())
            s = covariance * torch.eye(p.numel()).to(p) if isinstance(covariance, (int, float)) else covariance[k].to(p)
            found.append((rows @ s @ rows.mT).reshape(*shape, *shape[1:]))
        return sum(found)

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
        assert x.shape == y.shape, f"the tensor {path} has shape {tuple(x.shape)}, not {tuple(y.shape)}"
        if x.numel():
            x, y = x.detach().double().cpu(), y.detach().double().cpu()
            error = (x - y).abs().masked_fill(x == y, 0).max().item()  # infinity is near itself alone, NaN nothing
            largest = y.abs().nan_to_num(0, 0, 0).max().item()
            assert error <= rtol * max(largest, floor), (
                f"the tensor{path and ' '}{path} is off by {error:.1e}, its largest entry is {largest:.1e}"
            )


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


def _squared_norms(shares: torch.Tensor) -> torch.Tensor:
    return shares.reshape(len(shares), -1).square().sum(1)


Vectors = list[torch.Tensor]
"""One for each position of a sample."""


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


def loop_kfac(
    model: nn.Module, loss: Callable, *, fisher: str = "exact", weight_sharing: str = "expand", joint: bool = False
) -> Callable:
    """The oracle of `kfac`, by hooks: a layer reads a at a position, s is the cotangent of what it gives.

        A = sum(outer(a[n][r], a[n][r]) for n, r) / (N * R)        # "backpack": / N; "reduce": of the mean over r, / N
        B = sum(outer(s[v][n][r], s[v][n][r]) for v, n, r)         # "backpack", "reduce": of the sum over r

    What scales or shifts has s alone, the gradient at a position; with several dimensions each of its rows is looked up
    at positions of its own: s is the gradient of the row, and a its unit vector.

    Args:
        model: a module of linear layers, convolutions (without groups), embeddings and norms, whose inputs and outputs
            have the samples along axis 0.
        loss: of its outputs and a target.
        fisher: "exact", or "empirical": the gradient of the loss alone is pulled back.
        weight_sharing: "expand", "reduce" or "backpack".
        joint: the weight with its bias as one more input, as a matrix `[out, in + 1]`.

    Returns:
        A function `(params, *inputs, target) -> {name: (factor, ...)}`, in the order of the dimensions of a parameter.
    """

    def oracle(params: dict[str, torch.Tensor], *inputs: Any) -> dict[str, tuple[torch.Tensor, ...]]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        names = {id(p): name for name, p in model.named_parameters()}
        calls, z = _hooked(model, leaves, inputs[:-1])
        columns = _columns(z.detach(), inputs[-1], loss, fisher)
        given = [call.output for call in calls]
        pulled = [torch.autograd.grad(z, given, s, retain_graph=True, materialize_grads=True) for s in columns]
        found: dict[str, list[_Use]] = {name: [] for name in leaves}
        for call, *cotangents in zip(calls, *pulled, strict=True):
            own = {local: leaves[names[id(p)]] for local, p in call.layer.named_parameters(recurse=False)}
            for local, p in call.layer.named_parameters(recurse=False):
                if not joint or local == "weight" or _channel(call.layer, "weight") is None:
                    found[names[id(p)]].append(_used(call, local, own, cotangents, joint))
        return {name: _factors(uses, weight_sharing) for name, uses in found.items() if uses}

    return oracle


def loop_kfra(model: nn.Sequential, loss: Callable) -> Callable:
    """The oracle of `kfra` for layers on `[N, width]`, from the last to the first: `H = mean_n J[n]^T H J[n]`."""

    def oracle(params: dict[str, torch.Tensor], x: torch.Tensor, target: Any) -> dict[str, tuple[torch.Tensor, ...]]:
        steps = []
        for name, layer in model.named_children():
            own = {k: params[f"{name}.{k}"] for k, _ in layer.named_parameters()}
            steps.append((name, lambda x, layer=layer, own=own: functional_call(layer, own, x), own, x))
            x = steps[-1][1](x)
        h = _hessians(x, target, loss).sum(0)
        found = {}
        for name, layer, own, x in reversed(steps):
            if "weight" in own:
                found[f"{name}.weight"] = (h, torch.stack([x[n].outer(x[n]) for n in range(len(x))]).mean(0))
            if "bias" in own:
                found[f"{name}.bias"] = (h,)
            jacobians = [jacrev(layer)(one[None])[0, :, 0] for one in x]
            h = torch.stack([j.T @ h @ j for j in jacobians]).mean(0)
        return {name: found[name] for name in params}

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


def _hessians(z: torch.Tensor, target: Any, loss: Callable) -> torch.Tensor:
    """Hessians of the loss in the outputs of each sample, `[N, M, M]`."""
    whole = jacrev(grad(lambda z: loss(z, target).sum()), chunk_size=1)(z)
    return torch.stack([whole[n].reshape(z[0].numel(), len(z), -1)[:, n] for n in range(len(z))])


def _columns(z: torch.Tensor, target: Any, loss: Callable, fisher: str) -> Vectors:
    """S[v] shaped like the outputs."""
    if fisher == "empirical":
        return [grad(lambda z: loss(z, target).sum())(z)]
    if fisher != "exact":
        raise ArgumentError(f"loop_kfac(..., fisher={fisher!r}): there are loops for 'exact' and 'empirical'.")
    values, vectors = torch.linalg.eigh(_hessians(z, target, loss))
    roots = vectors * values.clamp(min=0).sqrt()[:, None]
    return [roots[:, :, v].reshape(z.shape) for v in range(roots.shape[2])]


class _Call(NamedTuple):
    layer: nn.Module
    args: tuple
    output: torch.Tensor


def _hooked(model: nn.Module, params: dict[str, torch.Tensor], inputs: Any) -> tuple[list[_Call], torch.Tensor]:
    """All calls of layers that have parameters of their own, and the outputs."""
    calls: list[_Call] = []

    def hook(layer: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        calls.append(_Call(layer, tree.map_tensors(lambda x: x.detach().clone(), args), output))
        return output.clone()  # what comes next may write into it

    handles = [m.register_forward_hook(hook) for m in model.modules() if list(m.parameters(recurse=False))]
    try:
        return calls, functional_call(model, params, tuple(inputs))
    finally:
        for handle in handles:
            handle.remove()


def _channel(layer: nn.Module, local: str) -> int | None:
    """The dimension of a weight that counts the entries of an output; None for what scales or shifts them."""
    if local != "weight" or not (isinstance(layer, (nn.Linear, nn.Embedding)) or hasattr(layer, "kernel_size")):
        return None
    return 1 if isinstance(layer, nn.Embedding) or "Transpose" in type(layer).__name__ else 0


def _positions(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """The output of a layer as `[N, R, C]`."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        return y.reshape(len(y), -1, y.shape[-1])
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return y.reshape(len(y), -1, math.prod(layer.normalized_shape))
    return y.reshape(*y.shape[:2], -1).mT


class _Use(NamedTuple):
    """One call of a layer, as one of its parameters sees it."""

    channel: int | None
    reads: list[Vectors]
    """a[n][r], of a weight only."""
    cotangents: list[list[Vectors]]
    """s[v][n][r], or the shares of a bias or a scale."""


def _used(call: _Call, local: str, own: dict[str, torch.Tensor], cotangents: Vectors, joint: bool) -> _Use:
    channel, p = _channel(call.layer, local), own[local]
    y = _positions(call.layer, functional_call(call.layer, own, call.args))
    along = [_positions(call.layer, s) for s in cotangents]
    if channel is None:
        return _scale(p, y, along)
    reads = [[_slope(at[0], p).select(channel, 0).flatten() for at in sample] for sample in y]
    if joint and "bias" in own:
        reads = [[torch.cat([a, a.new_ones(1)]) for a in sample] for sample in reads]
        channel = 0  # of [out, in + 1]
    return _Use(channel, reads, [[list(sample) for sample in s] for s in along])


def _scale(p: torch.Tensor, y: torch.Tensor, along: Vectors) -> _Use:
    """A bias or a scale: the shares at the positions; with several dimensions, each of its rows at each of them."""
    positions = range(y.shape[1])
    shares = [[[_slope(y[n, r], p, s[n, r]) for r in positions] for n in range(len(y))] for s in along]
    if p.ndim < 2:
        return _Use(None, [], shares)
    rows = [[[row for g in sample for row in g.flatten(0, -2)] for sample in column] for column in shares]
    units = torch.eye(p[..., 0].numel(), dtype=p.dtype, device=p.device)
    return _Use(1, [[e for _ in positions for e in units] for _ in range(len(y))], rows)


def _slope(y: torch.Tensor, p: torch.Tensor, cotangent: torch.Tensor | None = None) -> torch.Tensor:
    return torch.autograd.grad(y, p, cotangent, retain_graph=True)[0]


def _factors(uses: list[_Use], sharing: str) -> tuple[torch.Tensor, ...]:
    """The factors, with the positions of all uses taken together."""
    shares = []
    for v in range(len(uses[0].cotangents)):
        for n in range(len(uses[0].cotangents[v])):
            here = [s.flatten() for use in uses for s in use.cotangents[v][n]]
            shares += here if sharing == "expand" else [torch.stack(here).sum(0)]
    outer = torch.stack([s.outer(s) for s in shares]).sum(0)
    if uses[0].channel is None:
        return (outer,)
    reads = []
    for n in range(len(uses[0].reads)):
        here = [a for use in uses for a in use.reads[n]]
        reads += [torch.stack(here).mean(0)] if sharing == "reduce" else here
    inner = torch.stack([a.outer(a) for a in reads]).sum(0) / len(reads if sharing == "expand" else uses[0].reads)
    return (inner, outer) if uses[0].channel else (outer, inner)
