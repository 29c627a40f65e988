"""The border between model and loss in a function: at outputs that are marked, or that torch's criteria are of; and
columns there.

An output gets a node of its own in the graph of autograd, which says by itself whether the parameters reach the result
in another way. So nothing has to be known of the operations of f but the criteria that it calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import as_it_is, gradient_edge, node_of, nodes_below, nodes_of, storage_of, version
from invfunc._torch.values import anywhere, wide
from invfunc.core.marks import Mark, Run, Unsupported, know
from invfunc.core.refusals import check_outputs
from invfunc.errors import ArgumentError, SplitError, unreached, written
from invfunc.loss.drawn import drawn, targets
from invfunc.loss.hessian import by_rows, columns, gradient, hessian, once_only, pulled_back
from invfunc.loss.square_root import (
    Affine,
    Columns,
    Elementwise,
    FormedColumns,
    General,
    OutputCotangents,
    Softmax,
    rooted,
)
from invfunc.operations.axis import IN_FRONT, Axis
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.operations.operation import argument, called
from invfunc.problem import BoundProblem
from invfunc.reductions.reduction import Drawing, Quantity

ELEMENTWISE = called("mse_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits poisson_nll_loss")
SURE = ELEMENTWISE - called("poisson_nll_loss")
"""Losses that are convex whatever their targets are, as a cross entropy of classes is."""
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


@dataclass(eq=False)
class Output:
    """An output of the model: a tensor with a node of its own."""

    ordinal: int
    value: torch.Tensor
    axis: Axis = IN_FRONT
    source: Any = None
    """Outputs of the model, from which columns are pulled back."""

    def __post_init__(self) -> None:
        x = self.value
        self.source = x if self.source is None else self.source
        self.edge: Any = x if x.is_leaf else gradient_edge(x)
        """Tensor at which derivatives are taken, also if the loss writes into the value."""
        self.node, self.version = node_of(x), version(x)

    def views(self, x: torch.Tensor) -> bool:
        """Tells whether a tensor has all entries of the output in their order."""
        z = self.value
        if x.numel() != z.numel() or not x.is_contiguous() or not z.is_contiguous() or version(z) != self.version:
            return False
        return storage_of(x) == storage_of(z) and x.storage_offset() == z.storage_offset()


@dataclass
class Term:
    """The call of a criterion of an affine function of outputs, whose Hessian there has a known structure."""

    kind: str
    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    roots: frozenset[int]
    input: torch.Tensor
    axis: Axis
    output: torch.Tensor
    at_root: bool
    version: int
    read: int
    """The version of the input."""

    def __post_init__(self) -> None:
        self.arg = partial(argument, self.func, self.args, self.kwargs)

    @property
    def root(self) -> int:
        return min(self.roots)


class Finder(TorchFunctionMode):
    """Notes the criteria that are called, and the outputs that these are of, unless others are known.

    As a mode it sees the calls by itself; a run of the core tells it of them.
    """

    def __init__(self, known: Sequence[Output] = ()) -> None:
        super().__init__()
        self.outputs = list(known)
        self.fixed = bool(known)
        """True if outputs are given or marked, so that inputs of criteria are none."""
        self.confirmed: set[int] = set()
        self.logarithms: dict[Any, int] = {}
        """The nodes of logarithms, with the numbers of what they are of."""
        self.terms: list[Term] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = CRITERIA.get(func)
        return func(*args, **(kwargs or {})) if kind is None else self.criterion(kind, func, args, kwargs or {})

    def mark(self, z: torch.Tensor) -> torch.Tensor | None:
        """The tensor as outputs, instead of those that criteria are of."""
        if not z.requires_grad:
            return None
        if not self.fixed:
            self.outputs, self.terms, self.fixed = [], [], True
        if self.affine(z) != frozenset():
            return None  # it is computed from others that are marked
        own = z.clone()
        known = getattr(own, "_known", None)  # of a run of the core
        axis: Any = IN_FRONT if known is None else known.axis
        if type(axis) is not tuple:
            raise axis if isinstance(axis, Unsupported) else Unsupported("outputs that sum over samples")
        return self.added(own, axis, z).value

    def added(self, z: torch.Tensor, axis: Axis, source: torch.Tensor) -> Output:
        self.outputs.append(found := Output(len(self.outputs), z, axis, source))
        return found

    def criterion(self, kind: str, func: Any, args: tuple, kwargs: dict[str, Any], axis: Axis = IN_FRONT) -> Any:
        """Run a criterion of something that depends on the parameters, and note it."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return func(*args, **kwargs)
        if kind == "of logarithm":
            self._confirm(node_of(x))
            return func(*args, **kwargs)
        if self.fixed:
            read = version(x)
            at_root = any([x is z.value and read == z.version for z in self.outputs])
            roots = self.affine(x)
        else:
            root = self.added(x.view_as(x), axis, x)
            x, roots, at_root, read = root.value, frozenset({root.ordinal}), True, root.version
            args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "input": x})
        out = func(*args, **kwargs) if x.numel() < thresholds.LOGITS else by_rows(func, args, kwargs)
        if not self.fixed and kind in KNOWN:
            self.confirmed |= roots or set()
        elif not self.fixed:
            self.logarithms[node_of(out)] = min(roots or {0})
        others = [*args[1:], *kwargs.values()] if kwargs else args[1:]
        if roots and not any([isinstance(y, torch.Tensor) and y.requires_grad and y is not x for y in others]):
            call = NAMES.get(kind) or func.__name__, func, args, kwargs
            structure = "elementwise" if kind == "logsigmoid" else kind
            self.terms.append(Term(structure, *call, roots, x, axis, out, at_root, version(out), read))
        return out

    def _confirm(self, node: Any) -> None:
        """Find the logarithm whose entries a loss reads, perhaps in another shape: outputs are what that is of."""
        while node not in self.logarithms and len(node.next_functions) == 1 and named_node(node) in MOVES:
            node = node.next_functions[0][0]
        if node in self.logarithms:
            self.confirmed.add(self.logarithms[node])

    def affine(self, x: torch.Tensor) -> frozenset[int] | None:
        """The numbers of the outputs of which a tensor is an affine function; None if it is another one."""
        outputs = {z.node: z.ordinal for z in self.outputs}
        if (one := outputs.get(node_of(x))) is not None:
            return frozenset({one})
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

    def only(self, result: torch.Tensor) -> Output | None:
        """The output, if the result is one criterion of it, or of a view of it: the ordinary case, in short."""
        if len(self.terms) != 1 or len(self.outputs) != 1:
            return None
        (term,), (root,) = self.terms, self.outputs
        if term.output is not result or version(result) != term.version or term.kind not in KNOWN:
            return None
        if term.at_root:
            return root
        if not root.views(term.input):
            return None
        return Output(root.ordinal, term.input, term.axis)

    def found(self, result: torch.Tensor, params: Iterable[Any]) -> list[Output]:
        """The outputs that a result depends on, if it does in no other way; `params` are what the parameters are, or
        the edges of the operations that read them."""
        wanted = [z for z in self.outputs if self.fixed or z.ordinal in self.confirmed]
        own, ends = {z.node: z for z in wanted}, {node_of(p) if isinstance(p, torch.Tensor) else p.node for p in params}
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
                f"known does (they meet at `{_junction(met, own, ends)}`). Take it out of f, or: "
                f"{WAYS_OUT[0].lower()}{WAYS_OUT[1:]}"
            )
        below = [p for z in found for p, _ in z.node.next_functions] if len(found) > 1 else []
        if not {z.node for z in found}.isdisjoint(nodes_below(below)):
            raise SplitError(
                "outputs depend on other outputs (one known loss of another?), so that the derivative in each of them "
                "is not defined. Mark the outputs with `outputs(z)`."
            )
        return found


