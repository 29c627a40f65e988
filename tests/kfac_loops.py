"""Oracles of K-factors, by hooks: plain loops over samples and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev

from invfunc import tree

Vectors = list[torch.Tensor]
"""One for each position of a sample."""


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


def _hessians(z: torch.Tensor, target: Any, loss: Callable) -> torch.Tensor:
    """Hessians of the loss in the outputs of each sample, `[N, M, M]`."""
    whole = jacrev(grad(lambda z: loss(z, target).sum()), chunk_size=1)(z)
    return torch.stack([whole[n].reshape(z[0].numel(), len(z), -1)[:, n] for n in range(len(z))])


def _columns(z: torch.Tensor, target: Any, loss: Callable, fisher: str) -> Vectors:
    """S[v] shaped like the outputs."""
    if fisher == "empirical":
        return [grad(lambda z: loss(z, target).sum())(z)]
    if fisher != "exact":
        raise ValueError(fisher)
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
