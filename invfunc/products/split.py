"""Where a function ends as a model and begins as a loss: at outputs that are marked, or that torch's criteria are of.

f runs under a function mode that looks at calls of criteria alone. An output gets a node of its own in the graph of
autograd, which says by itself whether the parameters reach the result in another way. So nothing has to be known of the
operations of f, or of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import thresholds
from invfunc._torch.functorch import version
from invfunc._torch.graphs import node_of, nodes_below, nodes_of
from invfunc._torch.values import near
from invfunc.core.marks import Unsupported
from invfunc.core.tables import called
from invfunc.errors import ArgumentError, SplitError, unreached
from invfunc.loss.drawn import Drawn, drawn, targets
from invfunc.loss.hessian import gradient, hessian, structured
from invfunc.loss.square_root import Columns, Gradient
from invfunc.operations.naming import argument
from invfunc.products.maps import Pull, Scope, Vectors
from invfunc.reductions.quantity import Drawing

ELEMENTWISE = called("mse_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits poisson_nll_loss")
SURE = ELEMENTWISE.union(called("cross_entropy")) - called("poisson_nll_loss")
"""Losses that are convex whatever their targets are."""
CRITERIA = {
    **dict.fromkeys(called("cross_entropy"), "softmax"),
    **dict.fromkeys(ELEMENTWISE, "elementwise"),
    **dict.fromkeys(called("log_softmax"), "log_softmax"),
    **dict.fromkeys(called("logsigmoid log_sigmoid"), "logsigmoid"),
    **dict.fromkeys(called("nll_loss kl_div"), "of logarithm"),
}
"""Losses that are convex in their inputs, and logarithms with losses that are convex behind these."""
KNOWN, NAMES = ("softmax", "elementwise"), {"log_softmax": "log_softmax", "logsigmoid": "logsigmoid"}
MOVES = (
    "View UnsafeView Alias Transpose T Permute Expand Squeeze Unsqueeze Slice Select Index IndexSelect Gather Clone "
    "Split SplitWithSizes Unbind Stack Cat Add Sub Neg ToCopy Flip Roll Mean Sum Diagonal AsStrided MaskedSelect "
    "ReshapeAlias ConstantPadNd"
).split()
SCALES = ("Mul", "Div", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Dot", "Convolution", "NativeDropout")
"""Nodes of autograd that are linear, always or in one of their arguments."""
WAYS_OUT = "Mark the outputs with `outputs(z)`, use one of torch's convex losses, or give the model and the loss apart."


@dataclass(frozen=True)
class Axis:
    """The dim of a tensor that has its samples, as (outer, sample, inner); `dim=None`, all of it is of one sample."""

    dim: int | None
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> Axis:
        return Axis(dim, self.outer, self.inner)

    def expose(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """`[*lead, *shape] -> [*lead, n, *one]`: `one` is the shape of x with only one sample in it."""
        if self.dim is None:
            return x.unsqueeze(lead)
        d = lead + self.dim
        return x.unflatten(d, (self.outer, n, self.inner)).movedim(d + 1, lead).flatten(d + 1, d + 2)

    def restore(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """The inverse of `expose`."""
        if self.dim is None:
            return x.squeeze(lead)
        d = lead + 1 + self.dim
        return x.unflatten(d, (self.outer, self.inner)).movedim(lead, d).flatten(d - 1, d + 1)


WHOLE = Axis(None)


@dataclass(eq=False)
class Output:
    """An output of the model: a tensor with a node of its own."""

    ordinal: int
    value: torch.Tensor
    axis: Axis = WHOLE


@dataclass
class Call:
    """A call of a criterion."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]

    def arg(self, name: str, default: Any = None) -> Any:
        return argument(self.func, self.args, self.kwargs, name, default)


@dataclass
class Term:
    """A criterion of an affine function of outputs, whose Hessian there has a known structure."""

    kind: str
    roots: frozenset[int]
    input: torch.Tensor
    axis: Axis
    output: torch.Tensor
    call: Call
    at_root: bool
    version: int

    @property
    def root(self) -> int:
        return min(self.roots)