def _junction(nodes: Sequence[Any], own: Container[Any], ends: Container[Any]) -> str:
    """The operation at which a path around the outputs comes in."""
    for node in nodes[:100]:
        above = [p for p, _ in node.next_functions if p is not None] if node not in own else []
        around = [p for p in above if p in ends or not any([x in own for x in nodes_below([p], own)])]
        if node in ends or (around and len(around) < len(above)):
            return named_node(node).lower()
    return "add"


def named_node(node: Any) -> str:
    """`Add` of `AddBackward0`."""
    return node.name().rpartition("::")[2].partition("Backward")[0]


Again = Callable[[Callable[[Any], Any]], tuple[torch.Tensor, Sequence[Output]]]


@dataclass
class Split:
    """The loss part of a function: `result` as a function of the outputs `roots`."""

    scope: Any
    """A context that takes derivatives (`grad`) and gives values to the outside (`leave`)."""
    n: int
    result: torch.Tensor
    roots: list[Output]
    """The outputs; none where the result is the losses of the samples themselves."""
    terms: list[Term] = field(default_factory=list)
    again: Again | None = None
    """The loss at a target from a sampler, with the outputs that it is of; None where it is not known which argument is
    the target."""
    ordinary: bool = False
    """True if the result is one criterion of the output, as it is."""
    columns: list[Columns] | None = None
    """Columns of its Hessian, once they are made."""

    def gradient(self) -> FormedColumns:
        return gradient(self.scope, self.result, self.roots, self.n)

    def hessian(self, convex: bool = True) -> list[Columns]:
        if self.ordinary:
            slope = torch.ones_like(self.scope.leave(self.result))
            return [columns(self.scope, self.terms[0], slope, [], self.n, convex and not self.sure(self.terms[0]))]
        return hessian(self.scope, self.result, self.roots, self.terms, self.n, convex)

    def sure(self, term: Term) -> bool:
        """Tells whether the result is a criterion that is convex whatever numbers it is of."""
        classes = term.func is F.cross_entropy and not term.arg("target").is_floating_point()
        if term.output is not self.result or not (classes or term.func in SURE) or term.arg("weight") is not None:
            return False
        return term.func is not F.binary_cross_entropy_with_logits or term.arg("pos_weight") is None

    def drawn(self, drawing: Drawing, transform: str) -> list[Columns]:
        """Columns at targets that are drawn from the predictive of a known loss, or by a sampler of the user's."""
        if drawing.sample is None:
            return drawn(self.hessian(), drawing.count, drawing.source(self.n), drawing.peel)
        if self.again is None:
            raise ArgumentError(
                f"with `sample=`, the loss has to be given apart from the model, as in `{transform}(f, loss, ...)`: a "
                "function of all arguments does not say which of them is the target."
            )
        found, sample, source = [], drawing.sample, drawing.source(self.n)
        dims = [None if self.n == 1 else r.axis[0] for r in self.roots]
        for _ in range(drawing.count):
            losses, roots = self.again(lambda outputs: targets(sample, outputs, dims, source))
            if not losses.ndim:
                raise ArgumentError(
                    "with `sample=`, the loss has to return the [N] losses of the samples: a scalar does not say "
                    "whether it is their mean or their sum. Return the negative log-likelihoods, without a factor."
                )
            found.append(gradient(self.scope, losses, [*roots], self.n).values)
        scale = drawing.count**-0.5
        ordinals = {i for one in found for i in one}
        return [FormedColumns({i: scale * torch.cat([one[i] for one in found]) for i in ordinals})]


