"""Products of vectors with the derivatives of one run of f, by backward passes of torch.autograd alone.

There are no rules of operations, no structure and no batches of vectors here: a Jacobian times a vector is the
derivative of `u -> J^T u`, a Hessian times a vector a second backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch

Tensors = list[torch.Tensor]
Vector = Sequence[torch.Tensor | None]
"""A tensor for each leaf; None stands for zeros."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """The numbers on the CPU and in float64, where they are compared."""
    return x.detach().cpu().double()


class Loop:
    """One run of f from parameters to `z`, its outputs or losses, with derivatives of these and of their loss."""

    def __init__(
        self,
        leaves: Tensors,
        z: Tensors,
        loss: torch.Tensor | None,
        n: int,
        dim: int = 0,
        back: Callable[[torch.device], AbstractContextManager] = nullcontext,
    ) -> None:
        """`loss` is a function of z; None where z are losses themselves. Samples are along an axis of z. Backward
        passes run in the context `back(device)`."""
        self.leaves, self.z, self.dim, self.context = leaves, z, dim, back
        apart = all(-x.ndim <= dim < x.ndim and x.shape[dim] == n for x in z)
        self.n = n if apart else 1
        """The number of samples that z tells apart."""
        ones = [torch.ones_like(x) for x in z]
        self.slope = ones if loss is None else self.pulled([loss], z, [torch.ones_like(loss)], again=True)
        self.dummies = [x.requires_grad_() for x in map(torch.ones_like, z)]
        self.rows = self.pulled(z, self.leaves, self.dummies, again=True)

    def pulled(self, ys: Sequence[torch.Tensor], xs: Tensors, cotangents: Vector, again: bool = False) -> Tensors:
        """A vector-Jacobian product; with `again`, it is differentiated further."""
        pairs = [(y, c.to(y)) for y, c in zip(ys, cotangents, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in xs]
        y, c = zip(*pairs, strict=True)
        options = {"retain_graph": True, "create_graph": again, "materialize_grads": True}
        with self.context(xs[0].device):
            return list(torch.autograd.grad(y, xs, c, **options))

    def unit(self, leaf: int, place: int) -> Vector:
        """The vector with a one at an entry of a leaf."""
        one = torch.zeros_like(self.leaves[leaf], memory_format=torch.contiguous_format)
        one.view(-1)[place] = 1
        return [one if i == leaf else None for i in range(len(self.leaves))]

    def forth(self, v: Vector) -> Tensors:
        """`J v`"""
        return self.pulled(self.rows, self.dummies, v)

    def back(self, cotangents: Tensors) -> Tensors:
        """`J^T c`"""
        return self.pulled(self.z, self.leaves, cotangents)

    def bent(self, t: Tensors) -> Tensors:
        """`H t`, with the Hessian of the loss in z."""
        return self.pulled(self.slope, self.z, t)

    def paired(self, a: Tensors, b: Tensors) -> torch.Tensor:
        """The inner products of what each sample has at z, `[N]`."""
        pairs = zip(a, b, strict=True)
        return torch.stack([(self._flat(x) * self._flat(y)).sum(1) for x, y in pairs]).sum(0)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        return wide(x if self.n == 1 else x.movedim(self.dim, 0)).reshape(self.n, -1)

    def weighed(self, weights: torch.Tensor) -> Tensors:
        """The gradient of the loss in z, as if it were constant there, times a weight for each sample."""
        own, dim = [c.detach() for c in self.slope], self.dim
        if self.n == 1:
            return [weights.to(c) * c for c in own]
        return [(weights.to(c) * c.movedim(dim, -1)).movedim(-1, dim) for c in own]

    def share(self, v: Vector) -> torch.Tensor:
        """The derivative along v of the loss of each sample."""
        return self.paired(self.forth(v), self.slope)

    def ggn(self, v: Vector, other: Vector | None = None) -> torch.Tensor:
        """`v^T J[n]^T H[n] J[n] v` of each sample, or with another vector at its end."""
        t = self.forth(v)
        return self.paired(t if other is None else self.forth(other), self.bent(t))

    @cached_property
    def _weights(self) -> torch.Tensor:
        return torch.ones(self.n, dtype=torch.float64, requires_grad=True)

    @cached_property
    def _slopes(self) -> Tensors:
        """The gradient of the weighted losses in the parameters, where the loss is as if it were linear in z."""
        return self.pulled(self.z, self.leaves, self.weighed(self._weights), again=True)

    def hessian(self, leaf: int, place: int) -> torch.Tensor:
        """The second derivative along an entry of the loss of each sample: of the loss in z, and of z."""
        slope = self._slopes[leaf].flatten()[place]
        (twice,) = self.pulled([slope], self.leaves[leaf : leaf + 1], [torch.ones_like(slope)], again=True)
        twice = twice.flatten()[place]
        (each,) = self.pulled([twice], [self._weights], [torch.ones_like(twice)])
        return wide(each) + self.ggn(self.unit(leaf, place))
