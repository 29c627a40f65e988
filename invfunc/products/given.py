"""Arguments of a product: its function run on them, whole or split into model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import (
    dispatched,
    dual_level,
    grad_level,
    level_of,
    levels,
    listening,
    nodes_of,
    set_graph,
    transforming,
    version,
)
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.opened import Uncompiled
from invfunc._torch.values import near, same_values
from invfunc.core import columns as core
from invfunc.core.columns import CRITERIA, Finder, Output, lost, marked_for
from invfunc.core.marks import LEAF, SUMMED, Mark, Node, Unsupported, know, option
from invfunc.core.refusals import refused_by
from invfunc.core.run import Run
from invfunc.errors import ArgumentError, SplitError, unreached, written
from invfunc.loss.hessian import by_rows, hessian, pulled_back, pulled_rows, softmax_product, structured
from invfunc.loss.square_root import FormedColumns
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.problem import (
    BoundProblem,
    batch_dims,
    batch_size,
    check_numbers,
    check_params,
    problem,
    with_aux,
)

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


@dataclass
class ScopedSplit(core.Split):
    """The loss part of a function: `result` as a function of the outputs `roots`, whose `scope` is one of products."""

    dim: int = 0
    """The dim of the outputs that has samples, if the loss keeps them apart."""

    values: list[torch.Tensor] = field(default_factory=list)
    """The outputs, or the losses, or what else is to be differentiated in the parameters."""

    def __post_init__(self) -> None:
        if any([version(r.value) != r.version for r in self.roots]):
            raise written()
        self.values = self.values or [r.value for r in self.roots] or [self.result]
        wanted = {r.node for r in self.roots if r.value.requires_grad}
        if self.roots and wanted.isdisjoint(nodes_of([self.result], wanted)):
            raise unreached()

    def gradient(self) -> FormedColumns:
        """The gradient in the outputs; in the losses of the samples, where these are the outputs, it is 1."""
        return super().gradient() if self.roots else FormedColumns({0: torch.ones_like(self.result)[None, :, None]})

    def slopes(self) -> Vectors:
        """The gradient of the result in the outputs, as a function of them."""
        return Pull(self.scope, graph=True)([self.result], self.values, [torch.ones_like(self.result)])

    def middle(self) -> Callable[[Vectors, Sequence[torch.Tensor], Pull], Vectors]:
        """The product with the Hessian in the outputs, once it is seen that there is a GGN: `others` are tensors whose
        memory is not to be written to. Of a cross entropy alone nothing of the loss is kept but the logits."""
        if not self.ordinary or self.terms[0].kind != "softmax" or self.scope.create_graph:
            slopes = self.slopes()
            self.check_convex(slopes)
            return lambda t, others, pull: pull(slopes, self.values, t)
        product = softmax_product(self.terms[0], torch.ones_like(self.result), self.sure(self.terms[0]))
        self.result, self.terms = self.result.detach(), []
        return lambda t, others, pull: [None if u is None else product(u, others, pull.batched) for u in t]

    def check_convex(self, slopes: Vectors) -> None:
        """Check that a GGN exists, unless the Hessian of the loss is too large to be looked at."""
        if any(map(self.sure, self.terms)):
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
        return n, [Output(r.ordinal, r.value, (d - r.value.ndim, 1, 1)) for r, d in zip(roots, dims, strict=True)]


States = list[tuple[torch.Generator, torch.Tensor]]
"""Random generators with their states."""


class ProductArguments:
    """The arguments of one call, and the scope in which its derivatives are taken."""

    def __init__(self, t: Any, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> None:
        """Of a transform t with a function, a loss or None, dims and a drawing of columns or None."""
        self.f, self.loss, self.has_aux = t.f, t.loss, t.has_aux
        self.in_dims, self.out_dims, self.drawing = t.in_dims, t.out_dims, t.drawing
        self.args, self.kwargs, self.names = args, kwargs, names
        if len(args) < 1 + (self.loss is not None):
            raise ArgumentError("arguments are missing: the parameters come first, and the target last for a loss.")
        self.leaves, self.structure = check_params(args[0], names, 0)
        if not self.leaves:
            raise ArgumentError(f"{names[0]} has no tensors in it.")
        self.scope = Scope(tree.tensors((args, kwargs)))
        self.kinds = [Kind(p.shape, p.dtype, p.device) for p in self.leaves]
        self.mode = TwiceDifferentiable()
        self.watch: AbstractContextManager = nullcontext()
        """Looks at the calls of f."""
        self.params: list[torch.Tensor] = []
        """The leaves, as the function has got them."""
        self.aux: Any = None
        self.result: Any = None
        """The result of f, without aux."""
        self.losses: Any = None
        """The loss that was evaluated last."""
        self.tangents: list[Pushed.Pair] | None = None
        """The outputs with their derivatives along the vector, if forward mode has them."""

    def run(self) -> Any:
        """The result of f, without aux."""
        self.params = self.scope.entered(self.leaves)
        inputs = tree.map_tensors(self.scope.alias, self.args[1 : len(self.args) - (self.loss is not None)])
        with self.mode, self.watch:
            result = self.f(tree.unflatten(self.params, self.structure), *inputs, **self.kwargs)
        if self.has_aux:
            result, self.aux = with_aux(result)
        self._tell_constants(result, self.params)
        self.result = self.losses = result
        return result

    def value(self) -> torch.Tensor:
        """The loss; of `[N]` losses the sum."""
        result = self.run()
        if self.loss is None:
            return checked_value(result, "f").sum()
        result = self.called(result, tree.map_tensors(self.scope.alias, self.args[-1]))
        self._tell_constants(result, self.params)
        return checked_value(result, "the loss").sum()

    def let_go(self, losses: torch.Tensor) -> None:
        """Keep the losses as they are now, perhaps without the graph."""
        self.losses = losses
        self.result = losses if self.loss is None else self.result

    def called(self, outputs: Any, target: Any) -> Any:
        """The result of the loss."""
        assert self.loss is not None
        with self.mode:
            self.losses = self.loss(outputs, target)
        return self.losses

    def outputs(self) -> tuple[list[torch.Tensor], Any]:
        """The outputs of a model function, and their structure."""
        result = self.run()
        named, structure = tree.outputs(result)
        for path, z in named:
            if not z.is_floating_point():
                among = f" at {path}" if path else ""
                raise ArgumentError(f"f returned a tensor of {z.dtype}{among}, but outputs are floating-point tensors.")
        if not named:
            kind = type(result).__name__
            raise ArgumentError(f"f returned no tensors but an object of {kind}; outputs are floating-point tensors.")
        return [z for _, z in named], structure

    def _tell_constants(self, result: Any, own: list[torch.Tensor]) -> None:
        """Note a tensor that requires grad and that the function closes over, which autograd has seen."""
        scope = self.scope
        if scope.wanted or not (scope.plain and scope.outside):
            return
        known = {id(x) for x in own}
        for node in nodes_of(tree.tensors(result)):
            if hasattr(node, "variable") and id(node.variable) not in known:
                return scope.closes_over(node.variable)

    @property
    def states(self) -> States:
        """The states of torch's own generators, and of that of drawn columns."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        own = [torch.default_generator, *(torch.cuda.default_generators if cuda else ())]
        own += [] if self.drawing is None else [self.drawing.generator]
        return [(g, state_of(g)) for g in own]

    # Samples

    @cached_property
    def n(self) -> int:
        """The number of samples."""
        return batch_size(self.args, self.dims, self.names)

    @cached_property
    def dims(self) -> dict[int, int | None]:
        """The sample dimension of each batch argument."""
        return batch_dims(self.in_dims, list(range(1, len(self.args))))

    @property
    def problem(self) -> BoundProblem:
        """The call as statistics see it."""
        dims = self.in_dims, self.out_dims
        return problem(self.f, self.loss, self.args, self.kwargs, 0, *dims, self.has_aux, self.names)

    # Splits

    def split(self, each: bool, losses: bool = False) -> ScopedSplit:
        """Split a model function from its loss, or a loss function at its outputs; with `losses`, `[N]` losses are
        outputs themselves. Only with `each` the samples have to be kept apart."""
        if self.loss is not None:
            _, (values, structure) = self.dims, self.outputs()
            return self._followed_loss(values, structure) if each else self._loss(self._roots(values), structure)
        before, n = self.states, self.n
        if losses or not each:
            self.watch = finder = Finder()
            with marked_for(finder):
                result = self.run()
            self.watch = nullcontext()
            check_loss(result, n)
            if not each:
                roots, only = finder.found(result, self.params), finder.only(result) is not None
                return ScopedSplit(self.scope, 1, result, roots, finder.terms, ordinary=only)
            if result.ndim:
                return ScopedSplit(self.scope, n, result, [])
            set_states(before)
        try:
            return self.split_in(Following(self.scope, n, Finder()))
        except Unsupported as error:
            set_states(before)
            raise refused_by([error]) from None
        except SplitError as error:
            raise SplitError(f"{error} Or return the [N] losses of the samples.") if losses else error from None

    def _roots(self, values: Sequence[torch.Tensor]) -> list[Output]:
        """The outputs of a model, each with a node of its own; some may not depend on the parameters."""
        scope = self.scope
        own = [z.view_as(z) if z.requires_grad else scope.enter(scope.leave(z)) for z in values]
        return [*map(Output, range(len(own)), own)]

    def _loss(self, roots: list[Output], structure: Any) -> ScopedSplit:
        target, finder = tree.map_tensors(self.scope.alias, self.args[-1]), Finder(roots)
        with marked_for(None), finder:
            result = self.called(tree.unflatten([r.value for r in roots], structure), target)
        self._tell_constants(result, [*self.params, *(r.value for r in roots)])
        only = finder.only(checked_value(result, "the loss")) is not None
        return ScopedSplit(self.scope, 1, result, roots, finder.terms, dim=self.out_dims, ordinary=only)

    def split_in(self, run: Following) -> ScopedSplit:
        """Split a function in a run of the core; the loss that is given apart is no part of it."""
        given, finder = self.problem, run.finder
        self.params = [run.leaf(i, p) for i, p in enumerate(self.leaves)]
        with marked_for(finder), self.mode:
            result, self.aux = given.call(run, self.params)
        self.result = self.losses = result
        self._tell_constants(result, self.params)
        if self.loss is not None:
            named, structure = tree.outputs(result)
            return self._loss(self._roots([z for _, z in named]), structure)
        check_loss(result, given.n)
        run.check(result)
        roots = finder.found(result, self.params)
        return ScopedSplit(self.scope, given.n, result, roots, finder.terms)

    def _followed_loss(self, values: Sequence[torch.Tensor], structure: Any) -> ScopedSplit:
        """Split off the loss under a run of the core, which knows the samples."""
        given, before = self.problem, self.states
        run, own = Following(self.scope, given.n, Finder()), [z.view_as(z) for z in values]
        for z in own:
            know(z, Mark(run.token, (self.out_dims % max(1, z.ndim) - z.ndim, 1, 1), z.requires_grad))
        try:
            with self.mode:
                self.losses = result = lost(given, run, tree.unflatten(own, structure))
            self._tell_constants(result, self.params)
            run.check(checked_value(result, "the loss"))
        except Unsupported as error:
            set_states(before)
            raise refused_by([error]) from None
        finder: Any = run.criterion
        again, run.again = run.again, None  # which leads back to the run
        return ScopedSplit(self.scope, given.n, result, finder.outputs, finder.terms, again)

    # Forward mode

    def push(self, v: Sequence[torch.Tensor], losses: bool) -> bool:
        """Find the derivatives of the outputs along one vector by forward mode, in a run of f that leaves no graph;
        whether torch has them, as far as it is known.

        With `losses`, `[N]` losses are outputs themselves.
        """
        scope = self.scope
        if not scope.plain or scope.wanted or dispatched() or listening() or dual_level():
            return True
        if torch.is_inference_mode_enabled() or (scope.outside and any([x.requires_grad for x in v])):
            return True
        before, watch = self.states, Pushed(losses)
        try:
            with torch.enable_grad(), forward_ad.dual_level(), marked_for(watch), Uncompiled():
                duals = [forward_ad.make_dual(p.detach(), x.detach()) for p, x in zip(self.leaves, v, strict=True)]
                inputs = tree.map_tensors(torch.Tensor.detach, self.args[1 : len(self.args) - (self.loss is not None)])
                with self.mode, watch:
                    result = self.f(tree.unflatten(duals, self.structure), *inputs, **self.kwargs)
                result = with_aux(result)[0] if self.has_aux else result
                if self.loss is not None or (losses and isinstance(result, torch.Tensor) and result.ndim):
                    watch.pairs = [watch.pair(z) for _, z in tree.outputs(result)[0]]
                self.tangents = watch.pairs
        except Exception:  # an error of f comes once more where it runs again
            self.tangents = None
        set_states(before)
        return self.tangents is not None

    def pushed(self, split: ScopedSplit) -> list[torch.Tensor] | None:
        """The derivatives of the outputs that were found, if they are known and nobody differentiates them."""
        wanted = [r.ordinal for r in split.roots] or [0]
        if self.tangents is None or self.scope.wanted or max(wanted) >= len(self.tangents):
            return None
        found = []
        for i, y in zip(wanted, split.values, strict=True):
            (shape, z), t = self.tangents[i]
            if t is None and y.requires_grad:  # it was lost on the way
                return None
            if shape != y.shape or not same_values(z, some_of(y)):
                return None  # f draws from a generator of its own
            found.append(torch.zeros_like(y) if t is None else t)
        return found