# Marks

_active = threading.local()


def outputs(z: Any) -> Any:
    """Mark the outputs of the model inside a loss function: `outputs(z) == z`.

    The generalised Gauss-Newton matrix of `loss(z(params))` is `J^T H J`, with J the Jacobian of z and H the Hessian of
    the loss in z. It depends on where one ends and the other begins. `diag_ggn(f)` finds that place automatically at
    torch's convex losses; this identity sets it by hand, for any loss that is convex in z.

    Args:
        z: a tensor `[N, ...]` or a pytree of them. Several marked outputs are joined.

    Returns:
        z. Outside a transform of this library nothing else happens.

    Example:
        >>> import torch, invfunc
        >>> def loss(w, x, y):
        ...     z = invfunc.outputs(x @ w)
        ...     return (z - y).cosh().log().mean()
        >>> invfunc.diag_ggn(loss)(torch.zeros(2), torch.ones(3, 2), torch.zeros(3))
        tensor([1.0000, 1.0000])

    Composes with: `diag_ggn(f)`, and `chunked(..., over="samples")` of a statistic of a scalar loss.

    Cost: none; a loss without known structure needs its Hessian over all outputs of a sample.

    Source: Martens, "New insights and perspectives on the natural gradient method", JMLR 2020, section 8.
    """
    return tree.map_tensors(mark, z)


def mark(z: torch.Tensor) -> torch.Tensor:
    """The tensor as `outputs` marks it for whoever looks for outputs."""
    criterion = getattr(_active, "criterion", None)
    marked = None if criterion is None else criterion.mark(z)
    return z if marked is None else marked


