"""Linear maps that autograd has recorded, evaluated on one vector or on several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc._torch.functorch import grad_level, level_of, levels, transforming
from invfunc.arguments.problem import check_numbers
from invfunc.loss.hessian import pulled_back, pulled_rows
from invfunc.operations.forms import TwiceDifferentiable

Vectors = list[torch.Tensor | None]
"""A tensor for each input, or for each output; None stands for zeros."""


class Scope:
    """A context in which derivatives are taken: in plain autograd, or inside of torch.func in a level of our own.

    `enter` makes a tensor differentiable, and `leave` gives its value to the outside: with derivatives in what the
    caller differentiates, and without those that are taken in here.
    """

    twice = False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        tensors, self.outside, self.wanted = list(tensors), torch.is_grad_enabled(), False
        """Flags: gradients are on, and the caller can differentiate the result by plain autograd."""
        check_numbers(tensors)
        for x in tensors:
            self.wanted = self.wanted or (self.outside and x.requires_grad)
        self.plain = not transforming()
        self.level = 0
        self._stack = ExitStack()
        self._enter: Callable[[torch.Tensor], torch.Tensor]
        self._leave: Callable[[torch.Tensor], torch.Tensor]

    def __enter__(self) -> Scope:
        if torch.is_inference_mode_enabled():
            self._stack.enter_context(torch.inference_mode(False))
        self._stack.enter_context(torch.enable_grad())
        if self.wanted or not self.plain:  # the fused kernels of attention have no second derivative
            self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if not self.plain:
            self._enter, self._leave = self._stack.enter_context(grad_level())
            self.level = levels()[-1][1]
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def create_graph(self) -> bool:
        return self.wanted or not self.plain

    def closes_over(self, x: torch.Tensor) -> None:
        """Note a constant of the function: one that requires grad makes the result require it too."""
        if self.plain and self.outside and x.requires_grad and level_of(x) is None:
            self.wanted = True

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            return self._enter(x)
        x = x.clone() if x.is_inference() else x
        return x.view_as(x) if self.wanted and x.requires_grad else x.detach().requires_grad_()

    def entered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Several tensors, differentiable."""
        if not self.plain or self.wanted:
            return [*map(self.enter, tensors)]
        return [(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in tensors]

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor with the value of x that is another object."""
        if x.is_inference():
            return x.clone()
        return x.detach() if self.plain and not self.wanted else x.view_as(x)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            return self._leave(x)
        return x if self.wanted else x.detach()

    def result(self, value: Any) -> Any:
        """The value for the caller."""
        return tree.map_tensors(lambda x: self.leave(x) if self.outside else self.leave(x).detach(), value)

    def grad(
        self,
        outputs: Sequence[torch.Tensor | None],
        inputs: Sequence[Any],
        cotangents: Sequence[torch.Tensor | None],
        *,
        batched: bool = True,
        create_graph: bool | None = None,
        keep: bool = True,
    ) -> Vectors:
        """Vector-Jacobian products, None of an input without influence; `batched`, cotangents `[V, *output]` give
        `[V, *input]`. Without `keep`, one product frees the graph on the way."""
        ys, columns = list[torch.Tensor](), list[torch.Tensor]()
        for y, c in zip(outputs, cotangents, strict=True):
            if y is not None and c is not None and y.requires_grad:
                ys.append(y)
                columns.append(c)
        if not ys or not inputs or (batched and not len(columns[0])):
            return [None] * len(inputs)
        graph = self.wanted or not self.plain if create_graph is None else create_graph
        if not batched:
            return [*pulled_back(ys, inputs, columns, retain_graph=keep or graph, create_graph=graph)]
        return pulled_rows(ys, inputs, columns, graph, self.plain and not graph)


@dataclass(frozen=True)
class Pull:
    """A way to evaluate the steps of a map: each is a vector-Jacobian product on a graph that is there already."""

    scope: Scope
    batched: bool = False
    """True for several vectors, along a first axis."""
    graph: bool = False
    """True if the result is differentiated again."""
    keep: bool = True
    """True if the graph serves once more; without, it is freed on the way."""

    def __call__(self, outputs: Sequence[torch.Tensor | None], inputs: list, cotangents: Vectors) -> Vectors:
        options = {"batched": self.batched, "create_graph": self.graph, "keep": self.keep}
        return self.scope.grad(outputs, inputs, cotangents, **options)


Steps = Callable[[Vectors, Pull], Vectors]


class Kind(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> Kind:
        return cls(x.shape, x.dtype, x.device)

    def zeros(self, *lead: int) -> torch.Tensor:
        return torch.zeros((*lead, *self.shape), dtype=self.dtype, device=self.device)


class Direction(NamedTuple):
    """A map in one direction, and what it gives."""

    steps: Steps
    into: list[Kind]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear map of lists of tensors, with its transpose."""

    scope: Scope
    mode: TwiceDifferentiable
    there: Direction
    back: Direction
    """The map in the other direction, which is the same one if the map is symmetric."""

    @property
    def transposed(self) -> Linear:
        return replace(self, there=self.back, back=self.there)

    def __call__(self, vectors: list[torch.Tensor], lead: int = 0, keep: bool = True) -> list[torch.Tensor]:
        """The image of a vector; `lead` axes in front count several of them."""
        here = Scope(vectors)
        outside = here.outside
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
        flat: Vectors = [x.flatten(0, lead - 1) for x in vectors] if lead > 1 else [*vectors]
        with self.mode.back(vectors[0].device):
            found = self.there.steps(flat, Pull(self.scope, lead > 0, graph, keep))
        if lead > 1:
            found = [x if x is None else x.unflatten(0, count) for x in found]
        return [k.zeros(*count) if x is None else x for x, k in zip(found, self.there.into, strict=True)]


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
