"""Small networks and losses for the laws of whole transforms: hypothesis draws which, a seed the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import invfunc
from invfunc import tree
from invfunc.testing.models import CLASSES, FAMILIES, LOSS_FUNCTIONS, TARGETS
from tests.strategies import Numbers


@dataclass(frozen=True, repr=False)
class Network:
    """A model function `f(params, x) -> [N, CLASSES]`, or `[N, T, CLASSES]` of a sequence, with arguments for it."""

    called: str
    f: Callable
    params: Any
    x: Any
    n: int

    def __repr__(self) -> str:
        return f"{self.called}, N = {self.n}"


NETWORKS = {
    name: FAMILIES[name] for name in ("affine", "perceptron", "convolution", "tied", "derived", "generic", "module")
}


def network(called: str, n: int = 4, seed: int = 0) -> Network:
    return Network(called, *FAMILIES[called](Numbers(seed), n), n)


@st.composite
def networks(draw, low: int = 1, sequences: bool = False) -> Network:
    """A network and N; sequences too where their outputs are welcome."""
    names = [*NETWORKS, *["sequence"] * sequences]
    return network(draw(st.sampled_from(names)), draw(st.integers(low, 5)), draw(st.integers(0, 3)))


@dataclass(frozen=True, repr=False)
class Loss:
    """`loss(z, target, reduction)` of outputs `[N, CLASSES]`, with targets for N samples."""

    called: str
    loss: Callable
    target: Callable[[Numbers, int], torch.Tensor]

    def __repr__(self) -> str:
        return self.called

    def __call__(self, z: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return self.loss(z, target, reduction=reduction)


LOSSES = [
    Loss(called, loss, lambda rand, n, called=called: TARGETS[called](rand, n, CLASSES))
    for called, loss in LOSS_FUNCTIONS.items()
]


def samples_loss(network: Network, loss: Loss) -> Callable:
    """`f(params, x, y) -> [N]`."""

    def f(params: Any, x: Any, y: torch.Tensor) -> torch.Tensor:
        losses = loss(network.f(params, x), y, "none")
        return losses if losses.ndim == 1 else losses.sum(1)

    return f


def total(result: Any, at: float = 0.0) -> torch.Tensor:
    """A fixed linear function of a result, for derivatives of it."""
    parts = [(x * _weights(x, at)).sum() for x in tree.leaves(result)]
    return sum(parts[1:], parts[0])


def _weights(x: torch.Tensor, at: float) -> torch.Tensor:
    """Some numbers of the shape of x, without a generator: vmap refuses those."""
    return (torch.arange(x.numel(), dtype=x.dtype, device=x.device) + at + 0.5).cos().reshape(x.shape)


def plain(statistic: str) -> Callable:
    """`formula(f, loss)(params, x, y)` of a model function in terms of torch.func, to be composed as a statistic is."""

    def first_order(f, loss, of):
        def each(p, x, y):
            losses = loss(f(p, x), y, "none")
            return losses if losses.ndim == 1 else losses.sum(1)

        return lambda p, x, y: tree.map_leaves(of, torch.func.jacrev(each)(p, x, y))

    def ggn(f, loss):
        def formula(p, x, y):
            z, jacobian = f(p, x), torch.func.jacrev(f)(p, x)
            h = torch.func.hessian(lambda z: loss(z, y, "sum"))(z).reshape(z.numel(), z.numel())
            flat = tree.map_leaves(lambda j: j.reshape(z.numel(), -1), jacobian)
            diagonals = tree.map_leaves(lambda j: torch.einsum("ap,ab,bp->p", j, h, j), flat)
            return tree.map_leaves(lambda d, j: d.reshape(j.shape[z.ndim :]), diagonals, jacobian)

        return formula

    def hessian(f, loss):
        def formula(p, x, y):
            leaves, structure = tree.flatten(p)

            def slopes(*leaves):
                return torch.func.grad(lambda p: loss(f(p, x), y, "sum"))(tree.unflatten(leaves, structure))

            found, pull = torch.func.vjp(lambda *leaves: tuple(tree.leaves(slopes(*leaves))), *leaves)
            units = [torch.eye(g.numel(), dtype=g.dtype, device=g.device) for g in found]
            entries = [
                [pull(tuple(e.reshape(g.shape) if k == i else 0 * g for k, g in enumerate(found)))[i] for e in unit]
                for i, unit in enumerate(units)
            ]
            diagonals = [
                (torch.stack(rows).flatten(1) * unit).sum(1) for rows, unit in zip(entries, units, strict=True)
            ]
            return tree.unflatten([d.reshape(g.shape) for d, g in zip(diagonals, found, strict=True)], structure)

        return formula

    if "hessian" in statistic:
        return hessian
    of = {
        "batch_grad": lambda g: g,
        "sum_grad_squared": lambda g: g.square().sum(0),
        "variance": lambda g: (g - g.mean(0)).square().mean(0),
    }
    return ggn if statistic not in of else lambda f, loss: first_order(f, loss, of[statistic])


def _first(transform: Callable) -> Callable:
    return lambda f, loss: transform(lambda p, x, y: loss(f(p, x), y, "sum"))


"""Of a sum of losses, made as `STATISTICS[name](f, loss)` and called as `(params, x, y)`."""
STATISTICS = {
    "batch_grad": _first(invfunc.batch_grad),
    "sum_grad_squared": _first(invfunc.sum_grad_squared),
    "variance": _first(invfunc.variance),
    "diag_ggn of f and loss": lambda f, loss: invfunc.diag_ggn(f, lambda z, y: loss(z, y, "sum")),
    "diag_ggn of f": lambda f, loss: invfunc.diag_ggn(lambda p, x, y: loss(f(p, x), y, "sum")),
    "diag_hessian of f and loss": lambda f, loss: invfunc.diag_hessian(f, lambda z, y: loss(z, y, "sum")),
}


def chunkings(statistic: str) -> list[Callable]:
    """All ways in which a statistic is computed: by itself, and in two passes over each of its axes."""
    make = STATISTICS[statistic]
    overs = ["samples", "params"] + ["outputs"] * ("diag" in statistic)
    return [make, *(lambda f, loss, over=over: invfunc.chunked(make(f, loss), 2, over=over) for over in overs)]