class Pushed(TorchFunctionMode):
    """A mode that notes the tangents of what may be outputs, as `Finder` does, in a run in forward mode; the rows of
    tables that stand for padding have none there, as they get no gradient."""

    Pair = tuple[tuple[torch.Size, torch.Tensor], torch.Tensor | None]
    """The shape of an output, and some of its entries, with its tangent."""

    def __init__(self, losses: bool) -> None:
        """With `losses`, the derivative of the result is wanted, too."""
        super().__init__()
        self.pairs: list[Pushed.Pair] = []
        self.fixed = self.cut = False
        self.losses = losses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_graph:  # forward mode goes through what reverse mode leaves out
            raise Unsupported("f turns gradients off")
        kind, kwargs = CRITERIA.get(func), kwargs or {}
        x = None if kind in (None, "of logarithm") or self.fixed else args[0] if args else kwargs.get("input")
        if isinstance(x, torch.Tensor) and (dual := forward_ad.unpack_dual(x)).tangent is not None:
            self.pairs.append(self.pair(x))
            if kind == "softmax" and x.numel() >= thresholds.LOGITS:
                if not self.losses:  # then nothing behind it is looked at
                    x, self.cut = dual.primal, True
                return by_rows(func, (x, *args[1:]) if args else args, kwargs if args else {**kwargs, "input": x})
        out = func(*args, **kwargs)
        if func is F.embedding and (padding := option(args, kwargs, 2, "padding_idx")) is not None:
            index, table = option(args, kwargs, 0, "input"), option(args, kwargs, 1, "weight")
            out = torch.where((index == padding % len(table)).unsqueeze(-1), forward_ad.unpack_dual(out).primal, out)
        return out

    @staticmethod
    def pair(x: torch.Tensor) -> Pair:
        z, t = forward_ad.unpack_dual(x)
        return (z.shape, some_of(z)), t if t is None else t.detach()

    def mark(self, z: torch.Tensor) -> None:
        if self.cut:
            raise Unsupported("outputs that are marked behind a loss")
        self.pairs, self.fixed = self.pairs if self.fixed else [], True
        self.pairs.append(self.pair(z))