@contextmanager
def marked_for(criterion: Any) -> Iterator[None]:
    """Makes a finder the one that `outputs` tells of tensors; there may be none."""
    before, _active.criterion = getattr(_active, "criterion", None), criterion
    try:
        yield
    finally:
        _active.criterion = before


ROUGH = set(
    "NativeLayerNorm NativeGroupNorm NativeBatchNorm FusedRmsNorm EmbeddingBag LinalgSolveEx Cdist MultiMarginLoss "
    "WeightNormInterface HuberLoss SoftMarginLoss _ScaledDotProductFlashAttentionForCpu CudnnBatchNorm".split()
)
"""Nodes of operations whose second derivative is missing, or wrong somewhere: they run in another form."""


class Twice(Exception):
    """Raised where f has to run in a form that can be differentiated twice."""


class Within:
    """Derivatives that are taken in a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.leave = run, run.strip

    def grad(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        cotangents: Sequence[Any],
        *,
        batched: bool = True,
        create_graph: bool | None = None,
    ) -> list[Any]:
        """Vector-Jacobian products, None of an input without influence; `batched`, of several vectors."""
        pairs = [(y, c.to(y.dtype)) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
        if not pairs or (batched and not len(pairs[0][1])):
            return [None] * len(inputs)
        ys, given = [y for y, _ in pairs], [c for _, c in pairs]
        graph = self.run.deep if create_graph is None else create_graph
        with torch.enable_grad():
            if batched:
                try:
                    return self.run.rows(ys, inputs, given, graph)
                except RuntimeError as error:
                    raise once_only(error, ys) from error
            options = {"create_graph": graph, "retain_graph": True}
            return [*pulled_back(ys, inputs, given, **options)]


def criterion_of(run: Run, func: Any, args: tuple, kwargs: dict[str, Any], data: list) -> Any:
    """The result of a criterion of samples, where outputs are looked for; None of any other call."""
    kind = CRITERIA.get(func)
    if kind is None:
        return None
    x: Any = args[0] if args else kwargs.get("input")
    axis = next((axis for y, axis in data if y is x), None)
    return None if axis is None else run.criterion.criterion(kind, func, args, kwargs, axis)


def split(run: Run, result: torch.Tensor) -> Split:
    """The loss part of a run that has looked for outputs."""
    if run.split is None:
        finder, scope = run.criterion, Within(run)
        if (one := finder.only(result)) is not None:
            run.split = Split(scope, run.n, result, [one], finder.terms, ordinary=True)
        else:
            roots = finder.found(result, [*[u.edge for u in run.uses], *run.leaves])
            run.split = Split(scope, run.n, result, roots, finder.terms)
        run.split.again = run.again
    return run.split


def columns_at(run: Run, result: torch.Tensor, quantity: Quantity) -> list[Columns]:
    """The columns of a quantity."""
    found, drawing = split(run, result), quantity.drawing
    if not found.ordinary and not run.twice:
        nodes = nodes_of([result], {r.node for r in found.roots})
        if not ROUGH.isdisjoint(map(named_node, nodes)):
            raise Twice
    if drawing is not None and drawing.sample is not None:
        return found.drawn(drawing, "diag_ggn")
    if found.columns is None:
        found.columns = found.hessian()
    return made(found.columns, quantity, run.n)


def made(hessian: Sequence[Columns], quantity: Quantity, n: int) -> list[Columns]:
    """The columns of a quantity, given the Hessian of the loss."""
    drawing = quantity.drawing
    if drawing is None:
        return [rooted(part) for part in hessian]
    return drawn([*hessian], drawing.count, drawing.source(n), drawing.peel)


def single(found: Split, columns: Sequence[Columns]) -> bool:
    """Tells whether all columns are those of one criterion of one output, with the samples in front."""
    (root, *others), known = found.roots, all([t.kind in KNOWN and t.at_root for t in found.terms]) or found.ordinary
    in_front = found.n == 1 or (root.axis[0] == -root.value.ndim and root.axis[1] == 1)
    return not others and len(columns) == 1 and known and in_front


# A loss that is given apart


def lost(problem: BoundProblem, run: Run, outputs: Any, known: bool = False) -> Any:
    """The loss of the outputs of a model that is given apart from it; None where the columns at these are known."""
    assert problem.loss is not None
    loss, (named, structure) = problem.loss, tree.outputs(outputs)
    if not named:
        check_outputs(run, outputs, problem.out_dims)
    for path, z in named:
        check_outputs(run, z, problem.out_dims, path)

    def at(ordinal: int, z: torch.Tensor) -> Output:
        own = z.clone() if z.numel() < thresholds.LOGITS else z.view_as(z)  # the loss may write into it
        axis = (problem.out_dims % max(1, z.ndim) - z.ndim, 1, 1)
        know(own, Mark(run.token, axis, z.requires_grad))
        return Output(ordinal, own, axis, z)

    def called(roots: list[Output], target: Any) -> torch.Tensor:
        given = tree.unflatten([r.value for r in roots], structure)
        with marked_for(None), TwiceDifferentiable() if run.twice else nullcontext(), run:
            return loss(given, target)

    def again(sample: Callable[[Any], Any]) -> tuple[torch.Tensor, list[Output]]:
        with torch.no_grad():
            target = sample(tree.unflatten([run.strip(z).detach() for _, z in named], structure))
        with torch.enable_grad():
            fresh = [at(i, z) for i, (_, z) in enumerate(named)]
            return called(fresh, problem.drawn(run, target)), [r for r in fresh if r.value.requires_grad]

    roots, before = [at(i, z) for i, (_, z) in enumerate(named)], [version(z) for _, z in named]
    if known:
        run.criterion = Finder()
        run.split = Split(Within(run), run.n, roots[0].value, [r for r in roots if r.value.requires_grad])
        return None
    run.criterion = Finder([r for r in roots if r.value.requires_grad])
    run.again, result = again, called(roots, problem.target(run))
    if before != [version(z) for _, z in named]:
        raise written()  # they are too large for a copy
    return result


# Parts of the samples


def joined(parts: Sequence[Sequence[Columns]]) -> list[Columns]:
    """The Hessian of the loss of all samples, given that of parts of them."""
    if any([len(part) != len(parts[0]) for part in parts]):
        raise Unsupported("the criteria are others for a part of the samples")
    return [_joined(same) for same in zip(*parts, strict=True)]


def _joined(parts: Sequence[Any]) -> Columns:
    first = parts[0]
    if any([type(part) is not type(first) for part in parts]):
        raise Unsupported("the criterion is another one for a part of the samples")
    if isinstance(first, Affine):
        inner = _joined([part.inner for part in parts])
        sizes = [_count(part.inner) for part in parts]

        def pull(columns: torch.Tensor, some: slice) -> OutputCotangents:
            each = zip(parts, columns.split(sizes, 1), strict=True)
            pulled = [part.pull(own, slice(None)) for part, own in each]
            return {i: torch.cat([one[i] for one in pulled], 1)[:, some] for i in pulled[0]}

        return Affine(inner, first.root, first.roots, pull)
    fields = {Softmax: ("logits", "weight"), Elementwise: ("logits", "diagonal"), General: ("hessian",)}[type(first)]
    return replace(first, **{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})


def _count(columns: Any) -> int:
    """The number of samples that columns are of."""
    return len(columns.hessian if isinstance(columns, General) else columns.logits)


def weighs(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tells whether a criterion is a mean in which the targets weigh, which parts of the samples do not make up."""
    if func not in (F.cross_entropy, F.nll_loss) or argument(func, args, kwargs, "reduction", "mean") != "mean":
        return False
    target, ignored = argument(func, args, kwargs, "target"), argument(func, args, kwargs, "ignore_index", -100)
    if target.is_floating_point():
        return False
    return argument(func, args, kwargs, "weight") is not None or anywhere(target == ignored)


# Columns of an operation in the middle of f


def softmax_root(run: Run, func: Any, args: tuple, kwargs: dict, axis: Axis, slope: Any) -> Any:
    """The columns of a cross entropy or a log_softmax of any slope; None of another operation."""
    kind = CRITERIA.get(func)
    if kind not in ("softmax", "log_softmax"):
        return None
    x, soft = wide(run.strip(args[0])), kind == "softmax"
    dim = 1 if soft else argument(func, args, kwargs, "dim")
    if x.ndim < 2 or dim is None or dim % x.ndim == 0 or (run.n > 1 and (axis[0] != -x.ndim or axis[1] != 1)):
        return None
    call = kind, "cross_entropy" if soft else kind, func, (x, *args[1:]), kwargs
    term = Term(*call, frozenset({0}), x, axis, x, True, version(x), version(x))
    return columns(SimpleNamespace(leave=as_it_is), term, slope, [], run.n, convex=False)
