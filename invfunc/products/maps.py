"""Linear maps that autograd has recorded, evaluated on one vector or on several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.recording.graph import pulled_back
from invfunc.recording.scope import Scope, Vectors


@dataclass(frozen=True)
class Pull:
    """How the steps of a map are evaluated: each is a vector-Jacobian product on a graph that is there already."""

    scope: Scope
    batched: bool = False
    """Whether there are several vectors, along a first axis."""
    graph: bool = False
    """Whether the result is differentiated again."""
    keep: bool = True
    """Whether the graph serves once more; without, it is freed on the way."""

    def __call__(self, outputs: Sequence[torch.Tensor | None], inputs: list, cotangents: Vectors) -> Vectors:
        pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y is not None and c is not None]
        pairs = [(y, c) for y, c in pairs if y.requires_grad]
        if not pairs or not inputs:
            return [None] * len(inputs)
        ys, cs = [y for y, _ in pairs], [c for _, c in pairs]

        def pull() -> Vectors:
            if self.keep or self.batched:
                return self.scope.grad(ys, inputs, cs, batched=self.batched, create_graph=self.graph)
            return list(pulled_back(ys, inputs, cs))

        return pull() if self.scope.parts is None else self.scope.parts.through(inputs, self.graph, pull)


Steps = Callable[[Vectors, Pull], Vectors]


class Kind(NamedTuple):
    """What is known of a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Kind:
        return cls(x.shape, x.dtype, x.device)

    def zeros(self, *lead: int) -> torch.Tensor:
        return torch.zeros((*lead, *self.shape), dtype=self.dtype, device=self.device)


class Way(NamedTuple):
    """A map in one direction, and what it gives."""

    steps: Steps
    into: list[Kind]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear map of lists of tensors, with its transpose."""

    scope: Scope
    mode: TwiceDifferentiable
    there: Way
    back: Way
    """The map in the other direction, which is the same one if the map is symmetric."""

    @property
    def transposed(self) -> Linear:
        return replace(self, there=self.back, back=self.there)

    def __call__(self, vectors: list[torch.Tensor], lead: int = 0, keep: bool = True) -> list[torch.Tensor]:
        """The image of a vector; `lead` axes in front count several of them."""
        outside, here = torch.is_grad_enabled(), Scope(vectors)
        with torch.inference_mode(False), torch.set_grad_enabled(outside):
            vectors = [x.clone() if x.is_inference() else x for x in vectors]
            if self.scope.create_graph:  # it depends on what the caller may differentiate
                graph = outside or not self.scope.plain
                with torch.set_grad_enabled(graph):
                    found = self.evaluated(vectors, lead, graph)
                return found if outside else [x.detach() for x in found]
            if here.plain and not here.wanted:
                with torch.no_grad():
                    return self.evaluated(vectors, lead, keep=keep)
            return list(_Applied.apply(self, lead, *vectors))

    @torch.no_grad()
    def taken(self, vectors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The image of a vector, but None where its numbers were taken as they came, or are zeros; once only."""
        with torch.inference_mode(False), self.mode.back(vectors[0].device):
            return self.there.steps([*vectors], Pull(self.scope, keep=False))

    def evaluated(
        self, vectors: Sequence[torch.Tensor], lead: int, graph: bool = False, keep: bool = True
    ) -> list[torch.Tensor]:
        count = vectors[0].shape[:lead]
        if 0 in count:
            return [kind.zeros(*count) for kind in self.there.into]
        flat: Vectors = [x.flatten(0, lead - 1) if lead > 1 else x for x in vectors]
        with self.mode.back(vectors[0].device):
            found = self.there.steps(flat, Pull(self.scope, lead > 0, graph, keep))
        shaped = [x if x is None or lead < 2 else x.unflatten(0, count) for x in found]
        return [k.zeros(*count) if x is None else x for x, k in zip(shaped, self.there.into, strict=True)]


class _Applied(torch.autograd.Function):
    """A map as one operation of torch: it is its own derivative, so that its graph needs no derivatives."""

    @staticmethod
    def forward(linear: Linear, lead: int, *vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for x in linear.evaluated(vectors, lead))  # none may be one of the vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.linear, ctx.lead = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        return None, None, *_Applied.apply(ctx.linear.transposed, ctx.lead, *cotangents)

    @staticmethod
    def jvp(ctx: Any, _linear: None, _lead: None, *tangents: torch.Tensor) -> tuple:
        return _Applied.apply(ctx.linear, ctx.lead, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, linear: Linear, lead: int, *vectors: torch.Tensor) -> tuple:
        size = info.batch_size
        moved = [
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(vectors, in_dims[2:], strict=True)
        ]
        found = _Applied.apply(linear, lead + 1, *moved)
        return found, (0,) * len(found)