def some_of(z: torch.Tensor) -> torch.Tensor:
    """Entries of a tensor all over it, in the order of its memory, which tell whether it is that of another run."""
    z = z.detach().permute(sorted(range(z.ndim), key=z.stride, reverse=True))
    return z.reshape(-1)[:: z.numel() // 2**12 + 1].clone()


class Following(Run):
    """A run of the core that knows where the samples are, and leaves the graph of the parameters as it is."""

    def __init__(self, scope: Scope, n: int, finder: Finder) -> None:
        super().__init__(n, False)
        self.scope, self.level, self.alone = scope, scope.level or None, False
        self.criterion = self.finder = finder

    def leaf(self, i: int, p: torch.Tensor) -> torch.Tensor:
        leaf = self.scope.enter(p)
        know(leaf, Node(self.token, i, LEAF))
        self.leaves.append(leaf)
        return leaf

    def samples(self, x: torch.Tensor, axis: Any) -> torch.Tensor:
        y = self.scope.alias(x)
        know(y, Mark(self.token, axis, y.requires_grad))
        return y

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def meet(self, func: Any, rule: Any, args: tuple, kwargs: dict, data: list, params: list) -> Any:
        return self.mark(rule, func, args, kwargs, data, func(*args, **kwargs))

    def check(self, result: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check that a result has the losses of the samples, or adds up what each of them has."""
        known = getattr(result, "_known", None)
        if type(known) is not Mark or known.run is not self.token:
            raise Unsupported("samples do not reach the result in a way that was seen")
        if not result.requires_grad:
            raise unreached()
        if isinstance(known.axis, Unsupported):
            raise known.axis
        axis = (-1, 1, 1) if result.ndim else SUMMED
        if self.n > 1 and known.axis != axis:
            raise Unsupported("the result is neither [N] losses nor a sum over the samples")


def checked_value(result: Any, name: str) -> torch.Tensor:
    """The result of f or of a loss, if it is a scalar or one number for each sample."""
    wanted = "but a loss is a floating-point tensor: a scalar or [N]"
    if not isinstance(result, torch.Tensor):
        raise ArgumentError(f"{name} returned an object of type {type(result).__name__}, {wanted}.")
    if not result.is_floating_point():
        raise ArgumentError(f"{name} returned a tensor of {result.dtype}, {wanted}.")
    if result.ndim > 1:
        give = " Is it a model function? Then give the loss too." if name == "f" else ""
        raise ArgumentError(f"{name} returned shape {tuple(result.shape)}, {wanted}.{give}")
    return result


def check_loss(result: Any, n: int) -> None:
    """Check that f returned a scalar or the losses of n samples."""
    if isinstance(result, torch.Tensor) and result.ndim and tuple(result.shape) != (n,):
        raise ArgumentError(
            f"f returned shape {tuple(result.shape)} for N = {n}, so it looks like a model function; wanted is a loss "
            f"function, which returns a scalar or shape ({n},). Compute the loss in it, or sum over its other axes."
        )
    checked_value(result, "f")
