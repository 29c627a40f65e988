"""Columns at the outputs of a model, in a run of it: of criteria, or of any loss that is convex there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds, tree
from invfunc._torch.functorch import version
from invfunc._torch.graphs import nodes_of
from invfunc._torch.values import anywhere, wide
from invfunc.arguments.problem import BoundProblem
from invfunc.core.marks import Axis as Marked
from invfunc.core.marks import Mark, Run, Unsupported, know
from invfunc.core.refusals import check_outputs
from invfunc.core.split import (
    CRITERIA,
    KNOWN,
    WHOLE,
    Axis,
    CriterionCall,
    Finder,
    Output,
    Split,
    Term,
    axis_of,
    marked_for,
    named_node,
)
from invfunc.core.tables import called
from invfunc.errors import written
from invfunc.loss.drawn import drawn
from invfunc.loss.hessian import columns, once_only, pulled_back
from invfunc.loss.square_root import Affine, Columns, Elementwise, General, OutputCotangents, Softmax, rooted
from invfunc.operations.naming import argument
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.reductions.reduction import Quantity

ROUGH = set(
    "NativeLayerNorm NativeGroupNorm NativeBatchNorm FusedRmsNorm EmbeddingBag LinalgSolveEx Cdist MultiMarginLoss "
    "WeightNormInterface HuberLoss SoftMarginLoss _ScaledDotProductFlashAttentionForCpu CudnnBatchNorm".split()
)
"""Nodes of operations whose second derivative is missing, or wrong somewhere: they run in another form."""
LOGARITHMS = called("log_softmax")


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
    return None if axis is None else run.criterion.criterion(kind, func, args, kwargs, axis_of(x, axis, run.n))


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
    at = root.axis
    in_front = at.dim is None or (type(at) is Axis and at.dim == 0 and at.outer == 1)
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
        know(own, Mark(run.token, (problem.out_dims % max(1, z.ndim) - z.ndim, 1, 1), z.requires_grad))
        return Output(ordinal, own, WHOLE if run.n == 1 else Axis(problem.out_dims % z.ndim), z)

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
    run.criterion = Finder([r for r in roots if r.value.requires_grad], run.n)
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


def softmax_root(run: Run, func: Any, args: tuple, kwargs: dict, axis: Marked, slope: Any) -> tuple[Any, Axis] | None:
    """The columns of a cross entropy or a log_softmax of any slope, and their axis; None of another operation."""
    if func is not F.cross_entropy and func not in LOGARITHMS:
        return None
    x, soft = wide(run.strip(args[0])), func is F.cross_entropy
    dim = 1 if soft else argument(func, args, kwargs, "dim")
    if x.ndim < 2 or dim is None or dim % x.ndim == 0 or (run.n > 1 and (axis[0] != -x.ndim or axis[1] != 1)):
        return None
    call = CriterionCall("cross_entropy" if soft else "log_softmax", func, (x, *args[1:]), kwargs)
    at = axis_of(x, axis, run.n)
    term = Term("softmax" if soft else "log_softmax", frozenset({0}), x, at, x, call, True, version(x), version(x))
    return columns(Stripped, term, slope, [], run.n, convex=False), at


class Stripped:
    """A context of tensors that are out of a run."""

    leave = staticmethod(lambda x: x)
