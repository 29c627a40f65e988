"""Where derivatives are taken: in plain autograd, or inside torch.func transforms in a level of our own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc._torch.functorch import dual, grad_level, in_front, level_of, plainly, transforming
from invfunc.errors import ArgumentError
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.recording.graph import lowest, pulled_back

Vectors = list[torch.Tensor | None]
"""A tensor for each input, or for each output; None stands for zeros."""


class Parts(Protocol):
    """Takes derivatives in parameters as they come, where these are divided among processes."""

    def through(self, inputs: Sequence[Any], graph: bool, pull: Callable[[], Vectors]) -> Vectors:
        """What is pulled back to some inputs, but None of those that are taken; with `graph`, it is a graph alone that
        is wanted, in which these have no numbers."""
        ...


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Scope:
    """A context in which `enter` makes a tensor differentiable and `leave` gives its value to what lies outside.

    Values keep their derivatives with respect to what the caller differentiates, and lose those taken in here.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], twice: bool = False) -> None:
        """`twice` says that second derivatives are taken in here."""
        tensors = list(tensors)
        empty = next((x for x in tensors if x.is_meta), None)
        if empty is not None:
            raise ArgumentError(
                f"a tensor of shape {tuple(empty.shape)} is on the meta device, where tensors hold no numbers, and "
                "some are looked at. Make it anew where it holds some, as x.new_zeros(x.shape, device='cpu') does."
            )
        self.twice = twice
        self.plain = not transforming()
        if self.plain and dual(*tensors):
            raise ArgumentError(
                "an argument carries a tangent of torch.autograd.forward_ad, which is not followed; use jvp."
            )
        self.outside = torch.is_grad_enabled()
        self.wanted = self.outside and any(x.requires_grad for x in tensors)
        """Whether the caller can differentiate the result by plain autograd."""
        self._again: AbstractContextManager = nullcontext()
        """What was around f, as a backward pass may evaluate parts of it again (torch.utils.checkpoint)."""
        self.parts: Parts | None = None
        """Takes derivatives in parameters that are divided among processes."""
        self._stack = ExitStack()
        self._enter: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
        self._leave: Callable[[torch.Tensor], torch.Tensor] = _as_it_is

    def __enter__(self) -> Scope:
        if torch.is_inference_mode_enabled():
            self._stack.enter_context(torch.inference_mode(False))
        self._stack.enter_context(torch.enable_grad())  # also where it is, as f may leave another mode behind
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, about an operation of the user's
        if self.twice or self.create_graph:  # the fused kernels of attention have no second derivative
            self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if not self.plain:
            self._enter, self._leave = self._stack.enter_context(grad_level())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for f, whose operations run in a form that can be differentiated as often as they will be."""
        mode = TwiceDifferentiable()
        with mode if self.create_graph or self.twice else nullcontext():
            yield
        if mode.used:
            self._again = mode

    @property
    def create_graph(self) -> bool:
        return self.wanted or not self.plain

    def closes_over(self, x: torch.Tensor) -> None:
        """Called for each constant of the function: one that requires grad makes the result require it too."""
        if self.plain and self.outside and x.requires_grad and level_of(x) is None:
            self.wanted = True

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            return self._enter(x)
        x = x.clone() if x.is_inference() else x
        return x.view_as(x) if self.wanted and x.requires_grad else x.detach().requires_grad_()

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
        """What the caller gets."""
        return tree.map_tensors(lambda x: self.leave(x) if self.outside else self.leave(x).detach(), value)

    def grad(
        self,
        outputs: list[torch.Tensor],
        inputs: list[Any],
        cotangents: list[torch.Tensor],
        *,
        batched: bool = True,
        one_by_one: bool = False,
        create_graph: bool | None = None,
    ) -> list[torch.Tensor | None]:
        """Vector-Jacobian products; with `batched`, cotangents `[V, *output]` give `[V, *input]`.

        An input is a tensor or a gradient edge. What does not depend on it gives None. The graph is kept. `one_by_one`
        says that columns are so large that there is nothing to gain from doing them at once.
        """
        reached = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
        if not reached or not inputs or (batched and not len(reached[0][1])):
            return [None] * len(inputs)
        graph = self.create_graph if create_graph is None else create_graph
        columns = [c for _, c in reached]
        pull = partial(self._pulled_back, [y for y, _ in reached], inputs, retain_graph=True, create_graph=graph)
        if not batched:
            return list(pull(columns))
        simple = self.plain and not graph
        if not (simple and one_by_one):  # oneDNN's kernels want one batch dimension
            try:
                if simple:  # torch.func does not know this older vmap, which needs less memory
                    return list(pull(columns, is_grads_batched=True))
                return _at_once(pull, columns)
            except RuntimeError:  # no batching rule for a derivative
                pass
        return _one_by_one(pull, columns)

    def _pulled_back(self, *given: Any, **options: Any) -> Sequence[torch.Tensor | None]:
        with self._again:
            return pulled_back(*given, **options)

    def push(self, y: torch.Tensor, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """The Jacobian-vector product of a y that is linear in x: how a pullback depends on its cotangent."""
        zeros = self.leave(torch.zeros(y.shape, dtype=y.dtype, device=y.device))  # what is made at a level is of it
        cotangent = self.enter(zeros)
        (pulled,) = self.grad([y], [x], [cotangent], batched=False, create_graph=True)
        assert pulled is not None
        (pushed,) = self.grad([pulled], [cotangent], [tangent.to(pulled.dtype)], batched=False)
        return torch.zeros_like(y) if pushed is None else self.leave(pushed)

    def stream(
        self,
        outputs: list[torch.Tensor],
        cotangents: list[torch.Tensor],
        edges: dict[int, Any],
        arrived: Callable[[int, torch.Tensor], None],
        retain: bool,
        batched: bool = False,
    ) -> None:
        """Vector-Jacobian products at edges, each handed over as it comes; with `batched`, cotangents `[V, *output]`
        give `[V, *input]`.

        Without `retain` the graph is freed on the way.
        """
        reached = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
        if not reached:
            return
        last = lowest([y for y, _ in reached], {edge.node for edge in edges.values()})
        ends = {i: edge for i, edge in edges.items() if edge.node in last}
        if not ends:
            return

        ys, columns = [y for y, _ in reached], [c for _, c in reached]

        def tell(grads: Any, i: int, edge: Any) -> None:
            cotangent = grads[edge.output_nr]
            if cotangent is not None:
                cotangent = in_front(cotangent, len(columns[0])) if batched else cotangent
                with plainly() if batched else nullcontext():
                    arrived(i, cotangent)

        handles = [
            edge.node.register_prehook(partial(tell, i=i, edge=edge)) for i, edge in edges.items() if i not in ends
        ]
        try:
            with self._again:
                options = {"allow_unused": True, "retain_graph": retain, "is_grads_batched": batched}
                found = torch.autograd.grad(ys, list(ends.values()), columns, **options)
        finally:
            for handle in handles:
                handle.remove()
        for i, cotangent in zip(ends, found, strict=True):
            if cotangent is not None:
                arrived(i, cotangent)


_Pull = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
"""From the cotangents of the outputs to those of the inputs."""


def _at_once(pull: _Pull, columns: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Pull all columns back in one call of vmap, which can return nothing but tensors."""
    missing: list[bool] = []

    def pulled(*column: torch.Tensor) -> list[torch.Tensor]:
        grads = pull(column)
        missing[:] = [g is None for g in grads]
        return [g for g in grads if g is not None]

    found = iter(torch.vmap(pulled)(*columns))
    return [None if none else next(found) for none in missing]


def _one_by_one(pull: _Pull, columns: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Pull the columns back in a call for each."""
    parts = zip(*(pull(column) for column in zip(*columns, strict=True)), strict=True)
    return [None if grads[0] is None else torch.stack(grads) for grads in parts]