class Finder(TorchFunctionMode):
    """A mode that notes the criteria that are called, and the outputs that these are of, unless others are known."""

    def __init__(self, known: Sequence[Output] = ()) -> None:
        super().__init__()
        self.outputs = list(known)
        self.fixed = bool(known)
        """Whether outputs are given or marked, so that inputs of criteria are none."""
        self.confirmed: set[int] = set()
        self.logarithms: dict[Any, int] = {}
        """The nodes of logarithms, with the numbers of what they are of."""
        self.terms: list[Term] = []
        self.n = 1
        """How many samples there are, if they are told apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = CRITERIA.get(func)
        return func(*args, **(kwargs or {})) if kind is None else self.criterion(kind, func, args, kwargs or {})

    def meet(self, run: Any, func: Callable, args: tuple, kwargs: dict[str, Any], axis: tuple) -> Any:
        """Run a criterion, for a run that knows the samples: their axis is counted from the right."""
        dim, outer, inner = axis
        return self.criterion(CRITERIA[func], func, args, kwargs, Axis(dim % args[0].ndim, outer, inner))

    def mark(self, z: torch.Tensor) -> torch.Tensor | None:
        """The tensor as outputs, instead of those that criteria are of."""
        if not z.requires_grad:
            return None
        if not self.fixed:
            self.outputs, self.terms, self.fixed = [], [], True
        if self.affine(z) != frozenset():
            return None  # it is computed from others that are marked
        z = z.clone()
        known = getattr(z, "_known", None)  # of a run of the core
        if known is not None and known.axis is not None and type(known.axis) is not tuple:
            raise Unsupported("samples are mixed in outputs that are marked")
        at = known.axis if known is not None and self.n > 1 else None
        return self.added(z, WHOLE if at is None else Axis(at[0] + z.ndim, *at[1:])).value

    def added(self, z: torch.Tensor, axis: Axis) -> Output:
        self.outputs.append(found := Output(len(self.outputs), z, axis))
        return found

    def criterion(self, kind: str, func: Any, args: tuple, kwargs: dict[str, Any], axis: Axis = WHOLE) -> Any:
        """Run a criterion of something that depends on the parameters, and note it."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return func(*args, **kwargs)
        if kind == "of logarithm":
            self._confirm(node_of(x))
            return func(*args, **kwargs)
        if self.fixed:
            roots, at_root = self.affine(x), any([x is z.value for z in self.outputs])
        else:
            root = self.added(x.view_as(x), axis)
            x, roots, at_root = root.value, frozenset({root.ordinal}), True
        args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})
        out = func(*args, **kwargs)
        if not self.fixed and kind in KNOWN:
            self.confirmed |= roots or set()
        elif not self.fixed:
            self.logarithms[node_of(out)] = min(roots or {0})
        constants = [y for y in (*args[1:], *kwargs.values()) if isinstance(y, torch.Tensor) and y is not x]
        if roots and not any([y.requires_grad for y in constants]):
            call = Call(NAMES.get(kind) or func.__name__, func, args, kwargs)
            structure = "elementwise" if kind == "logsigmoid" else kind
            self.terms.append(Term(structure, roots, x, axis, out, call, at_root, version(out)))
        return out

    def _confirm(self, node: Any) -> None:
        """Find the logarithm whose entries a loss reads, perhaps in another shape: outputs are what that is of."""
        while node not in self.logarithms and len(node.next_functions) == 1 and named_node(node) in MOVES:
            node = node.next_functions[0][0]
        if node in self.logarithms:
            self.confirmed.add(self.logarithms[node])

    def affine(self, x: torch.Tensor) -> frozenset[int] | None:
        """The numbers of the outputs of which a tensor is an affine function; None if it is another one."""
        outputs = {node_of(z.value): z.ordinal for z in self.outputs}
        met, crooked = set[int](), False
        for node in nodes_of([x], outputs):
            parents = [p for p, _ in node.next_functions]
            if node in outputs:
                met.add(outputs[node])
            elif parents:
                one = named_node(node) in SCALES and sum(p is not None for p in parents) == 1
                straight = one and (named_node(node) != "Div" or parents[0] is not None)
                crooked |= not straight and named_node(node) not in MOVES
        return None if met and crooked else frozenset(met)

    def found(self, result: torch.Tensor, params: Sequence[torch.Tensor]) -> list[Output]:
        """The outputs that a result depends on, if it does in no other way."""
        wanted = [z for z in self.outputs if self.fixed or z.ordinal in self.confirmed]
        own, ends = {node_of(z.value): z for z in wanted}, {node_of(p) for p in params}
        met = nodes_of([result], {*own, *ends})
        found = sorted([own[node] for node in met if node in own], key=lambda z: z.ordinal)
        if not found and ends.isdisjoint(met):
            raise unreached()
        if not found:
            raise SplitError(
                f"no outputs are found in f: no known convex loss of the model's outputs is called. {WAYS_OUT}"
            )
        if not ends.isdisjoint(met):
            raise SplitError(
                "a path from the parameters to the result goes around the outputs, as an L2 term or a loss that is not "
                f"known does. Take it out of f, or: {WAYS_OUT[0].lower()}{WAYS_OUT[1:]}"
            )
        mine = {node_of(z.value) for z in found}
        below = [p for node in mine for p, _ in node.next_functions] if len(found) > 1 else []
        if not mine.isdisjoint(nodes_below(below)):
            raise SplitError(
                "outputs depend on other outputs (one known loss of another?), and the derivative of the result cannot "
                "keep them apart. Mark the outputs with `outputs(z)`."
            )
        return found


