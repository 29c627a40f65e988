"""What the statistics are, as the plain loops of their docstrings: slow, and simple enough to be believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree


def loop_batch_grad(f: Callable) -> Callable:
    """The oracle of `batch_grad` for an `[N]`-valued f: entry by entry, `torch.autograd.grad(f(params, *batch)[n])`."""

    def oracle(params: Any, *batch: Any, **kwargs: Any) -> Any:
        leaves, structure = tree.flatten(params)
        losses, leaves = _differentiably(lambda p: f(p, *batch, **kwargs), leaves, structure)
        rows = zip(*(_grad(loss, leaves) for loss in losses), strict=True)
        return tree.unflatten([torch.stack(shares) for shares in rows], structure)

    return oracle


def loop_sum_grad_squared(f: Callable) -> Callable:
    """The oracle of `sum_grad_squared` for an `[N]`-valued f."""
    shares = loop_batch_grad(f)
    return lambda *args, **kwargs: tree.map_tensors(lambda g: g.square().sum(0), shares(*args, **kwargs))


def loop_variance(f: Callable, correction: float = 0) -> Callable:
    """The oracle of `variance` for an `[N]`-valued f."""
    shares = loop_batch_grad(f)
    return lambda *args, **kwargs: tree.map_tensors(lambda g: g.var(0, correction=correction), shares(*args, **kwargs))


def dense_diag_ggn(f: Callable, loss: Callable) -> Callable:
    """The oracle of `diag_ggn(f, loss)`: the diagonal of `J^T H J` with the whole J and H of the batch, row by row."""

    def oracle(params: Any, *inputs: Any, **kwargs: Any) -> Any:
        *given, target = inputs
        leaves, structure = tree.flatten(params)
        z, leaves = _differentiably(lambda p: f(p, *given, **kwargs), leaves, structure)
        outputs, layout = tree.flatten(z)
        jacobian = _jacobian(outputs, leaves)
        value, outputs = _differentiably(lambda z: loss(z, target), outputs, layout)
        slope = torch.autograd.grad(value.sum(), outputs, create_graph=True, materialize_grads=True)
        hessian = torch.cat(_jacobian(slope, outputs), 1)
        diagonals = [torch.einsum("ap,ab,bp->p", j, hessian, j) for j in jacobian]
        return tree.unflatten([d.reshape(p.shape) for d, p in zip(diagonals, leaves, strict=True)], structure)

    return oracle


def assert_trees_close(actual: Any, expected: Any, rtol: float, floor: float = 0.0) -> None:
    """Same structure and shapes, and no entry of a leaf further off than `rtol` times the largest entry of that leaf.

    Args:
        actual, expected: pytrees of tensors.
        rtol: the tolerance.
        floor: a largest entry below this counts as this: the size of what cancels in a leaf that may be zero.

    Raises:
        AssertionError: it names the leaf, the error and the tolerance.
    """
    structure, (wanted, layout) = tree.flatten(actual)[1], tree.flatten(expected)
    assert structure == layout, f"{structure} is not {layout}"
    for (path, x), y in zip(tree.named_leaves(actual), wanted, strict=True):
        assert x.shape == y.shape, f"leaf {path} has shape {tuple(x.shape)}, not {tuple(y.shape)}"
        if x.numel():
            x, y = x.detach().double().cpu(), y.detach().double().cpu()
            error, largest = (x - y).abs().max().item(), y.abs().max().item()
            assert error <= rtol * max(largest, floor), (
                f"leaf {path} is off by {error:.1e}, its largest entry is {largest:.1e}"
            )


def _differentiably(f: Callable, leaves: Any, structure: Any) -> tuple[Any, list[torch.Tensor]]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():
        return f(tree.unflatten(leaves, structure)), leaves


def _grad(y: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return torch.autograd.grad(y, leaves, retain_graph=True, materialize_grads=True)


def _jacobian(outputs: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each leaf `[numbers in the outputs, numbers in the leaf]`."""
    rows = [_grad(y, leaves) for z in outputs for y in z.flatten()]
    return [torch.stack([g.flatten() for g in found]) for found in zip(*rows, strict=True)]
