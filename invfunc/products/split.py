"""The loss part of the function of a product, where what is known of its samples depends on the product."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from invfunc import thresholds
from invfunc._torch.graphs import nodes_of
from invfunc._torch.values import near
from invfunc.core import split as core
from invfunc.core.split import SURE, Axis, Output
from invfunc.errors import unreached
from invfunc.loss.hessian import hessian, structured
from invfunc.products.maps import Pull, Vectors


@dataclass
class Split(core.Split):
    """The loss part of a function: `result` as a function of the outputs `roots`, whose `scope` is one of products."""

    dim: int = 0
    """The dim of the outputs that has samples, if the loss keeps them apart."""

    values: list[torch.Tensor] = field(default_factory=list)
    """The outputs, or the losses, or what else is to be differentiated in the parameters."""

    def __post_init__(self) -> None:
        self.values = self.values or [r.value for r in self.roots] or [self.result]
        wanted = {r.node for r in self.roots if r.value.requires_grad}
        if self.roots and wanted.isdisjoint(nodes_of([self.result], wanted)):
            raise unreached()

    def slopes(self) -> Vectors:
        """The gradient of the result in the outputs, as a function of them."""
        return Pull(self.scope, graph=True)([self.result], self.values, [torch.ones_like(self.result)])

    def check_convex(self, slopes: Vectors) -> None:
        """Check that a GGN exists, unless the Hessian of the loss is too large to be looked at."""
        for t in self.terms:
            weights = t.call.arg("weight"), t.call.arg("pos_weight")
            if t.output is self.result and t.at_root and t.call.func in SURE and weights == (None, None):
                return
        apart = self.n > 1  # the run of f has told where the samples are
        n, roots = self.n, self.roots if apart else [Output(r.ordinal, r.value) for r in self.roots]
        known = structured(self.scope, self.result, roots, self.terms) is not None
        if not known and not apart:
            n, roots = self._apart(slopes, roots)
        outputs = sum([r.value.numel() for r in roots]) // n
        if outputs and (known or n * outputs**2 <= thresholds.CHECKED):
            hessian(self.scope, self.result, roots, self.terms, n)

    def _apart(self, slopes: Vectors, roots: list[Output]) -> tuple[int, list[Output]]:
        """The samples, and the outputs with the axes of these, if the loss keeps them apart: then signs of the samples
        in a vector are those in its product with the Hessian of the loss. Else one sample, with all outputs."""
        dims = [self.dim % max(1, z.ndim) for z in self.values]
        sizes = {z.shape[d] if z.ndim > d else 1 for z, d in zip(self.values, dims, strict=True)}
        n = max(sizes)
        if len(sizes) > 1 or n < 2 or not all([z.numel() for z in self.values]):
            return 1, roots
        signs = torch.arange(n).mul(7.3).sin().sign()

        def signed(x: torch.Tensor, dim: int) -> torch.Tensor:
            return x.detach() * signs.to(x).reshape(-1, *[1] * (x.ndim - 1 - dim))

        v = [torch.arange(1, z.numel() + 1).add(k / 3).cos().to(z).reshape(z.shape) for k, z in enumerate(self.values)]
        pull = Pull(self.scope)
        plain = pull(slopes, self.values, [*v])
        turned = pull(slopes, self.values, [*map(signed, v, dims)])
        for x, y, d in zip(plain, turned, dims, strict=True):
            if x is not None and y is not None and not near(signed(x, d), y.detach(), x.detach().abs().amax()):
                return 1, roots
        return n, [Output(r.ordinal, r.value, Axis(d)) for r, d in zip(roots, dims, strict=True)]