def named_node(node: Any) -> str:
    """`Add` of `AddBackward0`."""
    return node.name().rpartition("::")[2].partition("Backward")[0]


@dataclass
class Split:
    """The loss part of a function: `result` as a function of the outputs `roots`."""

    scope: Scope
    n: int
    result: torch.Tensor
    roots: list[Output]
    """The outputs; none where the result is the losses of the samples themselves."""
    terms: list[Term] = field(default_factory=list)
    again: Callable[[Callable[[Any], Any]], torch.Tensor] | None = None
    """The loss at a target from a sampler; None where it is not known which argument that is."""
    dim: int = 0
    """The dim of the outputs that has samples, if the loss keeps them apart."""

    values: list[torch.Tensor] = field(default_factory=list)
    """The outputs, or the losses, or what else is to be differentiated in the parameters."""

    def __post_init__(self) -> None:
        self.values = self.values or [r.value for r in self.roots] or [self.result]
        wanted = {node_of(r.value) for r in self.roots if r.value.requires_grad}
        if self.roots and wanted.isdisjoint(nodes_of([self.result], wanted)):
            raise unreached()

    def slopes(self) -> Vectors:
        """The gradient of the result in the outputs, as a function of them."""
        return Pull(self.scope, graph=True)([self.result], self.values, [torch.ones_like(self.result)])

    def gradient(self) -> Gradient:
        return gradient(self.scope, self.result, self.roots, self.n)

    def hessian(self, convex: bool = True) -> list[Columns]:
        return hessian(self.scope, self.result, self.roots, self.terms, self.n, convex)

    def drawn(self, drawing: Drawing, transform: str) -> list[Columns]:
        """Columns at targets that are drawn from the predictive of a known loss, or by a sampler of the user's."""
        if drawing.sample is None:
            return drawn(self.hessian(), drawing.count, drawing.source(self.n), drawing.peel)
        if self.again is None:
            raise ArgumentError(
                f"with `sample=`, the loss has to be given apart from the model, as in `{transform}(f, loss, ...)`: a "
                "function of all arguments does not say which is the target."
            )
        found, sample, source = [], drawing.sample, drawing.source(self.n)
        dims = [r.axis.dim for r in self.roots]
        for _ in range(drawing.count):
            losses = self.again(lambda outputs: targets(sample, outputs, dims, source))
            if not losses.ndim:
                raise ArgumentError(
                    "with `sample=`, the loss has to return the [N] losses of the samples: a scalar does not say "
                    "whether it is their mean or their sum. Return the negative log-likelihoods, without a factor."
                )
            found.append(gradient(self.scope, losses, self.roots, self.n).cotangents)
        scale = drawing.count**-0.5
        return [Drawn({i: scale * torch.stack([one[i] for one in found]) for i in {i for one in found for i in one}})]

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
